//! Ratios of paired runs and their confidence intervals.
//!
//! Equal pairs give equal ratios. An interval requires at least two pairs.
//!
//! **Method.** Each seed gives a pair: the same requests served twice. The difficulty of a seed affects both runs
//! equally, so it cancels in the pair's quotient. Quotients are averaged as logarithms (twice as slow and twice as fast
//! cancel), so the ratio is the geometric mean of the pairs' quotients. The interval is Student's t for the mean of the
//! logarithms, with one degree of freedom less than the number of pairs, at 95 %: about 95 of 100 such intervals
//! contain the ratio over infinitely many seeds. The interval is exact for normally distributed logarithms. The tests
//! below measure its coverage for other distributions. It does not cover other workloads or other traces of the same
//! kind: if all seeds share one trace, they only vary the router's random choices.

use serde::{Deserialize, Serialize};

/// Limit of the logarithm of a quotient. A larger value indicates a defect instead of slowness, and `f64` handles both.
const LOG_MAX: f64 = 600.0;

/// Ratio of a figure over paired runs.
///
/// ```
/// use pointsman_bench::compare::Ratio;
///
/// let of = Ratio::of_pairs([(2.0, 1.0), (4.0, 8.0), (3.0, 3.0)]).expect("three pairs");
/// assert!((of.ratio - 1.0).abs() < 1e-12); // half, twice, and the same
/// let (low, high) = of.interval.expect("pairs enough");
/// assert!(low < 0.3 && high > 3.0); // three such pairs say next to nothing
/// assert_eq!(Ratio::of_pairs([(2.0, 1.0)]).expect("a pair").interval, None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Geometric mean of the other contender's figure divided by the first one's.
    pub ratio: f64,
    /// 95 % confidence interval of the true ratio; none for a single pair.
    pub interval: Option<(f64, f64)>,
    /// Number of pairs.
    pub pairs: u32,
}

impl Ratio {
    /// Computes the ratio from pairs of the first and the other contender's figure. None without pairs, or if a figure
    /// is not above 0 and therefore has no logarithm.
    #[must_use]
    pub fn of_pairs(pairs: impl IntoIterator<Item = (f64, f64)>) -> Option<Self> {
        let logs: Option<Vec<f64>> = pairs.into_iter().map(|(first, other)| log_ratio(first, other)).collect();
        let logs = logs.filter(|logs| !logs.is_empty())?;
        let count = logs.len() as f64;
        let mean = logs.iter().sum::<f64>() / count;
        let freedom = logs.len() - 1;
        let interval = (freedom > 0).then(|| {
            let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / freedom as f64;
            let reach = student_t_975(freedom) * (variance / count).sqrt();
            ((mean - reach).exp(), (mean + reach).exp())
        });
        Some(Self { ratio: mean.exp(), interval, pairs: u32::try_from(logs.len()).unwrap_or(u32::MAX) })
    }
}

fn log_ratio(first: f64, other: f64) -> Option<f64> {
    let log = (other / first).ln();
    (first > 0.0 && other > 0.0 && log.is_finite()).then(|| log.clamp(-LOG_MAX, LOG_MAX))
}

/// Value that Student's t with this many degrees of freedom exceeds with probability 1/40, so that |t| stays below it
/// with probability 19/20.
///
/// Above 30 degrees the value of the normal distribution, at most 4 % less.
fn student_t_975(freedom: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814, 2.20099, 2.17881,
        2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596, 2.07961, 2.07387, 2.06866, 2.06390,
        2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227,
    ];
    freedom.checked_sub(1).and_then(|at| TABLE.get(at)).copied().unwrap_or(1.959_964)
}

#[cfg(test)]
mod tests {
    use pointsman_trial::workload::Rng;
    use proptest::prelude::*;

    use super::*;

    /// Number from the normal distribution, by Box and Muller.
    fn normal(rng: &mut Rng) -> f64 {
        let mut uniform = || (f64::from(rng.below(1 << 30)) + 0.5) / f64::from(1 << 30);
        (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
    }

    /// Number from a shifted exponential distribution: mean 0, deviation 1 and a long tail on one side.
    fn skewed(rng: &mut Rng) -> f64 {
        -((f64::from(rng.below(1 << 30)) + 0.5) / f64::from(1 << 30)).ln() - 1.0
    }

    /// Share of intervals over `pairs` pairs that contain a true ratio of 0.8. The difficulty of a seed varies
    /// threefold, and each run by about 5 % more.
    fn held(pairs: usize, noise: fn(&mut Rng) -> f64) -> f64 {
        const TRIALS: usize = 4_000;
        let mut rng = Rng::new(42);
        let holds = |rng: &mut Rng| {
            let pairs = (0..pairs).map(|_| {
                let difficulty = (0.5 * normal(rng)).exp();
                (difficulty * (0.05 * noise(rng)).exp(), 0.8 * difficulty * (0.05 * noise(rng)).exp())
            });
            let (low, high) = Ratio::of_pairs(pairs).and_then(|ratio| ratio.interval).expect("pairs enough");
            (low..=high).contains(&0.8)
        };
        (0..TRIALS).filter(|_| holds(&mut rng)).count() as f64 / TRIALS as f64
    }

    #[test]
    fn about_95_of_100_intervals_contain_the_true_ratio() {
        // 4,000 trials: three standard errors are 1 %.
        for pairs in [2, 3, 5, 10] {
            for (name, noise) in [("normal", normal as fn(&mut Rng) -> f64), ("skewed", skewed)] {
                let share = held(pairs, noise);
                assert!((0.94..=0.975).contains(&share), "{share} of intervals over {pairs} pairs, {name}");
            }
        }
    }

    #[test]
    fn values_without_a_logarithm_have_no_ratio() {
        for pair in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            assert_eq!(Ratio::of_pairs([(1.0, 1.0), pair]), None, "{pair:?}");
        }
        assert_eq!(Ratio::of_pairs([]), None);
    }

    proptest! {
        #[test]
        fn exchanging_the_sides_inverts_ratio_and_interval(pairs in proptest::collection::vec((0.01_f64..100.0, 0.01_f64..100.0), 2..12)) {
            let one = Ratio::of_pairs(pairs.clone()).expect("pairs");
            let other = Ratio::of_pairs(pairs.into_iter().map(|(first, other)| (other, first))).expect("pairs");
            let close = |one: f64, other: f64| (one * other - 1.0).abs() < 1e-9;
            let ((low, high), (other_low, other_high)) = (one.interval.expect("two"), other.interval.expect("two"));
            prop_assert!(close(one.ratio, other.ratio) && close(low, other_high) && close(high, other_low));
            prop_assert!(low <= one.ratio && one.ratio <= high);
        }
    }
}
