//! Costs and bounds of one request per rank.
//!
//! Combines overlap, projected load, overrides and preferences. [`KvCost`] and [`LatencyCost`] have the formulas;
//! `decide` chooses.

use std::cmp::Reverse;

use smallvec::SmallVec;

use super::latency::formula::{LatencyCost, LatencyFacts, PoolLoad, WorkPrices};
use super::pending::Case;
use super::pool::PoolSums;
use super::rank::{Measured, Projected, Rank};
use super::search::scratch::Scratch;
use super::{LoadView, PendingRequest, Schedule};
use crate::config::PoolRole;
use crate::load::EngineSpeed;
use crate::policy::{Bounds, Candidate, CostFacts, KvCost, Policy};
use crate::select::{RankOverlap, TierOverlap};

/// Cost of a policy with the parameters of one request. Policies without costs report that of `kv`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cost {
    Kv(KvCost),
    Latency(LatencyCost),
}

/// Cost of an ineligible rank. Every other cost is finite.
const NOT_ELIGIBLE: Bounds = Bounds { lo: f64::INFINITY, hi: f64::INFINITY };

/// Multiple of the mean number of requests above which a rank is crowded, measured: with 1.5 and 3 the tails are longer.
const CROWD_FACTOR: u64 = 2;

/// Requests that a rank has in addition before it is crowded, for pools with few requests.
const CROWD_REQUESTS: u64 = 4;

impl<T> Schedule<T> {
    pub(super) fn fill_overlaps(&self, overlaps: &[RankOverlap], scratch: &mut Scratch) {
        self.visit_overlaps(overlaps, scratch, |_, _| ());
    }

    /// The same, with a call for each rank with an overlap.
    #[inline(always)] // with the call of each caller
    pub(super) fn visit_overlaps(
        &self,
        overlaps: &[RankOverlap],
        scratch: &mut Scratch,
        mut visit: impl FnMut(usize, TierOverlap),
    ) {
        let by_position = &mut scratch.overlaps;
        by_position.clear();
        by_position.resize(self.ranks.as_slice().len(), TierOverlap::default());
        for known in overlaps {
            if let Some(position) = self.ranks.position_of(known.slot, known.generation) {
                by_position[position] = known.overlap;
                visit(position, known.overlap);
            }
        }
    }

    /// Computes bounds of every rank's cost under `kv`; `settle` uses the upper bounds. Requires the request's
    /// eligibility in `scratch`.
    pub(super) fn fill_bounds<V: LoadView>(&self, case: Case<'_, T, V>, settle: bool, scratch: &mut Scratch) {
        self.fill_overlaps(&case.pending.request.overlaps, scratch);
        let cost = self.kv_cost_of(case.pending);
        let bounds_of = |overlap, projected: &_| self.kv_bounds(&cost, case.pending, overlap, projected);
        let Scratch { eligibility, overlaps, bounds, .. } = scratch;
        let (ranks, statuses) = (self.ranks.as_slice(), self.ranks.statuses());
        bounds.clear();
        if eligibility.is_plain() && !settle {
            let plain = |(rank, overlap): (&Rank, &TierOverlap)| bounds_of(*overlap, &rank.project(case.candidate));
            bounds.extend(ranks.iter().zip(overlaps.iter()).map(plain));
            return;
        }
        bounds.extend(overlaps.iter().enumerate().map(|(position, overlap)| {
            if !eligibility.is_open(position) {
                return NOT_ELIGIBLE;
            }
            let rank = &ranks[position];
            let mut projected = rank.project(case.candidate);
            if settle || statuses[position].unresponsive {
                projected.take_worst();
            }
            bounds_of(*overlap, &projected).times(eligibility.factor(position))
        }));
    }

