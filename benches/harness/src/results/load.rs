//! Load balance over ranks during a run.
//!
//! The load of a rank is a step function: the value of its last sample, and empty before the first one.

use crate::results::RankSample;

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
/// let sample = |at_us, rank, requests| RankSample { at_us, rank, requests };
/// // Two ranks: 3 and 1 for 10 µs, then 1 and 1 for 10 µs. Fullest 2 on average, mean 1.5.
/// let samples = [sample(0, 0, 3), sample(0, 1, 1), sample(10, 0, 1)];
/// assert_eq!(max_over_mean(&samples, 2, 0, 20), Some(2.0 / 1.5));
/// ```
#[must_use]
pub fn max_over_mean(samples: &[RankSample], ranks: u32, from_us: u64, until_us: u64) -> Option<f64> {
    let named = samples.iter().map(|sample| sample.rank as usize + 1).max().unwrap_or_default();
    let mut requests = vec![0; named.max(ranks as usize)];
    let (mut fullest, mut all, mut now_us) = (0_u128, 0_u128, from_us);
    let samples = samples.iter().map(|sample| (sample.at_us, Some(sample)));
    for (at_us, sample) in samples.chain([(until_us, None)]) {
        let at_us = at_us.clamp(now_us, until_us.max(now_us));
        if at_us > now_us {
            let lasts_us = u128::from(at_us - now_us);
            fullest += u128::from(requests.iter().copied().max().unwrap_or_default()) * lasts_us;
            all += requests.iter().copied().map(u128::from).sum::<u128>() * lasts_us;
            now_us = at_us;
        }
        if let Some(sample) = sample {
            requests[sample.rank as usize] = sample.requests;
        }
    }
    (all > 0).then(|| fullest as f64 * requests.len() as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample((at_us, rank, requests): (u64, u32, u32)) -> RankSample {
        RankSample { at_us, rank, requests }
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
