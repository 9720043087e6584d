//! Stall meter: the time by which a rank must send a first token.
//!
//! A hung engine accepts requests, keeps its connections and may answer probes, but computes nothing. The only sign is
//! the lack of progress: no first token and no output block of any request, although first tokens are owed. The meter
//! publishes the end of the time that two earlier figures of the rank allow:
//!
//! - its backlog, at the time that it has taken per token of finished prefills,
//! - the longest silence beyond the backlog in the last minutes,
//!
//! both doubled, and a constant. A single request proves nothing, because the cause may be the request itself (an image
//! to load, a grammar to compile), so at least two must wait. A rank that has reported few first tokens is not judged.
//! Both learned values come from the rank itself, without priors and bounds, so that engines of any speed are judged by
//! their own one. Samples of a judged rank are at most the time allowed, so a hang does not make it tolerant.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ahash::AHashMap;

use super::PrefillLoadHint;
use crate::protocol::{BookingId, Timestamp};

/// Owed first tokens below which a rank is not judged.
const OWED_MIN: usize = 2;

/// Reported first tokens from which a rank is judged.
const REPORTS_MIN: u32 = 8;

/// Share of the earlier samples that a finished prefill leaves: half after 44 of them.
const KEPT: f64 = 1.0 - 1.0 / 64.0;

/// Time in which a past silence is forgotten, in seconds.
const FORGET_SECONDS: f64 = 120.0;

/// Figures of a stall meter for other threads.
#[derive(Debug, Default)]
pub struct StallCell {
    /// Time by which progress is due, in nanoseconds; 0 if none is.
    due: AtomicU64,
    /// Time of the last progress.
    progress_at: AtomicU64,
}

impl StallCell {
    /// Whether progress was due before `now` and has not come.
    #[must_use]
    pub fn is_overdue(&self, now: Timestamp) -> bool {
        (1..now.0).contains(&self.due.load(Ordering::Relaxed))
    }

    /// Whether the rank has made progress after `then`.
    #[must_use]
    pub fn has_progressed_since(&self, then: Timestamp) -> bool {
        self.progress_at.load(Ordering::Relaxed) > then.0
    }
}

/// Observes the bookings of one rank. Each call costs one lookup in a map of the unfinished prefills.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use pointsman::internals::load::{PrefillLoadHint, StallCell, StallMeter};
/// use pointsman::internals::protocol::BookingId;
/// use pointsman::protocol::Timestamp;
///
/// let cell = Arc::<StallCell>::default();
/// let mut meter = StallMeter::new(Arc::clone(&cell), Duration::from_secs(3));
/// let at = |seconds: u64| Timestamp(seconds * 1_000_000_000);
/// let hint = PrefillLoadHint::new(1_000, 0, true, None);
/// for n in 1..=20 {
///     meter.booked(BookingId(n), hint, 0, at(n));
///     meter.progressed(BookingId(n), 0, at(n + 1)); // a second for 1,000 tokens
/// }
/// meter.booked(BookingId(21), hint, 0, at(21));
/// meter.booked(BookingId(22), hint, 0, at(21));
/// assert!(!cell.is_overdue(at(21 + 3 + 2 * 2)), "3 s, and twice the backlog");
/// assert!(cell.is_overdue(at(21 + 3 + 2 * 2 + 2)), "and twice the longest silence, a second");
/// meter.progressed(BookingId(21), 0, at(40));
/// assert!(!cell.is_overdue(at(40)));
/// ```
#[derive(Debug)]
pub struct StallMeter {
    cell: Arc<StallCell>,
    slack: f64,
    prefills: AHashMap<BookingId, Unfinished>,
    /// Sum of the work, and number of the reported ones.
    work: u64,
    owed: usize,
    /// Last progress, or the time since which a first token is owed.
    since: Timestamp,
    /// Expected seconds of the backlog at that time, and the seconds allowed.
    expected: f64,
    allowed: f64,
    due: Option<Timestamp>,
    reports: u32,
    /// Time in which first tokens were owed, and the work finished in it, both decaying.
    seconds: f64,
    tokens: f64,
    /// Longest silence beyond the backlog in seconds, decaying.
    silence: f64,
}

#[derive(Clone, Copy, Debug)]
struct Unfinished {
    /// In work tokens.
    work: u32,
    booked: Timestamp,
    /// Whether its end will be reported: the first token is owed.
    is_reported: bool,
}

