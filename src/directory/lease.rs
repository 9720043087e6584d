//! One booking's shared record: who changes what, and in which order, without a lock on the way of a request.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::load::{LengthKeys, OutputBlocks, PrefillLoadHint, PromptBlocks, Weight};
use crate::protocol::{BookingId, Generation, Slot, Timestamp};

/// Where a lease stands. It only ever moves down this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Entered, not decided.
    Pending,
    /// Booked on one incarnation of a slot.
    Booked {
        /// The slot.
        slot: Slot,
        /// Its incarnation.
        generation: Generation,
    },
    /// Over: freed, dropped, removed with its rank, or never booked.
    Ended,
}

/// What ending a lease found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was not booked yet: a Book that comes later finds it ended and does nothing.
    Pending,
    /// It was booked there: its sequence actor must look.
    Booked(Slot, Generation),
    /// It had ended before.
    Already,
}

/// What a request has reported of itself so far.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Whether its first token is out.
    pub prefill_completed: bool,
    /// Its output blocks.
    pub output: OutputBlocks,
}

/// The shared record of one booking.
///
/// The caller's side changes it first and then tells the sequence actor to look; the sequence actor reads what it
/// finds. So a message that comes twice, late or never can only delay a count, not falsify it.
#[derive(Debug)]
pub struct Lease {
    booking: BookingId,
    request_id: Box<str>,
    prompt: PromptBlocks,
    arrival: Timestamp,
    /// Packed [`LeaseState`]: booking is one compare-and-swap, ending one swap.
    state: AtomicU64,
    /// The prefill it is booked with, and when.
    hint: OnceLock<(Option<PrefillLoadHint>, Timestamp)>,
    /// What the length of its output is remembered by.
    length_keys: OnceLock<LengthKeys>,
    /// Its embedder has freed it, by id.
    freed: AtomicBool,
    prefill_completed: AtomicBool,
    output: Mutex<OutputBlocks>,
    /// Set while a look is on its way, so that at most one is.
    dirty: AtomicBool,
    /// Its last sign of life, plus one; 0 while somebody holds it, which is a sign by itself.
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
            length_keys: OnceLock::new(),
            freed: AtomicBool::new(false),
            prefill_completed: AtomicBool::new(false),
            output: Mutex::default(),
            dirty: AtomicBool::new(false),
            seen_at: AtomicU64::new(0),
        }
    }

    /// Its number.
    #[must_use]
    pub fn booking(&self) -> BookingId {
        self.booking
    }

    /// The id it was entered under.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// The blocks it holds while it runs.
    #[must_use]
    pub fn prompt(&self) -> &PromptBlocks {
        &self.prompt
    }

    /// Says what the length of its output is remembered by. Only the first call counts.
    pub fn set_length_keys(&self, keys: LengthKeys) {
        let _ = self.length_keys.set(keys);
    }

    /// What the length of its output is remembered by.
    #[must_use]
    pub fn length_keys(&self) -> LengthKeys {
        self.length_keys.get().copied().unwrap_or_default()
    }

    /// When it was entered.
    #[must_use]
    pub fn arrival(&self) -> Timestamp {
        self.arrival
    }

    /// The prefill it was booked with.
    #[must_use]
    pub fn hint(&self) -> Option<PrefillLoadHint> {
        self.hint.get().and_then(|(hint, _)| *hint)
    }

    /// When it was booked; when it arrived, before that.
    #[must_use]
    pub fn booked_at(&self) -> Timestamp {
        self.hint.get().map_or(self.arrival, |(_, booked_at)| *booked_at)
    }

    /// Where it stands now.
    #[must_use]
    pub fn state(&self) -> LeaseState {
        unpack(self.state.load(Ordering::SeqCst))
    }

    /// Books it; `false` when it is not pending any more. Only a sequence actor calls this, for its own slot.
    #[must_use]
    pub fn book(&self, slot: Slot, generation: Generation, hint: Option<PrefillLoadHint>, now: Timestamp) -> bool {
        let _ = self.hint.set((hint, now)); // set before it is booked, so that whoever sees it booked sees the hint
        self.state.compare_exchange(PENDING, pack(slot, generation), Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Ends it, whatever it was. Exactly one call finds it not ended.
    pub fn end(&self) -> Ended {
        match unpack(self.state.swap(ENDED, Ordering::SeqCst)) {
            LeaseState::Pending => Ended::Pending,
            LeaseState::Booked { slot, generation } => Ended::Booked(slot, generation),
            LeaseState::Ended => Ended::Already,
        }
    }

    /// Notes that its embedder wants it ended, booked or not. Ending it is another step.
    pub fn mark_freed(&self) {
        self.freed.store(true, Ordering::SeqCst);
    }

    /// Whether its embedder has freed it: a booking that is under way must not be tried again.
    #[must_use]
    pub fn is_freed(&self) -> bool {
        self.freed.load(Ordering::SeqCst)
    }

    /// Notes that the first token is out; `false` when that was known.
    pub fn complete_prefill(&self) -> bool {
        !self.prefill_completed.swap(true, Ordering::SeqCst)
    }

    /// Notes one more output block. See [`OutputBlocks::push`].
    pub fn push_output_block(&self, decay: Option<Weight>) {
        self.output().push(decay);
    }

    /// What it has reported so far.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let prefill_completed = self.prefill_completed.load(Ordering::SeqCst);
        Progress { prefill_completed, output: *self.output() }
    }

    /// Asks for a look; `false` when one is on its way that will see every change made so far.
    #[must_use]
    pub fn mark_dirty(&self) -> bool {
        !self.dirty.swap(true, Ordering::SeqCst)
    }

    /// Before a look: changes made from here on ask for another one.
    pub fn clear_dirty(&self) {
        self.dirty.store(false, Ordering::SeqCst);
    }

    /// Nobody holds it from here on: it lasts while it shows signs of life.
    pub fn leave(&self, now: Timestamp) {
        self.seen_at.store(now.0.saturating_add(1), Ordering::Relaxed);
    }

    /// A sign of life. Means nothing while somebody holds the lease.
    pub fn seen(&self, now: Timestamp) {
        if self.seen_at.load(Ordering::Relaxed) != 0 {
            self.leave(now);
        }
    }

    /// Whether nobody holds it and it has shown no sign of life for longer than `liveness`.
    #[must_use]
    pub fn is_silent(&self, liveness: Duration, now: Timestamp) -> bool {
        let seen_at = self.seen_at.load(Ordering::Relaxed).checked_sub(1);
        seen_at.is_some_and(|seen_at| now.since(Timestamp(seen_at)) > liveness)
    }

    fn output(&self) -> MutexGuard<'_, OutputBlocks> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner) // plain numbers: whole between statements
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
    fn a_lease_ended_before_its_book_is_never_booked() {
        let lease = lease();
        assert_eq!(lease.end(), Ended::Pending);
        assert!(!lease.book(Slot(0), Generation(0), None, Timestamp(0)));
        assert_eq!(lease.end(), Ended::Already);
        assert_eq!(lease.state(), LeaseState::Ended);
    }

    #[test]
    fn a_lease_is_silent_only_when_nobody_holds_it() {
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
    fn every_slot_and_generation_survives_packing() {
        for (slot, generation) in [(0, 0), (0, u32::MAX), (u32::MAX - 2, 7), (5, u32::MAX - 1)] {
            let state = LeaseState::Booked { slot: Slot(slot), generation: Generation(generation) };
            assert_eq!(unpack(pack(Slot(slot), Generation(generation))), state);
        }
    }

    #[test]
    fn of_many_who_end_a_lease_one_finds_it_booked() {
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
