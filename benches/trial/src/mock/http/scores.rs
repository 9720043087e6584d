//! Handlers of reranking and scoring, in vLLM's format.
//!
//! The score of a text is the share of the query's tokens in it: enough to check the path of a request, and equal on
//! every engine. It takes no modelled time and uses no cache.

use std::collections::BTreeSet;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use super::request::Parsed;
use crate::mock::tokenizer::tokenize;

/// Body of `/v1/rerank`.
#[derive(Deserialize)]
pub(super) struct RerankRequest {
    query: String,
    documents: Vec<String>,
}

/// Body of `/v1/score`.
#[derive(Deserialize)]
pub(super) struct ScoreRequest {
    text_1: String,
    text_2: Texts,
}

/// One text or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Several(Vec<String>),
}

/// `POST /v1/rerank`.
pub(super) async fn rerank(State(engine): Shared, Parsed(request): Parsed<RerankRequest>) -> Response {
    let RerankRequest { query, documents } = request;
    let mut results: Vec<(usize, f64)> = scores(&query, &documents).into_iter().enumerate().collect();
    results.sort_by(|one, other| other.1.total_cmp(&one.1));
    let results = results.into_iter().map(
        |(index, score)| json!({ "index": index, "document": { "text": documents[index] }, "relevance_score": score }),
    );
    let results: Vec<Value> = results.collect();
    let usage = usage(&query, &documents);
    Json(json!({ "id": "rerank-mock", "model": engine.config.model, "usage": usage, "results": results }))
        .into_response()
}

/// `POST /v1/score`.
pub(super) async fn score(
    State(engine): Shared,
    Parsed(ScoreRequest { text_1, text_2 }): Parsed<ScoreRequest>,
) -> Response {
    let texts = match text_2 {
        Texts::One(text) => vec![text],
        Texts::Several(texts) => texts,
    };
    let data = scores(&text_1, &texts).into_iter().enumerate();
    let data: Vec<Value> =
        data.map(|(index, score)| json!({ "index": index, "object": "score", "score": score })).collect();
    let usage = usage(&text_1, &texts);
    let model = &engine.config.model;
    Json(json!({ "id": "score-mock", "object": "list", "model": model, "data": data, "usage": usage })).into_response()
}

#[expect(clippy::cast_precision_loss, reason = "token counts stay far below 2^53")]
fn scores(query: &str, texts: &[String]) -> Vec<f64> {
    let query: BTreeSet<u32> = tokenize(query).into_iter().collect();
    let score = |text: &String| {
        let text: BTreeSet<u32> = tokenize(text).into_iter().collect();
        query.intersection(&text).count() as f64 / query.len().max(1) as f64
    };
    texts.iter().map(score).collect()
}

/// The query is read once per text.
fn usage(query: &str, texts: &[String]) -> Value {
    let tokens = texts.iter().map(|text| tokenize(query).len() + tokenize(text).len()).sum::<usize>();
    json!({ "prompt_tokens": tokens, "total_tokens": tokens })
}
