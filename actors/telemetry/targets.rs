//! Counters of latency targets, met or missed by responses.

use metrics::Counter;

use super::Pool;

/// Counters of both targets.
pub(crate) struct TargetMeters {
    /// Time to first token.
    pub(crate) ttft: TargetCount,
    /// Mean time between tokens.
    pub(crate) itl: TargetCount,
}

/// Counters of one target.
pub(crate) struct TargetCount {
    met: Counter,
    missed: Counter,
}

impl TargetMeters {
    pub(super) fn new(pool: &Pool) -> Self {
        let count =
            |target, outcome| pool.counter("pointsman_targets_total", &[("target", target), ("outcome", outcome)]);
        let target = |target| TargetCount { met: count(target, "met"), missed: count(target, "missed") };
        Self { ttft: target("ttft"), itl: target("itl") }
    }
}

impl TargetCount {
    pub(crate) fn count(&self, is_met: bool) {
        let counter = if is_met { &self.met } else { &self.missed };
        counter.increment(1);
    }
}
