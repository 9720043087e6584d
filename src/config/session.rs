//! `[session]`: affinity of a session to the rank of its earlier requests.

use serde::{Deserialize, Serialize};

use super::table::settings;
use crate::policy::PolicyConfig;
use crate::validation::Problems;

settings! {
    /// Settings of session affinity.
    pub struct SessionConfig {
        /// Effect of a session's earlier rank on its next request. Default `soft`.
        affinity: SessionAffinity;
        /// Strength of a soft affinity: the rank's cost is multiplied by exp(-tanh(weight)). Default 0.5, 0 to 1e9.
        weight: f64 = 0.5;
        /// Time after which an idle session is forgotten, in milliseconds. Conversations differ in their pauses, so it
        /// is a setting. Default 3,600,000, at least 1.
        ttl_ms: u64 = 3_600_000;
        /// Sessions remembered; beyond, the longest idle is forgotten. Services differ in their number of users, so it
        /// is a setting. Default 65,536, at least 1.
        sessions_max: u32 = 65_536;
    }
}

/// Effect of a session's earlier rank on its next request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionAffinity {
    /// None.
    Off,
    /// Its cost is lowered by `weight`: a preference that cost can overrule. Without effect under a policy that compares
    /// no costs.
    #[default]
    Soft,
    /// It is the only candidate while it is registered and reachable; if it is overloaded, so is the session.
    Hard,
}

impl SessionConfig {
    pub(super) fn check(&self, policy: &PolicyConfig, problems: &mut Problems) {
        let default = Self::default();
        problems.weight("session.weight", self.weight);
        let applies = self.affinity == SessionAffinity::Soft && policy.compares_costs();
        let rule = "0.5 unless session.affinity is soft and the policy is latency or kv";
        problems.unused("session.weight", self.weight, default.weight, applies, rule);
        problems.positive("session.ttl_ms", self.ttl_ms);
        problems.positive("session.sessions_max", self.sessions_max);
        let applies = self.affinity != SessionAffinity::Off;
        let rule = "3600000 where session.affinity is off";
        problems.unused("session.ttl_ms", self.ttl_ms, default.ttl_ms, applies, rule);
        let rule = "65536 where session.affinity is off";
        problems.unused("session.sessions_max", self.sessions_max, default.sessions_max, applies, rule);
    }
}
