//! Building blocks of generators: texts, arrivals and popularities.
//!
//! Two texts are equal only if they have the same id. All functions give identical results on every platform.

use crate::workload::{Rng, Segment, mix};

/// Source of unique texts.
#[derive(Clone, Debug)]
pub(super) struct Texts {
    next: u64,
}

impl Texts {
    /// Creates the source of a generator. Other generators and other seeds have other text ids.
    pub(super) fn new(seed: u64, generator: &str) -> Self {
        Self { next: mix(seed ^ mix(number(generator))) }
    }

    /// Returns a new unique text.
    pub(super) fn fresh(&mut self, tokens: u32) -> Segment {
        self.next = self.next.wrapping_add(1);
        Segment { id: mix(self.next), tokens }
    }
}

/// Hash of a name.
fn number(name: &str) -> u64 {
    name.bytes().fold(0, |number, byte| mix(number ^ u64::from(byte)))
}

/// Independent arrivals: a Poisson process.
#[derive(Debug)]
pub(super) struct Arrival {
    at_us: f64,
    gap_us: f64,
}

impl Arrival {
    /// Creates a process with a mean of `rate` arrivals per second. The first arrival follows the first gap.
    pub(super) fn at_rate(rate: f64) -> Self {
        Self { at_us: 0.0, gap_us: 1e6 / rate }
    }

    /// Time of the next arrival in µs after the start.
    pub(super) fn next_us(&mut self, rng: &mut Rng) -> u64 {
        self.at_us += rng.exponential() * self.gap_us;
        self.at_us.round() as u64
    }
}

/// Popularity distribution: the k-th item has a probability proportional to k to the power of -`skew`.
///
/// A skew of 0 is uniform, 1 is Zipf's law, 2 is steeper.
#[derive(Debug)]
pub(super) struct Popularity {
    /// Cumulative probabilities, up to 1.
    sums: Vec<f64>,
}

impl Popularity {
    pub(super) fn new(count: u32, skew: u32) -> Self {
        let weight = |k: u32| (0..skew).fold(1.0, |weight, _| weight / f64::from(k));
        let mut sum = 0.0;
        let mut sums: Vec<f64> = (1..=count)
            .map(|k| {
                sum += weight(k);
                sum
            })
            .collect();
        for share in &mut sums {
            *share /= sum;
        }
        Self { sums }
    }

    /// Draws an index from 0 on.
    pub(super) fn draw(&self, rng: &mut Rng) -> usize {
        let drawn = rng.number() as f64 / 2_f64.powi(64);
        self.sums.partition_point(|share| *share <= drawn).min(self.sums.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_popularity_distribution() {
        let counts = |skew| {
            let (popularity, mut rng) = (Popularity::new(4, skew), Rng::new(1));
            let mut counts = [0_u32; 4];
            (0..100_000).for_each(|_| counts[popularity.draw(&mut rng)] += 1);
            counts
        };
        for (skew, shares) in [(0, [0.25, 0.25, 0.25, 0.25]), (1, [0.48, 0.24, 0.16, 0.12])] {
            for (count, share) in counts(skew).into_iter().zip(shares) {
                assert!((f64::from(count) / 1e5 - share).abs() < 0.01, "{count} for {share}");
            }
        }
    }
}
