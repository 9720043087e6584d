//! Explanations and overlaps of a prompt.
//!
//! Books nothing and drops the prompt after the response. The router computes results and [`prompt`](crate::tokens)
//! tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use pointsman::config::{OnTargetMiss, RouterConfigOverride};
use pointsman::error::RouteError;
use pointsman::{Constraints, Pin, PinMode, Prompt, RequestOptions, RouteRequest};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::extract::{Body, Id, ModelAt};
use super::internal;
use super::views::worker_ids_as_text;
use crate::formats::openai::{ApiError, ChatParts, ClientPrompt};
use crate::pools::model::Model;
use crate::pools::rank_names::RankNames;
use crate::tokens::{PromptContext, PromptTokens, TokenSource};

/// A prompt in one of three forms, with the other inputs of a decision.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct DecisionQuery {
    tokens: Option<Vec<u32>>,
    prompt: Option<String>,
    messages: Option<Box<RawValue>>,
    tools: Option<Box<RawValue>>,
    documents: Option<Box<RawValue>>,
    chat_template_kwargs: Option<Box<RawValue>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    lora_name: Option<Arc<str>>,
    cache_salt: Option<Arc<str>>,
    strict_priority: u32,
    priority_jump: f64,
    policy_class: Option<Arc<str>>,
    session_id: Option<Arc<str>>,
    expected_output_tokens: Option<u32>,
    output_tokens_max: Option<u32>,
    ttft_ms: Option<TargetMs>,
    itl_ms: Option<TargetMs>,
    on_target_miss: Option<OnTargetMiss>,
    allowed_workers: Option<BTreeSet<Id>>,
    pin: Option<PinInput>,
    required_taints: BTreeSet<String>,
    preferred_taints: BTreeMap<String, f64>,
    overrides: RouterConfigOverride,
}

/// A latency target in milliseconds.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "f64")]
struct TargetMs(Duration);

impl TryFrom<f64> for TargetMs {
    type Error = &'static str;

    fn try_from(ms: f64) -> Result<Self, Self::Error> {
        let target = Duration::try_from_secs_f64(ms / 1e3).ok().filter(|target| !target.is_zero());
        target.map(Self).ok_or("a target must be a positive number of milliseconds")
    }
}

/// A [`Pin`] whose id may be a string.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct PinInput {
    worker: Id,
    rank: Option<u32>,
    #[serde(default)]
    mode: PinMode,
}

impl DecisionQuery {
    /// Takes the prompt.
    fn take_prompt(&mut self) -> Result<ClientPrompt, ApiError> {
        let bytes = |json: Box<RawValue>| Bytes::from(Box::<str>::from(json).into_boxed_bytes());
        let chat_only = ChatParts {
            tools: self.tools.take().map(bytes),
            documents: self.documents.take().map(bytes),
            template_kwargs: self.chat_template_kwargs.take().map(bytes),
            add_generation_prompt: self.add_generation_prompt.take(),
            continue_final_message: self.continue_final_message.take(),
            ..ChatParts::default()
        };
        match (self.tokens.take(), self.prompt.take(), self.messages.take()) {
            (None, None, Some(messages)) => {
                Ok(ClientPrompt::Chat(Box::new(ChatParts { messages: bytes(messages), ..chat_only })))
            }
            (Some(ids), None, None) if chat_only == ChatParts::default() => Ok(ClientPrompt::Tokens(ids)),
            (None, Some(text), None) if chat_only == ChatParts::default() => Ok(ClientPrompt::Text(text)),
            (Some(_), None, None) | (None, Some(_), None) => {
                let message = "tools, documents and settings of a chat template require messages";
                Err(ApiError::invalid("invalid_prompt", None, message))
            }
            (None, None, None) | (Some(_), Some(_), _) | (Some(_), None, Some(_)) | (None, Some(_), Some(_)) => {
                let message = "the body must have one of tokens, prompt and messages";
                Err(ApiError::invalid("invalid_prompt", None, message))
            }
        }
    }

    fn constraints(&self) -> Constraints {
        let pin = |PinInput { worker: Id(worker), rank, mode }| Pin { worker, rank, mode };
        let allowed = |ids: &BTreeSet<Id>| ids.iter().map(|Id(worker)| *worker).collect();
        Constraints {
            allowed_workers: self.allowed_workers.as_ref().map(allowed),
            pin: self.pin.map(pin),
            required_taints: self.required_taints.clone(),
            preferred_taints: self.preferred_taints.clone(),
            ..Constraints::default()
        }
    }

