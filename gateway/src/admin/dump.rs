//! Index dump as JSON lines.
//!
//! A dump contains only hashes, is read from the index in one step, and is sent with backpressure. It is held in memory
//! until sent, about 16 bytes per block and rank.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use pointsman::protocol::WorkerRank;
use tokio::sync::OwnedSemaphorePermit;

use super::extract::ModelAt;
use super::{Admin, DUMPS_MAX};
use crate::formats::openai::ApiError;
use crate::pools::model::Model;

/// Size of a frame, or one longer line.
pub(super) const FRAME_BYTES: usize = 64 << 10;

/// Header with the number of lines.
const LINES: HeaderName = HeaderName::from_static("x-dump-lines");

/// Header with the number of blocks, counted per rank.
pub(super) const BLOCKS: HeaderName = HeaderName::from_static("x-dump-blocks");

pub(super) async fn dump(State(admin): State<Arc<Admin>>, ModelAt(model): ModelAt) -> Result<Response, ApiError> {
    let permit = permit(&admin)?;
    events(&model, None, permit).await
}

/// A permit for one dump.
pub(super) fn permit(admin: &Admin) -> Result<OwnedSemaphorePermit, ApiError> {
    Arc::clone(&admin.dumps).try_acquire_owned().map_err(|_| {
        let message = format!("the limit of {DUMPS_MAX} concurrent dumps is reached");
        ApiError::overloaded("dumps_in_progress", message, Duration::from_secs(1))
    })
}

/// The contents of the index, or of one rank, as events.
pub(super) async fn events(
    model: &Model,
    rank: Option<WorkerRank>,
    permit: OwnedSemaphorePermit,
) -> Result<Response, ApiError> {
    let lost = |lost: pointsman::error::FlushError| {
        ApiError::unavailable(StatusCode::SERVICE_UNAVAILABLE, "no_index", lost.to_string())
    };
    let mut events = model.router.dump_events().await.map_err(lost)?;
    events.retain(|event| rank.is_none_or(|rank| event.rank == rank));
    let blocks: usize = events.iter().map(|event| event.data.block_count()).sum();
    let lines = events.len();
    let mut events = events.into_iter();
    let next = move || {
        let mut lines = Vec::with_capacity(FRAME_BYTES);
        while lines.len() < FRAME_BYTES
            && let Some(event) = events.next()
        {
            serde_json::to_writer(&mut lines, &event).expect("events serialize to JSON");
            lines.push(b'\n');
        }
        (!lines.is_empty()).then(|| lines.into())
    };
    let mut response = streamed(permit, next);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(LINES, HeaderValue::from(lines));
    headers.insert(BLOCKS, HeaderValue::from(blocks));
    Ok(response)
}

/// A body of frames until `next` returns none. Holds the permit of the dump until they are sent.
pub(super) fn streamed(
    permit: OwnedSemaphorePermit,
    mut next: impl FnMut() -> Option<Bytes> + Send + 'static,
) -> Response {
    let frames = std::iter::from_fn(move || {
        let _held = &permit;
        next().map(Ok::<_, Infallible>)
    });
    Response::new(Body::from_stream(tokio_stream::iter(frames)))
}
