//! Recorder that drops the gauges of removed workers.
//!
//! A gauge with the label `worker` is set every second while its rank is registered. Without updates for [`IDLE_MAX`]
//! the exporter drops it, so that changing pods do not accumulate series. All other gauges may keep a value for long,
//! so they are refreshed before the exporter checks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::PrometheusRecorder;

/// Time during which gauges of a removed worker are exported as 0: several scrapes.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(300);

/// Label of gauges that expire with their worker.
const WORKER: &str = "worker";

/// Gauges that do not expire.
#[derive(Clone, Debug, Default)]
pub(super) struct LastingGauges(Arc<Mutex<BTreeMap<Key, Gauge>>>);

impl LastingGauges {
    /// Refreshes the gauges without changing their values.
    pub(super) fn touch(&self) {
        for gauge in self.0.lock().unwrap_or_else(PoisonError::into_inner).values() {
            gauge.increment(0.0);
        }
    }
}

/// The exporter's recorder and the gauges that must not expire.
pub(super) struct Expiring {
    recorder: PrometheusRecorder,
    lasting: LastingGauges,
}

impl Expiring {
    pub(super) fn new(recorder: PrometheusRecorder) -> (Self, LastingGauges) {
        let lasting = LastingGauges::default();
        (Self { recorder, lasting: lasting.clone() }, lasting)
    }
}

impl Recorder for Expiring {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.recorder.describe_counter(name, unit, help);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.recorder.describe_gauge(name, unit, help);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, help: SharedString) {
        self.recorder.describe_histogram(name, unit, help);
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        self.recorder.register_counter(key, metadata)
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        let gauge = self.recorder.register_gauge(key, metadata);
        if key.labels().all(|label| label.key() != WORKER) {
            let mut lasting = self.lasting.0.lock().unwrap_or_else(PoisonError::into_inner);
            lasting.insert(key.clone(), gauge.clone());
        }
        gauge
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        self.recorder.register_histogram(key, metadata)
    }
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;
    use metrics_util::MetricKindMask;

    use super::*;

    #[test]
    fn series_of_removed_workers_expire() {
        // All gauges not set since the last page are idle.
        let builder = PrometheusBuilder::new().idle_timeout(MetricKindMask::GAUGE, Some(Duration::ZERO));
        let recorder = builder.build_recorder();
        let pages = recorder.handle();
        let (recorder, lasting) = Expiring::new(recorder);
        metrics::with_local_recorder(&recorder, || {
            let of = |worker: u32| metrics::gauge!("held", "worker" => worker.to_string(), "rank" => "0");
            metrics::gauge!("build").set(1.0);
            let connections = metrics::gauge!("connections", "listener" => "clients");
            connections.increment(2.0);
            let (stays, mut page) = (of(0), String::new());
            for worker in 1..100 {
                of(worker).set(0.0);
                stays.set(7.0);
                lasting.touch();
                page = pages.render();
            }
            assert!(page.contains("held{worker=\"0\",rank=\"0\"} 7\n"), "{page}");
            let series = page.lines().filter(|line| line.starts_with("held{")).count();
            assert!(series <= 3, "{series} series are left of 99 workers that came and went:\n{page}");
            assert!(page.contains("build 1\n") && page.contains("connections{listener=\"clients\"} 2\n"), "{page}");
            connections.increment(1.0);
            lasting.touch();
            assert!(
                pages.render().contains("connections{listener=\"clients\"} 3\n"),
                "the handle still updates the series"
            );
        });
    }
}
