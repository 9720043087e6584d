//! The way down of a rank's prefill tokens, in five words.
//!
//! Owns the numbers that a rank publishes once per change so that readers can bound its prefill tokens at any
//! later time without asking. Promises that the truth lies within the bounds as long as nothing changes.
//! Leaves the exact answer to the rank itself.
//!
//! The alternative, publishing values, needs a message per rank and tick for nothing but the passing of time.

use std::time::Duration;

use super::prefill::nanos;
use crate::protocol::Timestamp;

/// What is left to prefill on a rank, from the last change on.
///
/// A rank's line begins with the prefills whose durations are modelled; they melt away one after the other,
/// and behind them everything stands still. The curve knows their sums and the range of their rates, not the
/// order of rates, hence bounds. When all have one rate, as they nearly do on one engine, the bounds meet.
///
/// Forty bytes, for the load board packs it into one cache line with a rank's other numbers.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use pointsman::load::{ActiveSequences, PrefillCurve, PrefillLoadHint, PromptBlocks};
/// use pointsman::protocol::{BookingId, Timestamp};
///
/// let (start, mut rank) = (Timestamp::default(), ActiveSequences::new(true));
/// for (id, tokens, seconds) in [(1, 1000, 10), (2, 500, 1)] {
///     let hint = PrefillLoadHint::new(tokens, 0, true, Some(Duration::from_secs(seconds)));
///     rank.book(BookingId(id), PromptBlocks::Counted(0), hint, start)?;
/// }
/// let curve = PrefillCurve::from_words(rank.prefill_curve().to_words());
/// assert_eq!(curve.bounds(start), (1500, 1500));
/// let (low, high) = curve.bounds(start + Duration::from_secs(10));
/// assert!(low <= 500 && 500 <= high);
/// assert_eq!(curve.bounds(start + Duration::from_secs(11)), (0, 0));
/// # Ok::<(), pointsman::load::BookError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillCurve {
    /// The last change. Earlier times are answered as this one.
    at: Timestamp,
    /// Nanoseconds by then since the turn of the first modelled prefill began. Where none is modelled: by how much the
    /// oldest prefill is overdue, or 0 where none is.
    elapsed: u64,
    /// Nanoseconds from the beginning of that turn until the last modelled prefill is done. Saturates.
    duration: u64,
    /// Tokens of the modelled prefills at the beginning of that turn. `u32::MAX` means at least as many.
    modelled: u32,
    /// Tokens that stand still. `u32::MAX` means at least as many.
    still: u32,
    /// Tokens per nanosecond of the slowest modelled prefill, rounded down. Equal to `fastest` only if all
    /// have the same rate, which is then exactly `modelled / duration`.
    slowest: f32,
    /// Tokens per nanosecond of the fastest modelled prefill, rounded up.
    fastest: f32,
}

impl PrefillCurve {
    /// Number of words of [`to_words`](Self::to_words).
    pub const WORDS: usize = 5;

    /// The curve of a line of `tokens` tokens that begins with prefills of the `modelled` tokens and
    /// durations in nanoseconds, the first of which has been computed for `elapsed` at time `at`.
    pub(super) fn new(
        at: Timestamp,
        elapsed: Duration,
        tokens: u64,
        modelled: impl Iterator<Item = (u32, u64)>,
    ) -> Self {
        let (mut modelled_tokens, mut duration, mut rates) = (0, 0_u64, None);
        for (tokens, nanos) in modelled {
            modelled_tokens += u64::from(tokens);
            duration = duration.saturating_add(nanos);
            let rate = Rate { tokens, nanos };
            let (slowest, fastest) = rates.unwrap_or((rate, rate));
            rates = Some((slowest.slower(rate), fastest.faster(rate)));
        }
        let Some((slowest, fastest)) = rates else {
            return Self { at, still: capped(tokens), ..Self::default() };
        };
        let (modelled, still) = (capped(modelled_tokens), capped(tokens - modelled_tokens));
        let (slowest, fastest) = if modelled == u32::MAX || duration == u64::MAX {
            (0.0, f32::INFINITY) // with sums that say too little, rates must claim nothing
        } else if slowest.equals(fastest) {
            (0.0, 0.0)
        } else {
            (slowest.per_nano().next_down().max(0.0), fastest.per_nano().next_up())
        };
        Self { at, elapsed: nanos(elapsed), duration, modelled, still, slowest, fastest }
    }

    /// The curve of a line of `tokens` tokens that stands still at time `at`, for its oldest prefill is overdue by so
    /// long.
    pub(super) fn overdue(at: Timestamp, overdue: Duration, tokens: u64) -> Self {
        Self { at, elapsed: nanos(overdue).max(1), still: capped(tokens), ..Self::default() }
    }

