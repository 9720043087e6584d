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
use axum::response::Response;
use http_body::Frame;
use pointsman::protocol::RouterEvent;
use tokio::sync::OwnedSemaphorePermit;

use super::extract::ModelAt;
use super::{Admin, DUMPS_MAX, error};
use crate::openai::{ApiError, ErrorType};

/// Size of a frame, or one longer line.
const FRAME_BYTES: usize = 64 << 10;

/// Header with the number of lines.
const LINES: HeaderName = HeaderName::from_static("x-dump-lines");

/// Header with the number of blocks, counted per rank.
const BLOCKS: HeaderName = HeaderName::from_static("x-dump-blocks");

pub(super) async fn dump(State(admin): State<Arc<Admin>>, ModelAt(model): ModelAt) -> Result<Response, ApiError> {
    let permit = Arc::clone(&admin.dumps).try_acquire_owned().map_err(|_| {
        let message = format!("the limit of {DUMPS_MAX} concurrent dumps is reached");
        let refused = error(StatusCode::TOO_MANY_REQUESTS, ErrorType::RateLimit, "dumps_in_progress", message);
        ApiError { retry_after_s: Some(1), ..refused }
    })?;
    let lost = |lost: pointsman::error::FlushError| {
        ApiError::unavailable(StatusCode::SERVICE_UNAVAILABLE, "no_index", lost.to_string())
    };
    let events = model.router.dump_events().await.map_err(lost)?;
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
