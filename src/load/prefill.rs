//! Prefill queue of a rank: unfinished prefills and their modelled progress.
//!
//! Prefills are in arrival order, with the time credited to them. A rank is assumed to compute one prompt after the
//! other: the first prefill progresses at its own rate, its tokens divided by its expected duration, and then the next
//! one starts. A prefill without an expected duration does not progress until it is reported complete, and blocks the
//! following ones.
//!
//! A modelled prefill leaves the queue at its expected end, before it is reported. If the report is missing for several
//! times the expected duration, on a rank that usually reports, the prefill is *overdue*. Until it is reported or
//! freed, no prefill progresses, later arrivals included, and the wait is at least the time by which it is overdue. An
//! engine that accepts requests and computes nothing therefore does not appear idle. Earlier modelled progress is kept:
//! an increase of the load would violate the published bounds.
//!
//! Arithmetic is exact: the remainder of a prefill is rounded up to whole tokens at each evaluation, so rounding does
//! not accumulate. Time that decreases counts as constant.
//!
//! The expected durations come from the caller. [`PrefillCurve`] lets readers compute the further decrease within
//! bounds.

use std::collections::VecDeque;
use std::time::Duration;

use super::curve::{ModelledPrefills, nanos};
use super::{PrefillCurve, PrefillLoadHint};
use crate::protocol::Timestamp;

/// Unfinished prefills in arrival order.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefillQueue {
    line: VecDeque<QueuedPrefill>,
    /// Tokens of all queued prefills, without progress deducted.
    tokens: u64,
    /// The leading prefills of modelled duration, and their number.
    modelled: ModelledPrefills,
    modelled_len: usize,
    /// Start time of the first queued prefill.
    turn: Timestamp,
    /// Time of the last change. Earlier times are treated as equal to it.
    latest: Timestamp,
    next_id: u64,
    /// Prefills after their expected end without a report, in arrival order.
    awaited: VecDeque<Awaited>,
    /// Number of overdue ones among these, from the first on.
    overdue: usize,
    /// Expected end of the oldest overdue prefill, or the last report if that was later.
    overdue_since: Timestamp,
    /// Received reports minus missing reports, between 0 and [`REPORTS_MAX`].
    reports: u8,
}

/// Identifies a prefill in the queue, in arrival order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PrefillId(u64);

#[derive(Clone, Copy, Debug)]
struct QueuedPrefill {
    id: PrefillId,
    tokens: u32,
    /// In nanoseconds. `None` also for a prefill behind an overdue one.
    duration: Option<u64>,
    booked: Timestamp,
    is_reported: bool,
}

/// A prefill after its expected end.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    prefill: QueuedPrefill,
    /// Its expected end.
    ended: Timestamp,
}

impl Awaited {
    /// Time at which it becomes overdue.
    fn due(&self) -> Timestamp {
        let expected = self.ended.since(self.prefill.booked);
        self.ended + expected.saturating_mul(OVERDUE_FACTOR).saturating_add(OVERDUE_SLACK)
    }
}

/// Multiple of the expected time, after the expected end, at which a prefill is overdue, plus [`OVERDUE_SLACK`].
const OVERDUE_FACTOR: u32 = 2;

/// See [`OVERDUE_FACTOR`]. Covers short prefills, which wait for a step, and late reports.
const OVERDUE_SLACK: Duration = Duration::from_secs(1);

/// Maximum of the report count.
const REPORTS_MAX: u8 = 8;

/// Minimum report count of a rank that is assumed to report.
const REPORTS_MIN: u8 = 4;

impl PrefillQueue {
    /// Appends a prefill.
    pub(super) fn push(&mut self, hint: PrefillLoadHint, now: Timestamp) -> PrefillId {
        self.advance(now);
        if self.line.is_empty() {
            self.turn = self.latest;
        }
        let id = PrefillId(self.next_id);
        self.next_id += 1;
        let tokens = hint.effective_tokens();
        self.line.push_back(QueuedPrefill {
            id,
            tokens,
            duration: hint.expected_duration().map(nanos).filter(|_| self.overdue == 0),
            booked: self.latest,
            is_reported: hint.is_reported(),
        });
        self.tokens += u64::from(tokens);
        self.extend_modelled();
        self.advance(now);
        id
    }

    /// Removes a prefill at any position. No effect if it has already left the queue.
    ///
    /// O(log queue) to find, and a move of at most half the queue.
    pub(super) fn complete(&mut self, id: PrefillId, now: Timestamp) {
        self.advance(now);
        if let Ok(at) = self.awaited.binary_search_by_key(&id, |awaited| awaited.prefill.id) {
            self.awaited.remove(at);
            self.overdue -= usize::from(at < self.overdue);
            return;
        }
        let Ok(at) = self.line.binary_search_by_key(&id, |prefill| prefill.id) else { return };
        if at == 0 {
            self.turn = self.latest;
        }
        let gone = self.line.remove(at).expect("the search found it");
        self.tokens -= u64::from(gone.tokens);
        if at < self.modelled_len {
            self.leave_modelled(&gone);
        }
        self.extend_modelled();
        self.advance(now);
    }

