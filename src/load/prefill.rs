//! The prefills that a rank has not finished, and how they melt away while it works on them.
//!
//! Owns the arrival order of prefills and the time credited to them. A rank is taken to compute one prompt
//! after the other: the first in line makes progress at its own rate, its tokens over its expected duration,
//! and when that is over the next one's turn begins. A prefill without an expected duration stands still until
//! it is reported complete, and everything behind it waits.
//!
//! A modelled prefill whose time is over leaves the line before anybody has reported it. If the report stays out for
//! several times the expected duration, on a rank that usually reports, the prefill is *overdue*: until it is reported or
//! freed nothing melts, what comes later included, and the wait lasts at least as long as it is overdue by now. So an
//! engine that accepts requests and computes nothing does not look idle. What had melted stays so: a load that rose by
//! itself would break the bounds that were published.
//!
//! Promises exact integers: what is left of a prefill is rounded up to whole tokens, at every moment anew, so
//! that no rounding accumulates. Time that seems to run backwards stands still.
//!
//! Leaves to others how long a prefill is expected to take. [`PrefillCurve`] is what others need to know the
//! rest of the way down, within bounds, without being told again.

use std::collections::VecDeque;
use std::time::Duration;

use super::{PrefillCurve, PrefillLoadHint};
use crate::protocol::Timestamp;

/// Un-finished prefills in arrival order.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefillQueue {
    line: VecDeque<Prefill>,
    /// Tokens of all in line, progress not deducted.
    tokens: u64,
    /// When the turn of the first in line began.
    turn: Timestamp,
    /// The last change. Whatever is asked about earlier times is answered for this one.
    latest: Timestamp,
    next_ticket: u64,
    /// Prefills that should be done and have not been reported, in arrival order.
    awaited: VecDeque<Awaited>,
    /// How many of these, from the first on, are overdue.
    overdue: usize,
    /// When the oldest of these should have been done; the last report, if that was later.
    overdue_since: Timestamp,
    /// Reports, less what was not reported, between 0 and [`REPORTS_MAX`].
    reports: u8,
}

/// A place in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

#[derive(Clone, Copy, Debug)]
struct Prefill {
    ticket: Ticket,
    tokens: u32,
    /// In nanoseconds. None as well where it stands still behind an overdue one.
    duration: Option<u64>,
    booked: Timestamp,
    is_reported: bool,
}

/// A prefill that should be done.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    prefill: Prefill,
    /// When its turn was over.
    ended: Timestamp,
}

impl Awaited {
    /// When it becomes overdue.
    fn due(&self) -> Timestamp {
        let expected = self.ended.since(self.prefill.booked);
        self.ended + expected.saturating_mul(OVERDUE_FACTOR).saturating_add(OVERDUE_SLACK)
    }
}

/// A prefill is overdue this many times its expected time after its expected end, plus [`OVERDUE_SLACK`].
pub(super) const OVERDUE_FACTOR: u32 = 2;

/// See [`OVERDUE_FACTOR`]: covers short prefills, which wait for a step, and late reports.
pub(super) const OVERDUE_SLACK: Duration = Duration::from_secs(1);

/// Most reports that are remembered.
pub(super) const REPORTS_MAX: u8 = 8;

/// From so many reports on, a rank is taken to report.
pub(super) const REPORTS_MIN: u8 = 4;

