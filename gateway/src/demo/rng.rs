//! Numbers that look random and are the same for the same seed: SplitMix64.
//!
//! Owns nothing but the stream. Promises the same numbers on every machine. Not for secrets.

/// One stream of numbers.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    /// The stream number `stream` of a seed. Streams of near numbers have nothing in common.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed ^ mix(stream.wrapping_add(1))))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, which is at least 1. Its bias, under `bound` / 2^32, does not matter here.
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        u32::try_from(((self.next() >> 32) * u64::from(bound)) >> 32).expect("the product is below 2^64")
    }

    /// A number of `range`, ends included.
    pub(super) fn within(&mut self, range: &std::ops::RangeInclusive<u32>) -> u32 {
        range.start() + self.below(range.end() - range.start() + 1)
    }
}

/// The finalizer of SplitMix64: every input bit reaches every output bit.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_their_range_reach_its_ends_and_come_again() {
        let draws = |stream| {
            let mut rng = Rng::new(7, stream);
            (0..1_000).map(|_| rng.within(&(3..=6))).collect::<Vec<u32>>()
        };
        assert_eq!((draws(0).iter().min(), draws(0).iter().max()), (Some(&3), Some(&6)));
        assert_eq!(draws(0), draws(0));
        assert_ne!(draws(0), draws(1));
    }
}
