//! One request's way to a worker and back.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use pointsman::{Prompt, RouteRequest};
use serde_json::{Value, json};

use super::App;
use crate::openai::{ApiError, Ask, Edits, Endpoint};
use crate::upstream::UpstreamError;

pub(super) async fn chat(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let ask = Ask::parse(Endpoint::Chat, body)?;
    let name = ask.model.as_deref().unwrap_or_default();
    let unknown = || ApiError::invalid("model_not_found", Some("model"), "there is no such model");
    let (model, _) = app.models.find(name).ok_or_else(unknown)?;
    let tokens = model.tokens.of(&ask.prompt, name).await;
    let prompt = Prompt::Tokens(&tokens.ids);
    let placement = model.router.route(RouteRequest::new("request", prompt)).await?;
    let (connected, path) = (app.settings.gateway.connect_timeout_ms, ask.endpoint.path());
    let url = format!("{}{path}", placement.endpoint());
    let answer = app.upstream.ask(&url, ask.body(Edits::default()), Duration::from_millis(connected), 1 << 20).await;
    let failed =
        |error: UpstreamError| ApiError::unavailable(StatusCode::BAD_GATEWAY, "worker_failed", error.to_string());
    Ok(answer.map_err(failed)?.into_response())
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let names = app.models.all().iter().map(|model| json!({ "id": model.settings.name, "object": "model" }));
    Json(json!({ "object": "list", "data": names.collect::<Vec<_>>() }))
}
