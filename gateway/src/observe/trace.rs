//! Trace of one request.
//!
//! Without `gateway.otlp_endpoint` a trace is only the context of the client: its id appears in the access log, and its
//! headers pass to the workers. Otherwise it has spans of its own (`otlp`), and workers receive the span of their attempt
//! as parent.

use axum::http::{HeaderMap, HeaderValue};
use pointsman::Placement;
use tokio::time::Instant;

use super::otlp::{RequestEnd, RequestSpans, Tracing};
use super::trace_context::{TRACEPARENT, TraceContext};

/// Trace of one request.
#[derive(Debug, Default)]
pub(crate) struct RequestTrace {
    client: Option<TraceContext>,
    spans: Option<Box<RequestSpans>>,
}

impl RequestTrace {
    /// Trace of a request without spans.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        Self { client: TraceContext::of(headers), spans: None }
    }

    /// Begins the spans of the request, if they are exported.
    pub(crate) fn begin(&mut self, tracing: &Tracing, name: &'static str, started: Instant) {
        self.spans = tracing.request(self.client, name, started).map(Box::new);
    }

    /// Whether the durations of the router's phases are needed.
    pub(crate) fn wants_phases(&self) -> bool {
        self.spans.as_ref().is_some_and(|spans| spans.is_recording())
    }

    /// Id of the trace, of the client or own.
    pub(crate) fn trace_id(&self) -> Option<String> {
        if let Some(spans) = &self.spans {
            return Some(spans.context().trace_id());
        }
        self.client.map(|context| context.trace_id())
    }

    /// Records a placement that the router has just returned.
    pub(crate) fn placed(&mut self, placement: &Placement) {
        if let Some(spans) = &mut self.spans {
            spans.placed(placement);
        }
    }

    /// Records the start of an attempt, or of a prefill leg.
    pub(crate) fn attempted(&mut self, placement: &Placement, is_prefill: bool) {
        if let Some(spans) = &mut self.spans {
            spans.attempted(placement, is_prefill);
        }
    }

    /// Value of `traceparent` for the worker of the present attempt. None without spans: that of the client remains.
    pub(crate) fn attempt_header(&self) -> Option<HeaderValue> {
        self.spans.as_ref().map(|spans| spans.attempt_context().header())
    }

    /// Sets the trace headers of the present attempt.
    pub(crate) fn inject(&self, headers: &mut HeaderMap) {
        if let Some(header) = self.attempt_header() {
            headers.insert(TRACEPARENT, header);
        }
    }

    /// Records the first token, or the first byte of a response that is not streamed.
    pub(crate) fn first_token(&mut self) {
        if let Some(spans) = &mut self.spans {
            spans.first_token();
        }
    }

    /// Records the failure of the present attempt.
    pub(crate) fn attempt_failed(&mut self, reason: &'static str) {
        if let Some(spans) = &mut self.spans {
            spans.attempt_failed(reason);
        }
    }

    /// Ends all spans.
    pub(crate) fn end(&mut self, end: &RequestEnd<'_>) {
        if let Some(spans) = &mut self.spans {
            spans.end(end);
        }
    }
}
