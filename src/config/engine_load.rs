//! `[engine_load]`: the load that engines report about themselves.

use serde::{Deserialize, Serialize};

use crate::validation::Problems;

/// Settings of engine-reported load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineLoadConfig {
    /// Interval between reads of an engine's metrics page, in milliseconds; 0 never reads it. Needs the feature
    /// `discovery`. Default 1,000.
    pub interval_ms: u64,
    /// Age at which a reported load counts as unknown, in milliseconds. Default 5,000, at least 1.
    pub stale_ms: u64,
}

impl Default for EngineLoadConfig {
    fn default() -> Self {
        Self { interval_ms: 1_000, stale_ms: 5_000 }
    }
}

impl EngineLoadConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("engine_load.stale_ms", self.stale_ms);
    }
}
