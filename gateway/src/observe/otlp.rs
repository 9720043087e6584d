//! Spans of requests, exported over OTLP.
//!
//! One tree per request: `route` with the phases of the router, and one `upstream` span per attempt with the event
//! `first token`. Spans leave in batches from a thread of the SDK. A full queue drops spans, never delays a request.

use std::time::{Duration, SystemTime};

use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use pointsman::Placement;
use tokio::time::Instant;

use super::trace_context::TraceContext;

/// Time limit of the last export at the end of the process.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(2);

/// Summary of a request at its end.
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

/// Exporter of the process.
#[derive(Debug)]
pub(crate) struct Tracing {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Tracing {
    /// Exports to a collector, `http://HOST:PORT`, with gRPC. The decision of the client applies to its traces, the
    /// share to all others. Must be called in a runtime; connects when the first spans leave.
    ///
    /// # Errors
    /// An address that the client library rejects.
    pub(crate) fn start(endpoint: &str, sample_share: f64) -> Result<Self, String> {
        let exporter = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build();
        let exporter = exporter.map_err(|error| error.to_string())?;
        let resource = Resource::builder_empty().with_attributes([
            KeyValue::new("service.name", "pointsman"),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        ]);
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(sample_share)));
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_sampler(sampler)
            .with_resource(resource.build())
            .build();
        let tracer = provider.tracer("pointsman");
        Ok(Self { provider, tracer })
    }

    /// Exports the remaining spans. Blocks for at most [`SHUTDOWN_WAIT`].
    pub(crate) fn shutdown(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(SHUTDOWN_WAIT) {
            tracing::debug!(%error, "spans were not exported at the end");
        }
    }

    /// Begins the spans of a request that began at `started`.
    pub(crate) fn request(
        &self,
        client: Option<TraceContext>,
        name: &'static str,
        started: Instant,
    ) -> Option<RequestSpans> {
        let parent = client.map_or_else(Context::new, |client| {
            let flags = TraceFlags::default().with_sampled(client.is_sampled());
            let (trace_id, span_id) = (TraceId::from(client.trace_id), SpanId::from(client.span_id));
            Context::new().with_remote_span_context(SpanContext::new(trace_id, span_id, flags, true, TraceState::NONE))
        });
        let begin = now() - started.elapsed();
        let builder = self.tracer.span_builder(name).with_kind(SpanKind::Server).with_start_time(begin);
        let root = parent.with_span(builder.start_with_context(&self.tracer, &parent));
        Some(RequestSpans { tracer: self.tracer.clone(), root, attempt: None })
    }
}

/// Spans of one request.
#[derive(Debug)]
pub(crate) struct RequestSpans {
    tracer: SdkTracer,
    root: Context,
    /// The present attempt.
    attempt: Option<Context>,
}

impl RequestSpans {
    pub(crate) fn is_recording(&self) -> bool {
        self.root.span().is_recording()
    }

    /// Context of the request's span.
    pub(crate) fn context(&self) -> TraceContext {
        context_of(&self.root)
    }

    /// Context of the present attempt's span.
    pub(crate) fn attempt_context(&self) -> TraceContext {
        context_of(self.attempt.as_ref().unwrap_or(&self.root))
    }

    pub(crate) fn placed(&self, placement: &Placement) {
        let Some(phases) = placement.phases().filter(|_| self.is_recording()) else { return };
        let (end, rank) = (now(), placement.rank());
        let mut at = end - phases.total();
        let route = self.tracer.span_builder("route").with_start_time(at).with_attributes([
            KeyValue::new("pointsman.decision", number(placement.number())),
            KeyValue::new("pointsman.worker_id", rank.worker.0.to_string()),
            KeyValue::new("pointsman.rank", i64::from(rank.rank)),
            KeyValue::new("pointsman.cached_tokens", i64::from(placement.cached_tokens())),
            KeyValue::new("pointsman.reachable_blocks", i64::from(placement.reachable_blocks())),
        ]);
        let route = self.root.with_span(route.start_with_context(&self.tracer, &self.root));
        for (name, duration) in [
            ("hash", phases.hash),
            ("overlap", phases.overlap),
            ("queue", phases.queue),
            ("decide", phases.decide),
            ("book", phases.book),
        ] {
            let builder = self.tracer.span_builder(name).with_start_time(at);
            at += duration;
            builder.start_with_context(&self.tracer, &route).end_with_timestamp(at);
        }
        route.span().end_with_timestamp(end);
    }

    pub(crate) fn attempted(&mut self, placement: &Placement, is_prefill: bool) {
        let worker = KeyValue::new("server.address", placement.endpoint().to_owned());
        let rank = KeyValue::new("pointsman.rank", i64::from(placement.rank().rank));
        if is_prefill {
            return self.root.span().add_event("prefill leg", vec![worker, rank]);
        }
        self.end_attempt();
        let builder = self.tracer.span_builder("upstream").with_kind(SpanKind::Client).with_attributes([worker, rank]);
        self.attempt = Some(self.root.with_span(builder.start_with_context(&self.tracer, &self.root)));
    }

    pub(crate) fn first_token(&self) {
        self.attempt.as_ref().unwrap_or(&self.root).span().add_event("first token", Vec::new());
    }

    pub(crate) fn attempt_failed(&mut self, reason: &'static str) {
        if let Some(attempt) = &self.attempt {
            attempt.span().set_status(Status::error(reason));
        }
        self.end_attempt();
    }

    pub(crate) fn end(&mut self, end: &RequestEnd<'_>) {
        self.end_attempt();
        let span = self.root.span();
        span.set_attributes([
            KeyValue::new("pointsman.request_id", end.request_id.to_owned()),
            KeyValue::new("pointsman.outcome", end.outcome),
            KeyValue::new("http.response.status_code", i64::from(end.status)),
        ]);
        let texts = [
            ("pointsman.tenant", end.tenant),
            ("gen_ai.request.model", Some(end.model).filter(|model| !model.is_empty())),
            ("error.type", end.error),
        ];
        span.set_attributes(texts.into_iter().filter_map(|(key, value)| Some(KeyValue::new(key, value?.to_owned()))));
        let counts = [
            ("gen_ai.usage.input_tokens", end.prompt_tokens.map(u64::from)),
            ("gen_ai.usage.output_tokens", end.output_tokens),
            ("pointsman.delivered_cached_tokens", end.cached_tokens.map(u64::from)),
        ];
        span.set_attributes(counts.into_iter().filter_map(|(key, value)| Some(KeyValue::new(key, number(value?)))));
        if end.outcome != "ok" {
            span.set_status(Status::error(end.outcome));
        }
        span.end();
    }

    fn end_attempt(&mut self) {
        if let Some(attempt) = self.attempt.take() {
            attempt.span().end();
        }
    }
}

fn context_of(context: &Context) -> TraceContext {
    let span = context.span();
    let context = span.span_context();
    TraceContext {
        trace_id: u128::from_be_bytes(context.trace_id().to_bytes()),
        span_id: u64::from_be_bytes(context.span_id().to_bytes()),
        flags: context.trace_flags().to_u8(),
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
