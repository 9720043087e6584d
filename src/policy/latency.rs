//! The `latency` cost of a request on a rank in seconds, lower is better.
//!
//! Marginal cost of an additional request: the delay in seconds over all requests that it affects. With the learned
//! [speed](EngineSpeed) of the rank:
//!
//! ```text
//! work     = new · (1 + (cached + new / 2) / 33000)                  tokens; attention reads what stands before each
//! prefill  = work / work_tokens_per_second
//! step     = step_seconds + request_seconds · requests + block_seconds · blocks
//! ttft     = wait + prefill + step
//! overdue  = wait² / 1 s
//! stall    = prefill · requests
//! decode   = output · (step + request_seconds + block_seconds · isl / block_size)
//! displace = displaced · prefill
//! copy     = the part of prefill from cached to common              what many ranks hold and this one lacks
//! cost     = 2 · (ttft + overdue) + stall + decode + displace − copy
//! ```
//!
//! - *ttft*: time to the first token: earlier prefills, its own uncached prompt, and one step. Rates are learned beside
//!   decodes and include them. Counts twice, because the caller sees nothing during it.
//! - *overdue*: long waits count progressively. Ten requests without a wait do not compensate one wait of ten seconds.
//! - *stall*: engines prefill within decode steps, so each active request on the rank stalls for that time.
//! - *decode*: its own output at the step time of the rank with its requests and blocks.
//! - *displace*: newly computed blocks evict blocks that later requests would have used.
//! - *copy*: a prefix on many ranks is requested repeatedly. Computing it on a rank that lacks it pays off at its next
//!   request there; without this term, few requests would stay on warm ranks beside an idle one.
//!
//! The first untuned form of this (queued + 2 · new + new · running / 8 + 4 · running, in blocks) and the idea to
//! multiply work and batch (LMetric, arXiv 2603.15202) were measured for comparison: docs/policies.md has the figures.

use serde::{Deserialize, Serialize};

use super::{Bounds, BuiltIn, Needs};
use crate::load::{EngineSpeed, work_tokens};
use crate::validation::Problems;

/// Weight of the time to first token.
const TTFT_WEIGHT: f64 = 2.0;

/// Wait in seconds that counts double.
const WAIT_TOLERANCE_SECONDS: f64 = 1.0;

/// Settings of [`Policy::Latency`](super::Policy::Latency). It weighs seconds against seconds, so it has no
/// weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LatencyConfig {
    /// Randomness of the choice; 0 takes the least cost. Default 0, 0 to 1e9.
    pub temperature: f64,
}

impl BuiltIn for LatencyConfig {
    const COMPARES_COSTS: bool = true;

    /// Costs are estimates from learned speeds: differences within 5 % are insignificant.
    const TIE_FACTOR: f64 = 1.05;

    /// With assumed reuse, the cached part lies between the index overlap and that plus blocks shared with active prompts;
    /// without reuse the bounds are exact and no rank is queried. A temperature depends on every cost, so it queries all
    /// ranks.
    fn needs(&self, temperature: f64) -> Needs {
        if temperature > 0.0 { Needs::All } else { Needs::Bounded }
    }

    fn temperature(&self) -> f64 {
        self.temperature
    }

    fn check(&self, problems: &mut Problems) {
        problems.weight("policy.temperature", self.temperature);
    }
}

/// Parameters of the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyCost {
    /// Tokens per block, at least 1.
    pub block_size: u32,
    /// Whether prefill counts: decode pools have none.
    pub track_prefill_tokens: bool,
    /// Expected output tokens of the request.
    pub output_tokens: f64,
    /// Leading tokens of the prompt cached on many ranks, and thus requested repeatedly.
    pub common_tokens: u32,
    /// Later loss in seconds per second of prefill with evictions.
    pub displaced: f64,
}

/// Facts about one request on one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyFacts {
    /// Prompt length in tokens.
    pub isl_tokens: u32,
    /// Tokens that need no computation when the request is served: cached, or computed by an earlier request.
    pub cached_tokens: u32,
    /// Duration of the earlier prefills, in seconds.
    pub wait_seconds: f64,
    /// Active requests on the rank, waiting or running.
    pub requests: u32,
    /// Blocks of the active requests.
    pub active_blocks: u64,
    /// Whether the cache of the rank is full, so that new blocks evict others.
    pub is_full: bool,
    /// Speed of the rank.
    pub speed: EngineSpeed,
}

/// Terms of a cost, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencyTerms {
    /// Expected time to first token.
    pub ttft_seconds: f64,
    /// Additional cost of a long wait.
    pub overdue_seconds: f64,
    /// Total stall of the active requests during its prefill.
    pub stall_seconds: f64,
    /// Duration of its output.
    pub decode_seconds: f64,
    /// Later loss from evicted blocks.
    pub displace_seconds: f64,
    /// Later gain from a prefix that many ranks hold and this one lacks.
    pub copy_seconds: f64,
}

