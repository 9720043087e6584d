//! The `latency` cost of a request on a rank in seconds, lower is better.
//!
//! Marginal cost of an additional request: the delay in seconds over all requests that it affects, in a pool whose ranks
//! are queues with Poisson arrivals and general service times (M/G/1). Choosing the lowest cost is one step of policy
//! improvement over a random choice. With the learned [speed](EngineSpeed) of the rank:
//!
//! ```text
//! work     = new · (1 + (cached + new / 2) / 33000)                  tokens; attention reads what stands before each
//! prefill  = work / work_tokens_per_second
//! step     = step_seconds + request_seconds · requests + block_seconds · read_blocks
//! own_step = request_seconds + block_seconds · isl / block_size      what the request adds to a step
//! room     = output · step · min(1, missing / total_blocks)          wait until ended requests release enough blocks
//! ttft     = wait + room + prefill + step
//! stall    = prefill · requests
//! later    = A · prefill · min(wait + prefill / 2, longest)          A = 2 · arrivals / (1 − utilization)
//! decode   = output · (step + own_step)
//! slowdown = output · own_step · requests
//! displace = P · reuse · prefill, if the cache is full               P = 3 + mean requests + A · mean wait
//! copy     = min(P · copied, 2 · copied + its part of stall and later)
//! cost     = 3 · ttft + stall + later + D · (decode + slowdown) + displace − copy
//! longest  = 2 · mean wait + mean prefill                            of the pool
//! D        = max(1 / (1 − utilization), min(mean step / step_seconds, 8)) / 5
//! ```
//!
//! - *ttft*: time to the first token: earlier prefills, blocks that must become free, its own uncached prompt, and one
//!   step. Rates are learned beside decodes and include them. Counts three times, because the caller sees nothing during
//!   it.
//! - *stall*: engines prefill within decode steps, so each active request on the rank stalls for that time.
//! - *later*: requests that arrive before the queue is empty wait for its prefill. `A` is the number of such requests per
//!   second of queue, from the pool's arrivals per rank and the share of time that ranks prefill. Arrivals beyond a
//!   utilization of 0.9 by the learned speeds do not count. Nor do arrivals behind a queue of more than `longest` seconds:
//!   they have shorter queues elsewhere. Otherwise a long prompt on an idle rank would cost more than any pile of requests
//!   on the rank that has it cached.
//! - *decode*, *slowdown*: its own output at the step time of the rank, and the additional time of the other requests'
//!   steps during that output. The price `D` is 1/5 on an idle pool: the difference in load between ranks lasts for a
//!   part of the output only, because active requests end and later ones go to ranks with fewer. Prefills between the
//!   steps stretch a second of decode to `1 / (1 − utilization)` seconds. Where steps are long rather than interrupted, a
//!   request that decodes longer slows down later requests, in steady state by the ratio of a step to an empty one, and
//!   the price is up to 8/5.
//! - *displace*: newly computed blocks evict blocks that later requests would have used. They are computed again on an
//!   average rank, where a second of work costs `P`.
//! - *copy*: a prefix on many ranks, or only on crowded ones, is requested repeatedly; `copied` is the part of prefill
//!   from cached to common. Computing it on a rank that lacks it pays off at its next request there; without this term,
//!   few requests would stay on warm ranks beside an idle one. The caller waits for it in any case, so its time counts at
//!   least once, and a cost always decreases with the cached part.
//!
//! The weight 3, the limit 8, the fifth and the reuse are measured; `docs/decisions` has the forms that were dropped.

use std::ops::{Add, Mul, Sub};

use serde::Serialize;

use crate::load::{EngineSpeed, work_tokens};
use crate::policy::Bounds;

/// Weight of the time to first token.
const TTFT_WEIGHT: f64 = 3.0;

/// Share of an output during which a rank has one request more than the others. Measured: active requests are half done
/// on average, and later ones go to the ranks with fewer. `docs/decisions` has other values.
const IMBALANCE_SHARE: f64 = 0.2;

/// Upper limit of the price of a second of decode time from the length of steps, before the share.
const STEP_PRICE_MAX: f64 = 8.0;

/// Upper limit of the utilization in the price of decode time, which is at most 1.
const DECODE_UTILIZATION_MAX: f64 = 0.8;

/// Upper limit of the utilization in the cost of later arrivals, which is infinite at 1.
const UTILIZATION_MAX: f64 = 0.9;