    /// The fewest and the most tokens that can be left at `now`, if nothing has changed since publication.
    /// The two are equal when all modelled prefills have the same rate, and when nothing is modelled.
    #[must_use]
    #[inline]
    pub fn bounds(&self, now: Timestamp) -> (u64, u64) {
        let spent = self.elapsed.saturating_add(nanos(now.since(self.at)));
        let (low, high) = self.modelled_bounds(spent);
        let still = u64::from(self.still);
        if self.modelled == u32::MAX || self.still == u32::MAX {
            return (still + low, u64::MAX);
        }
        (still + low, still + high)
    }

    /// How long whoever joins the line at `now` waits for its turn: for the modelled prefills this long, and for as
    /// many tokens that nobody has modelled. A line that is overdue is taken to be so for as long again.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pointsman::load::{ActiveSequences, PrefillLoadHint, PromptBlocks};
    /// use pointsman::protocol::{BookingId, Timestamp};
    ///
    /// let (start, mut rank) = (Timestamp::default(), ActiveSequences::new(true));
    /// let hint = PrefillLoadHint::new(1_000, 0, true, Some(Duration::from_secs(10)));
    /// rank.book(BookingId(1), PromptBlocks::Counted(0), hint, start)?;
    /// let now = start + Duration::from_secs(4);
    /// assert_eq!(rank.prefill_curve().wait(now), (Duration::from_secs(6), 0));
    /// # Ok::<(), pointsman::load::BookError>(())
    /// ```
    #[must_use]
    #[inline]
    pub fn wait(&self, now: Timestamp) -> (Duration, u64) {
        let spent = self.elapsed.saturating_add(nanos(now.since(self.at)));
        let modelled = if self.is_overdue() { spent } else { self.duration.saturating_sub(spent) };
        (Duration::from_nanos(modelled), u64::from(self.still))
    }

    /// Whether the line stands still because a prefill was not reported complete long after it should have been.
    #[must_use]
    #[inline]
    pub fn is_overdue(&self) -> bool {
        self.modelled == 0 && self.elapsed > 0
    }

    /// Whether any of it changes with time.
    #[must_use]
    #[inline]
    pub fn decays(&self) -> bool {
        self.modelled > 0 || self.elapsed > 0
    }

    /// The last change of the rank's line, from which on the curve holds.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// The curve as words, for publication through atomics.
    #[must_use]
    pub fn to_words(self) -> [u64; Self::WORDS] {
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let rates = pair(self.slowest.to_bits(), self.fastest.to_bits());
        [self.at.0, self.elapsed, self.duration, pair(self.modelled, self.still), rates]
    }

    /// The curve that [`to_words`](Self::to_words) was called on. Other words give a curve that means nothing,
    /// and do no harm.
    #[must_use]
    pub fn from_words([at, elapsed, duration, tokens, rates]: [u64; Self::WORDS]) -> Self {
        let (low, high) = (|pair: u64| pair as u32, |pair: u64| (pair >> 32) as u32);
        let (modelled, still) = (low(tokens), high(tokens));
        let (slowest, fastest) = (f32::from_bits(low(rates)), f32::from_bits(high(rates)));
        Self { at: Timestamp(at), elapsed, duration, modelled, still, slowest, fastest }
    }

    /// Bounds of the modelled tokens left `spent` nanoseconds into the curve.
    ///
    /// The curve starts at `modelled`, ends at zero after `duration`, and falls no slower than `slowest` and no
    /// faster than `fastest`: seen from either end, that makes two lower and two upper bounds.
    fn modelled_bounds(&self, spent: u64) -> (u64, u64) {
        let (modelled, left) = (u64::from(self.modelled), self.duration.saturating_sub(spent));
        if left == 0 {
            return (0, 0);
        }
        if self.slowest == self.fastest {
            let exact = (u128::from(modelled) * u128::from(left)).div_ceil(u128::from(self.duration)) as u64;
            return (exact, exact);
        }
        let low_from_start = modelled.saturating_sub(tokens_in(spent, self.fastest) as u64);
        let low_from_end = tokens_in(left, self.slowest).ceil() as u64;
        let high_from_start = modelled.saturating_sub(tokens_in(spent, self.slowest) as u64);
        let high_from_end = tokens_in(left, self.fastest).ceil() as u64;
        (low_from_start.max(low_from_end), high_from_start.min(high_from_end))
    }
}

