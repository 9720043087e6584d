//! The `kv` cost: remaining prefill blocks plus held blocks, lower is better.
//!
//! The formula equals that of NVIDIA Dynamo 1.6.1's default scorer, so that fleets can migrate without new tuning:
//!
//! ```text
//! credit   = overlap_score_credit · d · device + host · w_host + (disk + external) · w_disk + shared_mult · shared
//! d        = 1 / (1 + credit_decay · ((prefill − least prefill) / block_size) / max(1, request blocks))
//! adjusted = max(0, (prefill + isl) / block_size − credit)          (0 − credit when prefill is not tracked)
//! cost     = prefill_load_scale · adjusted + potential_blocks + active_request_weight · requests
//! decode   = max(0, potential_blocks − credit) + active_request_weight · requests
//! ```

use serde::Serialize;

use super::{Bounds, BuiltIn, CostUnit, Needs};
use crate::config::table::settings;
use crate::select::{TierOverlap, TierWeights};
use crate::validation::Problems;

settings! {
    /// Settings of [`Policy::Kv`](super::Policy::Kv). Names and defaults are those of NVIDIA Dynamo 1.6.1, so that
    /// fleets can move over without re-tuning; that is also why the settings that few change are kept.
    #[derive(Copy)]
    pub struct KvConfig {
        /// Credit of a device block against computing it. 0 keeps no index. Default 1, 0 to 1e9.
        overlap_score_credit: f64 = 1.0;
        /// Decrease of that credit on ranks with prefill backlog. Default 0 (none), 0 to 1e9.
        overlap_score_credit_decay: f64;
        /// Weight of a block of prefill against a block held. Default 1, 0 to 1e9.
        prefill_load_scale: f64 = 1.0;
        /// Cost of each active request, in blocks. Default 0, 0 to 1e9.
        active_request_weight: f64;
        /// Credit of a block that only the shared cache holds, against computing it. Has an effect only where the
        /// embedder provides a shared cache. Default 0.5, in [0, 1].
        shared_cache_multiplier: f64 = 0.5;
        /// Randomness of the choice; 0 takes the least cost. Default 0, 0 to 1e9.
        temperature: f64;
    }
}

impl BuiltIn for KvConfig {
    const UNIT: Option<CostUnit> = Some(CostUnit::Blocks);

    /// With assumed reuse, the blocks lie between active and active + request; without reuse the bounds are exact and no
    /// rank is queried. A temperature depends on every cost, and a decaying credit on every rank's prefill, so both query
    /// all ranks.
    fn needs(&self, temperature: f64) -> Needs {
        if temperature > 0.0 || self.overlap_score_credit_decay > 0.0 { Needs::All } else { Needs::Bounded }
    }

    fn temperature(&self) -> f64 {
        self.temperature
    }

    fn counts_overlap(&self) -> bool {
        self.overlap_score_credit > 0.0
    }

    fn check(&self, problems: &mut Problems) {
        problems.weight("policy.overlap_score_credit", self.overlap_score_credit);
        problems.weight("policy.overlap_score_credit_decay", self.overlap_score_credit_decay);
        problems.weight("policy.prefill_load_scale", self.prefill_load_scale);
        problems.weight("policy.active_request_weight", self.active_request_weight);
        problems.share("policy.shared_cache_multiplier", self.shared_cache_multiplier);
        problems.weight("policy.temperature", self.temperature);
    }
}

/// Parameters of the formula, all finite and not negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvCost {
    /// Credit of a device block; 1.0 equals its computation cost.
    pub overlap_score_credit: f64,
    /// Decrease of the credit on a rank with prefill load; 0 disables it.
    pub overlap_score_credit_decay: f64,
    /// Weight of a block of prefill compared with a held block.
    pub prefill_load_scale: f64,
    /// Cost of each active request, in blocks.
    pub active_request_weight: f64,
    /// Weights of lower tiers.
    pub tier_weights: TierWeights,
    /// Credit of a block that only the shared cache holds.
    pub shared_cache_multiplier: f64,
    /// Whether prefill tokens count at all.
    pub track_prefill_tokens: bool,
    /// Decode pools without prefill tracking: the credit is subtracted from the held blocks.
    pub decode_only: bool,
    /// Tokens per block.
    pub block_size: u32,
}

/// Facts about one request on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostFacts {
    /// Prompt length in tokens.
    pub prompt_tokens: u64,
    /// Overlap of the prompt on the rank.
    pub overlap: TierOverlap,
    /// Blocks in the shared cache beyond the rank's device blocks.
    pub shared_cache_blocks: u32,
    /// Remaining prefill tokens of the rank.
    pub prefill_tokens: u64,
    /// Minimum of these over all candidates; used only with a decaying credit.
    pub prefill_tokens_least: u64,
    /// Blocks held by the rank including this request.
    pub potential_blocks: u64,
    /// Active requests of the rank.
    pub active_requests: u32,
}