/// Multiple of the pool's mean wait behind which no requests arrive. Measured: `docs/decisions` has other values.
const QUEUE_FACTOR: f64 = 2.0;

/// Share of the cache that requests fill before others wait for blocks.
const FILL_MAX: f64 = 0.95;

/// Parameters of the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LatencyCost {
    /// Tokens per block, at least 1.
    pub(crate) block_size: u32,
    /// Whether prefill counts: decode pools have none.
    pub(crate) track_prefill_tokens: bool,
    /// Expected output tokens of the request.
    pub(crate) output_tokens: f64,
    /// Leading tokens of the prompt cached on many ranks, or only on crowded ones, and thus requested repeatedly.
    pub(crate) common_tokens: u32,
    /// Share of evicted blocks that will be requested again.
    pub(crate) reuse: f64,
    /// Prices of prefill work in the pool.
    pub(crate) prices: WorkPrices,
}

/// Load of a pool, as means over its ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PoolLoad {
    /// Arrivals per second and rank.
    pub(crate) arrivals_per_second: f64,
    /// Share of the time that a rank prefills.
    pub(crate) utilization: f64,
    /// Mean number of active requests of a rank.
    pub(crate) requests: f64,
    /// Mean duration of the queued prefills of a rank, in seconds.
    pub(crate) wait_seconds: f64,
    /// Mean duration of a step, as a multiple of an empty one.
    pub(crate) step_ratio: f64,
}

/// Prices of prefill work in a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct WorkPrices {
    /// Seconds by which later arrivals are delayed, per second of work and second of queue.
    pub(crate) later: f64,
    /// Longest queue behind which requests still arrive, in seconds.
    pub(crate) queue_seconds_max: f64,
    /// Cost of a second of work on an average rank.
    pub(crate) mean: f64,
    /// Cost of a second of decode time.
    pub(crate) decode: f64,
}

impl WorkPrices {
    /// Prices at this load.
    pub(crate) fn of(load: &PoolLoad) -> Self {
        // More work than time means that queues grow or that the learned speeds are too low: engines serve these arrivals.
        let served = load.arrivals_per_second * (UTILIZATION_MAX / load.utilization).min(1.0);
        let later = 2.0 * served / (1.0 - load.utilization.min(UTILIZATION_MAX));
        let stretch = (1.0 - load.utilization.min(DECODE_UTILIZATION_MAX)).recip();
        let mean_work_seconds =
            if load.arrivals_per_second > 0.0 { load.utilization / load.arrivals_per_second } else { 0.0 };
        Self {
            later,
            queue_seconds_max: QUEUE_FACTOR * load.wait_seconds + mean_work_seconds,
            mean: TTFT_WEIGHT + load.requests + later * load.wait_seconds,
            decode: IMBALANCE_SHARE * load.step_ratio.clamp(1.0, STEP_PRICE_MAX).max(stretch),
        }
    }
}

/// Facts about one request on one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LatencyFacts {
    /// Prompt length in tokens.
    pub(crate) prompt_tokens: u32,
    /// Tokens that need no computation when the request is served: cached, or computed by an earlier request.
    pub(crate) cached_tokens: u32,
    /// Duration of the earlier prefills, in seconds.
    pub(crate) wait_seconds: f64,
    /// Active requests on the rank, waiting or running.
    pub(crate) requests: u32,
    /// Blocks of the active requests with this one, shared ones counted once.
    pub(crate) potential_blocks: u64,
    /// Blocks that a step reads, shared ones counted once per request.
    pub(crate) read_blocks: u64,
    /// Blocks of the cache, if known.
    pub(crate) total_blocks: Option<u32>,
    /// Whether the cache of the rank is full, so that new blocks evict others.
    pub(crate) is_full: bool,
    /// Speed of the rank.
    pub(crate) speed: EngineSpeed,
}

/// Terms of a cost, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencyTerms<F = f64> {
    /// Expected time to first token.
    pub ttft_seconds: F,
    /// Part of it during which the request waits for KV blocks.
    pub kv_wait_seconds: F,
    /// Total stall of the active requests during its prefill.
    pub stall_seconds: F,
    /// Total wait of later arrivals for its prefill.
    pub queue_delay_seconds: F,
    /// Duration of its output.
    pub decode_seconds: F,
    /// Total additional duration of the active requests' output.
    pub slowdown_seconds: F,
    /// Later loss from evicted blocks.
    pub eviction_seconds: F,
    /// Later gain from a prefix that is requested repeatedly and that this rank lacks.
    pub replication_seconds: F,
    /// Cost of a second of decode time.
    pub decode_price: F,
}

