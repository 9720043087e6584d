//! Prefill curve: the decrease of a rank's prefill tokens over time, in five words.
//!
//! A rank publishes the curve once per change, and readers compute bounds of its prefill tokens at any later time
//! without a query. The exact value is within the bounds as long as nothing changes. Only the rank itself knows the
//! exact value.
//!
//! The alternative of publishing values requires a message per rank and tick only because time passes.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::protocol::Timestamp;

/// Remaining prefill tokens of a rank, starting at the last change.
///
/// The rank's prefill queue starts with prefills of modelled duration, which are processed one after the other; tokens
/// behind them do not decrease. The curve contains the sums and the range of their rates, but not the order of the
/// rates, hence bounds. With one common rate, the usual case on one engine, the bounds are equal.
///
/// 40 bytes, because the load board stores it in one cache line with a rank's other numbers.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use pointsman::internals::load::{ActiveSequences, PrefillCurve, PrefillLoadHint, PromptBlocks};
/// use pointsman::internals::protocol::BookingId;
/// use pointsman::protocol::Timestamp;
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
/// # Ok::<(), pointsman::internals::load::BookError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillCurve {
    /// Time of the last change. Earlier times are treated as equal to it.
    at: Timestamp,
    /// Nanoseconds from the start of the first modelled prefill to `at`. Without modelled prefills: the time by which
    /// the oldest prefill is overdue, or 0.
    elapsed: u64,
    /// Nanoseconds from that start until the last modelled prefill is complete. Saturates.
    duration: u64,
    /// Tokens of the modelled prefills at that start. `u32::MAX` means at least that many.
    modelled: u32,
    /// Tokens that do not decrease. `u32::MAX` means at least that many.
    still: u32,
    /// Tokens per nanosecond of the slowest modelled prefill, rounded down. Equal to `fastest` only if all rates are
    /// equal; the rate is then exactly `modelled / duration`.
    slowest: f32,
    /// Tokens per nanosecond of the fastest modelled prefill, rounded up.
    fastest: f32,
}

impl PrefillCurve {
    /// Number of words of [`to_words`](Self::to_words).
    pub const WORDS: usize = 5;

    /// The curve of a queue of `tokens` tokens that starts with `prefills` of modelled duration. The first of them has run
    /// for `elapsed` at time `at`. O(1).
    pub(super) fn new(at: Timestamp, elapsed: Duration, tokens: u64, prefills: &ModelledPrefills) -> Self {
        let rates = &prefills.rates;
        let Some(((&slowest, _), (&fastest, _))) = rates.first_key_value().zip(rates.last_key_value()) else {
            return Self { at, still: capped(tokens), ..Self::default() };
        };
        let duration = u64::try_from(prefills.nanos).unwrap_or(u64::MAX);
        let (modelled, still) = (capped(prefills.tokens), capped(tokens - prefills.tokens));
        let (slowest, fastest) = if modelled == u32::MAX || duration == u64::MAX {
            (0.0, f32::INFINITY) // saturated sums allow no statement about rates
        } else if slowest == fastest {
            (0.0, 0.0)
        } else {
            (slowest.per_nano().next_down().max(0.0), fastest.per_nano().next_up())
        };
        Self { at, elapsed: nanos(elapsed), duration, modelled, still, slowest, fastest }
    }

    /// The curve of a queue of `tokens` tokens that does not decrease at time `at`, because its oldest prefill is
    /// overdue.
    pub(super) fn overdue(at: Timestamp, overdue: Duration, tokens: u64) -> Self {
        Self { at, elapsed: nanos(overdue).max(1), still: capped(tokens), ..Self::default() }
    }

    /// Minimum and maximum of the remaining tokens at `now`, if nothing has changed since the publication. Equal if all
    /// modelled prefills have the same rate, or if none is modelled.
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

    /// Waiting time of a request that joins the queue at `now`: the time of the modelled prefills, and the number of
    /// tokens without a modelled duration. An overdue queue is assumed to remain overdue for the same time again.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pointsman::internals::load::{ActiveSequences, PrefillLoadHint, PromptBlocks};
    /// use pointsman::internals::protocol::BookingId;
    /// use pointsman::protocol::Timestamp;
    ///
    /// let (start, mut rank) = (Timestamp::default(), ActiveSequences::new(true));
    /// let hint = PrefillLoadHint::new(1_000, 0, true, Some(Duration::from_secs(10)));
    /// rank.book(BookingId(1), PromptBlocks::Counted(0), hint, start)?;
    /// let now = start + Duration::from_secs(4);
    /// assert_eq!(rank.prefill_curve().wait(now), (Duration::from_secs(6), 0));
    /// # Ok::<(), pointsman::internals::load::BookError>(())
    /// ```
    #[must_use]
    #[inline]
    pub fn wait(&self, now: Timestamp) -> (Duration, u64) {
        let spent = self.elapsed.saturating_add(nanos(now.since(self.at)));
        let modelled = if self.is_overdue() { spent } else { self.duration.saturating_sub(spent) };
        (Duration::from_nanos(modelled), u64::from(self.still))
    }

    /// Whether the queue does not decrease because a prefill is overdue.
    #[must_use]
    #[inline]
    pub fn is_overdue(&self) -> bool {
        self.modelled == 0 && self.elapsed > 0
    }

