//! Index dump as JSON lines.
//!
//! A dump contains only hashes, is read from the index in one step, and is sent with backpressure. It is held in memory
//! until sent, about 16 bytes per block and rank.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body::{Frame, SizeHint};
use pointsman::protocol::{RouterEvent, WorkerRank};
use tokio::sync::OwnedSemaphorePermit;

use super::extract::ModelAt;
use super::{Admin, DUMPS_MAX, error};
use crate::formats::openai::{ApiError, ErrorType};
use crate::pools::model::Model;

/// Size of a frame, or one longer line.
const FRAME_BYTES: usize = 64 << 10;

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
        let refused = error(StatusCode::TOO_MANY_REQUESTS, ErrorType::RateLimit, "dumps_in_progress", message);
        ApiError { retry_after_s: Some(1), ..refused }
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
    let mut response = Response::new(Body::new(DumpBody { events: events.into_iter(), _permit: permit }));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(LINES, HeaderValue::from(lines));
    headers.insert(BLOCKS, HeaderValue::from(blocks));
    Ok(response)
}

/// One event per line.
struct DumpBody {
    events: std::vec::IntoIter<RouterEvent>,
    _permit: OwnedSemaphorePermit,
}

impl http_body::Body for DumpBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut lines = Vec::with_capacity(FRAME_BYTES);
        while lines.len() < FRAME_BYTES {
            let Some(event) = self.events.next() else { break };
            serde_json::to_writer(&mut lines, &event).expect("events serialize to JSON");
            lines.push(b'\n');
        }
        let frame = (!lines.is_empty()).then(|| Ok(Frame::data(lines.into())));
        Poll::Ready(frame)
    }
}

/// Bytes in frames. Holds the permit of the dump until they are sent.
pub(super) struct Frames {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl Frames {
    pub(super) fn new(bytes: Vec<u8>, permit: OwnedSemaphorePermit) -> Self {
        Self { bytes: bytes.into(), _permit: permit }
    }
}

impl IntoResponse for Frames {
    fn into_response(self) -> Response {
        Response::new(Body::new(self))
    }
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = self.bytes.len().min(FRAME_BYTES);
        let frame = self.bytes.split_to(frame);
        Poll::Ready((!frame.is_empty()).then(|| Ok(Frame::data(frame))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}
