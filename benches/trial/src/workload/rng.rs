//! Reproducible pseudo-random numbers: SplitMix64, seeded by any u64. Fast enough to generate a trace's tokens.
//!
//! The numbers are equal on every machine: all distributions use only integers and the four basic arithmetic
//! operations. Logarithms are avoided, because platforms compute them differently. Not suitable for secrets.

/// One stream of pseudo-random numbers.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates the stream of `seed`. Streams of similar seeds are independent.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// Creates stream number `stream` of `seed`. Streams of similar numbers are independent.
    pub fn stream(seed: u64, stream: u64) -> Self {
        Self::new(seed ^ mix(stream.wrapping_add(1)))
    }

    /// Next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Number below `bound`, which is at least 1. The bias, below `bound` / 2^32, is negligible here.
    pub fn below(&mut self, bound: u32) -> u32 {
        (((self.number() >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// Number from 0 to 1.
    pub fn share(&mut self) -> f64 {
        self.number() as f64 / 2_f64.powi(64)
    }

    /// Number in the inclusive `range`.
    pub fn within(&mut self, range: std::ops::RangeInclusive<u32>) -> u32 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// Number from the exponential distribution with mean 1: the gap between independent arrivals.
    ///
    /// Uses von Neumann's comparison method ("Various techniques used in connection with random digits", 1951). The
    /// first number of a falling run of uniform numbers is accepted if the run has odd length; each rejected run adds
    /// 1.
    pub fn exponential(&mut self) -> f64 {
        let mut whole = 0.0;
        loop {
            let first = self.number();
            let (mut last, mut length) = (first, 1_u32);
            loop {
                let next = self.number();
                if next >= last {
                    break;
                }
                (last, length) = (next, length + 1);
            }
            if length % 2 == 1 {
                return whole + first as f64 / 2_f64.powi(64);
            }
            whole += 1.0;
        }
    }

    /// Number from the log-normal distribution with this median and this standard deviation of the logarithm.
    ///
    /// The normal number is a sum of twelve uniform ones, so it is within 6.
    pub fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        let normal = (0..12).map(|_| self.share()).sum::<f64>() - 6.0;
        median * exp(sigma * normal)
    }
}

/// Exponential function by additions and multiplications: (1 + y + y² / 2 + y³ / 6)^1024 with y = x / 1024.
pub(crate) fn exp(x: f64) -> f64 {
    let y = x / 1024.0;
    (0..10).fold(1.0 + y * (1.0 + y / 2.0 * (1.0 + y / 3.0)), |power, _| power * power)
}

/// Finalizer of SplitMix64: a bijection in which every input bit affects every output bit.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_reproducible_and_distinct() {
        let draws = |stream| {
            let mut rng = Rng::stream(7, stream);
            [rng.number(), rng.number(), rng.number()]
        };
        assert_eq!(draws(0), draws(0));
        assert_ne!(draws(0), draws(1));
    }

    #[test]
    fn log_normal_numbers_have_the_expected_quantiles() {
        let mut rng = Rng::new(5);
        let mut drawn: Vec<f64> = (0..100_000).map(|_| rng.log_normal(40.0, 1.5)).collect();
        drawn.sort_unstable_by(f64::total_cmp);
        for (at, normal) in [(0.5, 0.0), (0.9, 1.2816), (0.1, -1.2816), (0.99, 2.3263)] {
            let exact = 40.0 * (1.5_f64 * normal).exp();
            let found = drawn[(at * 1e5) as usize];
            assert!((found / exact - 1.0).abs() < 0.08, "{found} for {exact}");
        }
    }

    #[test]
    fn exponential_gaps_have_the_expected_moments_and_tail() {
        let mut rng = Rng::new(3);
        let gaps: Vec<f64> = (0..200_000).map(|_| rng.exponential()).collect();
        let share = |over: f64| gaps.iter().filter(|gap| **gap > over).count() as f64 / gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        for (found, exact, within) in [
            (mean, 1.0, 0.01),
            (variance, 1.0, 0.03),
            (share(1.0), (-1_f64).exp(), 0.005),
            (share(3.0), (-3_f64).exp(), 0.002),
        ] {
            assert!((found - exact).abs() < within, "{found} for {exact}");
        }
    }
}