    /// Whether the values change over time.
    #[must_use]
    #[inline]
    pub fn decays(&self) -> bool {
        self.modelled > 0 || self.elapsed > 0
    }

    /// Time of the last change, the start of the curve.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// The curve as words, for publication in atomics.
    #[must_use]
    pub fn to_words(self) -> [u64; Self::WORDS] {
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let rates = pair(self.slowest.to_bits(), self.fastest.to_bits());
        [self.at.0, self.elapsed, self.duration, pair(self.modelled, self.still), rates]
    }

    /// The inverse of [`to_words`](Self::to_words). Other words give a meaningless but harmless curve.
    #[must_use]
    pub fn from_words([at, elapsed, duration, tokens, rates]: [u64; Self::WORDS]) -> Self {
        let (low, high) = (|pair: u64| pair as u32, |pair: u64| (pair >> 32) as u32);
        let (modelled, still) = (low(tokens), high(tokens));
        let (slowest, fastest) = (f32::from_bits(low(rates)), f32::from_bits(high(rates)));
        Self { at: Timestamp(at), elapsed, duration, modelled, still, slowest, fastest }
    }

    /// Bounds of the modelled tokens after `spent` nanoseconds of the curve.
    ///
    /// The curve starts at `modelled`, reaches zero after `duration`, and decreases at a rate between `slowest` and
    /// `fastest`. Computed from both ends, this gives two lower and two upper bounds.
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

/// Nanoseconds, saturating at the maximum [`Timestamp`].
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Tokens at a rate in a given time. Casts of the result to integers saturate. The outward rounding of rates, by at
/// least 2^-25 relative, exceeds the rounding to 53 bits here.
fn tokens_in(nanos: u64, rate: f32) -> f64 {
    if nanos == 0 { 0.0 } else { nanos as f64 * f64::from(rate) }
}

fn capped(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Sums and rates of prefills of modelled duration. Each change costs O(log prefills).
#[derive(Clone, Debug, Default)]
pub(super) struct ModelledPrefills {
    tokens: u64,
    nanos: u128,
    /// Number of prefills of each rate.
    rates: BTreeMap<Rate, u32>,
}

impl ModelledPrefills {
    /// Adds a prefill of `tokens` tokens in `nanos` nanoseconds.
    pub(super) fn add(&mut self, tokens: u32, nanos: u64) {
        self.tokens += u64::from(tokens);
        self.nanos += u128::from(nanos);
        *self.rates.entry(Rate { tokens, nanos }).or_default() += 1;
    }

    /// Removes a prefill that was added.
    pub(super) fn remove(&mut self, tokens: u32, nanos: u64) {
        self.tokens -= u64::from(tokens);
        self.nanos -= u128::from(nanos);
        let rate = Rate { tokens, nanos };
        if let Some(prefills) = self.rates.get_mut(&rate) {
            *prefills -= 1;
            if *prefills == 0 {
                self.rates.remove(&rate);
            }
        }
    }
}

/// An exact rate, ordered by speed. A duration of zero is infinitely fast.
#[derive(Clone, Copy, Debug)]
struct Rate {
    tokens: u32,
    nanos: u64,
}

impl Rate {
    fn per_nano(self) -> f32 {
        (f64::from(self.tokens) / self.nanos as f64) as f32
    }
}

impl Ord for Rate {
    fn cmp(&self, other: &Self) -> Ordering {
        if self.nanos == 0 || other.nanos == 0 {
            return other.nanos.min(1).cmp(&self.nanos.min(1));
        }
        let (this, that) = (u128::from(self.tokens), u128::from(other.tokens));
        (this * u128::from(other.nanos)).cmp(&(that * u128::from(self.nanos)))
    }
}

impl PartialOrd for Rate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Rate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Rate {}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(still: u64, modelled: &[(u32, u64)]) -> PrefillCurve {
        let tokens = still + modelled.iter().map(|&(tokens, _)| u64::from(tokens)).sum::<u64>();
        let mut prefills = ModelledPrefills::default();
        modelled.iter().for_each(|&(tokens, nanos)| prefills.add(tokens, nanos));
        PrefillCurve::new(Timestamp(100), Duration::ZERO, tokens, &prefills)
    }

    #[test]
    fn saturated_numbers_widen_the_bounds() {
        let full = (u32::MAX, u64::from(u32::MAX));
        assert_eq!(curve(1 << 40, &[]).bounds(Timestamp(0)), (u64::from(u32::MAX), u64::MAX));
        let (low, high) = curve(0, &[full, full]).bounds(Timestamp(100));
        assert!(low <= 2 * u64::from(u32::MAX) && high == u64::MAX);
        let (low, high) = curve(3, &[(1000, u64::MAX), (1, 1)]).bounds(Timestamp(100));
        assert!(low <= 1004 && 1004 <= high);
    }

    #[test]
    fn words_round_trip_and_invalid_words_are_tolerated() {
        let curve = curve(3, &[(1000, 1000), (10, 1000)]);
        assert_eq!(PrefillCurve::from_words(curve.to_words()), curve);
        assert_eq!(size_of::<PrefillCurve>(), PrefillCurve::WORDS * size_of::<u64>());
        for word in [0, 1, u64::MAX, 0x7fc0_0000_7fc0_0000] {
            let _ = PrefillCurve::from_words([word; PrefillCurve::WORDS]).bounds(Timestamp(word));
        }
    }
}
