//! `[discovery]`: reconciliation of discovered workers with running ones.

use serde::{Deserialize, Serialize};

use crate::validation::Problems;

/// Settings of discovery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiscoveryConfig {
    /// Interval between reconciliations, in milliseconds; a change of a source starts one at once. Default 5,000, at
    /// least 1.
    pub interval_ms: u64,
    /// Longest drain of a worker that its source drains, in milliseconds. Bookings that remain then are ended. Default
    /// 600,000.
    pub drain_timeout_ms: u64,
}

impl Default for DiscoveryConfig {
    fn default() -> Self {
        Self { interval_ms: 5_000, drain_timeout_ms: 600_000 }
    }
}

impl DiscoveryConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("discovery.interval_ms", self.interval_ms);
    }
}
