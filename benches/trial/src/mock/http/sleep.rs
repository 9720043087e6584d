//! vLLM's endpoints for sleep, of its development mode: `/sleep`, `/wake_up` and `/is_sleeping`.
//!
//! A sleeping engine accepts requests and computes nothing. From level 1 on it loses its cache, which it publishes when it
//! is awake again.

use std::fmt::Write;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use super::answer;
use crate::mock::engine::Engine;

#[derive(Deserialize)]
pub(super) struct SleepQuery {
    #[serde(default = "weights_offloaded")]
    level: u8,
}

fn weights_offloaded() -> u8 {
    1
}

/// `POST /sleep?level=1`.
pub(super) async fn sleep(State(engine): Shared, Query(SleepQuery { level }): Query<SleepQuery>) -> Response {
    if level > 2 {
        return answer::error(StatusCode::BAD_REQUEST, "level must be 0 to 2");
    }
    engine.sleep.send_replace(Some(level));
    StatusCode::OK.into_response()
}

/// `POST /wake_up`.
pub(super) async fn wake_up(State(engine): Shared) -> StatusCode {
    if *engine.sleep.borrow() >= Some(1) {
        for rank in engine.ranks().iter() {
            rank.reset_cache(true);
        }
    }
    engine.sleep.send_replace(None);
    StatusCode::OK
}

/// `GET /is_sleeping`.
pub(super) async fn is_sleeping(State(engine): Shared) -> Json<Value> {
    Json(json!({ "is_sleeping": engine.sleep.borrow().is_some() }))
}

/// Writes the metric with one series per rank and state.
pub(super) fn write_metric(engine: &Engine, model: &str, text: &mut String) -> std::fmt::Result {
    let (name, level) = ("vllm:engine_sleep_state", *engine.sleep.borrow());
    writeln!(text, "# HELP {name} Engine sleep state.")?;
    writeln!(text, "# TYPE {name} gauge")?;
    for (state, is_set) in
        [("awake", level.is_none()), ("weights_offloaded", level == Some(1)), ("discard_all", level == Some(2))]
    {
        for rank in 0..engine.ranks().len() {
            let labels = format!("engine=\"{rank}\",model_name=\"{model}\",sleep_state=\"{state}\"");
            writeln!(text, "{name}{{{labels}}} {}", u8::from(is_set))?;
        }
    }
    Ok(())
}
