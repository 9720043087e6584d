//! Delay before the next connection attempt.
//!
//! Delays double from 100 ms to 5 s, with a jitter of up to 25 %, so that sources which lost one switch at the same
//! time do not reconnect at the same time. Equal seeds have equal delays. The caller waits.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

const FIRST_MS: u64 = 100;
const LONGEST_MS: u64 = 5_000;

/// Delays between attempts, jittered by a hash of seed and attempt.
///
/// ```
/// use pointsman::Backoff;
///
/// let mut backoff = Backoff::new(7);
/// let first = backoff.next_delay();
/// assert!((75..=125).contains(&first.as_millis()));
/// assert!((150..=250).contains(&backoff.next_delay().as_millis()));
/// backoff.reset();
/// assert_eq!(backoff.next_delay(), first);
/// ```
#[derive(Clone, Debug)]
pub struct Backoff {
    seed: u64,
    attempt: u32,
}

impl Backoff {
    /// A back-off with its own sequence of delays for each `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, attempt: 0 }
    }

    /// The delay before the next attempt: 100 ms, 200 ms and so on up to 5 s, each with a jitter of 25 %.
    pub fn next_delay(&mut self) -> Duration {
        let nominal_ms = FIRST_MS.saturating_mul(1 << self.attempt.min(16)).min(LONGEST_MS);
        let jitter = xxh3_64_with_seed(&self.attempt.to_le_bytes(), self.seed);
        self.attempt = self.attempt.saturating_add(1);
        let (least_us, span_us) = (nominal_ms * 750, nominal_ms * 500);
        Duration::from_micros(least_us + jitter % (span_us + 1))
    }

    /// Restarts the sequence of delays after a successful attempt.
    pub const fn reset(&mut self) {
        self.attempt = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_to_a_maximum_and_differ_between_seeds() {
        let delays = |seed| {
            let mut backoff = Backoff::new(seed);
            std::iter::repeat_with(move || backoff.next_delay()).take(100).collect::<Vec<_>>()
        };
        for (attempt, delay) in delays(3).into_iter().enumerate() {
            let nominal = (100 << attempt.min(10)).min(5_000) as f64;
            let off = delay.as_secs_f64() * 1000.0 / nominal;
            assert!((0.75..=1.25).contains(&off), "attempt {attempt} waits {delay:?}");
        }
        assert_eq!(delays(3), delays(3));
        assert_ne!(delays(3), delays(4));
    }
}
