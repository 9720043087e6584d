//! Control of a model's engines: one call to all of its workers.
//!
//! Each worker has its own result and timeout. An action that drops cached contents also drops those of the index, so that
//! no request follows a cache that is gone. While engines pause, sleep or take new weights, requests of the model wait or
//! are refused. A call runs to completion, with one audit line per worker.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::StatusCode;
use futures_util::future::join_all;
use pointsman::protocol::{KvEvent, RouterEvent, StorageTier};
use pointsman::{HealthState, RankHealth, WorkerEntry};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::audit::Change;
use super::extract::{Body, ClientAddress, Id, ModelAt};
use super::{internal, no_route};
use crate::formats::openai::ApiError;
use crate::net::upstream::UpstreamError;
use crate::pools::gate::{OnPause, Reason};
use crate::pools::model::Model;

/// Maximum time of an action at one worker, in milliseconds.
const TIMEOUT_MS_MAX: u64 = 60 * 60 * 1000;

/// Maximum length of an engine's response.
const RESPONSE_BYTES_MAX: usize = 1 << 20;

/// Interval of the questions whether engines are awake.
const AWAKE_POLL: Duration = Duration::from_millis(20);

/// Effect of an action on the requests of the model.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// None.
    None,
    /// They pause until another action.
    Pauses(Reason),
    /// Ends pauses.
    Resumes(&'static [Reason]),
    /// They pause during the call.
    PausesMeanwhile,
}

/// One action: its name, the paths of vLLM and SGLang, whether it drops cached contents, and its effect on requests.
type Action = (&'static str, &'static [&'static str], bool, Effect);

/// The paths are those of vLLM 0.33 with `VLLM_SERVER_DEV_MODE=1`, and of SGLang 0.5.23.
const ACTIONS: [Action; 17] = [
    ("sleep", &["/sleep", "/release_memory_occupation"], true, Effect::Pauses(Reason::Sleep)),
    ("wake", &["/wake_up", "/resume_memory_occupation"], false, Effect::Resumes(&[Reason::Sleep])),
    ("pause", &["/pause", "/pause_generation"], false, Effect::Pauses(Reason::Pause)),
    // Also the pause of an update whose gateway has ended.
    ("resume", &["/resume", "/continue_generation"], false, Effect::Resumes(&[Reason::Pause, Reason::Weights])),
    ("reset_prefix_cache", &["/reset_prefix_cache", "/flush_cache"], true, Effect::None),
    ("init_weights", &["/init_weight_transfer_engine", "/init_weights_update_group"], false, Effect::None),
    ("start_weights", &["/start_weight_update", "/begin_weight_update"], false, Effect::PausesMeanwhile),
    ("update_weights", &["/update_weights", "/update_weights_from_disk"], true, Effect::PausesMeanwhile),
    ("update_weights_from_distributed", &["/update_weights_from_distributed"], true, Effect::PausesMeanwhile),
    ("update_weights_from_tensor", &["/update_weights_from_tensor"], true, Effect::PausesMeanwhile),
    ("update_weights_from_ipc", &["/update_weights_from_ipc"], true, Effect::PausesMeanwhile),
    ("finish_weights", &["/finish_weight_update", "/end_weight_update"], true, Effect::PausesMeanwhile),
    ("load_lora", &["/v1/load_lora_adapter", "/load_lora_adapter"], false, Effect::None),
    ("unload_lora", &["/v1/unload_lora_adapter", "/unload_lora_adapter"], false, Effect::None),
    ("abort", &["/abort_requests", "/abort_request"], false, Effect::None),
    ("start_profile", &["/start_profile"], false, Effect::None),
    ("stop_profile", &["/stop_profile"], false, Effect::None),
];

/// Body of a call.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Call {
    /// Body for the engines, as JSON.
    body: Option<Box<RawValue>>,
    /// Query for the engines.
    query: String,
    /// Time per worker.
    timeout_ms: u64,
    /// Workers; all without it.
    workers: Option<BTreeSet<Id>>,
    /// Handling of the requests of the model while it is paused.
    requests: OnPause,
}

impl Default for Call {
    fn default() -> Self {
        Self { body: None, query: String::new(), timeout_ms: 60_000, workers: None, requests: OnPause::Hold }
    }
}

pub(super) async fn control(
    ModelAt(model): ModelAt,
    path: Path<(String, String)>,
    peer: ClientAddress,
    Body(call): Body<Call>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let Path((_, name)) = path;
    let action = ACTIONS.into_iter().find(|(known, ..)| *known == name).ok_or_else(no_route)?;
    if !(1..=TIMEOUT_MS_MAX).contains(&call.timeout_ms) {
        let message = format!("timeout_ms is {}, must be from 1 to {TIMEOUT_MS_MAX}", call.timeout_ms);
        return Err(ApiError::invalid("rule_broken", Some("timeout_ms"), message));
    }
    let registered = model.router.workers();
    let is_unknown = |id: &&Id| registered.iter().all(|entry| entry.worker != id.0);
    if let Some(Id(unknown)) = call.workers.iter().flatten().find(is_unknown) {
        let message = format!("worker {unknown} is not registered");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "worker_not_found", message));
    }
    // A caller that leaves does not leave requests paused.
    let ran = tokio::spawn(async move { run(model, action, call, peer).await }).await;
    ran.map_err(|_| internal("the call was interrupted"))
}

