//! A rank's learned prefill rate, readable by anyone without a message.
//!
//! Owns one number a rank, beside the board: a slot there is two full cache lines, and this changes far less often.
//! Its single writer is the rank's sequence actor. Promises that a reader sees a number that was published, or none.
//! Leaves learning to [`LearnedRate`](super::LearnedRate).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Prefill tokens a second of one rank, or not known yet.
///
/// Relaxed on both sides: the number stands alone, and a stale one is as good as a learned one ever is.
///
/// ```
/// use std::time::Duration;
/// use pointsman::load::RateCell;
///
/// let cell = RateCell::default();
/// assert_eq!((cell.tokens_per_second(), cell.estimate(500)), (None, None));
/// cell.publish(10_000.0);
/// assert_eq!(cell.estimate(500), Some(Duration::from_millis(50)));
/// ```
#[derive(Debug, Default)]
pub struct RateCell {
    /// Bits of an `f32`; 0 while nothing is known.
    bits: AtomicU32,
}

impl RateCell {
    /// Publishes a rate. Only the rank's sequence actor may call this. What is no positive number means unknown.
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a learned rate has")]
    pub fn publish(&self, tokens_per_second: f64) {
        let rate = tokens_per_second as f32;
        let known = rate.is_normal() && rate > 0.0;
        self.bits.store(if known { rate.to_bits() } else { 0 }, Ordering::Relaxed);
    }

    /// The rate, if one is known.
    #[must_use]
    pub fn tokens_per_second(&self) -> Option<f64> {
        let bits = self.bits.load(Ordering::Relaxed);
        (bits != 0).then(|| f64::from(f32::from_bits(bits)))
    }

    /// How long `tokens` take at that rate, if one is known.
    #[must_use]
    pub fn estimate(&self, tokens: u32) -> Option<Duration> {
        // A rate near zero, which nobody learns, would take longer than a duration can say.
        let seconds = f64::from(tokens) / self.tokens_per_second()?;
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_rate_is_unknown() {
        let cell = RateCell::default();
        for unknown in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e-60, 1e60] {
            cell.publish(7.0);
            cell.publish(unknown);
            assert_eq!(cell.tokens_per_second(), None, "{unknown}");
        }
        cell.publish(f64::from(f32::MIN_POSITIVE));
        assert_eq!(cell.estimate(u32::MAX), Some(Duration::MAX));
        assert_eq!(cell.estimate(0), Some(Duration::ZERO));
    }
}