impl StallMeter {
    /// Starts without knowledge. `slack` is the constant part of the allowed time.
    #[must_use]
    pub fn new(cell: Arc<StallCell>, slack: Duration) -> Self {
        let meter = Self {
            cell,
            slack: slack.as_secs_f64(),
            prefills: AHashMap::new(),
            work: 0,
            owed: 0,
            since: Timestamp::default(),
            expected: 0.0,
            allowed: 0.0,
            due: None,
            reports: 0,
            seconds: 0.0,
            tokens: 0.0,
            silence: 0.0,
        };
        meter.publish();
        meter
    }

    /// Records a booked request. `peer_tokens` are prompt tokens that other replicas have sent to the rank.
    pub fn booked(&mut self, booking: BookingId, hint: Option<PrefillLoadHint>, peer_tokens: u64, now: Timestamp) {
        let Some(hint) = hint else { return };
        let (work, is_reported) = (hint.work_tokens(), hint.is_reported());
        self.prefills.insert(booking, Unfinished { work, booked: now, is_reported });
        self.work += u64::from(work);
        self.owed += usize::from(is_reported);
        if is_reported && self.owed == 1 {
            self.restart(peer_tokens, now);
        } else if self.due.is_none() && self.owed >= OWED_MIN {
            self.expect(peer_tokens, now);
        }
    }

    /// Records the first token of a request, or further output.
    pub fn progressed(&mut self, booking: BookingId, peer_tokens: u64, now: Timestamp) {
        let is_owed = self.owed > 0;
        let finished = self.remove(booking);
        if is_owed {
            self.learn(finished, now);
        }
        self.reports += u32::from(finished.is_some_and(|prefill| prefill.is_reported) && self.reports < REPORTS_MIN);
        self.cell.progress_at.store(now.0, Ordering::Relaxed);
        self.restart(peer_tokens, now);
    }

    /// Records the end of a booking, which is no progress without a first token. If fewer than two others wait, nothing
    /// proves a stall any longer.
    pub fn ended(&mut self, booking: BookingId) {
        if self.remove(booking).is_some() && self.owed < OWED_MIN && self.due.take().is_some() {
            self.publish();
        }
    }

    fn remove(&mut self, booking: BookingId) -> Option<Unfinished> {
        let prefill = self.prefills.remove(&booking)?;
        self.work -= u64::from(prefill.work);
        self.owed -= usize::from(prefill.is_reported);
        Some(prefill)
    }

    /// Learns from the time since the last progress, at most since the booking of the `finished` prefill.
    fn learn(&mut self, finished: Option<Unfinished>, now: Timestamp) {
        let passed = now.since(finished.map_or(self.since, |prefill| self.since.max(prefill.booked))).as_secs_f64();
        let silence = if self.reports < REPORTS_MIN { passed } else { passed.min(self.allowed) };
        if let Some(Unfinished { work, .. }) = finished {
            (self.seconds, self.tokens) = (self.seconds * KEPT, self.tokens * KEPT + f64::from(work));
        }
        self.seconds += silence;
        let kept = self.silence * (1.0 - now.since(self.since).as_secs_f64() / FORGET_SECONDS).max(0.0);
        self.silence = kept.max(silence - self.expected);
    }

    /// Begins to wait for the next progress.
    fn restart(&mut self, peer_tokens: u64, now: Timestamp) {
        self.since = now;
        self.due = None;
        self.expect(peer_tokens, now);
    }

    fn expect(&mut self, peer_tokens: u64, now: Timestamp) {
        let backlog = (self.work + peer_tokens) as f64;
        self.expected = if self.tokens > 0.0 { backlog * self.seconds / self.tokens } else { 0.0 };
        self.allowed = self.slack + 2.0 * (self.expected + self.silence);
        if self.owed >= OWED_MIN && self.reports >= REPORTS_MIN {
            self.due = Some(now + Duration::try_from_secs_f64(self.allowed).unwrap_or(Duration::MAX));
        }
        self.publish();
    }

