//! `[health]`: probes of engines, and ejection of ranks.

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Settings of health probes and outlier ejection.
    pub struct HealthConfig {
        /// Interval between probes of an engine, in milliseconds; 0 sends none. Needs the feature `discovery` and an
        /// `http://` endpoint. Default 5,000.
        probe_interval_ms: u64 = 5_000;
        /// Timeout of a probe, in milliseconds. Default 2,000, at least 1.
        probe_timeout_ms: u64 = 2_000;
        /// Failed probes in a row that eject an engine's ranks. Default 3, at least 1.
        probe_failures_max: u32 = 3;
        /// Successful probes in a row that readmit them. Default 2, at least 1.
        probe_successes_min: u32 = 2;
        /// Failed requests in a row, as the embedder reports them, that eject a rank; at 0 failed and refused requests
        /// are ignored. Default 5.
        outcome_failures_max: u32 = 5;
        /// Duration of a rank's first such ejection, in milliseconds; the n-th lasts n times as long, up to 300,000.
        /// Default 30,000, 1 to 300,000.
        ejection_ms: u64 = 30_000;
        /// Share of the ranks that may be ejected for failed requests at the same time: at least one of two or more,
        /// and never the last that can serve; 0 ejects none. Ranks that are down (failed probes, failed connections) do
        /// not count. Default 0.5, in [0, 1].
        ejected_share_max: f64 = 0.5;
        /// Time without progress, beyond twice that of the rank's own speed, after which a rank that owes first
        /// tokens is stalled, in milliseconds; 0 disables the detection. Default 3,000.
        stall_ms: u64 = 3_000;
    }
}

impl HealthConfig {
    /// Longest ejection, in milliseconds.
    pub const EJECTION_MS_MAX: u64 = 300_000;

    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("health.probe_timeout_ms", self.probe_timeout_ms);
        problems.positive("health.probe_failures_max", self.probe_failures_max);
        problems.positive("health.probe_successes_min", self.probe_successes_min);
        let holds = (1..=Self::EJECTION_MS_MAX).contains(&self.ejection_ms);
        problems.check("health.ejection_ms", self.ejection_ms, holds, "1 to 300000");
        problems.share("health.ejected_share_max", self.ejected_share_max);
    }
}