impl PrefillQueue {
    /// Adds a prefill at the end of the line.
    pub(super) fn push(&mut self, hint: PrefillLoadHint, now: Timestamp) -> Ticket {
        self.settle(now);
        if self.line.is_empty() {
            self.turn = self.latest;
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let tokens = hint.effective_tokens();
        self.line.push_back(Prefill {
            ticket,
            tokens,
            duration: hint.expected_duration().map(nanos).filter(|_| self.overdue == 0),
            booked: self.latest,
            is_reported: hint.is_reported(),
        });
        self.tokens += u64::from(tokens);
        self.settle(now);
        ticket
    }

    /// Takes a prefill out of the line, wherever it stands. Nothing happens if it has left already.
    ///
    /// O(log line) to find, and a move of at most half the line.
    pub(super) fn complete(&mut self, ticket: Ticket, now: Timestamp) {
        self.settle(now);
        if let Ok(at) = self.awaited.binary_search_by_key(&ticket, |awaited| awaited.prefill.ticket) {
            self.awaited.remove(at);
            self.overdue -= usize::from(at < self.overdue);
            return;
        }
        let Ok(at) = self.line.binary_search_by_key(&ticket, |prefill| prefill.ticket) else { return };
        if at == 0 {
            self.turn = self.latest;
        }
        let gone = self.line.remove(at).expect("the search found it");
        self.tokens -= u64::from(gone.tokens);
        self.settle(now);
    }

    /// As [`complete`](Self::complete), for a prefill that was reported complete: the rank reports, and makes progress.
    pub(super) fn report(&mut self, ticket: Ticket, now: Timestamp) {
        self.reports = (self.reports + 1).min(REPORTS_MAX);
        self.complete(ticket, now);
        self.overdue_since = self.overdue_since.max(self.latest);
    }

    /// Some output was reported, but the prefill before it never was: the rank's caller may not report prefills at all.
    pub(super) fn was_not_reported(&mut self) {
        self.reports = self.reports.saturating_sub(2);
    }

    /// Tokens still to compute at `now`.
    ///
    /// O(turns since the last change).
    pub(super) fn tokens(&self, now: Timestamp) -> u64 {
        let mut spent = nanos(now.max(self.latest).since(self.turn));
        let mut left = self.tokens;
        for prefill in &self.line {
            let Some(duration) = prefill.duration else { break };
            if spent < duration {
                left -= (u128::from(prefill.tokens) * u128::from(spent) / u128::from(duration)) as u64;
                break;
            }
            spent -= duration;
            left -= u64::from(prefill.tokens);
        }
        left
    }

    /// How it goes on from the last change if nothing else happens.
    ///
    /// O(line).
    pub(super) fn curve(&self) -> PrefillCurve {
        let modelled = self.line.iter().map_while(|prefill| Some((prefill.tokens, prefill.duration?)));
        if self.overdue > 0 {
            return PrefillCurve::overdue(self.latest, self.latest.since(self.overdue_since), self.tokens);
        }
        PrefillCurve::new(self.latest, self.latest.since(self.turn), self.tokens, modelled)
    }

    /// Gives the time that has passed to those whose turn it was; who is done leaves the line.
    ///
    /// O(those who leave).
    pub(super) fn settle(&mut self, now: Timestamp) {
        self.latest = self.latest.max(now);
        while let Some(&prefill @ Prefill { tokens, duration: Some(duration), .. }) = self.line.front()
            && duration <= nanos(self.latest.since(self.turn))
        {
            self.turn = self.turn + Duration::from_nanos(duration);
            self.tokens -= u64::from(tokens);
            self.line.pop_front();
            if prefill.is_reported {
                self.awaited.push_back(Awaited { prefill, ended: self.turn });
            }
        }
        self.look_for_overdue();
    }

    /// Lets the line stand still if the oldest awaited prefill is overdue. The other awaited ones are then, too, for they
    /// wait for it.
    fn look_for_overdue(&mut self) {
        let Some(oldest) = self.awaited.front() else { return };
        if self.overdue > 0 || self.reports < REPORTS_MIN || oldest.due() > self.latest {
            return;
        }
        (self.overdue, self.overdue_since) = (self.awaited.len(), oldest.ended);
        let left = self.tokens(self.latest);
        if let Some(first) = self.line.front_mut() {
            // What was computed of it stays computed.
            first.tokens -= u32::try_from(self.tokens - left).unwrap_or(first.tokens);
        }
        self.tokens = left;
        self.line.iter_mut().for_each(|prefill| prefill.duration = None);
        self.turn = self.latest;
    }
}

/// Nanoseconds, up to the end of time as [`Timestamp`] knows it.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl PrefillQueue {
    /// # Panics
    /// If the line is inconsistent.
    pub(super) fn check_invariants(&self) {
        let sum: u64 = self.line.iter().map(|prefill| u64::from(prefill.tokens)).sum();
        assert_eq!(self.tokens, sum, "the sum of tokens is off");
        assert!(self.overdue <= self.awaited.len(), "an overdue prefill is not awaited");
        assert!(self.awaited.iter().is_sorted_by(|a, b| a.prefill.ticket < b.prefill.ticket));
        let tickets = self.awaited.back().zip(self.line.front());
        assert!(tickets.is_none_or(|(awaited, next)| awaited.prefill.ticket < next.ticket), "out of order");
        assert!(self.line.iter().is_sorted_by(|a, b| a.ticket < b.ticket), "the line is out of order");
        assert!(self.line.iter().all(|prefill| prefill.ticket.0 < self.next_ticket));
        assert!(self.turn <= self.latest, "a turn begins in the future");
        if let Some(Prefill { duration: Some(duration), .. }) = self.line.front() {
            assert!(*duration > nanos(self.latest.since(self.turn)), "the first in line is done");
        }
    }

