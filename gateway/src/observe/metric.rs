//! Definition of a metric: name, type, labels and description.

use metrics::Unit;

/// Metric type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Monotonic.
    Counter,
    /// Arbitrary value.
    Gauge,
    /// A distribution.
    Histogram,
}

impl MetricKind {
    /// Prometheus' name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

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
    pub(crate) const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Self {
        Self { name, kind: MetricKind::Counter, labels, help }
    }

    pub(crate) const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Self {
        Self { name, kind: MetricKind::Gauge, labels, help }
    }

    pub(crate) const fn histogram(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Self {
        Self { name, kind: MetricKind::Histogram, labels, help }
    }

    /// Unit.
    #[must_use]
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
