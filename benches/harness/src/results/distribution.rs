//! Mean and percentiles of a distribution of times. A percentile of exact values is always one of them.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Mean and percentiles of times in seconds.
///
/// Percentiles use the nearest rank: of `count` values in ascending order, `p99` is the one at position `ceil(0.99 ×
/// count)`, counted from 1. It is a value that occurred, at least 99 % of the values are at most equal to it, and there
/// is no interpolation.
///
/// ```
/// use pointsman_bench::results::Distribution;
///
/// let of = Distribution::of_us((1..=10).map(|second| second * 1_000_000)).expect("there are values");
/// assert_eq!((of.mean, of.p50, of.p90, of.p99, of.count), (5.5, 5.0, 9.0, 10.0, 10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Arithmetic mean in seconds.
    pub mean: f64,
    /// Median in seconds.
    pub p50: f64,
    /// 90th percentile in seconds.
    pub p90: f64,
    /// 99th percentile in seconds.
    pub p99: f64,
    /// Number of values.
    pub count: u64,
}

impl Distribution {
    /// Computes the exact distribution of values in µs; none without values.
    #[must_use]
    pub fn of_us(values: impl IntoIterator<Item = u64>) -> Option<Self> {
        let mut sorted: Vec<u64> = values.into_iter().collect();
        sorted.sort_unstable();
        let count = sorted.len() as u64;
        let sum: u128 = sorted.iter().map(|value| u128::from(*value)).sum();
        let at = |percent| nearest_rank(&sorted, percent).map(seconds);
        Some(Self { mean: sum as f64 / count as f64 / 1e6, p50: at(50)?, p90: at(90)?, p99: at(99)?, count })
    }

    /// Computes the distribution of a histogram in µs, at its precision; none if it is empty.
    ///
    /// A percentile is the highest value of the bucket that contains the nearest rank. The mean weights each bucket by
    /// its middle.
    #[must_use]
    pub fn of_histogram(values: &Histogram<u64>) -> Option<Self> {
        let at = |quantile| seconds(values.value_at_quantile(quantile));
        let count = values.len();
        (count > 0).then(|| Self { mean: values.mean() / 1e6, p50: at(0.5), p90: at(0.9), p99: at(0.99), count })
    }
}

/// Value at position `ceil(percent / 100 × count)` of ascending values, counted from 1.
pub(crate) fn nearest_rank(sorted: &[u64], percent: usize) -> Option<u64> {
    let place = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(place - 1).copied()
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Smallest value that at least `percent` of all values do not exceed, found by counting.
    fn slow_percentile(values: &[u64], percent: usize) -> Option<u64> {
        let not_above = |limit: u64| values.iter().filter(|value| **value <= limit).count();
        values.iter().copied().filter(|value| 100 * not_above(*value) >= percent * values.len()).min()
    }

    proptest! {
        #[test]
        fn percentiles_equal_those_found_by_counting(
            values in proptest::collection::vec(0_u64..50, 1..300), percent in 0_usize..=100
        ) {
            let mut sorted = values.clone();
            sorted.sort_unstable();
            prop_assert_eq!(nearest_rank(&sorted, percent), slow_percentile(&values, percent));
        }

        #[test]
        fn a_histogram_matches_its_values_within_its_precision(
            values in proptest::collection::vec(1_u64..10_000_000, 1..300)
        ) {
            let mut histogram = Histogram::<u64>::new_with_bounds(1, 60_000_000, 3).expect("bounds");
            for value in &values {
                histogram.record(*value).expect("within bounds");
            }
            let exact = Distribution::of_us(values).expect("not empty");
            let binned = Distribution::of_histogram(&histogram).expect("not empty");
            prop_assert_eq!(exact.count, binned.count);
            for (exact, binned) in [
                (exact.mean, binned.mean), (exact.p50, binned.p50), (exact.p90, binned.p90), (exact.p99, binned.p99),
            ] {
                prop_assert!((binned / exact - 1.0).abs() < 0.002, "{} for {}", binned, exact);
            }
        }
    }
}
