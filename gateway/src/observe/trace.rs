//! Trace of one request.
//!
//! Without `gateway.otlp_endpoint` a trace is only the context of the client: its id appears in the access log, and its
//! headers pass to the workers. Otherwise it has a tree of spans: `route` with the phases of the router, and one `upstream`
//! span per attempt with the event `first token`. Workers receive the span of their attempt as parent.

use std::time::SystemTime;

use axum::http::{HeaderMap, HeaderValue};
use opentelemetry::trace::{Span as _, SpanContext, SpanKind, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;
use pointsman::Placement;
use tokio::time::Instant;

use super::access::AccessRecord;
use super::otlp::Tracing;
use super::trace_context::{TRACEPARENT, client_context, header};

/// Trace of one request.
#[derive(Debug, Default)]
pub(crate) struct RequestTrace {
    client: Option<SpanContext>,
    spans: Option<Box<Spans>>,
}

/// Spans of one request.
#[derive(Debug)]
struct Spans {
    tracer: SdkTracer,
    root: Context,
    /// The present attempt.
    attempt: Option<Context>,
}

impl RequestTrace {
    /// Trace of a request without spans.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        Self { client: client_context(headers), spans: None }
    }

    /// Begins the spans of a request that began at `started`.
    pub(crate) fn begin(&mut self, tracing: &Tracing, name: &'static str, started: Instant) {
        let tracer = tracing.tracer.clone();
        let client = self.client.clone();
        let parent = client.map_or_else(Context::new, |client| Context::new().with_remote_span_context(client));
        let begin = now() - started.elapsed();
        let builder = tracer.span_builder(name).with_kind(SpanKind::Server).with_start_time(begin);
        let root = parent.with_span(builder.start_with_context(&tracer, &parent));
        self.spans = Some(Box::new(Spans { tracer, root, attempt: None }));
    }

    /// Whether the durations of the router's phases are needed.
    pub(crate) fn wants_phases(&self) -> bool {
        self.spans.as_ref().is_some_and(|spans| spans.root.span().is_recording())
    }

    /// Id of the trace, of the client or own.
    pub(crate) fn trace_id(&self) -> Option<String> {
        let own = self.spans.as_ref().map(|spans| spans.root.span().span_context().trace_id());
        own.or(self.client.as_ref().map(SpanContext::trace_id)).map(|id| id.to_string())
    }

    /// Records a placement that the router has just returned.
    pub(crate) fn placed(&mut self, placement: &Placement) {
        let Some(Spans { tracer, root, .. }) = self.spans.as_deref() else { return };
        let Some(phases) = placement.phases().filter(|_| root.span().is_recording()) else { return };
        let (end, rank) = (now(), placement.rank());
        let mut at = end - phases.total();
        let route = tracer.span_builder("route").with_start_time(at).with_attributes([
            KeyValue::new("pointsman.decision", number(placement.number())),
            KeyValue::new("pointsman.worker_id", rank.worker.0.to_string()),
            KeyValue::new("pointsman.rank", i64::from(rank.rank)),
            KeyValue::new("pointsman.cached_tokens", i64::from(placement.cached_tokens())),
            KeyValue::new("pointsman.reachable_blocks", i64::from(placement.reachable_blocks())),
        ]);
        let route = root.with_span(route.start_with_context(tracer, root));
        for (name, duration) in [
            ("hash", phases.hash),
            ("overlap", phases.overlap),
            ("queue", phases.queue),
            ("decide", phases.decide),
            ("book", phases.book),
        ] {
            let builder = tracer.span_builder(name).with_start_time(at);
            at += duration;
            builder.start_with_context(tracer, &route).end_with_timestamp(at);
        }
        route.span().end_with_timestamp(end);
    }

    /// Records the start of an attempt, or of a prefill leg.
    pub(crate) fn attempted(&mut self, placement: &Placement, is_prefill: bool) {
        let Some(spans) = &mut self.spans else { return };
        let worker = KeyValue::new("server.address", placement.endpoint().to_owned());
        let rank = KeyValue::new("pointsman.rank", i64::from(placement.rank().rank));
        if is_prefill {
            return spans.root.span().add_event("prefill leg", vec![worker, rank]);
        }
        spans.end_attempt(None);
        let builder = spans.tracer.span_builder("upstream").with_kind(SpanKind::Client);
        let span = builder.with_attributes([worker, rank]).start_with_context(&spans.tracer, &spans.root);
        spans.attempt = Some(spans.root.with_span(span));
    }

    /// Value of `traceparent` for the worker of the present attempt. None without spans: that of the client remains.
    pub(crate) fn attempt_header(&self) -> Option<HeaderValue> {
        self.spans.as_ref().map(|spans| header(spans.current().span().span_context()))
    }

    /// Sets the trace headers of the present attempt.
    pub(crate) fn inject(&self, headers: &mut HeaderMap) {
        if let Some(header) = self.attempt_header() {
            headers.insert(TRACEPARENT, header);
        }
    }

    /// Records the first token, or the first byte of a response that is not streamed.
    pub(crate) fn first_token(&mut self) {
        if let Some(spans) = &self.spans {
            spans.current().span().add_event("first token", Vec::new());
        }
    }

    /// Records the failure of the present attempt.
    pub(crate) fn attempt_failed(&mut self, reason: &'static str) {
        if let Some(spans) = &mut self.spans {
            spans.end_attempt(Some(reason));
        }
    }

    /// Ends all spans, with the summary of the request.
    pub(crate) fn end(&mut self, access: &AccessRecord, model: &str, status: u16, outcome: &'static str) {
        let Some(spans) = &mut self.spans else { return };
        spans.end_attempt(None);
        let span = spans.root.span();
        span.set_attributes([
            KeyValue::new("pointsman.request_id", access.request_id.clone()),
            KeyValue::new("pointsman.outcome", outcome),
            KeyValue::new("http.response.status_code", i64::from(status)),
        ]);
        let texts = [
            ("pointsman.tenant", access.tenant.as_deref()),
            ("gen_ai.request.model", Some(model).filter(|model| !model.is_empty())),
            ("error.type", access.error),
        ];
        span.set_attributes(texts.into_iter().filter_map(|(key, value)| Some(KeyValue::new(key, value?.to_owned()))));
        let counts = [
            ("gen_ai.usage.input_tokens", access.prompt_tokens.map(u64::from)),
            ("gen_ai.usage.output_tokens", access.output_tokens),
            ("pointsman.delivered_cached_tokens", access.cached_tokens.map(u64::from)),
        ];
        span.set_attributes(counts.into_iter().filter_map(|(key, value)| Some(KeyValue::new(key, number(value?)))));
        if outcome != "ok" {
            span.set_status(Status::error(outcome));
        }
        span.end();
    }
}

impl Spans {
    /// The span of the present attempt, or of the request.
    fn current(&self) -> &Context {
        self.attempt.as_ref().unwrap_or(&self.root)
    }

    fn end_attempt(&mut self, failure: Option<&'static str>) {
        let Some(attempt) = self.attempt.take() else { return };
        if let Some(reason) = failure {
            attempt.span().set_status(Status::error(reason));
        }
        attempt.span().end();
    }
}

/// Spans have signed integers.
fn number(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[expect(clippy::disallowed_methods, reason = "spans have wall-clock times")]
fn now() -> SystemTime {
    SystemTime::now()
}