    /// Prefills in line.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.line.len()
    }

    /// Prefills that have not been completed, as far as they are known.
    pub(super) fn unfinished(&self) -> usize {
        self.line.len() + self.awaited.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(seconds: f64) -> Timestamp {
        Timestamp((seconds * SECOND as f64) as u64)
    }

    /// Pushes all at time 0.
    fn queue(prefills: &[(u32, Option<f64>)]) -> (PrefillQueue, Vec<Ticket>) {
        let mut queue = PrefillQueue::default();
        let tickets = prefills.iter().map(|&(tokens, seconds)| {
            let hint = PrefillLoadHint::new(tokens, 0, true, seconds.map(Duration::from_secs_f64));
            queue.push(hint.expect("tokens"), at(0.0))
        });
        let tickets = tickets.collect();
        (queue, tickets)
    }

    fn assert_left(queue: &PrefillQueue, rows: &[(f64, u64)]) {
        queue.check_invariants();
        for &(seconds, left) in rows {
            assert_eq!(queue.tokens(at(seconds)), left, "at {seconds} s");
            let (low, high) = queue.curve().bounds(at(seconds));
            assert!((low..=high).contains(&left), "{left} at {seconds} s is not within {low} and {high}");
        }
    }

    #[test]
    fn each_prefill_melts_at_its_own_rate() {
        let (mut queue, tickets) = queue(&[(1000, Some(10.0)), (500, Some(1.0))]);
        assert_left(&queue, &[(0.0, 1500), (1.0, 1400), (10.0, 500), (10.5, 250), (11.0, 0), (99.0, 0)]);
        queue.complete(tickets[1], at(5.0));
        assert_left(&queue, &[(5.0, 500), (7.5, 250), (10.0, 0)]);
    }

    #[test]
    fn with_one_rate_for_all_the_line_melts_as_one() {
        let (mut queue, tickets) = queue(&[(1000, Some(10.0)), (500, Some(5.0))]);
        assert_left(&queue, &[(1.0, 1400), (5.0, 1000), (9.0, 600), (10.0, 500), (12.0, 300), (15.0, 0), (20.0, 0)]);
        assert_eq!(queue.curve().bounds(at(12.0)), (300, 300));
        queue.complete(tickets[1], at(5.0));
        assert_left(&queue, &[(5.0, 500), (10.0, 0)]);
    }

    #[test]
    fn completing_the_first_early_starts_the_next_now() {
        let (mut queue, tickets) = queue(&[(1000, Some(10.0)), (500, Some(1.0))]);
        queue.complete(tickets[0], at(8.0));
        assert_left(&queue, &[(8.0, 500), (8.25, 375), (8.5, 250), (9.0, 0)]);
        queue.complete(tickets[0], at(8.5));
        assert_left(&queue, &[(8.5, 250), (9.0, 0)]);
    }

    #[test]
    fn an_unmodelled_prefill_stands_still_and_stops_those_behind_it() {
        let (two, _) = queue(&[(1000, Some(10.0)), (500, None)]);
        assert_left(&two, &[(0.0, 1500), (5.0, 1000), (10.0, 500), (20.0, 500)]);
        let (mut three, tickets) = queue(&[(1000, Some(10.0)), (500, None), (200, Some(2.0))]);
        assert_left(&three, &[(0.0, 1700), (5.0, 1200), (10.0, 700), (20.0, 700)]);
        three.complete(tickets[1], at(20.0));
        assert_left(&three, &[(20.0, 200), (21.0, 100), (22.0, 0)]);
    }

    #[test]
    fn zero_duration_is_done_as_soon_as_its_turn_comes() {
        let (first, _) = queue(&[(300, Some(0.0)), (100, Some(1.0))]);
        assert_left(&first, &[(0.0, 100), (0.5, 50)]);
        let (mut second, tickets) = queue(&[(100, Some(1.0)), (300, Some(0.0)), (50, None)]);
        assert_left(&second, &[(0.0, 450), (0.5, 400), (1.0, 50)]);
        second.complete(tickets[0], at(0.5));
        assert_left(&second, &[(0.5, 50), (9.0, 50)]);
        assert_eq!(second.len(), 1);
    }

    #[test]
    fn time_is_lost_on_an_idle_rank_and_does_not_run_backwards() {
        let (mut queue, _) = queue(&[(100, Some(1.0))]);
        let hint = PrefillLoadHint::new(100, 0, true, Some(Duration::from_secs(1))).expect("tokens");
        queue.push(hint, at(50.0));
        assert_left(&queue, &[(0.0, 100), (49.0, 100), (50.0, 100), (50.5, 50)]);
        queue.push(hint, at(50.5));
        queue.push(hint, at(20.0));
        assert_left(&queue, &[(20.0, 250), (50.5, 250), (51.0, 200), (53.0, 0)]);
    }

    #[test]
    fn frequent_changes_do_not_pile_up_rounding() {
        let (mut queue, tickets) = queue(&[(1000, Some(10.0)), (1, None)]);
        for millisecond in 0..5000 {
            queue.complete(Ticket(u64::MAX), Timestamp(millisecond * 1_000_001));
        }
        assert_eq!(queue.tokens(at(5.0)), 501);
        queue.complete(tickets[0], at(5.0));
        assert_left(&queue, &[(5.0, 1)]);
    }

    #[test]
    fn absurd_numbers_saturate() {
        let mut queue = PrefillQueue::default();
        for duration in [Some(Duration::MAX), Some(Duration::MAX), None, Some(Duration::ZERO)] {
            queue.push(PrefillLoadHint::new(u32::MAX, 0, true, duration).expect("tokens"), at(0.0));
        }
        for now in [Timestamp(0), Timestamp(u64::MAX / 2), Timestamp(u64::MAX)] {
            let (low, high) = queue.curve().bounds(now);
            assert!((low..=high).contains(&queue.tokens(now)), "{low} {high} at {now:?}");
        }
        queue.check_invariants();
    }
}