/// Terms of a cost, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CostTerms {
    /// Prefill blocks that need no computation.
    pub credit_blocks: f64,
    /// Prefill blocks to compute, scaled; 0 for decode pools.
    pub prefill_blocks: f64,
    /// Held blocks including the request, minus the credit for decode pools.
    pub held_blocks: f64,
    /// Cost of the active requests.
    pub requests_blocks: f64,
}

impl CostTerms {
    /// The cost.
    #[must_use]
    #[inline]
    pub fn total(&self) -> f64 {
        self.prefill_blocks + self.held_blocks + self.requests_blocks
    }
}

impl KvCost {
    /// The cost in blocks, lower is better.
    ///
    /// ```
    /// use pointsman::RouterConfig;
    /// use pointsman::internals::policy::CostFacts;
    /// use pointsman::internals::select::TierOverlap;
    ///
    /// // Cold and idle, 1024 tokens in blocks of 16: 64 blocks to compute, 64 to hold.
    /// let cost = RouterConfig { block_size: Some(16), ..RouterConfig::default() }.kv_cost();
    /// let facts = CostFacts { prompt_tokens: 1024, potential_blocks: 64, ..CostFacts::default() };
    /// assert_eq!(cost.cost(&facts), 128.0);
    /// ```
    #[must_use]
    #[inline]
    pub fn cost(&self, facts: &CostFacts) -> f64 {
        self.terms(facts).total()
    }

    /// Terms of the cost.
    #[must_use]
    #[inline]
    pub fn terms(&self, facts: &CostFacts) -> CostTerms {
        let credit_blocks = self.credit_blocks(facts);
        let requests_blocks = self.active_request_weight * f64::from(facts.active_requests);
        let held_blocks = self.held_blocks(facts.potential_blocks, credit_blocks);
        if self.decode_only {
            return CostTerms { credit_blocks, prefill_blocks: 0.0, held_blocks, requests_blocks };
        }
        let raw_tokens =
            if self.track_prefill_tokens { facts.prefill_tokens.saturating_add(facts.prompt_tokens) } else { 0 };
        let adjusted = (blocks(raw_tokens) / f64::from(self.block_size) - credit_blocks).max(0.0);
        let prefill_blocks = self.prefill_load_scale * adjusted;
        CostTerms { credit_blocks, prefill_blocks, held_blocks, requests_blocks }
    }

    /// Interval of the cost for potential blocks in `potential_blocks` and prefill tokens in `prefill_tokens` (each
    /// lowest, highest). Exact facts give a single point.
    ///
    /// The cost increases with both, so its bounds are the costs of the bounds. This holds only without a decaying
    /// credit, which is not bounded here (see [`PolicyConfig::needs`](super::PolicyConfig::needs)).
    #[must_use]
    #[inline(always)] // in the loop over all ranks
    pub fn bounds(&self, facts: &CostFacts, potential_blocks: (u64, u64), prefill_tokens: (u64, u64)) -> Bounds {
        debug_assert!(self.overlap_score_credit_decay == 0.0, "bounds hold only while the credit does not decay");
        let at =
            |potential_blocks, prefill_tokens| self.terms(&CostFacts { potential_blocks, prefill_tokens, ..*facts });
        let least = at(potential_blocks.0, prefill_tokens.0);
        let most = if prefill_tokens.0 == prefill_tokens.1 {
            CostTerms { held_blocks: self.held_blocks(potential_blocks.1, least.credit_blocks), ..least }
        } else {
            at(potential_blocks.1, prefill_tokens.1)
        };
        Bounds { lo: least.total(), hi: most.total() }
    }

    /// Held blocks, minus the credit for decode pools.
    fn held_blocks(&self, potential_blocks: u64, credit_blocks: f64) -> f64 {
        let potential = blocks(potential_blocks);
        if self.decode_only { (potential - credit_blocks).max(0.0) } else { potential }
    }

    /// Credit in blocks for an overlap on a rank without prefill load.
    #[must_use]
    pub fn credit(&self, overlap: TierOverlap, shared_cache_blocks: u32) -> f64 {
        self.credit_blocks(&CostFacts { overlap, shared_cache_blocks, ..CostFacts::default() })
    }

    fn credit_blocks(&self, facts: &CostFacts) -> f64 {
        let overlap = &facts.overlap;
        if overlap.total_blocks() == overlap.device_blocks && facts.shared_cache_blocks == 0 {
            if overlap.device_blocks == 0 {
                return 0.0;
            }
            return self.overlap_score_credit * self.credit_factor(facts) * f64::from(overlap.device_blocks);
        }
        let lower = self.tier_weights.host * f64::from(overlap.host_pinned_blocks)
            + self.tier_weights.disk * f64::from(overlap.disk_blocks + overlap.external_blocks);
        let shared = self.shared_cache_multiplier * f64::from(facts.shared_cache_blocks);
        self.overlap_score_credit * self.credit_factor(facts) * f64::from(overlap.device_blocks) + lower + shared
    }