    fn request<'t>(self, tokens: &'t PromptTokens<'_>) -> RouteRequest<'t> {
        let options = RequestOptions {
            constraints: self.constraints(),
            lora_name: self.lora_name,
            cache_salt: self.cache_salt,
            mm_spans: tokens.media.spans.clone(),
            strict_priority: self.strict_priority,
            priority_jump: self.priority_jump,
            policy_class: self.policy_class,
            session_id: self.session_id,
            expected_output_tokens: self.expected_output_tokens,
            output_tokens_max: self.output_tokens_max,
            ttft_target: self.ttft_ms.map(|TargetMs(target)| target),
            itl_target: self.itl_ms.map(|TargetMs(target)| target),
            on_target_miss: self.on_target_miss,
            overrides: self.overrides,
            ..RequestOptions::default()
        };
        RouteRequest { options, ..RouteRequest::query(Prompt::Tokens(&tokens.ids)) }
    }
}

pub(super) async fn explain(
    ModelAt(model): ModelAt,
    Body(mut query): Body<DecisionQuery>,
) -> Result<Json<Value>, ApiError> {
    let prompt = query.take_prompt()?;
    let tokens = tokens_of(&model, &prompt, query.cache_salt.as_deref()).await;
    let request = query.request(&tokens);
    let prefill = match &model.prefill {
        Some(side) => Some(explained_prefill(&side.model, request.clone()).await?),
        None => None,
    };
    let explanation = model.router.explain(request).await.map_err(route_error)?;
    let Json(mut answer) = answer("explanation", named(&model, &explanation)?, tokens.source, tokens.ids.len());
    if let Some(prefill) = prefill {
        answer["prefill"] = prefill;
    }
    Ok(Json(answer))
}

/// The decision of the prefill pool. Pins and allowed workers of the request apply to the decode pool only.
async fn explained_prefill(model: &Model, mut request: RouteRequest<'_>) -> Result<Value, ApiError> {
    let constraints = &mut request.options.constraints;
    (constraints.pin, constraints.allowed_workers) = (None, None);
    let explanation = model.router.explain(request).await.map_err(route_error)?;
    Ok(json!({ "model": model.settings.name, "explanation": named(model, &explanation)? }))
}

pub(super) async fn overlap(
    ModelAt(model): ModelAt,
    Body(mut query): Body<DecisionQuery>,
) -> Result<Json<Value>, ApiError> {
    let prompt = query.take_prompt()?;
    let tokens = tokens_of(&model, &prompt, query.cache_salt.as_deref()).await;
    let request = query.request(&tokens);
    let scores = model.router.overlap_scores(request, true).await.map_err(route_error)?;
    Ok(answer("overlap", named(&model, &scores)?, tokens.source, tokens.ids.len()))
}

/// Tokens of the prompt as for a request.
async fn tokens_of<'p>(model: &Model, prompt: &'p ClientPrompt, cache_salt: Option<&str>) -> PromptTokens<'p> {
    model
        .tokens
        .of(prompt, PromptContext { cache_salt, ..PromptContext::default() })
        .await
        .with_estimate_up_to(model.router.max_model_len())
}

fn answer(name: &str, answer: Value, source: TokenSource, tokens: usize) -> Json<Value> {
    Json(json!({ "tokens_source": source.name(), "tokens": tokens, name: answer }))
}

/// A value of a model as JSON, with worker ids as text and the names of ranks.
pub(super) fn named(model: &Model, value: &impl Serialize) -> Result<Value, ApiError> {
    let mut shown = to_json(value)?;
    worker_ids_as_text(&mut shown);
    RankNames::of(model).add_to(&mut shown);
    Ok(shown)
}

/// A value as JSON. Fails only for file names that are not UTF-8.
pub(super) fn to_json(value: &impl Serialize) -> Result<Value, ApiError> {
    serde_json::to_value(value).map_err(internal)
}

/// The router's error with its original message, because operators may see worker names.
pub(super) fn route_error(error: RouteError) -> ApiError {
    let message = error.to_string();
    ApiError { message, ..error.into() }
}
