//! `[recorder]`: records of decisions in memory.

use serde::{Deserialize, Serialize};

use crate::validation::Problems;

/// Settings of the flight recorder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RecorderConfig {
    /// Bytes of records in memory; the oldest are dropped. Default 33,554,432 (32 MiB); 0 records nothing.
    pub bytes_max: u64,
    /// Age in milliseconds at which records are dropped from memory. Default 3,600,000 (an hour), at least 1.
    pub age_max_ms: u64,
}

impl Default for RecorderConfig {
    fn default() -> Self {
        Self { bytes_max: 32 << 20, age_max_ms: 3_600_000 }
    }
}

impl RecorderConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.positive("recorder.age_max_ms", self.age_max_ms);
        let rule = "0, or at least 1048576";
        problems.check("recorder.bytes_max", self.bytes_max, self.bytes_max == 0 || self.bytes_max >= 1 << 20, rule);
        let (default, applies) = (Self::default().age_max_ms, self.bytes_max > 0);
        problems.unused(
            "recorder.age_max_ms",
            self.age_max_ms,
            default,
            applies,
            "3600000 where recorder.bytes_max is 0",
        );
    }
}
