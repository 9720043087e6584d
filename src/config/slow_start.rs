//! `[slow_start]`: higher cost of new and returning ranks.

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Settings of slow start.
    pub struct SlowStartConfig {
        /// Fill of a new rank's cache, as a share of its capacity (of the median rank's fill if the capacity is
        /// unknown), at which slow start ends; until then its cost is higher. Default 0 (no slow start), in [0, 1].
        fill: f64;
        /// Longest slow start of a new rank, in milliseconds. Default 60,000, at least 1.
        max_ms: u64 = 60_000;
        /// Slow start of a rank that returns, in milliseconds: its cost is ten times as high at first; 0 for none.
        /// Default 10,000.
        return_ms: u64 = 10_000;
    }
}

impl SlowStartConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.share("slow_start.fill", self.fill);
        problems.positive("slow_start.max_ms", self.max_ms);
        let (default_ms, applies) = (Self::default().max_ms, self.fill > 0.0);
        problems.unused("slow_start.max_ms", self.max_ms, default_ms, applies, "60000 where slow_start.fill is 0");
    }
}
