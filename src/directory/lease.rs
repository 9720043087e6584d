//! Lease: the shared record of one booking, without a lock on the request path.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::load::{OutputBlocks, PrefillLoadHint, PromptBlocks, RequestKeys, Weight};
use crate::protocol::{BookingId, Generation, Slot, Timestamp};

/// State of a lease. Transitions go only down this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Created, without a decision.
    Pending,
    /// Booked on one generation of a slot.
    Booked {
        /// The slot.
        slot: Slot,
        /// Its generation.
        generation: Generation,
    },
    /// Freed, dropped, removed with its rank, or never booked.
    Ended,
}

/// State of a lease before it was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Not booked: a later Book has no effect.
    Pending,
    /// Booked there: the sequence actor must reconcile.
    Booked(Slot, Generation),
    /// Already ended.
    Already,
}

/// Progress that the caller has reported.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Whether the first token was sent.
    pub prefill_completed: bool,
    /// The output blocks.
    pub output: OutputBlocks,
}

/// The shared record of one booking.
///
/// The caller's side changes the record first and then notifies the sequence actor, which reads the current state. A
/// notification that is repeated, late or lost can therefore delay a count, but not falsify it.
#[derive(Debug)]
pub struct Lease {
    booking: BookingId,
    request_id: Box<str>,
    prompt: PromptBlocks,
    arrival: Timestamp,
    /// Packed [`LeaseState`]: booking is one compare-and-swap, ending is one swap.
    state: AtomicU64,
    /// The booked prefill and the time of booking.
    hint: OnceLock<(Option<PrefillLoadHint>, Timestamp)>,
    /// Keys of the request's output length statistics, set once.
    pub request_keys: OnceLock<RequestKeys>,
    /// Whether the embedder has freed it by id, booked or not: a booking in progress must not be retried. Ending the lease
    /// is a separate step.
    pub freed: AtomicBool,
    prefill_completed: AtomicBool,
    output: Mutex<OutputBlocks>,
    /// Mean time between the tokens of the response, set before the end of the lease.
    pub mean_itl: OnceLock<Duration>,
    /// Cached tokens of the prompt as reported by the engine, set before the end of the lease.
    pub delivered_cached_tokens: OnceLock<u32>,
    /// Whether the response ended with the finish reason `stop`, set before the end of the lease: its program returns late or
    /// never.
    pub has_stopped: AtomicBool,
    /// Whether a reconciliation is pending, so that at most one is.
    dirty: AtomicBool,
    /// Time of the last activity, plus one; 0 while a placement holds the lease.
    seen_at: AtomicU64,
}

const PENDING: u64 = 0;
const ENDED: u64 = u64::MAX;

impl Lease {
    pub(super) fn new(booking: BookingId, request_id: Box<str>, prompt: PromptBlocks, arrival: Timestamp) -> Self {
        Self {
            booking,
            request_id,
            prompt,
            arrival,
            state: AtomicU64::new(PENDING),
            hint: OnceLock::new(),
            request_keys: OnceLock::new(),
            freed: AtomicBool::new(false),
            prefill_completed: AtomicBool::new(false),
            output: Mutex::default(),
            mean_itl: OnceLock::new(),
            delivered_cached_tokens: OnceLock::new(),
            has_stopped: AtomicBool::new(false),
            dirty: AtomicBool::new(false),
            seen_at: AtomicU64::new(0),
        }
    }

    /// The booking id.
    #[must_use]
    pub fn booking(&self) -> BookingId {
        self.booking
    }

    /// The request id.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Prompt blocks that it holds while active.
    #[must_use]
    pub fn prompt(&self) -> &PromptBlocks {
        &self.prompt
    }

    /// Arrival time of the request.
    #[must_use]
    pub fn arrival(&self) -> Timestamp {
        self.arrival
    }

    /// The booked prefill.
    #[must_use]
    pub fn hint(&self) -> Option<PrefillLoadHint> {
        self.hint.get().and_then(|(hint, _)| *hint)
    }

    /// Time of booking; before it, the arrival time.
    #[must_use]
    pub fn booked_at(&self) -> Timestamp {
        self.hint.get().map_or(self.arrival, |(_, booked_at)| *booked_at)
    }

    /// The current state.
    #[must_use]
    pub fn state(&self) -> LeaseState {
        unpack(self.state.load(Ordering::SeqCst))
    }

