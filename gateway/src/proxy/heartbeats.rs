//! Heartbeats of a streamed request until a worker has started its response.
//!
//! Clients and proxies close connections that are silent for a minute or less, while a queue or a long prompt takes
//! longer. After `heartbeat_after_ms` of silence the client receives the head of a stream and a heartbeat, which repeats
//! after the same time, and the body continues the attempts. Heartbeats of an engine pass at once. Neither commits the
//! request to an attempt: it can still be retried, and an error becomes the last event. A response that starts in time is
//! returned as it is.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use futures_util::stream::unfold;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use parking_lot::Mutex;
use pointsman::AnswerKind;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::formats::openai::Endpoint;
use crate::formats::stream_error::events_of;

/// Disables buffering in nginx.
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Maximum length of an error that becomes an event.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// Maximum length of unsent heartbeats of an engine; further ones are dropped.
const PASSED_BYTES_MAX: usize = 4 << 10;

/// Heartbeats of one request, shared by its attempts, its account and its response.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    endpoint: Endpoint,
    /// Zero disables heartbeats.
    interval: Duration,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug)]
struct State {
    /// Whether the client waits for the start of a stream.
    is_waiting: bool,
    is_head_sent: bool,
    /// Unsent heartbeats of an engine.
    passed: Vec<u8>,
    silent_since: Instant,
}

impl Heartbeats {
    pub(super) fn new(endpoint: Endpoint, interval: Duration) -> Arc<Self> {
        let silent_since = Instant::now();
        let state = State { is_waiting: false, is_head_sent: false, passed: Vec::new(), silent_since };
        Arc::new(Self { endpoint, interval, state: Mutex::new(state), changed: Notify::new() })
    }

    /// Starts the heartbeats of a request that is known to be streamed.
    pub(super) fn begin(&self) {
        self.state.lock().is_waiting = !self.interval.is_zero();
        self.changed.notify_one();
    }

    /// Whether the client has the head of the stream.
    pub(super) fn has_head(&self) -> bool {
        self.state.lock().is_head_sent
    }

    /// Passes heartbeats of an engine to the client. Returns whether the client waits for them.
    pub(super) fn pass<'a>(&self, heartbeats: impl Iterator<Item = &'a Bytes>) -> bool {
        let mut state = self.state.lock();
        if state.is_waiting {
            let unsent = state.passed.len();
            heartbeats.for_each(|bytes| state.passed.extend_from_slice(bytes));
            if state.passed.len() > PASSED_BYTES_MAX {
                state.passed.truncate(unsent);
            }
            self.changed.notify_one();
        }
        state.is_waiting
    }

    /// The next heartbeat.
    async fn next(&self) -> Bytes {
        let due = self.state.lock().silent_since + self.interval;
        let mut silence = pin!(sleep_until(due));
        loop {
            let (passed, is_waiting) = self.passed();
            if !passed.is_empty() {
                return passed;
            }
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = &mut silence, if is_waiting => {
                    self.state.lock().silent_since = Instant::now();
                    return Bytes::from_static(match self.endpoint.is_anthropic() {
                        true => b"event: ping\ndata: {\"type\": \"ping\"}\n\n",
                        false => b": keep-alive\n\n",
                    });
                }
            }
        }
    }

    fn passed(&self) -> (Bytes, bool) {
        let mut state = self.state.lock();
        if !state.passed.is_empty() {
            state.silent_since = Instant::now();
        }
        (std::mem::take(&mut state.passed).into(), state.is_waiting)
    }

    /// Ends the heartbeats. Returns those that are not sent.
    fn end(&self) -> Bytes {
        self.state.lock().is_waiting = false;
        self.passed().0
    }
}

/// A request in progress. Its many bytes are moved once, into the box.
pub(super) type Serving = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// The response of a request, or the head of a stream whose body continues to serve it.
pub(super) async fn kept_alive(heartbeats: Arc<Heartbeats>, mut serving: Serving) -> Response<Body> {
    let (mut head, beat, source) = tokio::select! {
        biased;
        mut response = &mut serving => {
            let passed = heartbeats.end();
            if !is_stream(&response) {
                return response;
            }
            set_unbuffered(response.headers_mut());
            if passed.is_empty() {
                return response;
            }
            let (head, body) = response.into_parts();
            (head, passed, Source::Response(body))
        }
        beat = heartbeats.next() => {
            heartbeats.state.lock().is_head_sent = true;
            let mut head = Response::new(()).into_parts().0;
            head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
            (head, beat, Source::Attempts(serving))
        }
    };
    set_unbuffered(&mut head.headers);
    let kept = Box::new(KeptAlive { heartbeats, beat, source });
    let next = |mut kept: Box<KeptAlive>| async move { Some((kept.next().await?, kept)) };
    Response::from_parts(head, Body::new(StreamBody::new(unfold(kept, next))))
}

/// Whether the response is a readable stream.
fn is_stream(response: &Response<Body>) -> bool {
    let content_type = response.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let is_encoded = response.headers().contains_key(CONTENT_ENCODING);
    response.status() == StatusCode::OK
        && !is_encoded
        && content_type.map(AnswerKind::of_content_type) == Some(AnswerKind::Events)
}

/// Proxies forward the events at once, unless the engine has its own rules.
fn set_unbuffered(headers: &mut HeaderMap) {
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-cache"));
    headers.entry(X_ACCEL_BUFFERING).or_insert(HeaderValue::from_static("no"));
}

/// A stream that starts with heartbeats.
struct KeptAlive {
    heartbeats: Arc<Heartbeats>,
    /// Empty after it was sent.
    beat: Bytes,
    source: Source,
}

enum Source {
    /// No worker has started a response.
    Attempts(Serving),
    Response(Body),
}

impl KeptAlive {
    async fn next(&mut self) -> Option<Result<Frame<Bytes>, axum::Error>> {
        loop {
            if !self.beat.is_empty() {
                return Some(Ok(Frame::data(std::mem::take(&mut self.beat))));
            }
            let serving = match &mut self.source {
                Source::Attempts(serving) => serving,
                Source::Response(body) => return body.frame().await,
            };
            tokio::select! {
                biased;
                response = serving => {
                    self.beat = self.heartbeats.end();
                    self.source = Source::Response(body_of(self.heartbeats.endpoint, response).await);
                }
                beat = self.heartbeats.next() => self.beat = beat,
            }
        }
    }
}

/// The events of the response. The client has the head of another one, so that an error becomes an event.
async fn body_of(endpoint: Endpoint, response: Response<Body>) -> Body {
    if is_stream(&response) {
        return response.into_body();
    }
    let (head, body) = response.into_parts();
    let status = if head.status.is_success() { StatusCode::BAD_GATEWAY } else { head.status };
    let body = to_bytes(body, ERROR_BYTES_MAX).await.unwrap_or_default();
    Body::from(events_of(endpoint, status.as_u16(), &body))
}