    fn credit_factor(&self, facts: &CostFacts) -> f64 {
        if self.overlap_score_credit_decay == 0.0 || !self.track_prefill_tokens {
            return 1.0;
        }
        let busier_tokens = facts.prefill_tokens.saturating_sub(facts.prefill_tokens_least);
        let busier_blocks = blocks(busier_tokens) / f64::from(self.block_size);
        let request_blocks = blocks(facts.prompt_tokens.div_ceil(u64::from(self.block_size)));
        1.0 / (1.0 + self.overlap_score_credit_decay * busier_blocks / request_blocks.max(1.0))
    }
}

/// Counts stay far below 2^53, where f64 is exact.
#[expect(clippy::cast_precision_loss, reason = "token and block counts stay far below 2^53")]
fn blocks(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::{LoadConfig, RouterConfig};
    use crate::policy::{KvConfig, PolicyConfig};

    fn cost_of(change: fn(&mut KvConfig), facts: CostFacts) -> f64 {
        let mut kv = KvConfig::default();
        change(&mut kv);
        let config = RouterConfig { block_size: Some(16), policy: PolicyConfig::Kv(kv), ..RouterConfig::default() };
        config.kv_cost().cost(&CostFacts { prompt_tokens: 1024, ..facts })
    }

    fn held(device_blocks: u32, host_pinned_blocks: u32, disk_blocks: u32) -> TierOverlap {
        TierOverlap { device_blocks, host_pinned_blocks, disk_blocks, external_blocks: 0 }
    }

    /// Worked examples of the reference: 1,024 tokens in blocks of 16.
    #[test]
    fn worked_examples() {
        let warm_idle = CostFacts { overlap: held(48, 8, 4), potential_blocks: 70, ..CostFacts::default() };
        assert_eq!(cost_of(|_| {}, warm_idle), 79.0, "A: 48 + 6 + 1 blocks of credit");
        let cold_busy = CostFacts { prefill_tokens: 2048, potential_blocks: 64, ..CostFacts::default() };
        assert_eq!(cost_of(|_| {}, cold_busy), 256.0, "B");
        let warm_busy =
            CostFacts { overlap: held(48, 0, 0), prefill_tokens: 4096, potential_blocks: 100, ..CostFacts::default() };
        assert_eq!(cost_of(|c| c.overlap_score_credit_decay = 0.5, warm_busy), 404.0, "C: credit falls to a third");
        assert_eq!(cost_of(|_| {}, CostFacts { potential_blocks: 64, ..CostFacts::default() }), 128.0, "D");
    }

    #[test]
    fn decode_pools_subtract_credit_from_held_blocks() {
        let facts =
            CostFacts { overlap: held(10, 0, 0), potential_blocks: 64, active_requests: 2, ..CostFacts::default() };
        let decode = RouterConfig {
            block_size: Some(16),
            role: crate::config::PoolRole::Decode,
            load: LoadConfig { track_prefill_tokens: false, ..LoadConfig::default() },
            policy: PolicyConfig::Kv(KvConfig { active_request_weight: 1.5, ..KvConfig::default() }),
            ..RouterConfig::default()
        };
        assert_eq!(decode.kv_cost().cost(&CostFacts { prompt_tokens: 1024, ..facts }), 57.0);
    }

    proptest! {
        #[test]
        fn bounds_hold(
            prompt_tokens in 0u64..100_000, device in 0u32..2_000, host in 0u32..50, disk in 0u32..50,
            active in 0u64..10_000, depth in 0u64..2_000, prefill in 0u64..100_000, spread in 0u64..5_000,
            scale in 0.0..4.0, credit in 0.0..3.0, weight in 0.0..64.0, track: bool, decode: bool,
        ) {
            let config = RouterConfig { role: if decode { crate::config::PoolRole::Decode } else { crate::config::PoolRole::Aggregated }, policy: PolicyConfig::Kv(KvConfig { prefill_load_scale: scale, overlap_score_credit: credit, active_request_weight: weight, ..KvConfig::default() }), load: LoadConfig { track_prefill_tokens: track, ..LoadConfig::default() }, ..RouterConfig::default() };
            let cost = config.kv_cost();
            let request_blocks = prompt_tokens / u64::from(config.block_size_or_assumed());
            let shared = depth.min(request_blocks);
            let facts = CostFacts {
                prompt_tokens, overlap: held(device, host, disk), prefill_tokens: prefill + spread / 2,
                potential_blocks: active + request_blocks - shared, active_requests: 3, prefill_tokens_least: 0,
                shared_cache_blocks: 0,
            };
            let bounds = cost.bounds(&facts, (active, active + request_blocks), (prefill, prefill + spread));
            let exact = cost.cost(&facts);
            prop_assert!(bounds.lo <= exact && exact <= bounds.hi, "{bounds:?} does not hold {exact}");
        }
    }
}