/// Tokens at a rate in a time. Casts of the result to integers saturate. The outward rounding of rates, by a
/// 2^-25th at the least, outweighs the rounding to 53 bits here.
fn tokens_in(nanos: u64, rate: f32) -> f64 {
    if nanos == 0 { 0.0 } else { nanos as f64 * f64::from(rate) }
}

fn capped(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// An exact rate. No time at all is infinitely fast.
#[derive(Clone, Copy)]
struct Rate {
    tokens: u32,
    nanos: u64,
}

impl Rate {
    /// `self` and `other` by a common denominator.
    fn crossed(self, other: Self) -> (u128, u128) {
        (u128::from(self.tokens) * u128::from(other.nanos), u128::from(other.tokens) * u128::from(self.nanos))
    }

    fn equals(self, other: Self) -> bool {
        let (this, that) = self.crossed(other);
        this == that
    }

    fn slower(self, other: Self) -> Self {
        let (this, that) = self.crossed(other);
        if that < this { other } else { self }
    }

    fn faster(self, other: Self) -> Self {
        let (this, that) = self.crossed(other);
        if that > this { other } else { self }
    }

    fn per_nano(self) -> f32 {
        (f64::from(self.tokens) / self.nanos as f64) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(still: u64, modelled: &[(u32, u64)]) -> PrefillCurve {
        let tokens = still + modelled.iter().map(|&(tokens, _)| u64::from(tokens)).sum::<u64>();
        PrefillCurve::new(Timestamp(100), Duration::ZERO, tokens, modelled.iter().copied())
    }

    #[test]
    fn one_rate_is_exact_and_needs_no_range() {
        let curve = curve(7, &[(1000, 3000), (1, 3), (500, 1500)]);
        for (now, left) in [(0, 1508), (100, 1508), (101, 1508), (103, 1507), (4602, 8), (4603, 7), (9999, 7)] {
            assert_eq!(curve.bounds(Timestamp(now)), (left, left), "at {now}");
        }
    }

    #[test]
    fn different_rates_meet_at_both_ends() {
        let curve = curve(0, &[(1000, 1000), (10, 1000)]);
        assert_eq!(curve.bounds(Timestamp(100)), (1010, 1010));
        assert_eq!(curve.bounds(Timestamp(2100)), (0, 0));
        // The order of rates is not known, and rates are rounded outward, which costs a token.
        assert_eq!(curve.bounds(Timestamp(1100)), (10, 1001));
    }

    /// Such rates are no binary fractions, and a rounding of one billionth in the wrong direction breaks a bound.
    #[test]
    fn rates_are_rounded_outward() {
        for more in (0..20).map(|n| n * 7_000_001) {
            let (fast, slow) = ((1_000_000_000 + more, 3_000_000_000), (100_000_000 + more, 3_000_000_000));
            for (first, then) in [(fast, slow), (slow, fast)] {
                let (low, high) = curve(0, &[first, then]).bounds(Timestamp(100 + first.1));
                assert!((low..=high).contains(&u64::from(then.0)), "{} is not within {low} and {high}", then.0);
            }
        }
    }

    #[test]
    fn the_end_of_a_zero_duration_is_infinitely_steep() {
        let curve = curve(0, &[(10, 1000), (500, 0)]);
        assert_eq!(curve.bounds(Timestamp(100)).1, 510);
        let (low, high) = curve.bounds(Timestamp(1099));
        assert!(low <= 501 && 501 <= high, "{low} {high}");
        assert_eq!(curve.bounds(Timestamp(1100)), (0, 0));
    }

    #[test]
    fn numbers_that_do_not_fit_widen_the_bounds() {
        let full = (u32::MAX, u64::from(u32::MAX));
        assert_eq!(curve(1 << 40, &[]).bounds(Timestamp(0)), (u64::from(u32::MAX), u64::MAX));
        let (low, high) = curve(0, &[full, full]).bounds(Timestamp(100));
        assert!(low <= 2 * u64::from(u32::MAX) && high == u64::MAX);
        let (low, high) = curve(3, &[(1000, u64::MAX), (1, 1)]).bounds(Timestamp(100));
        assert!(low <= 1004 && 1004 <= high);
    }

    #[test]
    fn words_round_trip_and_garbage_does_no_harm() {
        let curve = curve(3, &[(1000, 1000), (10, 1000)]);
        assert_eq!(PrefillCurve::from_words(curve.to_words()), curve);
        assert_eq!(size_of::<PrefillCurve>(), PrefillCurve::WORDS * size_of::<u64>());
        for word in [0, 1, u64::MAX, 0x7fc0_0000_7fc0_0000] {
            let _ = PrefillCurve::from_words([word; PrefillCurve::WORDS]).bounds(Timestamp(word));
        }
    }
}