impl LatencyTerms {
    /// The cost.
    #[must_use]
    #[inline]
    pub fn total(&self) -> f64 {
        TTFT_WEIGHT * (self.ttft_seconds + self.overdue_seconds)
            + self.stall_seconds
            + self.decode_seconds
            + self.displace_seconds
            - self.copy_seconds
    }
}

impl LatencyCost {
    /// The cost in seconds, lower is better.
    ///
    /// ```
    /// use pointsman::load::EngineSpeed;
    /// use pointsman::policy::{LatencyCost, LatencyFacts};
    ///
    /// let cost = LatencyCost { block_size: 64, track_prefill_tokens: true, output_tokens: 100.0, common_tokens: 0, displaced: 0.0 };
    /// let speed = EngineSpeed::prior(64);
    /// let idle = LatencyFacts {
    ///     isl_tokens: 6_400, cached_tokens: 0, wait_seconds: 0.0, requests: 0, active_blocks: 0,
    ///     is_full: false, speed,
    /// };
    /// let warm = LatencyFacts { cached_tokens: 6_336, ..idle };
    /// let busy = LatencyFacts { wait_seconds: 3.0, requests: 20, active_blocks: 2_000, ..warm };
    /// assert!(cost.cost(&warm) < cost.cost(&idle) && cost.cost(&idle) < cost.cost(&busy));
    /// assert!((cost.terms(&warm).ttft_seconds - 0.0117).abs() < 1e-4); // 64 tokens behind 6,336, and a step
    /// ```
    #[must_use]
    #[inline]
    pub fn cost(&self, facts: &LatencyFacts) -> f64 {
        self.terms(facts).total()
    }

    /// Interval of the cost if the load is between bounds: `facts` has the upper bounds, at most `cached_tokens_max`
    /// tokens need no computation, and active requests hold at least `active_blocks_min` blocks.
    #[must_use]
    #[inline]
    pub fn bounds(&self, facts: &LatencyFacts, cached_tokens_max: u32, active_blocks_min: u64) -> Bounds {
        let hi = self.cost(facts);
        let lo = self.cost(&LatencyFacts {
            cached_tokens: facts.cached_tokens.max(cached_tokens_max).min(facts.isl_tokens),
            active_blocks: active_blocks_min,
            ..*facts
        });
        Bounds { lo: lo.min(hi), hi }
    }

    /// Terms of the cost.
    #[must_use]
    #[inline]
    pub fn terms(&self, facts: &LatencyFacts) -> LatencyTerms {
        let speed = &facts.speed;
        let (requests, blocks) = (f64::from(facts.requests), count(facts.active_blocks));
        let prefill_seconds = speed.prefill(self.work_tokens(facts));
        let step_seconds = speed.step(requests, blocks);
        let new_tokens = self.new_tokens(facts);
        let copied_tokens = self.common_tokens.saturating_sub(self.cached_tokens(facts)).min(new_tokens);
        let own_blocks = f64::from(facts.isl_tokens) / f64::from(self.block_size);
        let own_step_seconds = step_seconds + speed.request_seconds + speed.block_seconds * own_blocks;
        LatencyTerms {
            ttft_seconds: facts.wait_seconds + prefill_seconds + step_seconds,
            overdue_seconds: facts.wait_seconds * facts.wait_seconds / WAIT_TOLERANCE_SECONDS,
            stall_seconds: prefill_seconds * requests,
            decode_seconds: self.output_tokens * own_step_seconds,
            displace_seconds: if facts.is_full { self.displaced * prefill_seconds } else { 0.0 },
            copy_seconds: speed.prefill(work_tokens(copied_tokens, self.cached_tokens(facts))),
        }
    }

    /// Tokens to compute: at least one, which produces the first token.
    fn new_tokens(&self, facts: &LatencyFacts) -> u32 {
        if self.track_prefill_tokens { facts.isl_tokens.saturating_sub(facts.cached_tokens).max(1) } else { 0 }
    }

    fn work_tokens(&self, facts: &LatencyFacts) -> f64 {
        work_tokens(self.new_tokens(facts), self.cached_tokens(facts))
    }

    /// Tokens before the computed ones.
    fn cached_tokens(&self, facts: &LatencyFacts) -> u32 {
        facts.isl_tokens.saturating_sub(self.new_tokens(facts))
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
        displaced: 0.1,
    };

