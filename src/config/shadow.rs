//! `[shadow]`: policies that decide the same requests without booking.

use serde::{Deserialize, Serialize};

use crate::policy::{Policy, PolicyConfig};
use crate::validation::Problems;

/// Settings of shadow policies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShadowConfig {
    /// The policies. Default `["round_robin"]`, the baseline; empty for none.
    pub policies: Vec<PolicyConfig>,
    /// Share of the decisions that they also decide. Pools with more than 64 ranks sample 64 / ranks of it. Default 0.05,
    /// in [0, 1].
    pub share: f64,
}

impl Default for ShadowConfig {
    fn default() -> Self {
        Self { policies: vec![Policy::RoundRobin.into()], share: 0.05 }
    }
}

impl ShadowConfig {
    /// Maximum number of policies.
    pub const POLICIES_MAX: usize = 8;

    pub(super) fn check(&self, problems: &mut Problems) {
        problems.share("shadow.share", self.share);
        for policy in &self.policies {
            policy.check(problems);
        }
        let names: Vec<&str> = self.policies.iter().map(PolicyConfig::name).collect();
        let repeats = (1..names.len()).any(|at| names[..at].contains(&names[at]));
        let holds = names.len() <= Self::POLICIES_MAX && !repeats;
        problems.check("shadow.policies", format!("{names:?}"), holds, "at most 8 policies, each once");
    }
}
