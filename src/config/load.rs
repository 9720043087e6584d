//! `[load]`: the accounting of booked requests.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::table::settings;
use crate::policy::Policy;
use crate::validation::Problems;

settings! {
    /// Settings of the load that the router accounts per rank.
    pub struct LoadConfig {
        /// Whether active requests with a common prefix share its blocks on a rank. Set it to false for engines without
        /// cascade attention. Default true.
        assume_kv_reuse: bool = true;
        /// Whether prompt and output blocks of active requests count. Default true.
        track_active_blocks: bool = true;
        /// Whether pending prefill tokens count. Default true.
        track_prefill_tokens: bool = true;
        /// Whether reported output blocks count. Default true.
        track_output_blocks: bool = true;
        /// Source of expected prefill durations. Default `none`. The policy `latency` always learns them.
        prefill_model: PrefillModel;
        /// Lifetime of a booking by id without any report on it, in milliseconds. A booking whose placement is held has
        /// no such limit. Default 300,000, at least 1,000.
        booking_liveness_ms: u64 = 300_000;
    }
}

/// Source of the expected duration of a prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefillModel {
    /// None: prefill load stays until the prefill is reported complete.
    #[default]
    None,
    /// Learned per rank from reported prefills, in tokens per second: prefill load decreases with time.
    Learned,
}

impl LoadConfig {
    /// Timeout of a load query; then the load board's values are used. The query crosses two mailboxes of one process,
    /// which takes microseconds, so a longer wait means that an actor hangs: no setting would help.
    pub const QUERY_TIMEOUT: Duration = Duration::from_millis(5);

    pub(super) fn check(&self, policy: Policy, problems: &mut Problems) {
        let learns = self.prefill_model == PrefillModel::Learned;
        let (field, tracks) = ("load.prefill_model", self.track_prefill_tokens);
        problems.check(field, "learned", !learns || tracks, "none where load.track_prefill_tokens is false");
        let rule = "none under policy latency, which always learns prefill speeds";
        problems.check(field, "learned", !learns || policy != Policy::Latency, rule);
        let liveness_ms = self.booking_liveness_ms;
        problems.check("load.booking_liveness_ms", liveness_ms, liveness_ms >= 1_000, "at least 1000");
    }
}
