//! `[overload]`: limits beyond which a rank gets no requests.

use super::table::settings;
use crate::validation::Problems;

settings! {
    /// Limits of a rank's load. A rank beyond any of them is overloaded and gets no requests. No limit by default.
    pub struct OverloadConfig {
        /// Share of the rank's `total_kv_blocks` in use. Not negative.
        blocks_frac: Option<f64>;
        /// Pending prefill tokens.
        prefill_tokens: Option<u64>;
        /// Pending prefill tokens as a share of the rank's `max_num_batched_tokens`. Not negative.
        prefill_frac: Option<f64>;
        /// Active requests of one rank. A rank with as many is overloaded. At least 1.
        active_requests_max: Option<u32>;
        /// Waiting requests in the engine's own report. A report older than `engine_load.stale_ms` is ignored.
        engine_waiting: Option<u32>;
        /// Share of the KV cache in use in the engine's own report, likewise. In [0, 1].
        engine_kv_usage: Option<f64>;
    }
}

impl OverloadConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.threshold("overload.blocks_frac", self.blocks_frac);
        problems.threshold("overload.prefill_frac", self.prefill_frac);
        problems.check_given("overload.active_requests_max", self.active_requests_max, |max| *max > 0, "at least 1");
        problems.share("overload.engine_kv_usage", self.engine_kv_usage);
    }
}
