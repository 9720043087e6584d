//! The `latency` cost of one request, and the facts of a rank that it and predictions read.

use std::cmp::Reverse;

use smallvec::SmallVec;

use super::formula::{LatencyCost, LatencyFacts, PoolLoad, WorkPrices};
use super::prediction::LatencyPrediction;
use crate::config::PoolRole;
use crate::load::PredictionBias;
use crate::policy::Bounds;
use crate::schedule::LoadView;
use crate::schedule::case::Case;
use crate::schedule::pool::PoolSums;
use crate::schedule::rank::{Measured, Projected, Rank};
use crate::select::{RankOverlap, TierOverlap};

/// Multiple of the mean number of requests above which a rank is crowded, measured: with 1.5 and 3 the tails are longer.
const CROWD_FACTOR: u64 = 2;

/// Requests that a rank has in addition before it is crowded, for pools with few requests.
const CROWD_REQUESTS: u64 = 4;

/// Prediction for one rank.
#[derive(Clone, Copy, Debug)]
pub(in crate::schedule) struct Predicted {
    /// With the correction.
    pub(in crate::schedule) latency: LatencyPrediction,
    /// Part of the time to first token that earlier prefills take.
    pub(in crate::schedule) wait_seconds: f64,
    /// The correction.
    pub(in crate::schedule) bias: PredictionBias,
}

impl<T, V: LoadView> Case<'_, T, V> {
    pub(in crate::schedule) fn latency_cost(&self) -> LatencyCost {
        let pool = &self.settings.pool;
        LatencyCost {
            block_size: pool.block_size.max(1),
            track_prefill_tokens: self.tracks_prefill(),
            output_tokens: match pool.role {
                PoolRole::Prefill => 1.0,
                PoolRole::Aggregated | PoolRole::Decode => self.expected_output_tokens(),
            },
            common_tokens: self.common_tokens(),
            reuse: self.pool.typical.reuse(),
            prices: self.work_prices(),
        }
    }

    /// Prices of prefill work at the pool's load.
    fn work_prices(&self) -> WorkPrices {
        let (own, peers) = (self.pool.arrival_rate.rate(self.ranks().refreshed_at()), self.pool.peers);
        let PoolSums { ranks, requests } = self.ranks().sums();
        let mean = |sum: f64| sum / f64::from(ranks.max(1));
        WorkPrices::of(&PoolLoad {
            arrivals_per_second: mean(own.placements_per_second + peers.placements_per_second),
            utilization: mean(own.work_per_second + peers.work_per_second),
            requests: mean(f64::from(requests)),
            wait_seconds: self.pool.typical.wait_seconds,
            step_ratio: self.pool.typical.step_ratio,
        })
    }
    /// Expected output tokens: the caller's estimate, else the learned mean, capped by the maximum.
    fn expected_output_tokens(&self) -> f64 {
        let typical = self.pool.typical.output_tokens;
        let Some(options) = &self.pending.request.options else { return typical };
        let usual = options.usual_output_tokens.unwrap_or(typical);
        let expected = options.expected_output_tokens.map_or(usual, f64::from);
        options.output_tokens_max.map_or(expected, |most| expected.min(f64::from(most)))
    }

    /// Leading tokens of the prompt that are requested repeatedly: cached on many ranks, or only on crowded ones.
    fn common_tokens(&self) -> u32 {
        let (overlaps, longest_blocks) = (&self.pending.request.overlaps, self.pending.longest_blocks);
        let widespread_blocks = widespread_blocks(overlaps, self.ranks().as_slice().len());
        let is_crowded = longest_blocks > widespread_blocks && self.are_crowded(overlaps, longest_blocks);
        self.tokens(if is_crowded { longest_blocks } else { widespread_blocks }.into())
    }

    /// Whether all ranks with an overlap of `blocks` blocks have far more requests than the average rank.
    fn are_crowded(&self, overlaps: &[RankOverlap], blocks: u32) -> bool {
        let PoolSums { ranks, requests } = self.ranks().sums();
        let usual = u64::from(requests) * CROWD_FACTOR / u64::from(ranks.max(1)) + CROWD_REQUESTS;
        let holders = overlaps.iter().filter(|known| known.overlap.device_blocks == blocks);
        let mut positions = holders.filter_map(|known| self.ranks().position_in(known.slot)).peekable();
        positions.peek().is_some()
            && positions.all(|position| u64::from(self.ranks().as_slice()[position].requests()) > usual)
    }

    /// Facts of a rank at their upper bounds, with the minimum of shared blocks.
    pub(in crate::schedule) fn latency_facts(
        &self,
        rank: &Rank,
        overlap: TierOverlap,
        projected: &Projected,
    ) -> LatencyFacts {
        let Measured { speed, is_full } = rank.measured();
        let wait = rank.wait(self.ranks().refreshed_at());
        let unmodelled = u32::try_from(wait.unmodelled_tokens).unwrap_or(u32::MAX);
        let wait_seconds = wait.modelled.as_secs_f64() + speed.prefill(f64::from(unmodelled));
        LatencyFacts {
            prompt_tokens: self.pending.request.prompt_tokens,
            cached_tokens: self.expected_cached_tokens(rank, overlap, projected),
            wait_seconds,
            requests: projected.requests,
            potential_blocks: projected.potential_blocks.1,
            read_blocks: projected.read_blocks.into(),
            total_blocks: rank.about.traits.total_kv_blocks,
            is_full,
            speed,
        }
    }

    /// Bounds of the cost of a rank with these `facts`, which are those of its upper bounds.
    #[inline]
    pub(in crate::schedule) fn latency_bounds(
        &self,
        cost: &LatencyCost,
        rank: &Rank,
        projected: &Projected,
        facts: &LatencyFacts,
    ) -> Bounds {
        if projected.potential_blocks.0 == projected.potential_blocks.1 {
            return Bounds::exactly(cost.cost(facts));
        }
        let (_, shared_blocks) = projected.shared_blocks(self.candidate.block_count);
        let counts_shared = self.counts_overlap() && !rank.is_overdue();
        let shared_tokens = if counts_shared { self.tokens(self.pending.awaited_blocks(shared_blocks)) } else { 0 };
        cost.bounds(facts, shared_tokens, projected.potential_blocks.0)
    }

    /// Predicted latency of a request on a rank with these `facts`.
    pub(in crate::schedule) fn predict(&self, cost: &LatencyCost, rank: &Rank, facts: &LatencyFacts) -> Predicted {
        let bias = self.loads.with_speed(rank.slot(), |cell| cell.bias_at(self.pool.now));
        let decodes = self.settings.pool.role != PoolRole::Prefill;
        let latency = LatencyPrediction {
            ttft_seconds: cost.track_prefill_tokens.then(|| bias.ttft * cost.terms(facts).ttft_seconds),
            itl_seconds: decodes.then(|| bias.itl * cost.itl_seconds(facts)),
        };
        Predicted { latency, wait_seconds: bias.ttft * facts.wait_seconds, bias }
    }
}

/// Leading blocks cached on more than half of the ranks, and on more than one.
fn widespread_blocks(overlaps: &[RankOverlap], ranks: usize) -> u32 {
    let others = (ranks / 2).max(1);
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
