//! Start of a worker's response, read until it is known to be valid.
//!
//! Holds back at most [`BEGIN_BYTES_MAX`] and one frame, without a copy, and forwards the frames unchanged. A stream is
//! held until its first event with output, so that a worker that fails after the role chunk can still be replaced. A
//! JSON response is held until its end or the limit, because a part of it is useless to clients. Heartbeats pass at once.
//! [`Answer`](super::answer::Answer) streams the rest.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use pointsman::protocol::WorkerRank;
use pointsman::{AnswerKind, AnswerReader};
use tokio::time::{Instant, timeout_at};

use super::failure::Failure;
use super::heartbeats::Heartbeats;
use crate::formats::stream_error::body_of;
use crate::net::upstream::UpstreamError;
use crate::pools::model::Model;

/// Maximum held bytes, except for the frame that exceeds them.
const BEGIN_BYTES_MAX: usize = 64 << 10;

/// Interval of the checks whether the engine sleeps.
const SLEEP_CHECK: Duration = Duration::from_millis(500);

/// Time limit of the start of a response.
pub(super) struct TimeLimit {
    silence_max: Duration,
    deadline: Instant,
    latest: Instant,
    rank: (Arc<Model>, WorkerRank),
    checked_at: Instant,
}

impl TimeLimit {
    /// At most `silence_max` without a heartbeat, and `whole_max` with heartbeats, at an engine that does not sleep.
    pub(super) fn new(silence_max: Duration, whole_max: Duration, rank: (&Arc<Model>, WorkerRank)) -> Self {
        let (now, rank) = (Instant::now(), (Arc::clone(rank.0), rank.1));
        let latest = now + silence_max.max(whole_max);
        Self { silence_max, deadline: now + silence_max, latest, rank, checked_at: now }
    }

    /// Restarts the time after a heartbeat.
    pub(super) fn extend(&mut self) {
        self.deadline = self.latest.min(Instant::now() + self.silence_max);
    }

    /// The output of a future that completes in time. A request that reached an engine before its sleep was known would
    /// wait until it wakes.
    pub(super) async fn of<T>(&mut self, future: impl Future<Output = T>) -> Result<T, Failure> {
        let mut future = pin!(future);
        loop {
            let due = self.deadline.min(self.checked_at + SLEEP_CHECK);
            if let Ok(output) = timeout_at(due, &mut future).await {
                return Ok(output);
            }
            let (model, rank) = &self.rank;
            if model.router.is_asleep(*rank) {
                return Err(Failure::Asleep);
            }
            if due == self.deadline {
                return Err(Failure::NoResponse(UpstreamError::Timeout(self.silence_max)));
            }
            self.checked_at = due;
        }
    }
}

/// A worker's body with the held frames in front.
#[derive(Debug)]
pub(crate) struct ResponseStart {
    held: VecDeque<Frame<Bytes>>,
    /// Absent for a response that is complete already.
    rest: Option<Incoming>,
}

impl ResponseStart {
    /// A complete response.
    pub(super) fn of(body: Bytes) -> Self {
        Self { held: VecDeque::from([Frame::data(body)]), rest: None }
    }

    /// The held bytes.
    pub(super) fn held_bytes(&self) -> Vec<u8> {
        self.held.iter().filter_map(Frame::data_ref).flatten().copied().collect()
    }

    /// Waits for the first frame with content of any kind.
    pub(super) async fn any(mut rest: Incoming) -> Result<Self, Failure> {
        let mut held = VecDeque::new();
        while let Some(frame) = rest.frame().await {
            let frame = frame.map_err(broken)?;
            if !frame.data_ref().is_some_and(Bytes::is_empty) {
                held.push_back(frame);
                break;
            }
        }
        Ok(Self { held, rest: Some(rest) })
    }

    /// Waits until the response is known to be valid. Passes heartbeats, which extend the time limit.
    pub(super) async fn valid(
        mut rest: Incoming,
        kind: AnswerKind,
        mut limit: TimeLimit,
        heartbeats: Option<&Heartbeats>,
    ) -> Result<Self, Failure> {
        let (mut held, mut reader, mut bytes_held) = (VecDeque::new(), AnswerReader::new(kind), 0);
        // Held frames, and events in them, before the current event.
        let (mut whole_frames, mut whole_events) = (0, 0);
        let mut has_ended = false;
        while !has_ended && !reader.is_decided() && bytes_held < BEGIN_BYTES_MAX {
            let Some(frame) = limit.of(rest.frame()).await? else {
                has_ended = true;
                break;
            };
            let frame = frame.map_err(broken)?;
            if let Some(data) = frame.data_ref() {
                bytes_held += data.len();
                reader.read(data);
            }
            held.push_back(frame);
            has_ended = rest.is_end_stream();
            if reader.is_between_events() {
                if reader.events() == whole_events {
                    limit.extend();
                    let beats = || held.range(whole_frames..).filter_map(Frame::data_ref);
                    if heartbeats.is_some_and(|heartbeats| heartbeats.pass(beats())) {
                        bytes_held -= beats().map(Bytes::len).sum::<usize>();
                        held.truncate(whole_frames);
                    }
                }
                (whole_frames, whole_events) = (held.len(), reader.events());
            }
        }
        if has_ended {
            reader.end();
        }
        if let Some(status @ (429 | 500..)) = reader.error_status() {
            return Err(error_event(status, &held));
        }
        let is_valid = reader.has_opened() && (!has_ended || reader.is_complete());
        if is_valid {
            Ok(Self { held, rest: Some(rest) })
        } else {
            Err(Failure::Invalid(defect(&reader, kind, has_ended)))
        }
    }
}

/// The failure that an error event or body reports, as if the worker had responded with its status.
fn error_event(status: u16, held: &VecDeque<Frame<Bytes>>) -> Failure {
    let stream: Vec<_> = held.iter().filter_map(Frame::data_ref).map(Bytes::as_ref).collect();
    let body = Some(body_of(&stream.concat(), status));
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    Failure::Status { status, headers, body }
}

fn broken(error: hyper::Error) -> Failure {
    Failure::NoResponse(UpstreamError::Broken(error.to_string()))
}

fn defect(reader: &AnswerReader, kind: AnswerKind, has_ended: bool) -> String {
    let shape = match kind {
        AnswerKind::Events => "stream of events with JSON objects",
        AnswerKind::Json => "JSON object",
    };
    if has_ended && !reader.is_invalid() {
        format!("the body is no complete {shape}")
    } else {
        format!("the body is no {shape}")
    }
}

impl Body for ResponseStart {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        match (this.held.pop_front(), &mut this.rest) {
            (Some(frame), _) => Poll::Ready(Some(Ok(frame))),
            (None, Some(rest)) => Pin::new(rest).poll_frame(context),
            (None, None) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let held = self.held.iter().filter_map(Frame::data_ref).map(|data| data.len() as u64).sum::<u64>();
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + held);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + held);
        }
        hint
    }
}

/// The picker follows responses that pass the proxy instead of this gateway.
impl From<ResponseStart> for axum::body::Body {
    fn from(start: ResponseStart) -> Self {
        Self::new(start)
    }
}
