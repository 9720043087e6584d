//! `[recorder]`: records of decisions in memory.

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Settings of the flight recorder.
    pub struct RecorderConfig {
        /// Bytes of records in memory; the oldest are dropped. Default 33,554,432 (32 MiB); 0 records nothing.
        bytes_max: u64 = 32 << 20;
        /// Age in milliseconds at which records are dropped from memory. Default 3,600,000 (an hour), at least 1.
        age_max_ms: u64 = 3_600_000;
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
