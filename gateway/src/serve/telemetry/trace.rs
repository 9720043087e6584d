//! Trace of one request.
//!
//! Without the feature `otlp`, or without `gateway.otlp_endpoint`, a trace is only the context of the client: its id
//! appears in the access log, and its headers pass to the workers. Otherwise it has spans of its own (`otlp`), and
//! workers receive the span of their attempt as parent.

use axum::http::{HeaderMap, HeaderValue};
use pointsman::Placement;
#[cfg(feature = "otlp")]
use tokio::time::Instant;

#[cfg(feature = "otlp")]
use super::otlp::{RequestSpans, Tracing};
use super::trace_context::{TRACEPARENT, TraceContext};

/// Trace of one request.
#[derive(Debug, Default)]
pub(crate) struct RequestTrace {
    client: Option<TraceContext>,
    #[cfg(feature = "otlp")]
    spans: Option<Box<RequestSpans>>,
}

/// Summary of a request at its end.
#[cfg_attr(not(feature = "otlp"), expect(dead_code, reason = "attributes of the span"))]
pub(crate) struct RequestEnd<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) tenant: Option<&'a str>,
    pub(crate) model: &'a str,
    pub(crate) status: u16,
    pub(crate) outcome: &'static str,
    pub(crate) error: Option<&'static str>,
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) output_tokens: Option<u64>,
}

impl RequestTrace {
    /// Trace of a request without spans.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        Self {
            client: TraceContext::of(headers),
            #[cfg(feature = "otlp")]
            spans: None,
        }
    }

    /// Begins the spans of the request, if they are exported.
    #[cfg(feature = "otlp")]
    pub(crate) fn begin(&mut self, tracing: &Tracing, name: &'static str, started: Instant) {
        self.spans = tracing.request(self.client, name, started).map(Box::new);
    }

    /// Whether the durations of the router's phases are needed.
    pub(crate) fn wants_phases(&self) -> bool {
        #[cfg(feature = "otlp")]
        return self.spans.as_ref().is_some_and(|spans| spans.is_recording());
        #[cfg(not(feature = "otlp"))]
        false
    }

    /// Id of the trace, of the client or own.
    pub(crate) fn trace_id(&self) -> Option<String> {
        #[cfg(feature = "otlp")]
        if let Some(spans) = &self.spans {
            return Some(spans.context().trace_id());
        }
        self.client.map(|context| context.trace_id())
    }

    /// Records a placement that the router has just returned.
    pub(crate) fn placed(&mut self, placement: &Placement) {
        #[cfg(feature = "otlp")]
        if let Some(spans) = &mut self.spans {
            spans.placed(placement);
        }
        #[cfg(not(feature = "otlp"))]
        let _ = placement;
    }

    /// Records the start of an attempt, or of a prefill leg.
    pub(crate) fn attempted(&mut self, placement: &Placement, is_prefill: bool) {
        #[cfg(feature = "otlp")]
        if let Some(spans) = &mut self.spans {
            spans.attempted(placement, is_prefill);
        }
        #[cfg(not(feature = "otlp"))]
        let _ = (placement, is_prefill);
    }

    /// Value of `traceparent` for the worker of the present attempt. None without spans: that of the client remains.
    pub(crate) fn attempt_header(&self) -> Option<HeaderValue> {
        #[cfg(feature = "otlp")]
        return self.spans.as_ref().map(|spans| spans.attempt_context().header());
        #[cfg(not(feature = "otlp"))]
        None
    }

    /// Sets the trace headers of the present attempt.
    pub(crate) fn inject(&self, headers: &mut HeaderMap) {
        if let Some(header) = self.attempt_header() {
            headers.insert(TRACEPARENT, header);
        }
    }

    /// Records the first token, or the first byte of a response that is not streamed.
    pub(crate) fn first_token(&mut self) {
        #[cfg(feature = "otlp")]
        if let Some(spans) = &mut self.spans {
            spans.first_token();
        }
    }

    /// Records the failure of the present attempt.
    pub(crate) fn attempt_failed(&mut self, reason: &'static str) {
        #[cfg(feature = "otlp")]
        if let Some(spans) = &mut self.spans {
            spans.attempt_failed(reason);
        }
        #[cfg(not(feature = "otlp"))]
        let _ = reason;
    }

    /// Ends all spans.
    pub(crate) fn end(&mut self, end: &RequestEnd<'_>) {
        #[cfg(feature = "otlp")]
        if let Some(spans) = &mut self.spans {
            spans.end(end);
        }
        #[cfg(not(feature = "otlp"))]
        let _ = end;
    }
}
