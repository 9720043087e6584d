//! Definition of a metric: name, type, labels and description.

use metrics::Unit;
use pointsman::named;

named! {
/// Metric type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Monotonic.
    Counter = "counter",
    /// Arbitrary value.
    Gauge = "gauge",
    /// A distribution.
    Histogram = "histogram",
}
}

/// The metrics of a module by name: `NAME: kind "name" ["label"] = "description";`. They have descriptions once
/// [`all`](crate::app::metrics::all) has `METRICS` of the module.
macro_rules! metric_table {
    ($($(#[$doc:meta])* $metric:ident: $kind:ident $name:literal [$($label:literal),*] = $help:literal;)*) => {
        $($(#[$doc])* pub(crate) const $metric: $crate::observe::metric::Metric =
            $crate::observe::metric::Metric { name: $name, kind: metric_table!(@$kind), labels: &[$($label),*], help: $help };)*

        /// The metrics of this module.
        pub(crate) const METRICS: &[$crate::observe::metric::Metric] = &[$($metric),*];
    };
    (@counter) => { $crate::observe::metric::MetricKind::Counter };
    (@gauge) => { $crate::observe::metric::MetricKind::Gauge };
    (@histogram) => { $crate::observe::metric::MetricKind::Histogram };
}
pub(crate) use metric_table;

/// One metric of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name.
    pub name: &'static str,
    /// Type.
    pub kind: MetricKind,
    /// Labels.
    pub labels: &'static [&'static str],
    /// Description.
    pub help: &'static str,
}

impl Metric {
    /// Unit.
    pub fn unit(&self) -> &'static str {
        if self.name.contains("_seconds") {
            "seconds"
        } else if self.name.contains("_bytes") {
            "bytes"
        } else {
            "count"
        }
    }

    /// Registers the description with the recorder.
    pub(crate) fn describe(&self) {
        let unit = match self.unit() {
            "seconds" => Unit::Seconds,
            "bytes" => Unit::Bytes,
            _ => Unit::Count,
        };
        match self.kind {
            MetricKind::Counter => metrics::describe_counter!(self.name, unit, self.help),
            MetricKind::Gauge => metrics::describe_gauge!(self.name, unit, self.help),
            MetricKind::Histogram => metrics::describe_histogram!(self.name, unit, self.help),
        }
    }
}