    /// 25,000 work tokens per second, and step times of the prior.
    fn facts() -> LatencyFacts {
        LatencyFacts {
            isl_tokens: 6_600,
            cached_tokens: 0,
            wait_seconds: 0.0,
            requests: 0,
            active_blocks: 0,
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
        close(terms.displace_seconds, 0.1 * prefill);
        assert_eq!((terms.overdue_seconds, terms.stall_seconds), (0.0, 0.0));
    }

    #[test]
    fn worked_example_of_a_busy_rank() {
        let busy = LatencyFacts {
            cached_tokens: 6_592,
            wait_seconds: 3.0,
            requests: 50,
            active_blocks: 5_000,
            is_full: false,
            ..facts()
        };
        let terms = COST.terms(&busy);
        let prefill = 8.0 * (1.0 + 6_596.0 / 33_000.0) / 25_000.0;
        let step = 0.004 + 50.0 * 20e-6 + 5_000.0 * 64.0 * 65e-9;
        close(terms.ttft_seconds, 3.0 + prefill + step);
        close(terms.overdue_seconds, 9.0);
        close(terms.stall_seconds, 50.0 * prefill);
        assert_eq!(terms.displace_seconds, 0.0, "capacity available");
        close(terms.total(), 2.0 * (terms.ttft_seconds + 9.0) + terms.stall_seconds + terms.decode_seconds);
    }

    #[test]
    fn a_decode_pool_has_no_prefill() {
        let decode = LatencyCost { track_prefill_tokens: false, ..COST };
        let terms = decode.terms(&facts());
        close(terms.ttft_seconds, 0.004);
        assert_eq!((terms.stall_seconds, terms.displace_seconds), (0.0, 0.0));
    }

    /// First workload of Dynamo's benchmark: 7,000 tokens, half of them one of ten prefixes. An idle rank without the
    /// prefix is eventually chosen over a warm rank with one request.
    #[test]
    fn a_common_prefix_is_copied_to_an_idle_rank() {
        let cold = LatencyFacts { isl_tokens: 7_000, ..facts() };
        let warm = LatencyFacts { cached_tokens: 3_500, requests: 1, active_blocks: 110, ..cold };
        let of = |common_tokens| LatencyCost { common_tokens, output_tokens: 100.0, ..COST };
        assert!(of(0).cost(&cold) > of(0).cost(&warm), "a session's own prefix is followed");
        assert!(of(3_500).cost(&cold) < of(3_500).cost(&warm), "a common one is copied");
        let copied = of(3_500).terms(&cold);
        close(copied.copy_seconds, 3_500.0 * (1.0 + 1_750.0 / 33_000.0) / 25_000.0);
    }

    /// A rank of half the speed is chosen only if the fast one is busy enough.
    #[test]
    fn slow_ranks_receive_the_excess_of_fast_ones() {
        let prior = facts().speed;
        let slow = EngineSpeed {
            work_tokens_per_second: prior.work_tokens_per_second / 2.0,
            step_seconds: prior.step_seconds * 2.0,
            ..prior
        };
        let slow = COST.cost(&LatencyFacts { speed: slow, ..facts() });
        let fast = |requests: u32| {
            let active_blocks = u64::from(requests) * 100;
            COST.cost(&LatencyFacts { requests, active_blocks, wait_seconds: f64::from(requests) * 0.02, ..facts() })
        };
        assert!(fast(0) < slow && fast(1) < slow && slow < fast(8), "{slow}: {} {}", fast(1), fast(8));
    }

    proptest! {
        #[test]
        fn costs_are_finite_and_increase_with_queued_work(
            isl_tokens: u32, cached_tokens: u32, wait_seconds in 0.0..1e6,
            requests in 0u32..100_000, active_blocks in 0u64..1 << 40, is_full: bool, fewer in 1u32..1_000,
            common_tokens: u32,
        ) {
            let cost_of = LatencyCost { common_tokens, ..COST };
            let facts =
                LatencyFacts { isl_tokens, cached_tokens, wait_seconds, requests, active_blocks, is_full, ..facts() };
            let cost = cost_of.cost(&facts);
            prop_assert!(cost.is_finite() && cost > 0.0, "{cost}");
            for more in [
                LatencyFacts { cached_tokens: cached_tokens.saturating_sub(fewer), ..facts },
                LatencyFacts { wait_seconds: wait_seconds + f64::from(fewer), ..facts },
                LatencyFacts { requests: requests + fewer, ..facts },
                LatencyFacts { active_blocks: active_blocks + u64::from(fewer), ..facts },
                LatencyFacts { is_full: true, ..facts },
            ] {
                prop_assert!(cost_of.cost(&more) >= cost * (1.0 - 1e-12), "{facts:?} against {more:?}");
            }
        }
    }
}