async fn run(model: Arc<Model>, action: Action, call: Call, peer: ClientAddress) -> (StatusCode, Json<Value>) {
    let (name, _, _, effect) = action;
    let workers = model.router.workers();
    let is_part = call.workers.as_ref().is_some_and(|ids| ids.len() < workers.len());
    let pauses = match effect {
        // The other workers serve the requests.
        _ if is_part => None,
        Effect::Pauses(reason) => Some(reason),
        Effect::PausesMeanwhile => Some(Reason::Weights),
        Effect::None | Effect::Resumes(_) => None,
    };
    if let Some(reason) = pauses {
        model.gate.set(reason, Some(call.requests)).await;
    }
    let body = Bytes::from(call.body.as_ref().map_or("{}", |body| body.get()).to_owned());
    let query = if call.query.is_empty() { String::new() } else { format!("?{}", call.query) };
    let within = Duration::from_millis(call.timeout_ms);
    let mut results = Vec::new();
    for entry in workers.iter() {
        if call.workers.as_ref().is_none_or(|ids| ids.contains(&Id(entry.worker))) {
            let sent = (body.clone(), query.clone(), within);
            let change = Change::new(name, &model, entry.worker, peer);
            results.push(at_worker(Arc::clone(&model), action, sent, entry.clone(), change));
        }
    }
    let results = join_all(results).await;
    let n_ok = results.iter().filter(|result| result["ok"] == true).count();
    let ended = match (effect, &pauses) {
        (Effect::PausesMeanwhile, reason) => reason.as_slice(),
        (Effect::Pauses(_), reason) if n_ok == 0 => reason.as_slice(),
        (Effect::Resumes(reasons), _) if n_ok > 0 && !wakes_partly(&call, &results) => reasons,
        (Effect::None | Effect::Pauses(_) | Effect::Resumes(_), _) => &[],
    };
    for reason in ended {
        if *reason == Reason::Sleep && matches!(effect, Effect::Resumes(_)) {
            _ = timeout(within, awake(&model, &results)).await;
        }
        model.gate.set(*reason, None).await;
    }
    let is_ok = n_ok == results.len();
    let status = if is_ok { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
    (status, Json(json!({ "action": name, "ok": is_ok, "workers": results })))
}

/// Whether engines have only their weights back, which new weights replace before the caches return.
fn wakes_partly(call: &Call, results: &[Value]) -> bool {
    let body: Value = call.body.as_ref().and_then(|body| serde_json::from_str(body.get()).ok()).unwrap_or_default();
    let tags = body["tags"].as_array().filter(|tags| !tags.is_empty());
    let is_asleep = |result: &Value| result["body"]["status"] == "sleeping";
    tags.is_some_and(|tags| !tags.contains(&json!("kv_cache"))) || results.iter().any(is_asleep)
}

/// Waits until the router knows from the polled load pages that the engines are awake: it rejects requests before.
async fn awake(model: &Model, results: &[Value]) {
    let is_woken = |health: &RankHealth| {
        let id = health.rank.worker.to_string();
        results.iter().any(|result| result["ok"] == true && result["id"] == *id)
    };
    while let Ok(ranks) = model.router.rank_health().await
        && ranks.iter().any(|health| health.state == HealthState::Asleep && is_woken(health))
    {
        sleep(AWAKE_POLL).await;
    }
}

/// The result of one worker.
async fn at_worker(
    model: Arc<Model>,
    action: Action,
    (body, query, within): (Bytes, String, Duration),
    worker: WorkerEntry,
    change: Change,
) -> Value {
    let (_, paths, mut drops_cache, _) = action;
    let id = worker.worker.to_string();
    let work = async move {
        let begun = Instant::now();
        let mut result = json!({ "id": worker.worker.to_string(), "endpoint": worker.config.endpoint, "ok": false });
        for path in paths {
            let path_and_query = [*path, &query].concat();
            let address = (worker.config.endpoint.as_str(), path_and_query.as_str());
            let called = model.access.call(address, body.clone(), within, RESPONSE_BYTES_MAX).await;
            let is_unknown = matches!(&called, Ok((status, body)) if is_unknown_path(*status, body));
            record(&mut result, path, called);
            if !is_unknown {
                drops_cache |=
                    *path == "/pause" && !["mode=keep", "clear_cache=false"].iter().any(|kept| query.contains(kept));
                break;
            }
        }
        result["ms"] = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX).into();
        if drops_cache && result["ok"] == true {
            let cleared = |rank| RouterEvent { rank, tier: StorageTier::default(), data: KvEvent::Cleared };
            model.router.apply_events(worker.ranks.iter().copied().map(cleared).collect()).await.map_err(internal)?;
        }
        let detail = match result["error"].as_str() {
            Some(error) => error.to_owned(),
            None => format!("status {}", result["status"]),
        };
        Ok((result, detail))
    };
    let done = change.carry_out(work).await;
    done.unwrap_or_else(|error| json!({ "id": id, "ok": false, "error": error.message }))
}

