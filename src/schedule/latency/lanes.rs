//! Lower bounds of the `latency` cost for groups of ranks.
//!
//! A decision computes exact costs of the few ranks that can win. The others are excluded by these bounds, which cost a
//! few instructions per rank: the loads of [`RANKS`](RankGroup::RANKS) ranks are columns of `f32`, so that the compiler
//! computes several ranks at once. The wait for KV blocks is left out, the slowest parts of speeds are replaced by the
//! fastest of the pool, and a margin covers the rounding.

use super::formula::{Coefficients, Delays, LatencyCost, Real};

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
            let (wait_seconds, token_seconds) = (loads.idle_at[lane] - self.now, loads.token_seconds[lane]);
            let delays = Delays {
                wait_seconds: if wait_seconds > 0.0 { wait_seconds } else { 0.0 },
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
        let mut least = bounds;
        for width in [8, 4, 2, 1] {
            (0..width).for_each(|lane| least[lane] = least[lane].lesser(least[lane + width]));
        }
        (bounds, least[0])
    }

    /// The bound below which a rank may cost less than `cost`.
    pub(crate) fn limit(cost: f64) -> f64 {
        cost / MARGIN
    }
}
