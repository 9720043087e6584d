//! Recorded decisions: the last ones, and those of one request with their candidate tables.
//!
//! Both replay parts of the record, on a thread for blocking work.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use pointsman::RecordedDecision;
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use super::queries::named;
use super::{Admin, internal};
use crate::formats::openai::ApiError;
use crate::pools::model::Model;

/// Decisions of a model in the list of the last ones.
const LISTED_MAX: usize = 100;

pub(super) async fn last(State(admin): State<Arc<Admin>>) -> Result<Json<Value>, ApiError> {
    let pools = admin.pools.get();
    let decisions = blocking(move || {
        let mut last: Vec<(Arc<Model>, RecordedDecision)> = Vec::new();
        for model in pools.models.all() {
            let known = model.router.recorded_decisions(LISTED_MAX, None).into_iter();
            last.extend(known.map(|known| (Arc::clone(model), known)));
        }
        last.sort_by(|(_, a), (_, b)| b.age_seconds.total_cmp(&a.age_seconds));
        last.split_off(last.len().saturating_sub(LISTED_MAX))
    });
    let rows: Result<Vec<Value>, ApiError> = decisions.await?.iter().map(|(model, known)| row(model, known)).collect();
    Ok(Json(json!({ "decisions": rows? })))
}

pub(super) async fn of_request(
    State(admin): State<Arc<Admin>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let (pools, request_id) = (admin.pools.get(), id.clone());
    let decisions = blocking(move || {
        let mut found = Vec::new();
        for model in pools.models.all() {
            let known = model.router.recorded_decisions_of(&request_id).into_iter();
            found.extend(known.map(|(known, explanation)| (Arc::clone(model), known, explanation)));
        }
        found
    });
    let decisions = decisions.await?;
    if decisions.is_empty() {
        let message = format!("no decision of request {id} is recorded");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "decision_not_recorded", message));
    }
    let rows = decisions.iter().map(|(model, known, explanation)| {
        let (mut shown, table) = (row(model, known)?, named(model, explanation)?);
        shown["explanation"] = table;
        Ok(shown)
    });
    let rows: Result<Vec<Value>, ApiError> = rows.collect();
    Ok(Json(json!({ "decisions": rows? })))
}

/// A decision as a row. The id of a booking is that of its request with a suffix.
fn row(model: &Model, known: &RecordedDecision) -> Result<Value, ApiError> {
    let mut shown = named(model, known)?;
    let request_id = known.request_id.rsplit_once('/').map_or(known.request_id.as_str(), |(id, _)| id);
    shown["model"] = model.settings.name.as_str().into();
    shown["booking_id"] = known.request_id.as_str().into();
    shown["request_id"] = request_id.into();
    Ok(shown)
}

pub(super) async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R, ApiError> {
    spawn_blocking(work).await.map_err(internal)
}