/// Adds the response of an engine to a result.
fn record(result: &mut Value, path: &str, called: Result<(StatusCode, Bytes), UpstreamError>) {
    result["path"] = path.into();
    match called {
        Ok((status, body)) => {
            let body: Value = serde_json::from_slice(&body).unwrap_or_else(|_| String::from_utf8_lossy(&body).into());
            // vLLM reports a reset that was not possible with status 200.
            result["ok"] = (status.is_success() && body["success"] != false).into();
            (result["status"], result["body"]) = (status.as_u16().into(), body);
        }
        Err(error) => result["error"] = error.to_string().into(),
    }
}

/// Whether an engine does not have the path. Its own errors with status 404 have other bodies.
fn is_unknown_path(status: StatusCode, body: &[u8]) -> bool {
    let is_default = serde_json::from_slice::<Value>(body).is_ok_and(|body| body["detail"] == "Not Found");
    status == StatusCode::METHOD_NOT_ALLOWED || status == StatusCode::NOT_FOUND && (is_default || body.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_an_engine_are_no_unknown_paths() {
        let not_found = StatusCode::NOT_FOUND;
        assert!(is_unknown_path(not_found, br#"{"detail":"Not Found"}"#) && is_unknown_path(not_found, b""));
        assert!(is_unknown_path(StatusCode::METHOD_NOT_ALLOWED, br#"{"detail":"Method Not Allowed"}"#));
        assert!(!is_unknown_path(not_found, br#"{"error":{"message":"the adapter does not exist","code":404}}"#));
        assert!(!is_unknown_path(StatusCode::OK, b""));
    }
}
