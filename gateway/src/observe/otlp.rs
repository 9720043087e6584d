//! Export of spans over OTLP.
//!
//! Spans leave in batches from a thread of the SDK. A full queue drops spans, never delays a request.

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};

/// Time limit of the last export at the end of the process.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(2);

/// Exporter of the process.
#[derive(Debug)]
pub(crate) struct Tracing {
    provider: SdkTracerProvider,
    pub(super) tracer: SdkTracer,
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
}
