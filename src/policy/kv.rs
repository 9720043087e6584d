//! Settings of the policy `kv`.

use serde::{Deserialize, Serialize};

use crate::validation::Problems;

/// Settings of [`Policy::Kv`](crate::select::Policy::Kv). Names and defaults are those of NVIDIA Dynamo 1.6.1, so that
/// fleets can move over without re-tuning; that is also why the settings that few change are kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvConfig {
    /// Credit of a device block against computing it. 0 keeps no index. Default 1, 0 to 1e9.
    pub overlap_score_credit: f64,
    /// Decrease of that credit on ranks with prefill backlog. Default 0 (none), 0 to 1e9.
    pub overlap_score_credit_decay: f64,
    /// Weight of a block of prefill against a block held. Default 1, 0 to 1e9.
    pub prefill_load_scale: f64,
    /// Cost of each active request, in blocks. Default 0, 0 to 1e9.
    pub active_request_weight: f64,
    /// Credit of a block that only the shared cache holds, against computing it. Has an effect only where the embedder
    /// provides a shared cache. Default 0.5, in [0, 1].
    pub shared_cache_multiplier: f64,
    /// Randomness of the choice; 0 takes the least cost. Default 0, 0 to 1e9.
    pub temperature: f64,
}

impl Default for KvConfig {
    fn default() -> Self {
        Self {
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 1.0,
            active_request_weight: 0.0,
            shared_cache_multiplier: 0.5,
            temperature: 0.0,
        }
    }
}

impl KvConfig {
    pub(super) fn check(&self, problems: &mut Problems) {
        problems.weight("policy.overlap_score_credit", self.overlap_score_credit);
        problems.weight("policy.overlap_score_credit_decay", self.overlap_score_credit_decay);
        problems.weight("policy.prefill_load_scale", self.prefill_load_scale);
        problems.weight("policy.active_request_weight", self.active_request_weight);
        problems.share("policy.shared_cache_multiplier", self.shared_cache_multiplier);
        problems.weight("policy.temperature", self.temperature);
    }
}
