//! `[engine_load]`: the load that engines report about themselves.

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Settings of engine-reported load.
    pub struct EngineLoadConfig {
        /// Interval between reads of an engine's metrics page, in milliseconds; 0 never reads it. Needs the feature
        /// `discovery`. Default 1,000.
        interval_ms: u64 = 1_000;
        /// Age at which a reported load counts as unknown, in milliseconds. Default 5,000, at least 1.
        stale_ms: u64 = 5_000;
    }
}

impl EngineLoadConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("engine_load.stale_ms", self.stale_ms);
    }
}
