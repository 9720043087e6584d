//! Handlers of the endpoints of disaggregated serving: counters, transfers between engines, bootstrap and aborts.
//!
//! `/handover/claim` and `/handover/push` are internal to mock engines and stand for the transfer of KV blocks.
//! [`super::legs`] serves the legs of requests.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::request::Parsed;
use super::{Shared, answer};
use crate::mock::engine::Engine;
use crate::mock::handover::{Claim, HandoverProtocol, Push, Refusal};

/// Routes of an engine with disaggregated serving.
pub(super) fn routes() -> Router<Arc<Engine>> {
    Router::new()
        .route("/handover", get(counters))
        .route("/handover/claim", post(claim))
        .route("/handover/push", post(push))
        .route("/abort_request", post(abort_request))
}

/// `GET /handover`.
async fn counters(State(engine): Shared) -> Response {
    match &engine.handover {
        Some(board) => Json(board.counters()).into_response(),
        None => disabled(),
    }
}

/// `POST /handover/claim`: a decode engine claims the blocks of a prefill.
pub(super) async fn claim(State(engine): Shared, Parsed(claim): Parsed<Claim>) -> Response {
    let Some(board) = engine.handover.as_ref().filter(|board| board.facts.role.has_prefill()) else {
        return disabled();
    };
    match board.claim(&claim).await {
        Ok(grant) => Json(grant).into_response(),
        Err(refusal @ (Refusal::Unknown(_) | Refusal::Pending)) => {
            answer::error(StatusCode::NOT_FOUND, &refusal.to_string())
        }
        Err(refusal @ Refusal::Mismatch(_)) => answer::error(StatusCode::CONFLICT, &refusal.to_string()),
    }
}

/// `POST /handover/push`: a prefill engine delivers the blocks of a prefill.
async fn push(State(engine): Shared, Parsed(push): Parsed<Push>) -> Response {
    let is_receiver = |protocol| protocol == HandoverProtocol::VllmP2pNccl;
    match engine.handover.as_ref().filter(|board| is_receiver(board.facts.protocol) && board.facts.role.has_decode()) {
        Some(board) => {
            board.arrive(push);
            StatusCode::OK.into_response()
        }
        None => disabled(),
    }
}

/// `GET /query` of the Mooncake bootstrap server: the engine id of each rank.
pub(super) async fn query(State(engine): Shared) -> Response {
    match engine.handover.as_ref().filter(|board| board.facts.protocol == HandoverProtocol::VllmMooncake) {
        Some(board) => {
            let entry = |rank: u16| (rank.to_string(), serde_json::json!({ "engine_id": board.engine_id(rank) }));
            let ranks: Map<String, Value> = (0..board.facts.ranks).map(entry).collect();
            Json(Value::Object(ranks)).into_response()
        }
        None => disabled(),
    }
}

#[derive(Debug, Deserialize)]
struct AbortRequest {
    rid: String,
}

/// `POST /abort_request` of SGLang: succeeds also for an unknown request.
async fn abort_request(State(engine): Shared, Parsed(request): Parsed<AbortRequest>) -> Response {
    match engine.handover.as_ref().filter(|board| board.facts.protocol == HandoverProtocol::Sglang) {
        Some(board) => {
            board.abort(&request.rid);
            StatusCode::OK.into_response()
        }
        None => disabled(),
    }
}

fn disabled() -> Response {
    answer::error(StatusCode::NOT_FOUND, "the engine has no such endpoint in its protocol and role")
}
