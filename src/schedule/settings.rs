//! What one policy decides by: its settings and those of the pool, its rules, and the embedder's code.

use super::Extensions;
use super::eligible::{Eligibility, EligibilityInputs, Rules};
use super::pending::PendingRequest;
use super::ranks::Ranks;
use crate::config::{PoolRole, RouterConfig};
use crate::policy::{CostUnit, KvCost, Needs, Policy};
use crate::select::{Filter, RankOverlap, TierOverlap, TierWeights};

/// Configuration read by every decision, kept together for locality.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) pool: PoolParameters,
    pub(super) kv: KvCost,
    pub(super) temperature: f64,
    pub(super) seed: u64,
    pub(super) decision_trace: f64,
    /// Required knowledge for the lowest cost, and for a temperature.
    pub(super) needs: Needs,
    pub(super) needs_at_temperature: Needs,
    pub(super) policy: Policy,
    /// Unit of the configured policy's costs, if it compares any.
    pub(super) unit: Option<CostUnit>,
    /// Whether ranks are chosen by comparing these costs. A custom policy does not.
    pub(super) compares_costs: bool,
    /// Whether the choice is between two random ranks.
    pub(super) draws_two: bool,
    /// Costs up to this multiple of the lowest are ties.
    pub(super) tie_factor: f64,
    pub(super) rules: Rules,
    pub(super) extensions: Extensions,
}

impl Settings {
    pub(super) fn new(config: &RouterConfig, extensions: Extensions) -> Self {
        let custom_needs = extensions.policy_needs();
        let needs = custom_needs.unwrap_or_else(|| config.policy.needs(0.0));
        let policy = config.policy.kind();
        Self {
            pool: PoolParameters::of(config),
            kv: config.kv_cost(),
            temperature: config.policy.temperature(),
            seed: config.seed,
            decision_trace: config.decision_trace,
            needs: extensions.needs(needs),
            needs_at_temperature: extensions.needs(config.policy.needs(f64::MIN_POSITIVE)),
            policy,
            unit: policy.cost_unit(),
            compares_costs: custom_needs.is_none() && policy.cost_unit().is_some(),
            draws_two: needs == Needs::Two,
            tie_factor: policy.cost_unit().map_or(1.0, CostUnit::tie_factor),
            rules: Rules::new(config, &config.queue.classes_or_default(), extensions.filters.clone()),
            extensions,
        }
    }

    /// Prompt tokens cached on the best rank that may serve the request, now or after a wait.
    pub(super) fn best_cached_tokens(
        &self,
        ranks: &Ranks,
        eligibility: &mut Eligibility,
        inputs: EligibilityInputs<'_>,
        overlaps: &[RankOverlap],
    ) -> u32 {
        self.rules.evaluate(ranks, inputs, eligibility);
        let may_serve = overlaps.iter().filter(|known| {
            let position = ranks.position_of(known.slot, known.generation);
            position.is_some_and(|position| eligibility.of(position).is_none_or(Filter::passes))
        });
        may_serve.map(|known| self.pool.cached_tokens(known.overlap, inputs.prompt_tokens)).max().unwrap_or(0)
    }

    /// Whether latencies are compared, for the choice or only for predictions beside a custom policy.
    pub(super) fn is_in_seconds(&self) -> bool {
        self.unit == Some(CostUnit::Seconds)
    }
}

/// Parameters of a pool, whatever its policy.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolParameters {
    /// Tokens per block.
    pub(super) block_size: u32,
    pub(super) tier_weights: TierWeights,
    pub(super) role: PoolRole,
    track_prefill_tokens: bool,
    /// Whether cache hits count.
    pub(super) counts_overlap: bool,
    /// Whether prefills have an expected duration.
    pub(super) models_prefill: bool,
}

impl PoolParameters {
    pub(super) fn of(config: &RouterConfig) -> Self {
        Self {
            block_size: config.block_size_or_assumed(),
            tier_weights: config.index.tier_weights(),
            role: config.role,
            track_prefill_tokens: config.load.track_prefill_tokens,
            counts_overlap: config.has_index(),
            models_prefill: config.learns_speed(),
        }
    }

    /// Tokens of a prompt that the engine takes from its cache: at most its whole blocks without the last token, which
    /// every engine computes for its logits.
    pub(super) fn cached_tokens(&self, overlap: TierOverlap, prompt_tokens: u32) -> u32 {
        overlap.cached_tokens(self.tier_weights, self.block_size).min(self.reusable_tokens(prompt_tokens))
    }

    pub(super) fn reusable_tokens(&self, prompt_tokens: u32) -> u32 {
        let last = prompt_tokens.saturating_sub(1);
        last - last % self.block_size
    }

    pub(super) fn tracks_prefill<T>(&self, pending: &PendingRequest<T>) -> bool {
        let options = pending.request.options.as_ref();
        options.and_then(|options| options.overrides.track_prefill_tokens).unwrap_or(self.track_prefill_tokens)
    }
}
