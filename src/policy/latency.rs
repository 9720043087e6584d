//! Settings of the policy `latency`. `schedule` computes its costs.

use serde::{Deserialize, Serialize};

use super::{BuiltIn, CostUnit, Needs};
use crate::validation::Problems;

/// Settings of [`Policy::Latency`](super::Policy::Latency). It weighs seconds against seconds, so it has no
/// weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LatencyConfig {
    /// Randomness of the choice; 0 takes the least cost. Default 0, 0 to 1e9.
    pub temperature: f64,
}

impl BuiltIn for LatencyConfig {
    const UNIT: Option<CostUnit> = Some(CostUnit::Seconds);

    /// With assumed reuse, the cached part lies between the index overlap and that plus blocks shared with active prompts;
    /// without reuse the bounds are exact and no rank is queried. A temperature depends on every cost, so it queries all
    /// ranks.
    fn needs(&self, temperature: f64) -> Needs {
        if temperature > 0.0 { Needs::All } else { Needs::Bounded }
    }

    fn temperature(&self) -> f64 {
        self.temperature
    }

    fn check(&self, problems: &mut Problems) {
        problems.weight("policy.temperature", self.temperature);
    }
}
