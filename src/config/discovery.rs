//! `[discovery]`: reconciliation of discovered workers with running ones.

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Settings of discovery.
    pub struct DiscoveryConfig {
        /// Interval between reconciliations, in milliseconds; a change of a source starts one at once. Default 5,000,
        /// at least 1.
        interval_ms: u64 = 5_000;
        /// Longest drain of a worker that its source drains, in milliseconds. Bookings that remain then are ended.
        /// Default 600,000.
        drain_timeout_ms: u64 = 600_000;
    }
}

impl DiscoveryConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("discovery.interval_ms", self.interval_ms);
    }
}
