//! Requests in order of arrival, each removable at constant cost.
//!
//! A removed request leaves a gap, so that a large number of clients that leave at once costs the same per request as
//! one. Bookings are looked up by a scan in a short line. In a long one the first removal creates a table, which exists
//! until the line is short again: without removals no request pays for it.

use std::collections::VecDeque;

use ahash::AHashMap;

use super::pending::PendingRequest;
use crate::protocol::BookingId;

/// Number of entries up to which bookings are looked up by a scan.
const SHORT: usize = 64;

/// Requests in order of arrival.
#[derive(Debug)]
pub(super) struct Line<T> {
    /// Gaps are absent requests. The first entry is a request.
    entries: VecDeque<Option<PendingRequest<T>>>,
    gaps: usize,
    /// Number of the first entry; entries are numbered consecutively.
    first: i64,
    /// Number of the entry of each booking.
    by_booking: Option<AHashMap<BookingId, i64>>,
}

impl<T> Line<T> {
    pub(super) fn new() -> Self {
        Self { entries: VecDeque::new(), gaps: 0, first: 0, by_booking: None }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.gaps
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn push_back(&mut self, pending: PendingRequest<T>) {
        let number = self.first + self.entries.len() as i64;
        self.list(&pending, number);
        self.entries.push_back(Some(pending));
    }

    pub(super) fn push_front(&mut self, pending: PendingRequest<T>) {
        self.first -= 1;
        self.list(&pending, self.first);
        self.entries.push_front(Some(pending));
    }

    pub(super) fn pop_front(&mut self) -> Option<PendingRequest<T>> {
        let pending = self.entries.pop_front()??;
        self.first += 1;
        self.unlist(&pending);
        self.close_gaps();
        Some(pending)
    }

    /// Removes the request with this booking, if it is in the line.
    pub(super) fn remove(&mut self, booking: BookingId) -> Option<PendingRequest<T>> {
        if self.entries.len() <= SHORT {
            let at = self
                .entries
                .iter()
                .position(|entry| entry.as_ref().and_then(PendingRequest::booking) == Some(booking))?;
            return self.take(at);
        }
        if self.by_booking.is_none() {
            self.list_all();
        }
        let number = *self.by_booking.as_ref()?.get(&booking)?;
        self.take((number - self.first) as usize)
    }

    fn take(&mut self, at: usize) -> Option<PendingRequest<T>> {
        let taken = self.entries.get_mut(at)?.take()?;
        self.unlist(&taken);
        self.gaps += 1;
        self.close_gaps();
        Some(taken)
    }

    /// Drops the gaps at the front, and all gaps if they are the majority; then the table, if the line is short.
    fn close_gaps(&mut self) {
        while matches!(self.entries.front(), Some(None)) {
            self.entries.pop_front();
            (self.first, self.gaps) = (self.first + 1, self.gaps - 1);
        }
        if self.gaps > self.entries.len() / 2 {
            self.entries.retain(Option::is_some);
            self.gaps = 0;
            self.list_all();
        }
        if self.entries.len() <= SHORT / 2 {
            self.by_booking = None;
        }
    }

    /// Lists every booking.
    fn list_all(&mut self) {
        let bookings = self.entries.iter().zip(self.first..);
        let bookings = bookings.filter_map(|(entry, number)| Some((entry.as_ref()?.booking()?, number)));
        self.by_booking = Some(bookings.collect());
    }

    fn list(&mut self, pending: &PendingRequest<T>, number: i64) {
        if let Some((by_booking, booking)) = self.by_booking.as_mut().zip(pending.booking()) {
            by_booking.insert(booking, number);
        }
    }

    fn unlist(&mut self, pending: &PendingRequest<T>) {
        if let Some((by_booking, booking)) = self.by_booking.as_mut().zip(pending.booking()) {
            by_booking.remove(&booking);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{PromptBlocks, PromptFingerprint};
    use crate::protocol::Timestamp;
    use crate::schedule::{Request, Waits};
    use crate::test_support::mix;

    /// A request; every fourth one cannot be cancelled.
    fn pending(number: u64) -> PendingRequest<u64> {
        let waits = Waits { booking: BookingId(number), arrival: Timestamp(0), block_hashes: None };
        let request = Request {
            waits: (!number.is_multiple_of(4)).then(|| Box::new(waits)),
            ..Request::new(number, PromptBlocks::Counted(1), 1)
        };
        PendingRequest {
            number,
            fingerprint: PromptFingerprint::unshared(),
            request,
            session: None,
            begins: false,
            class: None,
            full: Vec::new(),
            longest_blocks: 0,
            overlaps_at: None,
            cancelled: false,
        }
    }

    /// Cause: a cancellation searched all arrivals, so that many clients that left at once blocked the scheduler.
    #[test]
    fn requests_leave_in_order_or_by_booking() {
        let (mut line, mut expected) = (Line::new(), VecDeque::new());
        for n in 0..40_000 {
            let draw = mix(n);
            // The line grows and becomes empty in turn.
            let grows = n % 4_000 < 1_000;
            match draw % 8 {
                0 => {
                    line.push_front(pending(n));
                    expected.push_front(n);
                }
                1..=5 if grows => {
                    line.push_back(pending(n));
                    expected.push_back(n);
                }
                2 | 3 => assert_eq!(line.pop_front().map(|pending| pending.number), expected.pop_front()),
                _ => {
                    let any = draw >> 8;
                    let known = expected.get(any as usize % expected.len().max(1)).copied();
                    let wanted = known.filter(|number| !number.is_multiple_of(4));
                    let removed = line.remove(BookingId(wanted.unwrap_or(u64::MAX)));
                    assert_eq!(removed.map(|pending| pending.number), wanted);
                    expected.retain(|number| Some(*number) != wanted);
                }
            }
            assert_eq!((line.len(), line.is_empty()), (expected.len(), expected.is_empty()));
            assert!(line.entries.len() <= 2 * line.len() + 1, "gaps are bounded");
            let bookings = expected.iter().filter(|number| !number.is_multiple_of(4)).count();
            assert!(line.by_booking.as_ref().is_none_or(|table| table.len() == bookings), "only present bookings");
        }
        let rest = std::iter::from_fn(|| line.pop_front()).map(|pending| pending.number);
        assert!(rest.eq(expected));
    }
}
