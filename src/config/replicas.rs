//! `[replicas]`: load shared with other replicas of the router.

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Settings of replicas. Without a bus to other replicas they have no effect.
    pub struct ReplicasConfig {
        /// Interval of the summaries of own load, in milliseconds. The first booking in an interval is published at
        /// once. Default 20, 1 to 1,000.
        interval_ms: u64 = 20;
    }
}

impl ReplicasConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        let holds = (1..=1_000).contains(&self.interval_ms);
        problems.check("replicas.interval_ms", self.interval_ms, holds, "1 to 1000");
    }
}