    fn publish(&self) {
        self.cell.due.store(self.due.map_or(0, |due| due.0), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLACK: Duration = Duration::from_secs(3);

    fn at(seconds: f64) -> Timestamp {
        Timestamp((seconds * 1e9) as u64)
    }

    fn hint(tokens: u32) -> Option<PrefillLoadHint> {
        PrefillLoadHint::new(tokens, 0, true, None)
    }

    /// A meter after twenty prompts of 1,000 tokens, each of which took `seconds`, and its present time.
    fn learned(seconds: f64) -> (StallMeter, Arc<StallCell>, f64) {
        let cell = Arc::<StallCell>::default();
        let mut meter = StallMeter::new(Arc::clone(&cell), SLACK);
        for n in 0..20 {
            let booked = f64::from(n) * seconds;
            meter.booked(BookingId(u64::from(n as u32)), hint(1_000), 0, at(booked));
            meter.progressed(BookingId(u64::from(n as u32)), 0, at(booked + seconds));
        }
        (meter, cell, 20.0 * seconds)
    }

    #[test]
    fn new_rank_is_not_judged() {
        let cell = Arc::<StallCell>::default();
        let mut meter = StallMeter::new(Arc::clone(&cell), SLACK);
        (0..50).for_each(|n| meter.booked(BookingId(n), hint(1_000), 0, at(0.0)));
        (0..7).for_each(|n| meter.progressed(BookingId(n), 0, at(100.0)));
        assert!(!cell.is_overdue(at(1e6)), "seven first tokens");
    }

    #[test]
    fn one_request_proves_nothing() {
        let (mut meter, cell, now) = learned(0.1);
        meter.booked(BookingId(50), hint(1_000), 0, at(now));
        assert!(!cell.is_overdue(at(now + 1e6)));
        meter.booked(BookingId(51), hint(1_000), 0, at(now + 60.0));
        assert!(!cell.is_overdue(at(now + 63.0)) && cell.is_overdue(at(now + 64.0)), "from the second one on");
        meter.ended(BookingId(50));
        assert!(!cell.is_overdue(at(now + 1e6)), "one is left");
    }

    #[test]
    fn later_requests_do_not_move_the_time() {
        let (mut meter, cell, now) = learned(0.1);
        for n in 0..200 {
            meter.booked(BookingId(100 + n), hint(1_000), 0, at(now + n as f64 * 0.02));
        }
        assert!(cell.is_overdue(at(now + 4.0)), "of the first two");
    }

    #[test]
    fn hang_does_not_make_the_rank_tolerant() {
        let (mut meter, cell, now) = learned(0.1);
        for n in [50, 51] {
            meter.booked(BookingId(n), hint(1_000), 0, at(now));
        }
        let later = now + 1_000.0; // it hung for 1,000 s
        meter.progressed(BookingId(50), 0, at(later));
        assert!(!cell.is_overdue(at(later)) && cell.has_progressed_since(at(now)));
        meter.booked(BookingId(52), hint(1_000), 0, at(later));
        assert!(cell.is_overdue(at(later + 20.0)));
    }

    #[test]
    fn other_replicas_explain_a_wait() {
        let (mut meter, cell, now) = learned(0.1);
        for n in [50, 51] {
            meter.booked(BookingId(n), hint(1_000), 200_000, at(now)); // 20 s
        }
        assert!(!cell.is_overdue(at(now + 40.0)) && cell.is_overdue(at(now + 45.0)));
    }

    proptest! {
        /// An engine that computes its prompts one after the other, at any constant speed and with any fixed cost, is
        /// never overdue, however it is loaded.
        #[test]
        fn healthy_engine_is_never_overdue(
            tokens_per_second in prop_oneof![Just(10.0), 10.0..100_000.0],
            fixed in 0.0..2.0f64,
            prompts in prop::collection::vec((0.0..2.0f64, 1..60_000u32, any::<bool>()), 1..200),
        ) {
            let cell = Arc::<StallCell>::default();
            let mut meter = StallMeter::new(Arc::clone(&cell), SLACK);
            let seconds = |hint: PrefillLoadHint| fixed + f64::from(hint.work_tokens()) / tokens_per_second;
            let mean = prompts.iter().filter_map(|(_, tokens, _)| hint(*tokens)).map(seconds).sum::<f64>() / prompts.len() as f64;
            let (mut booked_at, mut free_at, mut events) = (0.0, 0.0f64, Vec::new());
            for (n, (gap, tokens, cancelled)) in prompts.into_iter().enumerate() {
                let id = BookingId(n as u64);
                booked_at += gap * mean;
                free_at = free_at.max(booked_at) + hint(tokens).map_or(0.0, seconds);
                events.push((booked_at, id, Some(tokens), false));
                events.push((free_at, id, None, cancelled && n % 5 == 0));
            }
            events.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (time, id, booked, cancelled) in events {
                prop_assert!(!cell.is_overdue(at(time)), "at {time} s");
                match booked {
                    Some(tokens) => meter.booked(id, hint(tokens), 0, at(time)),
                    None if cancelled => meter.ended(id),
                    None => meter.progressed(id, 0, at(time)),
                }
            }
            prop_assert_eq!((meter.owed, meter.work), (0, 0));
        }
    }
}
