//! Handlers of the information endpoints, and of the two endpoints that change the engine.
//!
//! Serves models, health, metrics, server info, tokenization, cache reset and faults. Names and formats match those of
//! real engines, so that a probe can read them. [`super::completions`] handles completions.

use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use super::answer;
use super::request::{Parsed, PromptInput, TokenizeRequest};
use super::sleep;
use crate::kv_events::EventFormat;
use crate::mock::engine::{BOOTSTRAP_PORT, Engine, MockError};
use crate::mock::faults::Faults;
use crate::mock::handover::HandoverProtocol;
use crate::mock::rank::RankDriver;
use crate::mock::sockets::TOPIC;
use crate::mock::tokenizer;

/// Creation time of the models, in seconds since 1970.
const CREATED: u64 = 1_700_000_000;

/// `GET /health`.
pub(super) async fn health() -> StatusCode {
    StatusCode::OK
}

/// `GET /v1/models`.
pub(super) async fn models(State(engine): Shared) -> Json<Value> {
    let base = &engine.config.model;
    let model = |id: &String| {
        let parent = (id != base).then_some(base);
        json!({
            "id": id, "object": "model", "created": CREATED, "owned_by": "pointsman", "root": id, "parent": parent,
            "max_model_len": engine.config.model_len_max(),
        })
    };
    let data: Vec<Value> = [base].into_iter().chain(&engine.config.loras).map(model).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// `POST /tokenize`.
pub(super) async fn tokenize(State(engine): Shared, Parsed(request): Parsed<TokenizeRequest>) -> Response {
    let tokens = match (request.prompt, request.messages) {
        (Some(PromptInput::Text(text)), None) => tokenizer::tokenize(&text),
        (Some(PromptInput::Tokens(tokens)), None) => tokens,
        (None, Some(messages)) => {
            let texts: Vec<String> = messages.iter().map(super::request::Message::text).collect();
            let lines = messages.iter().zip(&texts).map(|(message, text)| (message.role.as_str(), text.as_str()));
            tokenizer::tokenize(&tokenizer::chat_text(lines))
        }
        (None, None) | (Some(_), Some(_)) => {
            return answer::error(StatusCode::BAD_REQUEST, "either prompt or messages is required");
        }
    };
    let max_model_len = engine.config.model_len_max();
    Json(json!({ "count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens })).into_response()
}

/// Body of `/detokenize`.
#[derive(Deserialize)]
pub(super) struct DetokenizeRequest {
    tokens: Vec<u32>,
}

/// `POST /detokenize`.
pub(super) async fn detokenize(Parsed(request): Parsed<DetokenizeRequest>) -> Response {
    Json(json!({ "prompt": tokenizer::detokenize(&request.tokens) })).into_response()
}

/// `GET /server_info`, in SGLang's format.
pub(super) async fn server_info(State(engine): Shared) -> Response {
    let config = &engine.config;
    if config.no_server_info {
        return answer::error(StatusCode::NOT_FOUND, "/server_info is disabled");
    }
    let host = if config.host.is_unspecified() { "*".to_owned() } else { config.host.to_string() };
    let mut info = json!({
        "model_path": config.model,
        "served_model_name": config.model,
        "page_size": config.stated_block_size(),
        "dp_size": config.data_parallel_size,
        "max_total_num_tokens": u64::from(config.kv_blocks.saturating_sub(1)) * u64::from(config.block_size),
        "context_length": config.model_len_max(),
        "max_running_requests": config.sequences_max,
        "enable_session_radix_cache": config.session_radix_cache,
        "version": concat!("pointsman-mock-", env!("CARGO_PKG_VERSION")),
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": engine.event_port(0),
            "replay_endpoint_port_base": engine.replay_port(0),
            "topic": TOPIC,
            "block_size": config.stated_block_size(),
            "dp_size": config.data_parallel_size,
        },
    });
    if config.handover == Some(HandoverProtocol::Sglang) {
        let is_prefill = config.role.has_prefill();
        info["disaggregation_mode"] = if is_prefill { "prefill" } else { "decode" }.into();
        info["disaggregation_bootstrap_port"] = config.bootstrap_port.unwrap_or(BOOTSTRAP_PORT).into();
    }
    Json(info).into_response()
}

/// `GET /kv_event_sources`: event endpoints by rank, as vLLM reports them from 0.31 on.
pub(super) async fn kv_event_sources(State(engine): Shared) -> Response {
    let dialect = engine.format().dialect;
    if dialect.is_sglang() || !dialect.replays_with_topic() {
        return answer::error(StatusCode::NOT_FOUND, "/kv_event_sources does not exist in this dialect");
    }
    let config = &engine.config;
    // vLLM reports the configured wildcard, and its own address with ports that the system has assigned.
    let endpoint = |configured: Option<u16>, port: u16| match configured {
        Some(0) => format!("tcp://{}", SocketAddr::new(config.host, port)),
        Some(_) | None => format!("tcp://*:{port}"),
    };
    let source = |rank: u16| {
        let source = json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": endpoint(config.event_port, engine.event_port(rank)),
            "replay_endpoint": endpoint(config.replay_port, engine.replay_port(rank)),
            "buffer_steps": config.replay_messages_max,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": TOPIC,
        });
        (rank.to_string(), source)
    };
    Json(Value::Object((0..config.data_parallel_size).map(source).collect())).into_response()
}

/// `POST /reset_prefix_cache`: succeeds if every rank's cache was cleared.
pub(super) async fn reset_prefix_cache(State(engine): Shared) -> Response {
    // Reset every rank, even if another one fails.
    let cleared = engine.ranks().iter().filter(|rank| rank.reset_cache(false)).count();
    if cleared == engine.ranks().len() {
        StatusCode::OK.into_response()
    } else {
        answer::error(StatusCode::SERVICE_UNAVAILABLE, "requests hold blocks")
    }
}

#[derive(Deserialize)]
pub(super) struct CloseSession {
    session_id: String,
}

/// `POST /close_session`, in SGLang's format.
pub(super) async fn close_session(
    State(engine): Shared,
    Parsed(CloseSession { session_id }): Parsed<CloseSession>,
) -> StatusCode {
    engine.ranks().iter().for_each(|rank| rank.close_session(&session_id));
    StatusCode::OK
}

/// `GET /faults`: current settings and counters.
pub(super) async fn faults(State(engine): Shared) -> Json<Value> {
    Json(faults_json(&engine))
}

/// Body of `POST /faults`: all faults (omitted ones are off) and an optional restart.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    /// Restarts the ranks, in this format or the current one.
    restart: Option<Restart>,
    #[serde(flatten)]
    faults: serde_json::Map<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Restart {
    dialect: Option<crate::mock::Dialect>,
    binary_hashes: Option<bool>,
}

/// `POST /faults`.
pub(super) async fn set_faults(State(engine): Shared, Parsed(change): Parsed<Change>) -> Response {
    match apply(&engine, change).await {
        Ok(()) => Json(faults_json(&engine)).into_response(),
        Err(MockError::Config(message)) => answer::error(StatusCode::BAD_REQUEST, &message),
        Err(error @ (MockError::Listen { .. } | MockError::Serve(_))) => {
            answer::error(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string())
        }
    }
}

async fn apply(engine: &Arc<Engine>, change: Change) -> Result<(), MockError> {
    let faults: Faults =
        serde_json::from_value(Value::Object(change.faults)).map_err(|error| MockError::Config(error.to_string()))?;
    let format = change.restart.map(|restart| {
        let present = engine.format();
        let dialect = restart.dialect.unwrap_or(present.dialect);
        let binary_hashes = restart.binary_hashes.unwrap_or(present.binary_hashes && !dialect.is_sglang());
        EventFormat { dialect, binary_hashes }
    });
    // Validate everything before the first change.
    format.map_or(Ok(()), EventFormat::validate).map_err(MockError::Config)?;
    engine.set_faults(faults)?;
    if let Some(format) = format { engine.restart(format).await } else { Ok(()) }
}

fn faults_json(engine: &Engine) -> Value {
    json!({ "faults": engine.faults.get(), "done": engine.faults.done(), "events": engine.format() })
}

/// `GET /metrics`, with vLLM's metric names.
pub(super) async fn metrics(State(engine): Shared) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], metrics_text(&engine)).into_response()
}