    /// Updates bounds computed before the queries: only queried ranks can have changed load or status.
    pub(super) fn update_bounds<V: LoadView>(&self, case: Case<'_, T, V>, scratch: &mut Scratch) {
        let cost = self.kv_cost_of(case.pending);
        let Scratch { eligibility, overlaps, bounds, listed, .. } = scratch;
        for position in listed.iter().filter_map(|slot| self.ranks.position_in(*slot)) {
            bounds[position] = if eligibility.is_open(position) {
                let (rank, overlap) = (&self.ranks.as_slice()[position], overlaps[position]);
                let mut projected = rank.project(case.candidate);
                if self.ranks.statuses()[position].unresponsive {
                    projected.take_worst();
                }
                self.kv_bounds(&cost, case.pending, overlap, &projected).times(eligibility.factor(position))
            } else {
                NOT_ELIGIBLE
            };
        }
    }

    #[inline]
    fn kv_bounds(
        &self,
        cost: &KvCost,
        pending: &PendingRequest<T>,
        overlap: TierOverlap,
        projected: &Projected,
    ) -> Bounds {
        let facts = self.cost_facts(pending, overlap, projected);
        cost.bounds(&facts, projected.potential_blocks, projected.prefill_tokens)
    }

    /// Bounds of the cost of a rank with these `facts`, which are those of its upper bounds.
    #[inline]
    pub(super) fn latency_bounds<V: LoadView>(
        &self,
        cost: &LatencyCost,
        case: &Case<'_, T, V>,
        rank: &Rank,
        projected: &Projected,
        facts: &LatencyFacts,
    ) -> Bounds {
        let Case { pending, candidate, .. } = *case;
        if projected.potential_blocks.0 == projected.potential_blocks.1 {
            return Bounds::exactly(cost.cost(facts));
        }
        let (_, shared_blocks) = projected.shared_blocks(candidate.block_count);
        let credits_shared = self.credits_cache(pending) && !rank.is_overdue();
        let shared_tokens = if credits_shared { self.tokens(pending.awaited_blocks(shared_blocks)) } else { 0 };
        cost.bounds(facts, shared_tokens, projected.potential_blocks.0)
    }

    /// Cost compared by the policy, with the parameters of the request.
    pub(super) fn cost_of(&self, pending: &PendingRequest<T>) -> Cost {
        if self.settings.policy == Policy::Latency {
            Cost::Latency(self.latency_cost_of(pending))
        } else {
            Cost::Kv(self.kv_cost_of(pending))
        }
    }

    pub(super) fn latency_cost_of(&self, pending: &PendingRequest<T>) -> LatencyCost {
        LatencyCost {
            block_size: self.settings.cost.block_size.max(1),
            track_prefill_tokens: self.tracks_prefill(pending),
            output_tokens: match self.settings.role {
                PoolRole::Prefill => 1.0,
                PoolRole::Aggregated | PoolRole::Decode => self.expected_output_tokens(pending),
            },
            common_tokens: self.common_tokens(pending),
            reuse: self.typical.reuse(),
            prices: self.work_prices(),
        }
    }

    /// Prices of prefill work at the pool's load.
    fn work_prices(&self) -> WorkPrices {
        let (own, peers) = (self.arrival_rate.rate(self.ranks.refreshed_at()), self.peers);
        let PoolSums { ranks, requests } = self.ranks.sums();
        let mean = |sum: f64| sum / f64::from(ranks.max(1));
        WorkPrices::of(&PoolLoad {
            arrivals_per_second: mean(own.placements_per_second + peers.placements_per_second),
            utilization: mean(own.work_per_second + peers.work_per_second),
            requests: mean(f64::from(requests)),
            wait_seconds: self.typical.wait_seconds,
            step_ratio: self.typical.step_ratio,
        })
    }

    /// Expected output tokens: the caller's estimate, else the learned mean, capped by the maximum.
    fn expected_output_tokens(&self, pending: &PendingRequest<T>) -> f64 {
        let typical = self.typical.output_tokens;
        let Some(options) = &pending.request.options else { return typical };
        let usual = options.usual_output_tokens.unwrap_or(typical);
        let expected = options.expected_output_tokens.map_or(usual, f64::from);
        options.output_tokens_max.map_or(expected, |most| expected.min(f64::from(most)))
    }

