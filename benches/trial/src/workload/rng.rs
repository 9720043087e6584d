//! Reproducible numbers: SplitMix64. Fast enough to write a trace's tokens, and seeded by any u64.
//!
//! Owns the stream and what is drawn from it. Promises the same numbers on every machine: whatever is drawn needs only
//! integers and the four operations of arithmetic, never a logarithm, which platforms compute differently. Not for
//! secrets.

/// One stream of pseudo-random numbers.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The stream of `seed`. Streams of near seeds have nothing in common.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// The stream number `stream` of `seed`. Streams of near numbers have nothing in common.
    pub fn stream(seed: u64, stream: u64) -> Self {
        Self::new(seed ^ mix(stream.wrapping_add(1)))
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, which is at least 1. Its bias, under `bound` / 2^32, does not matter here.
    pub fn below(&mut self, bound: u32) -> u32 {
        (((self.number() >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// A number of `range`, ends included.
    pub fn within(&mut self, range: std::ops::RangeInclusive<u32>) -> u32 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// A number from the exponential distribution of mean 1: the gap to the next of independent arrivals.
    ///
    /// By von Neumann's comparisons ("Various techniques used in connection with random digits", 1951): the first of a
    /// falling run of uniform numbers stands if the run has odd length; each run that does not stand adds 1.
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
}

/// The finalizer of SplitMix64: a bijection in which every input bit reaches every output bit.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_their_range_and_reach_its_ends() {
        let mut rng = Rng::new(7);
        let draws: Vec<u32> = (0..1_000).map(|_| rng.within(3..=6)).collect();
        assert_eq!(draws.iter().min(), Some(&3));
        assert_eq!(draws.iter().max(), Some(&6));
    }

    #[test]
    fn streams_of_a_seed_come_again_and_differ() {
        let draws = |stream| {
            let mut rng = Rng::stream(7, stream);
            [rng.number(), rng.number(), rng.number()]
        };
        assert_eq!(draws(0), draws(0));
        assert_ne!(draws(0), draws(1));
    }

    #[test]
    fn exponential_gaps_have_mean_variance_and_tail_of_their_distribution() {
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
