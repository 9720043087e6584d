//! What a rank's completed prefills teach about its rate.
//!
//! Owns which prefills are under way on one rank, since when, and the rate learned. Promises that each counts once,
//! when it is first reported complete, and that the rate is published as soon as it changes. Leaves the arithmetic to
//! [`LearnedRate`]. A prefill that it did not see booked teaches nothing.

use std::sync::Arc;

use ahash::AHashMap;

use super::{EngineSpeed, LearnedRate, PrefillLoadHint, SpeedCell};
use crate::protocol::{BookingId, Timestamp};

/// Watches the prefills of one rank.
///
/// ```
/// use std::sync::Arc;
/// use pointsman::load::{PrefillLoadHint, PrefillMeter, SpeedCell};
/// use pointsman::protocol::{BookingId, Timestamp};
///
/// let cell = Arc::new(SpeedCell::default());
/// let mut meter = PrefillMeter::new(Arc::clone(&cell));
/// meter.booked(BookingId(1), PrefillLoadHint::new(8_000, 0, true, None), Timestamp(0));
/// assert_eq!(cell.speed(), None);
/// meter.completed(BookingId(1), Timestamp(1_000_000_000)); // 8,000 tokens in a second
/// assert!(cell.speed().is_some_and(|speed| (9_000.0..10_000.0).contains(&speed.work_tokens_per_second)));
/// ```
#[derive(Debug)]
pub struct PrefillMeter {
    rate: LearnedRate,
    cell: Arc<SpeedCell>,
    under_way: AHashMap<BookingId, UnderWay>,
}

#[derive(Clone, Copy, Debug)]
struct UnderWay {
    /// Work, in tokens without context.
    tokens: u32,
    booked: Timestamp,
}

impl PrefillMeter {
    /// Begins with what is published already, which is worth as much as any prior: the meter may be a successor's.
    #[must_use]
    pub fn new(cell: Arc<SpeedCell>) -> Self {
        let known = cell.speed();
        let rate =
            known.map_or_else(LearnedRate::default, |speed| LearnedRate::from_prior(speed.work_tokens_per_second));
        Self { rate, cell, under_way: AHashMap::new() }
    }

    /// A request was booked, with this prefill to do.
    pub fn booked(&mut self, booking: BookingId, hint: Option<PrefillLoadHint>, now: Timestamp) {
        if let Some(hint) = hint {
            self.under_way.insert(booking, UnderWay { tokens: hint.work_tokens(), booked: now });
        }
    }

    /// A prefill was reported complete. Again, or of a request that is not known, is harmless.
    pub fn completed(&mut self, booking: BookingId, now: Timestamp) {
        if let Some(UnderWay { tokens, booked }) = self.under_way.remove(&booking)
            && self.rate.observe(tokens, booked, now)
        {
            self.publish();
        }
    }

    /// A booking has ended. If its prefill was not reported complete, nobody knows how far it came.
    pub fn ended(&mut self, booking: BookingId) {
        self.under_way.remove(&booking);
    }

    fn publish(&self) {
        self.cell.publish(&EngineSpeed { work_tokens_per_second: self.rate.tokens_per_second(), ..EngineSpeed::PRIOR });
    }

    /// What is learned so far.
    #[must_use]
    pub fn rate(&self) -> &LearnedRate {
        &self.rate
    }

    /// Prefills under way.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// For tests.
    ///
    /// # Panics
    /// If the rate is out of bounds, or what is published is another.
    pub fn check_invariants(&self) {
        self.rate.check_invariants();
        if self.rate.samples() > 0 {
            let published = self.cell.speed().expect("a learned rate is published").work_tokens_per_second;
            assert!((published / self.rate.tokens_per_second() - 1.0).abs() < 1e-6, "{published} is published");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::load::ATTENTION_TOKENS;

    const SECOND: u64 = 1_000_000_000;

    fn meter() -> PrefillMeter {
        PrefillMeter::new(Arc::default())
    }

    #[test]
    fn each_prefill_counts_once_and_from_the_completion_before_it() {
        let mut meter = meter();
        for n in 0..40 {
            meter.booked(BookingId(n), PrefillLoadHint::new(5_000, 0, true, None), Timestamp(0));
        }
        for n in 0..40 {
            for _ in 0..3 {
                meter.completed(BookingId(n), Timestamp((n + 1) * SECOND));
                meter.check_invariants();
            }
        }
        assert_eq!((meter.rate().samples(), meter.under_way()), (40, 0));
        let rate = meter.rate().tokens_per_second();
        let work = 5_000.0 * (1.0 + 2_500.0 / ATTENTION_TOKENS);
        assert!((rate / work - 1.0).abs() < 0.05, "{rate}: a second each, though all were booked at once");
    }

    #[test]
    fn what_ended_before_it_completed_teaches_nothing() {
        let mut meter = meter();
        meter.booked(BookingId(1), PrefillLoadHint::new(5_000, 0, true, None), Timestamp(0));
        meter.booked(BookingId(2), None, Timestamp(0));
        meter.ended(BookingId(1));
        meter.completed(BookingId(1), Timestamp(SECOND));
        meter.completed(BookingId(2), Timestamp(SECOND));
        assert_eq!((meter.rate().samples(), meter.under_way()), (0, 0));
    }

    #[test]
    fn a_successor_goes_on_from_what_was_published() {
        let cell = Arc::new(SpeedCell::default());
        cell.publish(&EngineSpeed { work_tokens_per_second: 50_000.0, ..EngineSpeed::PRIOR });
        let rate = PrefillMeter::new(cell).rate().tokens_per_second();
        assert!((rate - 50_000.0).abs() < 1.0, "{rate}");
    }

    proptest! {
        #[test]
        fn whatever_is_reported_in_whatever_order(
            reports in prop::collection::vec((0..3u8, 0..6u64, 0..20_000u32, 0..10 * SECOND), 1..120),
        ) {
            let mut meter = meter();
            let mut model: Vec<u64> = Vec::new(); // bookings under way
            for (report, id, tokens, now) in reports {
                let (booking, now) = (BookingId(id), Timestamp(now));
                let was_under_way = model.contains(&id);
                let samples = meter.rate().samples();
                match report {
                    0 => {
                        let hint = PrefillLoadHint::new(tokens, 0, true, None);
                        meter.booked(booking, hint, now);
                        if hint.is_some() && !was_under_way {
                            model.push(id);
                        }
                    }
                    1 => meter.completed(booking, now),
                    _ => meter.ended(booking),
                }
                if report > 0 {
                    model.retain(|known| *known != id);
                }
                let learned = meter.rate().samples() - samples;
                prop_assert!(learned <= u32::from(report == 1 && was_under_way));
                prop_assert_eq!(meter.under_way(), model.len());
                meter.check_invariants();
            }
        }
    }
}
