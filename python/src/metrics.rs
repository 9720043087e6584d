//! Metrics of all routers of the process, as a Prometheus page.

use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use pyo3::prelude::*;
use tokio::runtime::Handle;

/// Bounds of histograms of durations, in seconds.
const SECONDS: &[f64] = &[1e-5, 1e-4, 1e-3, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// Bounds of histograms of tokens and blocks.
const COUNTS: &[f64] = &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16_384.0, 65_536.0];

/// Bounds of histograms of ratios.
const RATIOS: &[f64] = &[0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0];

/// Interval of upkeep, which reduces unread observations of histograms to counts.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// Installs the recorder. Without effect after the first call, and if the process has a recorder already.
pub(crate) fn install(runtime: &Handle) {
    let bounds = [
        (Matcher::Suffix("_seconds".to_owned()), SECONDS),
        (Matcher::Suffix("_tokens".to_owned()), COUNTS),
        (Matcher::Suffix("_blocks".to_owned()), COUNTS),
        (Matcher::Suffix("_ratio".to_owned()), RATIOS),
    ];
    let builder = bounds.into_iter().try_fold(PrometheusBuilder::new(), |builder, (matcher, bounds)| {
        builder.set_buckets_for_metric(matcher, bounds)
    });
    let Ok(recorder) = builder.and_then(PrometheusBuilder::install_recorder) else { return };
    if RECORDER.set(recorder.clone()).is_ok() {
        runtime.spawn(async move {
            let mut ticks = tokio::time::interval(UPKEEP_EVERY);
            loop {
                ticks.tick().await;
                recorder.run_upkeep();
            }
        });
    }
}

/// Metrics of all routers of this process in Prometheus' text format. Empty before the first router starts.
#[pyfunction]
pub(crate) fn metrics(py: Python<'_>) -> String {
    py.detach(|| RECORDER.get().map(PrometheusHandle::render).unwrap_or_default())
}