/// A number of the formula: `f64` for the cost of one rank, `f32` for bounds of many.
pub trait Real: Copy + PartialOrd + Add<Output = Self> + Mul<Output = Self> + Sub<Output = Self> {
    /// The nearest number.
    fn of(number: f64) -> Self;

    /// The lesser of two numbers, neither NaN: one instruction.
    #[inline]
    #[must_use]
    fn lesser(self, other: Self) -> Self {
        if self < other { self } else { other }
    }
}

impl Real for f64 {
    fn of(number: f64) -> Self {
        number
    }
}

impl Real for f32 {
    #[expect(clippy::cast_possible_truncation, reason = "the margin of the bounds covers the rounding")]
    fn of(number: f64) -> Self {
        number as Self
    }
}

/// What the formula reads of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Coefficients<F> {
    pub(crate) output_tokens: F,
    pub(crate) later: F,
    pub(crate) queue_seconds_max: F,
    pub(crate) mean: F,
    pub(crate) displace: F,
    pub(crate) decode: F,
}

/// What the formula reads of the request on one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delays<F> {
    pub(crate) wait_seconds: F,
    pub(crate) kv_wait_seconds: F,
    /// Prefill of the common prefix that the rank lacks.
    pub(crate) copied_seconds: F,
    /// The other prefill.
    pub(crate) rest_seconds: F,
    pub(crate) step_seconds: F,
    /// What the request adds to a step.
    pub(crate) own_step_seconds: F,
    pub(crate) requests: F,
    /// 1 if the cache is full, else 0.
    pub(crate) full: F,
}

impl<F: Real> Coefficients<F> {
    /// Terms of the cost. Without `COPIES` there is no common prefix that the rank lacks.
    #[inline(always)] // in the loop over the ranks of a group
    pub(crate) fn terms<const COPIES: bool>(&self, delays: &Delays<F>) -> LatencyTerms<F> {
        let Delays { wait_seconds, kv_wait_seconds, copied_seconds, rest_seconds, step_seconds, .. } = *delays;
        let Delays { own_step_seconds, requests, full, .. } = *delays;
        let prefill_seconds = if COPIES { copied_seconds + rest_seconds } else { rest_seconds };
        let queue_delay =
            |work: F| self.later * work * (wait_seconds + work * F::of(0.5)).lesser(self.queue_seconds_max);
        let queue_delay_seconds = queue_delay(prefill_seconds);
        let replication_seconds = if COPIES {
            let copy_price = F::of(TTFT_WEIGHT - 1.0) + requests;
            let copy_seconds = copy_price * copied_seconds + queue_delay_seconds - queue_delay(rest_seconds);
            copy_seconds.lesser(self.mean * copied_seconds)
        } else {
            F::of(0.0)
        };
        LatencyTerms {
            ttft_seconds: wait_seconds + kv_wait_seconds + prefill_seconds + step_seconds,
            kv_wait_seconds,
            stall_seconds: prefill_seconds * requests,
            queue_delay_seconds,
            decode_seconds: self.output_tokens * (step_seconds + own_step_seconds),
            slowdown_seconds: self.output_tokens * own_step_seconds * requests,
            eviction_seconds: self.displace * prefill_seconds * full,
            replication_seconds,
            decode_price: self.decode,
        }
    }
}

impl<F: Real> LatencyTerms<F> {
    /// The cost.
    #[inline]
    pub(crate) fn total(&self) -> F {
        F::of(TTFT_WEIGHT) * self.ttft_seconds
            + self.stall_seconds
            + self.queue_delay_seconds
            + self.decode_price * (self.decode_seconds + self.slowdown_seconds)
            + self.eviction_seconds
            - self.replication_seconds
    }
}

impl LatencyCost {
    /// The cost in seconds, lower is better.
    #[inline]
    pub(crate) fn cost(&self, facts: &LatencyFacts) -> f64 {
        self.terms(facts).total()
    }