    /// Leading tokens of the prompt that are requested repeatedly: cached on many ranks, or only on crowded ones.
    fn common_tokens(&self, pending: &PendingRequest<T>) -> u32 {
        let overlaps = &pending.request.overlaps;
        let widespread_blocks = self.widespread_blocks(overlaps);
        let is_crowded =
            pending.longest_blocks > widespread_blocks && self.are_crowded(overlaps, pending.longest_blocks);
        self.tokens(if is_crowded { pending.longest_blocks } else { widespread_blocks }.into())
    }

    /// Leading blocks cached on more than a quarter of the ranks, and on more than one.
    fn widespread_blocks(&self, overlaps: &[RankOverlap]) -> u32 {
        let others = (self.ranks.as_slice().len() / 4).max(1);
        if overlaps.len() <= others {
            return 0;
        }
        // Usually most overlaps are one system prompt, and few are longer.
        let least_blocks = overlaps.iter().map(|known| known.overlap.device_blocks).min().unwrap_or(0);
        if overlaps.iter().filter(|known| known.overlap.device_blocks > least_blocks).count() <= others {
            return least_blocks;
        }
        let mut blocks: SmallVec<[u32; 64]> = overlaps.iter().map(|known| known.overlap.device_blocks).collect();
        let (_, common_blocks, _) = blocks.select_nth_unstable_by_key(others, |blocks| Reverse(*blocks));
        *common_blocks
    }

    /// Whether all ranks with an overlap of `blocks` blocks have far more requests than the average rank.
    fn are_crowded(&self, overlaps: &[RankOverlap], blocks: u32) -> bool {
        let PoolSums { ranks, requests } = self.ranks.sums();
        let usual = u64::from(requests) * CROWD_FACTOR / u64::from(ranks.max(1)) + CROWD_REQUESTS;
        let holders = overlaps.iter().filter(|known| known.overlap.device_blocks == blocks);
        let mut positions = holders.filter_map(|known| self.ranks.position_in(known.slot)).peekable();
        positions.peek().is_some()
            && positions.all(|position| u64::from(self.ranks.as_slice()[position].requests()) > usual)
    }

    /// Facts of a rank at their upper bounds, with the minimum of shared blocks.
    pub(super) fn latency_facts(
        &self,
        pending: &PendingRequest<T>,
        rank: &Rank,
        overlap: TierOverlap,
        projected: &Projected,
    ) -> LatencyFacts {
        let Measured { speed, is_full } = rank.measured();
        let wait = rank.wait(self.ranks.refreshed_at());
        let unmodelled = u32::try_from(wait.unmodelled_tokens).unwrap_or(u32::MAX);
        let wait_seconds = wait.modelled.as_secs_f64() + speed.prefill(f64::from(unmodelled));
        LatencyFacts {
            prompt_tokens: pending.request.prompt_tokens,
            cached_tokens: self.expected_cached_tokens(pending, rank, overlap, projected),
            wait_seconds,
            requests: projected.requests,
            potential_blocks: projected.potential_blocks.1,
            read_blocks: projected.read_blocks.into(),
            total_blocks: rank.about.traits.total_kv_blocks,
            is_full,
            speed,
        }
    }

    /// Prompt tokens that need no computation when the request is served: cached, or computed by an earlier request
    /// unless that is overdue or another rank has them cached already.
    pub(super) fn expected_cached_tokens(
        &self,
        pending: &PendingRequest<T>,
        rank: &Rank,
        overlap: TierOverlap,
        projected: &Projected,
    ) -> u32 {
        if !self.credits_cache(pending) {
            return 0;
        }
        let cost = &self.settings.cost;
        let cached = overlap.cached_tokens(cost.tier_weights, cost.block_size);
        let block_count = u64::from(pending.request.prompt.block_count());
        let (shared_blocks, _) = if rank.is_overdue() { (0, 0) } else { projected.shared_blocks(block_count) };
        cached.max(self.tokens(pending.awaited_blocks(shared_blocks))).min(pending.request.prompt_tokens)
    }

