//! Lower bounds of the `latency` cost for groups of ranks.
//!
//! A decision computes exact costs of the few ranks that can win. The others are excluded by these bounds, which cost a
//! few instructions per rank: the loads of [`RANKS`](RankGroup::RANKS) ranks are columns of `f32`, so that the compiler
//! computes several ranks at once. The wait for KV blocks is left out, the slowest parts of speeds are replaced by the
//! fastest of the pool, and a margin covers the rounding.

use super::formula::{Coefficients, Delays, LatencyCost};

/// One value per rank of a group.
pub(crate) type Lanes = [f32; RankGroup::RANKS];

/// Factor that makes up for the rounding of `f32`, whose relative error per operation is below 1e-7.
const MARGIN: f64 = 0.999;

/// Wait of a lane without a rank: no real rank waits that long, and products with it stay finite.
const VACANT: f32 = 1e18;

/// Loads of a group of ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankGroup {
    /// End of the queued prefills, in seconds after an epoch.
    pub(crate) idle_at: Lanes,
    /// Active requests.
    pub(crate) requests: Lanes,
    /// Seconds of a step.
    pub(crate) step_seconds: Lanes,
    /// Seconds per work token.
    pub(crate) token_seconds: Lanes,
    /// 1 if the cache is full, else 0.
    pub(crate) full: Lanes,
}

impl RankGroup {
    /// Ranks of a group.
    pub(crate) const RANKS: usize = 16;

    /// A group without ranks.
    pub(crate) const VACANT: Self = Self {
        idle_at: [VACANT; Self::RANKS],
        requests: [0.0; Self::RANKS],
        step_seconds: [0.0; Self::RANKS],
        token_seconds: [0.0; Self::RANKS],
        full: [0.0; Self::RANKS],
    };
}

/// Work tokens of a request on the ranks of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkGroup {
    /// Work tokens of a common prefix that the rank lacks.
    pub(crate) copied: Lanes,
    /// The other work tokens.
    pub(crate) rest: Lanes,
}

/// The formula for the bounds of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupCost {
    coefficients: Coefficients<f32>,
    now: f32,
    own_step_seconds: f32,
    copies: bool,
}

#[expect(clippy::cast_possible_truncation, reason = "the margin of the bounds covers the rounding")]
impl GroupCost {
    /// The bounds of a cost `now_seconds` after the epoch, where the request adds at least `own_step_seconds` to a step.
    pub(crate) fn new(cost: &LatencyCost, now_seconds: f64, own_step_seconds: f64) -> Self {
        Self {
            coefficients: LatencyCost { output_tokens: cost.prices.decode * cost.output_tokens, ..*cost }
                .coefficients(),
            now: now_seconds as f32,
            own_step_seconds: own_step_seconds as f32,
            copies: cost.common_tokens > 0,
        }
    }

    /// Lower bounds of the costs up to the [margin](Self::limit), and the least of them.
    #[inline]
    pub(crate) fn bounds(&self, loads: &RankGroup, work: &WorkGroup) -> (Lanes, f32) {
        // Most prompts have no common prefix.
        if self.copies { self.bounds_with::<true>(loads, work) } else { self.bounds_with::<false>(loads, work) }
    }

    #[inline]
    fn bounds_with<const COPIES: bool>(&self, loads: &RankGroup, work: &WorkGroup) -> (Lanes, f32) {
        let mut bounds = [0.0; RankGroup::RANKS];
        #[expect(clippy::needless_range_loop, reason = "arrays of one length, which the compiler vectorizes")]
        for lane in 0..RankGroup::RANKS {
            let token_seconds = loads.token_seconds[lane];
            let delays = Delays {
                wait_seconds: greater(loads.idle_at[lane] - self.now, 0.0),
                kv_wait_seconds: -0.0, // adds nothing, which the compiler knows
                copied_seconds: work.copied[lane] * token_seconds,
                rest_seconds: work.rest[lane] * token_seconds,
                step_seconds: loads.step_seconds[lane],
                own_step_seconds: self.own_step_seconds,
                requests: loads.requests[lane],
                full: loads.full[lane],
            };
            let coefficients = Coefficients { decode: 1.0, ..self.coefficients }; // is in the output tokens
            bounds[lane] = coefficients.terms::<COPIES>(&delays).total();
        }
        let least = bounds.iter().fold(f32::INFINITY, |least, bound| if *bound < least { *bound } else { least });
        (bounds, least)
    }

    /// The bound below which a rank may cost less than `cost`.
    pub(crate) fn limit(cost: f64) -> f64 {
        cost / MARGIN
    }
}

/// The greater of two numbers, neither NaN: one instruction.
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::load::EngineSpeed;
    use crate::schedule::latency::formula::{LatencyFacts, PoolLoad, WorkPrices};

    proptest! {
        /// The bound of a rank is below its cost, and close to it if the rank has enough blocks.
        #[test]
        fn bounds_are_below_the_costs_and_close(
            prompt_tokens in 0u32..200_000, cached_tokens in 0u32..200_000, common_tokens in 0u32..200_000,
            wait_seconds in 0.0..100.0, requests in 0u32..500, read_blocks in 0u64..100_000, is_full: bool,
            output_tokens in 0.0..5_000.0, reuse in 0.0..0.8, now_seconds in 0.0..0.25, rate in 100.0..1e5,
            arrivals_per_second in 0.0..50.0, utilization in 0.0..2.0, pool_requests in 0.0..200.0, step_ratio in 0.5..9.0,
            pool_wait in 0.0..50.0, lane in 0..RankGroup::RANKS, total_blocks: Option<u32>,
        ) {
            let load = PoolLoad { arrivals_per_second, utilization, requests: pool_requests, wait_seconds: pool_wait, step_ratio };
            let prices = WorkPrices::of(&load);
            let cost = LatencyCost {
                block_size: 16, track_prefill_tokens: true, output_tokens, common_tokens, reuse, prices,
            };
            let speed = EngineSpeed { work_tokens_per_second: rate, ..EngineSpeed::prior(16) };
            let facts = LatencyFacts {
                prompt_tokens, cached_tokens, wait_seconds, requests, potential_blocks: read_blocks, read_blocks,
                total_blocks, is_full, speed,
            };
            let own_step_seconds = cost.own_step_seconds(prompt_tokens, &speed);
            let mut loads = RankGroup::VACANT;
            loads.idle_at[lane] = (now_seconds + wait_seconds) as f32;
            loads.requests[lane] = requests as f32;
            loads.step_seconds[lane] = speed.step(f64::from(requests), read_blocks as f64) as f32;
            loads.token_seconds[lane] = speed.work_tokens_per_second.recip() as f32;
            loads.full[lane] = f32::from(u8::from(is_full));
            let (copied, rest) = cost.work_split(prompt_tokens, cached_tokens);
            let mut work = WorkGroup { copied: [0.0; RankGroup::RANKS], rest: [0.0; RankGroup::RANKS] };
            (work.copied[lane], work.rest[lane]) = (copied as f32, rest as f32);
            let (bounds, least) = GroupCost::new(&cost, now_seconds, own_step_seconds).bounds(&loads, &work);
            let (bound, exact) = (MARGIN * f64::from(bounds[lane]), cost.cost(&facts));
            prop_assert!(bound <= exact, "{bound} is above {exact}");
            let with_room = cost.cost(&LatencyFacts { total_blocks: None, ..facts });
            prop_assert!(bound >= 0.998 * with_room, "{bound} is far below {with_room}");
            prop_assert_eq!(least, bounds[lane], "a vacant lane is never the least");
        }
    }
}
