//! Settings of the policy `latency`.

use serde::{Deserialize, Serialize};

use crate::validation::Problems;

/// Settings of [`Policy::Latency`](crate::select::Policy::Latency). It weighs seconds against seconds, so it has no
/// weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LatencyConfig {
    /// Randomness of the choice; 0 takes the least cost. Default 0, 0 to 1e9.
    pub temperature: f64,
}

impl LatencyConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.weight("policy.temperature", self.temperature);
    }
}