    /// Books the lease; returns false unless it is pending. Only a sequence actor calls this, for its own slot.
    #[must_use]
    pub fn book(&self, slot: Slot, generation: Generation, hint: Option<PrefillLoadHint>, now: Timestamp) -> bool {
        let _ = self.hint.set((hint, now)); // set before the state, so that readers of a booked state see the hint
        self.state.compare_exchange(PENDING, pack(slot, generation), Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Ends the lease in any state. Exactly one call observes a state other than ended.
    pub fn end(&self) -> Ended {
        match unpack(self.state.swap(ENDED, Ordering::SeqCst)) {
            LeaseState::Pending => Ended::Pending,
            LeaseState::Booked { slot, generation } => Ended::Booked(slot, generation),
            LeaseState::Ended => Ended::Already,
        }
    }

    /// Records the first token; returns false if it was already recorded.
    pub fn complete_prefill(&self) -> bool {
        !self.prefill_completed.swap(true, Ordering::SeqCst)
    }

    /// Adds one output block. See [`OutputBlocks::push`].
    pub fn push_output_block(&self, decay: Option<Weight>) {
        self.output().push(decay);
    }

    /// The reported progress.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let prefill_completed = self.prefill_completed.load(Ordering::SeqCst);
        Progress { prefill_completed, output: *self.output() }
    }

    /// Requests a reconciliation; returns false if a pending one will see all changes so far.
    #[must_use]
    pub fn mark_dirty(&self) -> bool {
        !self.dirty.swap(true, Ordering::SeqCst)
    }

    /// Called before a reconciliation: later changes request another one.
    pub fn clear_dirty(&self) {
        self.dirty.store(false, Ordering::SeqCst);
    }

    /// Detaches the lease from its placement: from now on it lives as long as it shows activity.
    pub fn leave(&self, now: Timestamp) {
        self.seen_at.store(now.0.saturating_add(1), Ordering::Relaxed);
    }

    /// Records activity. No effect while a placement holds the lease.
    pub fn seen(&self, now: Timestamp) {
        if self.seen_at.load(Ordering::Relaxed) != 0 {
            self.leave(now);
        }
    }

    /// Whether the lease is detached and has shown no activity for longer than `liveness`.
    #[must_use]
    pub fn is_silent(&self, liveness: Duration, now: Timestamp) -> bool {
        let seen_at = self.seen_at.load(Ordering::Relaxed).checked_sub(1);
        seen_at.is_some_and(|seen_at| now.since(Timestamp(seen_at)) > liveness)
    }

    fn output(&self) -> MutexGuard<'_, OutputBlocks> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner) // plain numbers, consistent after every statement
    }
}

fn pack(slot: Slot, generation: Generation) -> u64 {
    (u64::from(slot.0) + 1) << 32 | u64::from(generation.0)
}

#[expect(clippy::cast_possible_truncation, reason = "the halves that `pack` joined")]
fn unpack(state: u64) -> LeaseState {
    match state {
        PENDING => LeaseState::Pending,
        ENDED => LeaseState::Ended,
        booked => LeaseState::Booked { slot: Slot((booked >> 32) as u32 - 1), generation: Generation(booked as u32) },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn lease() -> Lease {
        Lease::new(BookingId(0), "r".into(), PromptBlocks::Counted(0), Timestamp::default())
    }

    #[test]
    fn only_detached_leases_become_silent() {
        let (lease, liveness) = (lease(), Duration::from_nanos(10));
        lease.seen(Timestamp(1));
        assert!(!lease.is_silent(liveness, Timestamp(1_000)), "held, however long");
        lease.leave(Timestamp(1_000));
        assert!(!lease.is_silent(liveness, Timestamp(1_010)));
        assert!(lease.is_silent(liveness, Timestamp(1_011)));
        lease.seen(Timestamp(1_011));
        assert!(!lease.is_silent(liveness, Timestamp(1_021)), "long, but alive");
    }

    #[test]
    fn concurrent_ends_observe_the_booking_once() {
        for _ in 0..200 {
            let lease = Arc::new(lease());
            assert!(lease.book(Slot(1), Generation(2), None, Timestamp(0)));
            let enders: Vec<_> = (0..4)
                .map(|_| {
                    let lease = Arc::clone(&lease);
                    std::thread::spawn(move || lease.end())
                })
                .collect();
            let found: Vec<_> = enders.into_iter().map(|ender| ender.join().expect("no panic")).collect();
            assert_eq!(found.iter().filter(|found| **found == Ended::Booked(Slot(1), Generation(2))).count(), 1);
        }
    }
}