/// Name, type, help and value per rank of a metric.
type Metric = (&'static str, &'static str, &'static str, fn(&RankDriver) -> f64);

#[expect(clippy::cast_precision_loss, reason = "counts of tokens fit 53 bits")]
const METRICS: &[Metric] = &[
    ("vllm:num_requests_running", "gauge", "Requests that run.", |rank| rank.load().running.into()),
    ("vllm:num_requests_waiting", "gauge", "Requests that wait.", |rank| rank.load().waiting.into()),
    ("vllm:kv_cache_usage_perc", "gauge", "Used share of the KV cache, 0 to 1.", |rank| rank.load().kv_usage),
    ("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.", |rank| {
        rank.counters().prompt_tokens as f64
    }),
    ("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.", |rank| {
        rank.counters().cache_hits as f64
    }),
    ("vllm:prompt_tokens_total", "counter", "Prompt tokens processed.", |rank| rank.counters().prompt_tokens as f64),
    ("vllm:generation_tokens_total", "counter", "Tokens generated.", |rank| rank.counters().generation_tokens as f64),
    ("vllm:request_success_total", "counter", "Requests finished.", |rank| rank.counters().requests_finished as f64),
];

fn metrics_text(engine: &Engine) -> String {
    let (mut text, ranks, model) = (String::new(), engine.ranks(), escaped(&engine.config.model));
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        writeln!(text, "{arguments}").expect("writing to memory cannot fail");
    };
    for (name, kind, help, value) in METRICS {
        line(format_args!("# HELP {name} {help}"));
        line(format_args!("# TYPE {name} {kind}"));
        for (engine_idx, rank) in ranks.iter().enumerate() {
            line(format_args!("{name}{{engine=\"{engine_idx}\",model_name=\"{model}\"}} {}", value(rank)));
        }
    }
    let (name, block_size) = ("vllm:cache_config_info", engine.config.stated_block_size());
    let blocks = engine.config.kv_blocks;
    line(format_args!("# HELP {name} The cache's configuration, as labels."));
    line(format_args!("# TYPE {name} gauge"));
    for engine_idx in 0..ranks.len() {
        line(format_args!(
            "{name}{{block_size=\"{block_size}\",enable_prefix_caching=\"True\",engine=\"{engine_idx}\",\
             num_gpu_blocks=\"{blocks}\"}} 1"
        ));
    }
    sleep::write_metric(engine, &model, &mut text).expect("writing to memory cannot fail");
    text
}

/// Escapes the value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