    /// Interval of the cost if the load is between bounds: `facts` has the upper bounds, at most `cached_tokens_max`
    /// tokens need no computation, and the requests hold at least `potential_blocks_min` blocks with this one.
    #[inline]
    pub(crate) fn bounds(&self, facts: &LatencyFacts, cached_tokens_max: u32, potential_blocks_min: u64) -> Bounds {
        let hi = self.cost(facts);
        let lo = self.cost(&LatencyFacts {
            cached_tokens: facts.cached_tokens.max(cached_tokens_max).min(facts.prompt_tokens),
            potential_blocks: potential_blocks_min,
            ..*facts
        });
        Bounds { lo: lo.min(hi), hi }
    }

    /// Predicted time between two tokens of the request: a step of the rank with it, in seconds.
    pub(crate) fn itl_seconds(&self, facts: &LatencyFacts) -> f64 {
        let own_blocks = f64::from(facts.prompt_tokens) / f64::from(self.block_size);
        facts.speed.step(f64::from(facts.requests) + 1.0, count(facts.read_blocks) + own_blocks)
    }

    /// Terms of the cost.
    #[inline]
    pub(crate) fn terms(&self, facts: &LatencyFacts) -> LatencyTerms {
        let (speed, requests) = (&facts.speed, f64::from(facts.requests));
        let (copied_tokens, rest_tokens) = self.work_split(facts.prompt_tokens, facts.cached_tokens);
        let step_seconds = speed.step(requests, count(facts.read_blocks));
        let delays = Delays {
            wait_seconds: facts.wait_seconds,
            kv_wait_seconds: self.kv_wait_seconds(facts, step_seconds),
            copied_seconds: speed.prefill(copied_tokens),
            rest_seconds: speed.prefill(rest_tokens),
            step_seconds,
            own_step_seconds: self.own_step_seconds(facts.prompt_tokens, speed),
            requests,
            full: f64::from(u8::from(facts.is_full)),
        };
        self.coefficients().terms::<true>(&delays)
    }

    /// The coefficients of the formula for this request.
    #[inline]
    pub(crate) fn coefficients<F: Real>(&self) -> Coefficients<F> {
        let WorkPrices { later, queue_seconds_max, mean, decode } = self.prices;
        Coefficients {
            output_tokens: F::of(self.output_tokens),
            later: F::of(later),
            queue_seconds_max: F::of(queue_seconds_max),
            mean: F::of(mean),
            displace: F::of(mean * self.reuse),
            decode: F::of(decode),
        }
    }

    /// Time that a request adds to a step.
    pub(crate) fn own_step_seconds(&self, prompt_tokens: u32, speed: &EngineSpeed) -> f64 {
        let own_blocks = f64::from(prompt_tokens) / f64::from(self.block_size);
        speed.request_seconds + speed.block_seconds * own_blocks
    }

    /// Work tokens of a request with `cached_tokens` of its `prompt_tokens` cached: those of the common prefix that the rank
    /// lacks, and the others.
    pub(crate) fn work_split(&self, prompt_tokens: u32, cached_tokens: u32) -> (f64, f64) {
        let new_tokens = self.new_tokens(prompt_tokens, cached_tokens);
        let cached_tokens = prompt_tokens.saturating_sub(new_tokens);
        let copied_tokens = self.common_tokens.saturating_sub(cached_tokens).min(new_tokens);
        let copied = work_tokens(copied_tokens, cached_tokens);
        (copied, (work_tokens(new_tokens, cached_tokens) - copied).max(0.0))
    }

    /// Time until enough blocks are free: all requests grow by their output, and blocks become free at the rate at which
    /// the active requests end.
    #[inline]
    fn kv_wait_seconds(&self, facts: &LatencyFacts, step_seconds: f64) -> f64 {
        let Some(total_blocks) = facts.total_blocks else { return 0.0 };
        let output_blocks = self.output_tokens * f64::from(facts.requests + 1) / f64::from(self.block_size);
        let missing = count(facts.potential_blocks) + output_blocks - FILL_MAX * f64::from(total_blocks);
        if missing <= 0.0 || facts.requests == 0 {
            return 0.0; // enough blocks, or no request that will release some
        }
        self.output_tokens * step_seconds * (missing / f64::from(total_blocks)).min(1.0)
    }

    /// Tokens to compute: at least one, which produces the first token.
    fn new_tokens(&self, prompt_tokens: u32, cached_tokens: u32) -> u32 {
        if self.track_prefill_tokens { prompt_tokens.saturating_sub(cached_tokens).max(1) } else { 0 }
    }
}

