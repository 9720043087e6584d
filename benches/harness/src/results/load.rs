//! Load balance over ranks during a run.
//!
//! The load of a rank is a step function: the value of its last sample, and empty before the first one.

use crate::results::RankSample;

/// State of all ranks at one time, from their latest samples.
pub(crate) struct FleetSnapshot {
    ranks: Vec<RankSample>,
}

impl FleetSnapshot {
    /// Creates `ranks` empty ranks, or more if samples contain higher numbers.
    pub(crate) fn new(ranks: u32, samples: &[RankSample]) -> Self {
        let empty = |rank| RankSample {
            at_us: 0,
            rank,
            requests: 0,
            prefill_tokens: 0,
            used_blocks: 0,
            prompt_tokens_total: 0,
            cached_tokens_total: 0,
        };
        Self { ranks: (0..).map(empty).take(ranks_of(ranks, samples)).collect() }
    }

    /// Applies a sample.
    pub(crate) fn apply(&mut self, sample: RankSample) {
        if let Some(rank) = self.ranks.get_mut(sample.rank as usize) {
            *rank = sample;
        }
    }

    /// Latest sample of each rank.
    pub(crate) fn ranks(&self) -> &[RankSample] {
        &self.ranks
    }

    /// Calls `held` with the state of the ranks, start and duration in µs, for each interval without samples between
    /// `from_us` and `until_us`. `samples` are in order of time.
    pub(crate) fn walk(
        mut self,
        samples: &[RankSample],
        from_us: u64,
        until_us: u64,
        mut held: impl FnMut(&Self, u64, u64),
    ) {
        let mut now = from_us;
        for sample in samples {
            let at = sample.at_us.clamp(now, until_us.max(now));
            if at > now {
                held(&self, now, at - now);
                now = at;
            }
            if sample.at_us < until_us {
                self.apply(*sample);
            }
        }
        if until_us > now {
            held(&self, now, until_us - now);
        }
    }
}

/// Number of ranks: `ranks`, or more if samples contain higher numbers.
pub(crate) fn ranks_of(ranks: u32, samples: &[RankSample]) -> usize {
    let named = samples.iter().map(|sample| sample.rank as usize + 1).max().unwrap_or_default();
    named.max(ranks as usize)
}

/// Requests of the most loaded rank divided by the mean of all ranks. Both are averaged over the time from `from_us` to
/// `until_us` before the division.
///
/// The quotient of averages avoids a strong influence of nearly idle times, when one request on one of eight ranks
/// gives a quotient of eight. With a constant number of requests it equals the average of quotients. None if there are
/// no ranks or no rank ever had a request.
///
/// ```
/// use pointsman_bench::results::RankSample;
/// use pointsman_bench::results::load::max_over_mean;
///
/// let sample = |at_us, rank, requests| RankSample {
///     at_us, rank, requests, prefill_tokens: 0, used_blocks: 0, prompt_tokens_total: 0, cached_tokens_total: 0,
/// };
/// // Two ranks: 3 and 1 for 10 µs, then 1 and 1 for 10 µs. Fullest 2 on average, mean 1.5.
/// let samples = [sample(0, 0, 3), sample(0, 1, 1), sample(10, 0, 1)];
/// assert_eq!(max_over_mean(&samples, 2, 0, 20), Some(2.0 / 1.5));
/// ```
#[must_use]
pub fn max_over_mean(samples: &[RankSample], ranks: u32, from_us: u64, until_us: u64) -> Option<f64> {
    let fleet = FleetSnapshot::new(ranks, samples);
    let count = fleet.ranks().len() as f64;
    let (mut fullest, mut all) = (0_u128, 0_u128);
    fleet.walk(samples, from_us, until_us, |fleet, _, lasts_us| {
        let requests = || fleet.ranks().iter().map(|rank| u128::from(rank.requests));
        fullest += requests().max().unwrap_or_default() * u128::from(lasts_us);
        all += requests().sum::<u128>() * u128::from(lasts_us);
    });
    (all > 0).then(|| fullest as f64 * count / all as f64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample((at_us, rank, requests): (u64, u32, u32)) -> RankSample {
        RankSample {
            at_us,
            rank,
            requests,
            prefill_tokens: 0,
            used_blocks: 0,
            prompt_tokens_total: 0,
            cached_tokens_total: 0,
        }
    }

    /// Reference implementation, µs by µs.
    fn slow(samples: &[RankSample], ranks: u32, from_us: u64, until_us: u64) -> Option<f64> {
        let (mut fullest, mut all) = (0, 0);
        for now in from_us..until_us {
            let requests = |rank| {
                let mut seen = samples.iter().filter(|sample| sample.rank == rank && sample.at_us <= now);
                seen.next_back().map_or(0, |sample| u64::from(sample.requests))
            };
            fullest += (0..ranks).map(requests).max().unwrap_or_default();
            all += (0..ranks).map(requests).sum::<u64>();
        }
        (all > 0).then(|| fullest as f64 * f64::from(ranks) / all as f64)
    }

    #[test]
    fn a_fleet_without_samples_has_no_load_ratio() {
        assert_eq!(max_over_mean(&[], 8, 0, 100), None);
        assert_eq!(max_over_mean(&[sample((0, 0, 0))], 8, 0, 100), None);
        assert_eq!(max_over_mean(&[sample((0, 0, 1))], 8, 0, 100), Some(8.0));
    }

    proptest! {
        #[test]
        fn load_ratio_equals_the_reference_implementation(
            mut samples in proptest::collection::vec((0_u64..60, 0_u32..3, 0_u32..5), 0..30),
            from in 0_u64..40, lasts in 0_u64..40
        ) {
            samples.sort_by_key(|sample| sample.0);
            let samples: Vec<_> = samples.into_iter().map(sample).collect();
            prop_assert_eq!(max_over_mean(&samples, 3, from, from + lasts), slow(&samples, 3, from, from + lasts));
        }
    }
}