    /// Whether cache hits count for the request.
    pub(super) fn credits_cache(&self, pending: &PendingRequest<T>) -> bool {
        let options = pending.request.options.as_ref();
        let otherwise = options.and_then(|options| options.overrides.overlap_score_credit);
        otherwise.unwrap_or(self.settings.cost.overlap_score_credit) > 0.0
    }

    pub(super) fn tokens(&self, blocks: u64) -> u32 {
        u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(self.settings.cost.block_size)
    }

    /// Speed of the rank; unknown parts use the typical speed of the pool.
    #[inline]
    pub(super) fn speed_of<V: LoadView>(&self, loads: &V, rank: &Rank) -> EngineSpeed {
        rank.about.speed(loads.speed(rank.slot()), self.typical.speed)
    }

    /// Parameters of the `kv` cost for the request.
    pub(super) fn kv_cost_of(&self, pending: &PendingRequest<T>) -> KvCost {
        let cost = self.settings.cost;
        let Some(options) = &pending.request.options else { return cost };
        let otherwise = options.overrides;
        let overlap_score_credit = otherwise.overlap_score_credit.unwrap_or(cost.overlap_score_credit);
        let track_prefill_tokens = self.tracks_prefill(pending);
        KvCost {
            overlap_score_credit,
            prefill_load_scale: otherwise.prefill_load_scale.unwrap_or(cost.prefill_load_scale),
            shared_cache_multiplier: otherwise.shared_cache_multiplier.unwrap_or(cost.shared_cache_multiplier),
            track_prefill_tokens,
            decode_only: self.settings.role == PoolRole::Decode && !track_prefill_tokens && overlap_score_credit > 0.0,
            ..cost
        }
    }

    pub(super) fn temperature(&self, pending: &PendingRequest<T>) -> f64 {
        let options = pending.request.options.as_ref();
        options.and_then(|options| options.overrides.temperature).unwrap_or(self.settings.temperature)
    }

    pub(super) fn tracks_prefill(&self, pending: &PendingRequest<T>) -> bool {
        let options = pending.request.options.as_ref();
        options
            .and_then(|options| options.overrides.track_prefill_tokens)
            .unwrap_or(self.settings.cost.track_prefill_tokens)
    }

    /// Facts of a rank at their upper bounds, which equal the exact values if known.
    #[inline]
    pub(super) fn cost_facts(
        &self,
        pending: &PendingRequest<T>,
        overlap: TierOverlap,
        projected: &Projected,
    ) -> CostFacts {
        CostFacts {
            prompt_tokens: u64::from(pending.request.prompt_tokens),
            overlap,
            shared_cache_blocks: pending.request.shared_cache.beyond(overlap.device_blocks),
            prefill_tokens: projected.prefill_tokens.1,
            prefill_tokens_least: 0,
            potential_blocks: projected.potential_blocks.1,
            active_requests: projected.requests,
        }
    }

    /// All raw facts of a rank and the request. Requires overlaps and eligibility in `scratch`.
    pub(super) fn candidate_facts<V: LoadView>(
        &self,
        pending: &PendingRequest<T>,
        loads: &V,
        position: usize,
        projected: &Projected,
        scratch: &Scratch,
    ) -> Candidate {
        let (rank, overlap) = (&self.ranks.as_slice()[position], scratch.overlaps[position]);
        Candidate {
            rank: rank.rank,
            overlap,
            shared_cache_blocks: pending.request.shared_cache.beyond(overlap.device_blocks),
            prefill_tokens: projected.prefill_tokens.1,
            potential_blocks: projected.potential_blocks.1,
            active_requests: projected.requests,
            max_num_batched_tokens: rank.about.traits.max_num_batched_tokens,
            total_kv_blocks: rank.about.traits.total_kv_blocks,
            held_blocks: loads.held_blocks(rank.slot()),
            load_age: self.now.since(rank.seen_at()),
            index_age: loads.index_changed_at(rank.slot()).map(|changed_at| self.now.since(changed_at)),
            engine_load: loads.engine_load(rank.slot()).map(|load| load.fact(self.now, self.rules.engine.stale_after)),
            preference: scratch.eligibility.factor(position),
        }
    }
}
