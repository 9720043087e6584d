//! `[shadow]`: policies that decide the same requests without booking.

use super::table::settings;
use crate::policy::{Policy, PolicyConfig};
use crate::validation::Problems;

settings! {
    /// Settings of shadow policies.
    pub struct ShadowConfig {
        /// The policies. Default `["round_robin"]`, the baseline; empty for none.
        policies: Vec<PolicyConfig> = vec![Policy::RoundRobin.into()];
        /// Share of the decisions that they also decide. Pools with more than 64 ranks sample 64 / ranks of it. Default
        /// 0.05, in [0, 1].
        share: f64 = 0.05;
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