/// Counts stay far below 2^53, where f64 is exact; a count that means "at least" may be imprecise.
#[expect(clippy::cast_precision_loss, reason = "block and token counts stay far below 2^53")]
fn count(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COST: LatencyCost = LatencyCost {
        block_size: 64,
        track_prefill_tokens: true,
        output_tokens: 200.0,
        common_tokens: 0,
        reuse: 0.1,
        prices: WorkPrices { later: 8.0, queue_seconds_max: 10.0, mean: 20.0, decode: 2.0 },
    };

    /// 25,000 work tokens per second, and step times of the prior.
    fn facts() -> LatencyFacts {
        LatencyFacts {
            prompt_tokens: 6_600,
            cached_tokens: 0,
            wait_seconds: 0.0,
            requests: 0,
            potential_blocks: 104,
            read_blocks: 0,
            total_blocks: None,
            is_full: true,
            speed: EngineSpeed { work_tokens_per_second: 25_000.0, ..EngineSpeed::prior(64) },
        }
    }

    fn close(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-9 * want.abs().max(1.0), "{got} is not {want}");
    }

    #[test]
    fn worked_example_of_an_idle_rank() {
        let terms = COST.terms(&facts());
        // 6,600 tokens after 3,300 cached ones on average: a tenth more work.
        let prefill = 6_600.0 * 1.1 / 25_000.0;
        close(terms.ttft_seconds, prefill + 0.004);
        close(terms.decode_seconds, 200.0 * (0.004 + 20e-6 + 65e-9 * 6_600.0));
        close(terms.queue_delay_seconds, 8.0 * prefill * prefill / 2.0);
        close(terms.eviction_seconds, 20.0 * 0.1 * prefill);
        assert_eq!((terms.slowdown_seconds, terms.stall_seconds, terms.kv_wait_seconds), (0.0, 0.0, 0.0));
    }

    #[test]
    fn worked_example_of_a_busy_rank() {
        let busy = LatencyFacts {
            cached_tokens: 6_592,
            wait_seconds: 3.0,
            requests: 50,
            read_blocks: 5_000,
            is_full: false,
            ..facts()
        };
        let terms = COST.terms(&busy);
        let prefill = 8.0 * (1.0 + 6_596.0 / 33_000.0) / 25_000.0;
        let step = 0.004 + 50.0 * 20e-6 + 5_000.0 * 64.0 * 65e-9;
        close(terms.ttft_seconds, 3.0 + prefill + step);
        close(terms.queue_delay_seconds, 8.0 * prefill * (3.0 + prefill / 2.0));
        close(terms.stall_seconds, 50.0 * prefill);
        assert_eq!(terms.eviction_seconds, 0.0, "capacity available");
        close(terms.slowdown_seconds, 200.0 * (20e-6 + 65e-9 * 6_600.0) * 50.0);
        let decode = terms.decode_seconds + terms.slowdown_seconds;
        close(terms.total(), 3.0 * terms.ttft_seconds + terms.stall_seconds + terms.queue_delay_seconds + 2.0 * decode);
    }

    /// 20 requests hold 2,000 of 2,000 blocks: the new one lacks 100 blocks, and 65.6 for the output of all.
    #[test]
    fn worked_example_of_a_rank_without_free_blocks() {
        let facts = LatencyFacts {
            requests: 20,
            potential_blocks: 2_104,
            read_blocks: 2_000,
            total_blocks: Some(2_000),
            ..facts()
        };
        let step = 0.004 + 20.0 * 20e-6 + 2_000.0 * 64.0 * 65e-9;
        let missing = 2_104.0 + 200.0 * 21.0 / 64.0 - 0.95 * 2_000.0;
        close(COST.terms(&facts).kv_wait_seconds, missing * 200.0 * step / 2_000.0);
        let room = LatencyFacts { total_blocks: Some(3_000), ..facts };
        assert_eq!(COST.terms(&room).kv_wait_seconds, 0.0);
    }

    #[test]
    fn worked_example_of_prices_and_steps() {
        let load =
            PoolLoad { arrivals_per_second: 4.0, utilization: 0.5, requests: 10.0, wait_seconds: 0.1, step_ratio: 1.5 };
        let prices = WorkPrices { later: 16.0, queue_seconds_max: 0.2 + 0.125, mean: 3.0 + 10.0 + 1.6, decode: 0.4 };
        assert_eq!(WorkPrices::of(&load), prices);
        let busy = LatencyFacts { prompt_tokens: 6_400, requests: 9, read_blocks: 400, ..facts() };
        close(COST.itl_seconds(&busy), 0.004 + 10.0 * 20e-6 + 500.0 * 64.0 * 65e-9);
    }

    #[test]
    fn a_decode_pool_has_no_prefill() {
        let decode = LatencyCost { track_prefill_tokens: false, ..COST };
        let terms = decode.terms(&facts());
        close(terms.ttft_seconds, 0.004);
        assert_eq!((terms.stall_seconds, terms.eviction_seconds), (0.0, 0.0));
    }

    /// A burst of requests for a document of 40,000 tokens, cached on one rank. Without the limit of the queue, the prefill
    /// of a copy costs more than 100 requests on that rank.
    #[test]
    fn a_burst_for_one_document_leaves_the_rank_that_has_it() {
        let load = PoolLoad {
            arrivals_per_second: 40.0,
            utilization: 2.0,
            requests: 5.0,
            wait_seconds: 0.01,
            step_ratio: 2.0,
        };
        let burst = LatencyCost { prices: WorkPrices::of(&load), ..COST };
        let cold = LatencyFacts { prompt_tokens: 40_000, is_full: false, ..facts() };
        let warm = |requests: u32| LatencyFacts {
            cached_tokens: 39_000,
            wait_seconds: 0.1 * f64::from(requests),
            requests,
            read_blocks: u64::from(requests) * 625,
            ..cold
        };
        assert!(burst.cost(&warm(3)) < burst.cost(&cold));
        assert!(burst.cost(&warm(100)) > burst.cost(&cold));
        let unlimited = WorkPrices { queue_seconds_max: f64::INFINITY, ..burst.prices };
        let unlimited = LatencyCost { prices: unlimited, ..burst };
        assert!(unlimited.cost(&warm(100)) < unlimited.cost(&cold));
    }

    /// 100 arrivals of 0.09 s each fill a second nine times: a tenth of them is a utilization of 0.9.
    #[test]
    fn arrivals_beyond_the_capacity_do_not_count() {
        let load = PoolLoad { arrivals_per_second: 10.0, utilization: 0.9, ..PoolLoad::default() };
        let within = WorkPrices::of(&load);
        let beyond = WorkPrices::of(&PoolLoad { arrivals_per_second: 100.0, utilization: 9.0, ..load });
        close(within.later, 2.0 * 10.0 / 0.1);
        close(beyond.later, within.later);
        close(beyond.decode, 1.0);
        close(WorkPrices::of(&PoolLoad { utilization: 0.2, step_ratio: 9.0, ..load }).decode, 1.6);
    }

    proptest! {
        #[test]
        fn costs_are_finite_and_increase_with_queued_work(
            prompt_tokens: u32, cached_tokens: u32, wait_seconds in 0.0..1e6,
            requests in 0u32..100_000, is_full: bool, fewer in 1u32..1_000,
            potential_blocks in 0u64..1 << 40, read_blocks in 0u64..1 << 40, total_blocks: Option<u32>, common_tokens: u32,
            arrivals_per_second in 0.0..1e4, utilization in 0.0..2.0, pool_requests in 0.0..1e4, pool_wait in 0.0..1e4,
            step_ratio in 0.5..10.0,
        ) {
            let load =
                PoolLoad { arrivals_per_second, utilization, requests: pool_requests, wait_seconds: pool_wait, step_ratio };
            let cost_of = LatencyCost { common_tokens, prices: WorkPrices::of(&load), ..COST };
            let facts = LatencyFacts {
                prompt_tokens, cached_tokens, wait_seconds, requests, potential_blocks, read_blocks,
                total_blocks, is_full, ..facts()
            };
            let cost = cost_of.cost(&facts);
            prop_assert!(cost.is_finite() && cost > 0.0, "{cost}");
            for more in [
                LatencyFacts { cached_tokens: cached_tokens.saturating_sub(fewer), ..facts },
                LatencyFacts { wait_seconds: wait_seconds + f64::from(fewer), ..facts },
                LatencyFacts { requests: requests + fewer, ..facts },
                LatencyFacts { potential_blocks: potential_blocks + u64::from(fewer), ..facts },
                LatencyFacts { read_blocks: read_blocks + u64::from(fewer), ..facts },
                LatencyFacts { is_full: true, ..facts },
            ] {
                prop_assert!(cost_of.cost(&more) >= cost * (1.0 - 1e-12), "{facts:?} against {more:?}");
            }
        }
    }
}
