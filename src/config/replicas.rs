//! `[replicas]`: load shared with other replicas of the router.

use serde::{Deserialize, Serialize};

use crate::validation::Problems;

/// Settings of replicas. Without a bus to other replicas they have no effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReplicasConfig {
    /// Interval of the summaries of own load, in milliseconds. The first booking in an interval is published at once.
    /// Default 20, 1 to 1,000.
    pub interval_ms: u64,
}

impl Default for ReplicasConfig {
    fn default() -> Self {
        Self { interval_ms: 20 }
    }
}

impl ReplicasConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        let holds = (1..=1_000).contains(&self.interval_ms);
        problems.check("replicas.interval_ms", self.interval_ms, holds, "1 to 1000");
    }
}
