//! One request under one policy: what searches, costs and predictions read of it.

use super::latency::formula::LatencyCost;
use super::pending::PendingRequest;
use super::rank::{Projected, ProjectedPrompt, Rank};
use super::ranks::Ranks;
use super::settings::Settings;
use super::state::Pool;
use super::{LoadView, Purpose, ResolvedTargets, Target};
use crate::config::PoolRole;
use crate::load::{EngineSpeed, SpeedCell};
use crate::policy::{Candidate, CostFacts, KvCost, Needs, RequestFacts};
use crate::select::{Draw, TierOverlap};

/// A pending request while a policy evaluates it: the state of the pool, its prompt with its position in the batch, and
/// the loads of this step.
#[derive(Debug)]
pub(super) struct Case<'a, T, V> {
    pub(super) settings: &'a Settings,
    pub(super) pool: &'a Pool,
    pub(super) pending: &'a PendingRequest<T>,
    pub(super) candidate: ProjectedPrompt<'a>,
    pub(super) loads: &'a V,
}

/// Cost of a policy with the parameters of one request. Policies without costs report that of `kv`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cost {
    Kv(KvCost),
    Latency(LatencyCost),
}

impl<'a, T, V: LoadView> Case<'a, T, V> {
    pub(super) fn ranks(&self) -> &'a Ranks {
        &self.pool.ranks
    }

    /// Knowledge required for an exact decision.
    pub(super) fn needs(&self) -> Needs {
        let (request, settings, extensions) = (&self.pending.request, self.settings, &self.settings.extensions);
        match (request.purpose, request.target) {
            (Purpose::LoadSnapshot | Purpose::Explain, _) => Needs::All,
            (Purpose::Book | Purpose::Report, Target::Exactly { .. }) => Needs::Board,
            (Purpose::Book | Purpose::Report, Target::Any) if extensions.policy.is_some() => settings.needs,
            (Purpose::Book | Purpose::Report, Target::Any)
                if settings.compares_costs && (!extensions.scorers.is_empty() || self.targets().is_some()) =>
            {
                Needs::All
            }
            (Purpose::Book | Purpose::Report, Target::Any) if self.temperature() > 0.0 => settings.needs_at_temperature,
            (Purpose::Book | Purpose::Report, Target::Any) => settings.needs,
        }
    }

    /// Targets that can be compared with predictions.
    pub(super) fn targets(&self) -> Option<ResolvedTargets> {
        self.pending.request.options.as_ref()?.targets.filter(|_| self.settings.pool.models_prefill)
    }

    pub(super) fn draw(&self) -> Draw {
        Draw { seed: self.settings.seed, request: self.pending.number }
    }

    pub(super) fn request_facts(&self) -> RequestFacts<'a> {
        self.settings.rules.request_facts(&self.pending.eligibility_inputs())
    }

    pub(super) fn temperature(&self) -> f64 {
        let options = self.pending.request.options.as_ref();
        options.and_then(|options| options.overrides.temperature).unwrap_or(self.settings.temperature)
    }

    pub(super) fn tracks_prefill(&self) -> bool {
        self.settings.pool.tracks_prefill(self.pending)
    }

    /// Whether cache hits count for the request.
    pub(super) fn counts_overlap(&self) -> bool {
        let options = self.pending.request.options.as_ref();
        let credit = options.and_then(|options| options.overrides.overlap_score_credit);
        credit.map_or(self.settings.pool.counts_overlap, |credit| credit > 0.0)
    }

    pub(super) fn tokens(&self, blocks: u64) -> u32 {
        u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(self.settings.pool.block_size)
    }

    pub(super) fn cached_tokens(&self, overlap: TierOverlap) -> u32 {
        self.settings.pool.cached_tokens(overlap, self.pending.request.prompt_tokens)
    }

    /// The overlap of the request per rank, by position.
    pub(super) fn overlaps(&self) -> Vec<TierOverlap> {
        let mut by_position = Vec::new();
        self.visit_overlaps(&mut by_position, |_, _| ());
        by_position
    }

    /// Sets the overlap of the request per rank, by position, and calls `visit` for each rank with an overlap.
    #[inline(always)] // with the call of each caller
    pub(super) fn visit_overlaps(&self, by_position: &mut Vec<TierOverlap>, mut visit: impl FnMut(usize, TierOverlap)) {
        by_position.clear();
        by_position.resize(self.ranks().as_slice().len(), TierOverlap::default());
        let by_position = by_position.as_mut_slice();
        for known in &self.pending.request.overlaps {
            if let Some(position) = self.ranks().position_of(known.slot, known.generation) {
                by_position[position] = known.overlap;
                visit(position, known.overlap);
            }
        }
    }

    /// Overlap of the request on one rank.
    pub(super) fn overlap_on(&self, rank: &Rank) -> TierOverlap {
        let overlaps = &self.pending.request.overlaps;
        let known = overlaps.iter().find(|known| (known.slot, known.generation) == (rank.slot(), rank.generation));
        known.map(|known| known.overlap).unwrap_or_default()
    }

    /// Cost compared by the policy, with the parameters of the request.
    pub(super) fn cost(&self) -> Cost {
        if self.settings.is_in_seconds() { Cost::Latency(self.latency_cost()) } else { Cost::Kv(self.kv_cost()) }
    }

    /// Prompt tokens that need no computation when the request is served: cached, or computed by an earlier request
    /// unless that is overdue or another rank has them cached already.
    pub(super) fn expected_cached_tokens(&self, rank: &Rank, overlap: TierOverlap, projected: &Projected) -> u32 {
        if !self.counts_overlap() {
            return 0;
        }
        let cached = self.cached_tokens(overlap);
        let block_count = self.candidate.block_count;
        let (shared_blocks, _) = if rank.is_overdue() { (0, 0) } else { projected.shared_blocks(block_count) };
        let reusable = self.settings.pool.reusable_tokens(self.pending.request.prompt_tokens);
        cached.max(self.tokens(self.pending.awaited_blocks(shared_blocks)).min(reusable))
    }

    /// Speed of the rank; unknown parts use the typical speed of the pool.
    #[inline]
    pub(super) fn speed_of(&self, rank: &Rank) -> EngineSpeed {
        rank.about.speed(self.loads.with_speed(rank.slot(), SpeedCell::published), self.pool.typical.speed)
    }

    /// Parameters of the `kv` cost for the request.
    pub(super) fn kv_cost(&self) -> KvCost {
        let Settings { kv, pool, .. } = self.settings;
        let Some(options) = &self.pending.request.options else { return *kv };
        let otherwise = options.overrides;
        let overlap_score_credit = otherwise.overlap_score_credit.unwrap_or(kv.overlap_score_credit);
        let track_prefill_tokens = self.tracks_prefill();
        KvCost {
            overlap_score_credit,
            prefill_load_scale: otherwise.prefill_load_scale.unwrap_or(kv.prefill_load_scale),
            shared_cache_multiplier: otherwise.shared_cache_multiplier.unwrap_or(kv.shared_cache_multiplier),
            track_prefill_tokens,
            decode_only: pool.role == PoolRole::Decode && !track_prefill_tokens && overlap_score_credit > 0.0,
            ..*kv
        }
    }

    /// Facts of a rank at their upper bounds, which equal the exact values if known.
    #[inline]
    pub(super) fn cost_facts(&self, overlap: TierOverlap, projected: &Projected) -> CostFacts {
        let request = &self.pending.request;
        CostFacts {
            prompt_tokens: u64::from(request.prompt_tokens),
            overlap,
            shared_cache_blocks: request.shared_cache.beyond(overlap.device_blocks),
            prefill_tokens: projected.prefill_tokens.1,
            prefill_tokens_least: 0,
            potential_blocks: projected.potential_blocks.1,
            active_requests: projected.requests,
        }
    }

    /// All raw facts of a rank and the request, with the cost factor of its `preference`.
    pub(super) fn candidate_facts(
        &self,
        position: usize,
        overlap: TierOverlap,
        projected: &Projected,
        preference: f64,
    ) -> Candidate {
        let (rank, loads, now) = (&self.ranks().as_slice()[position], self.loads, self.pool.now);
        let stale_after = self.settings.rules.engine.stale_after;
        Candidate {
            rank: rank.rank,
            overlap,
            shared_cache_blocks: self.pending.request.shared_cache.beyond(overlap.device_blocks),
            prefill_tokens: projected.prefill_tokens.1,
            potential_blocks: projected.potential_blocks.1,
            active_requests: projected.requests,
            max_num_batched_tokens: rank.about.traits.max_num_batched_tokens,
            total_kv_blocks: rank.about.traits.total_kv_blocks,
            held_blocks: loads.held_blocks(rank.slot()),
            load_age: now.since(rank.seen_at()),
            index_age: loads.index_changed_at(rank.slot()).map(|changed_at| now.since(changed_at)),
            engine_load: loads.engine_load(rank.slot()).map(|load| load.fact(now, stale_after)),
            preference,
        }
    }
}