    /// Like [`complete`](Self::complete), for a reported completion: the rank reports and progresses.
    pub(super) fn report(&mut self, id: PrefillId, now: Timestamp) {
        self.reports = (self.reports + 1).min(REPORTS_MAX);
        self.complete(id, now);
        self.overdue_since = self.overdue_since.max(self.latest);
    }

    /// Records that output was reported without a report of its prefill: the rank's caller may not report prefills.
    pub(super) fn was_not_reported(&mut self) {
        self.reports = self.reports.saturating_sub(2);
    }

    /// Remaining tokens at `now`.
    ///
    /// O(prefills finished since the last change).
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

    /// The further decrease from the last change on, if nothing else happens.
    ///
    /// O(1).
    pub(super) fn curve(&self) -> PrefillCurve {
        if self.overdue > 0 {
            return PrefillCurve::overdue(self.latest, self.latest.since(self.overdue_since), self.tokens);
        }
        PrefillCurve::new(self.latest, self.latest.since(self.turn), self.tokens, &self.modelled)
    }

    /// Credits the elapsed time to the prefills; finished ones leave the queue.
    ///
    /// O(finished prefills).
    pub(super) fn advance(&mut self, now: Timestamp) {
        self.latest = self.latest.max(now);
        while let Some(&prefill @ QueuedPrefill { tokens, duration: Some(duration), .. }) = self.line.front()
            && duration <= nanos(self.latest.since(self.turn))
        {
            self.turn = self.turn + Duration::from_nanos(duration);
            self.tokens -= u64::from(tokens);
            self.line.pop_front();
            self.leave_modelled(&prefill);
            if prefill.is_reported {
                self.awaited.push_back(Awaited { prefill, ended: self.turn });
            }
        }
        self.check_overdue();
    }

    /// Counts the prefills behind the leading ones of modelled duration, as far as their durations are modelled. Each is
    /// counted once.
    fn extend_modelled(&mut self) {
        while let Some(&QueuedPrefill { tokens, duration: Some(duration), .. }) = self.line.get(self.modelled_len) {
            self.modelled.add(tokens, duration);
            self.modelled_len += 1;
        }
    }

    /// Uncounts one of the leading prefills of modelled duration, which has left the queue.
    fn leave_modelled(&mut self, gone: &QueuedPrefill) {
        self.modelled_len -= 1;
        self.modelled.remove(gone.tokens, gone.duration.expect("leading prefills have a modelled duration"));
    }

    /// Stops all progress if the oldest awaited prefill is overdue. The other awaited ones are then overdue as well,
    /// because they wait for it.
    fn check_overdue(&mut self) {
        let Some(oldest) = self.awaited.front() else { return };
        if self.overdue > 0 || self.reports < REPORTS_MIN || oldest.due() > self.latest {
            return;
        }
        (self.overdue, self.overdue_since) = (self.awaited.len(), oldest.ended);
        let left = self.tokens(self.latest);
        if let Some(first) = self.line.front_mut() {
            // Keeps the progress so far.
            first.tokens -= u32::try_from(self.tokens - left).unwrap_or(first.tokens);
        }
        self.tokens = left;
        self.line.iter_mut().for_each(|prefill| prefill.duration = None);
        (self.modelled, self.modelled_len) = (ModelledPrefills::default(), 0);
        self.turn = self.latest;
    }
}

impl PrefillQueue {
    /// Checks the invariants, for tests.
    ///
    /// # Panics
    /// If the queue is inconsistent.
    pub(super) fn check_invariants(&self) {
        let sum: u64 = self.line.iter().map(|prefill| u64::from(prefill.tokens)).sum();
        assert_eq!(self.tokens, sum, "the sum of tokens is wrong");
        let modelled = self.line.iter().take_while(|prefill| prefill.duration.is_some()).count();
        assert_eq!(self.modelled_len, modelled, "the leading prefills of modelled duration are counted");
        assert!(self.overdue <= self.awaited.len(), "an overdue prefill is not awaited");
        assert!(self.awaited.iter().is_sorted_by(|a, b| a.prefill.id < b.prefill.id));
        let ids = self.awaited.back().zip(self.line.front());
        assert!(ids.is_none_or(|(awaited, next)| awaited.prefill.id < next.id), "out of order");
        assert!(self.line.iter().is_sorted_by(|a, b| a.id < b.id), "the queue is out of order");
        assert!(self.line.iter().all(|prefill| prefill.id.0 < self.next_id));
        assert!(self.turn <= self.latest, "a prefill starts in the future");
        if let Some(QueuedPrefill { duration: Some(duration), .. }) = self.line.front() {
            assert!(*duration > nanos(self.latest.since(self.turn)), "the first queued prefill is finished");
        }
    }

    /// Number of prefills that are not known to be complete.
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

    #[test]
    fn extreme_numbers_saturate() {
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
