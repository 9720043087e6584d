//! Recorder that drops the series of removed workers.
//!
//! A gauge or counter with the label `worker` is updated every second while its rank is registered. Without updates for
//! [`IDLE_MAX`] the exporter drops it, so that changing pods do not accumulate series. All others may keep a value for
//! long, so they are refreshed before the exporter checks. Series with that label can be left out altogether.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::PrometheusRecorder;
use parking_lot::Mutex;

/// Time during which series of a removed worker are exported: several scrapes.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(300);

/// Label of series that expire with their worker.
const WORKER: &str = "worker";

/// Gauges and counters that do not expire.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastingSeries {
    gauges: Arc<Mutex<BTreeMap<Key, Gauge>>>,
    counters: Arc<Mutex<BTreeMap<Key, Counter>>>,
}

impl LastingSeries {
    /// Refreshes the series without changing their values.
    pub(crate) fn touch(&self) {
        for gauge in self.gauges.lock().values() {
            gauge.increment(0.0);
        }
        for counter in self.counters.lock().values() {
            counter.increment(0);
        }
    }
}

/// The exporter's recorder and the series that must not expire.
pub(crate) struct Expiring {
    recorder: PrometheusRecorder,
    lasting: LastingSeries,
    has_workers: bool,
}

impl Expiring {
    /// `has_workers`: whether series with the label `worker` are recorded.
    pub(crate) fn new(recorder: PrometheusRecorder, has_workers: bool) -> (Self, LastingSeries) {
        let lasting = LastingSeries::default();
        (Self { recorder, lasting: lasting.clone(), has_workers }, lasting)
    }

    /// The handle of a recorded series. It is kept unless the series belongs to a worker.
    fn kept<T: Clone>(&self, lasting: &Mutex<BTreeMap<Key, T>>, key: &Key, register: impl FnOnce() -> T) -> Option<T> {
        let is_of_worker = key.labels().any(|label| label.key() == WORKER);
        let handle = (self.has_workers || !is_of_worker).then(register)?;
        if !is_of_worker {
            lasting.lock().entry(key.clone()).or_insert_with(|| handle.clone());
        }
        Some(handle)
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
        let register = || self.recorder.register_counter(key, metadata);
        self.kept(&self.lasting.counters, key, register).unwrap_or_else(Counter::noop)
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        let register = || self.recorder.register_gauge(key, metadata);
        self.kept(&self.lasting.gauges, key, register).unwrap_or_else(Gauge::noop)
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        self.recorder.register_histogram(key, metadata)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics_exporter_prometheus::PrometheusBuilder;

    #[test]
    fn series_of_removed_workers_expire() {
        // All series not updated since the last page are idle.
        let builder = PrometheusBuilder::new().idle_timeout(super::super::page::expiring(), Some(Duration::ZERO));
        let recorder = builder.build_recorder();
        let pages = recorder.handle();
        let (recorder, lasting) = Expiring::new(recorder, true);
        metrics::with_local_recorder(&recorder, || {
            let of = |worker: u32| metrics::gauge!("held", "worker" => worker.to_string(), "rank" => "0");
            metrics::gauge!("build").set(1.0);
            let connections = metrics::gauge!("connections", "listener" => "clients");
            connections.increment(2.0);
            let placed = |worker: u32| metrics::counter!("placed", "worker" => worker.to_string());
            metrics::counter!("requests").increment(3);
            let (stays, placed_on_it, mut page) = (of(0), placed(0), String::new());
            placed_on_it.increment(5);
            for worker in 1..100 {
                of(worker).set(0.0);
                placed(worker).increment(1);
                stays.set(7.0);
                placed_on_it.increment(0);
                lasting.touch();
                page = pages.render();
            }
            assert!(page.contains("held{worker=\"0\",rank=\"0\"} 7\n"), "{page}");
            let series = page.lines().filter(|line| line.starts_with("held{")).count();
            assert!(series <= 3, "{series} series are left of 99 workers that came and went:\n{page}");
            assert!(page.contains("placed{worker=\"0\"} 5\n") && page.contains("requests 3\n"), "{page}");
            let counters = page.lines().filter(|line| line.starts_with("placed{")).count();
            assert!(counters <= 3, "{counters} counters are left of 99 workers that came and went:\n{page}");
            assert!(page.contains("build 1\n") && page.contains("connections{listener=\"clients\"} 2\n"), "{page}");
            connections.increment(1.0);
            lasting.touch();
            assert!(
                pages.render().contains("connections{listener=\"clients\"} 3\n"),
                "the handle still updates the series"
            );
        });
    }

    #[test]
    fn series_of_workers_can_be_left_out() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let pages = recorder.handle();
        metrics::with_local_recorder(&Expiring::new(recorder, false).0, || {
            metrics::gauge!("held", "worker" => "1").set(1.0);
            metrics::counter!("placed", "worker" => "1").increment(1);
            metrics::counter!("requests", "model" => "m").increment(1);
        });
        assert_eq!(pages.render(), "# TYPE requests counter\nrequests{model=\"m\"} 1\n\n");
    }
}
