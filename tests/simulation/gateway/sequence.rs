//! Shell of a sequence actor: the bookings of one rank.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use pointsman::directory::{Lease, LeaseState};
use pointsman::load::{ActiveSequences, BoardLoad, Change, SpeedMeter};
use pointsman::protocol::{BookingId, Generation, Slot, Timestamp};
use pointsman::schedule::LoadAnswer;

use super::{Entry, Gateway, Surroundings};
use crate::letter::{Ack, Answer, Book, Letter, LoadJoin};
use crate::net::Actor;

pub(super) struct Sequence {
    entry: Rc<Entry>,
    incarnation: u32,
    applied: u32,
    pub(super) active: ActiveSequences,
    meter: Option<SpeedMeter>,
    draining: Option<Ack>,
    pub(super) is_retired: bool,
    /// Bookings, for the oracle.
    pub(super) known: BTreeSet<BookingId>,
}

impl Gateway {
    /// Starts the sequence actor of a rank: without bookings at first, with those of the leases after a restart.
    pub(super) fn start_sequence(&mut self, entry: &Rc<Entry>, incarnation: u32, now: Timestamp) {
        let config = &self.settings.config;
        let mut sequence = Sequence {
            entry: Rc::clone(entry),
            incarnation,
            applied: 0,
            active: ActiveSequences::new(true),
            meter: config
                .learns_speed()
                .then(|| SpeedMeter::new(Arc::clone(&entry.cells.speed), config.block_size_or_assumed())),
            draining: None,
            is_retired: false,
            known: BTreeSet::new(),
        };
        let leases = self.directory.booked_on(entry.slot, entry.generation);
        for lease in &leases {
            lease.clear_dirty();
            sequence.book(lease, lease.booked_at());
        }
        for lease in &leases {
            sequence.agree_with(lease, now);
        }
        sequence.publish(now);
        self.changed_at = now;
        self.sequences.insert(entry.slot, (entry.generation, Some(sequence)));
    }

    pub(super) fn on_sequence(
        &mut self,
        slot: Slot,
        generation: Generation,
        letter: Letter,
        around: &mut Surroundings<'_>,
    ) {
        let now = around.net.now;
        let here = self.sequences.get_mut(&slot).filter(|(current, _)| *current == generation);
        let Some(sequence) = here.and_then(|(_, sequence)| sequence.as_mut()) else { return }; // the message is lost
        let mut fell = false;
        match letter {
            Letter::Load(join) => sequence.on_load(&join, now),
            Letter::Book(book) => {
                self.changed_at = now;
                let Book { mut context, decision, number } = *book;
                assert!(!sequence.is_retired, "a Book arrives after the removal of rank {}", sequence.entry.rank);
                if number.incarnation == sequence.incarnation {
                    assert!(number.number == sequence.applied + 1, "Books are numbered without a gap");
                    sequence.applied = number.number;
                }
                if let Some(meter) = &mut sequence.meter {
                    meter.peers_are(sequence.entry.cells.peers.read(), now);
                }
                let is_booked = context.lease.book(slot, generation, decision.prefill_load(), now);
                if is_booked {
                    sequence.book(&context.lease, now);
                    if let Some(meter) = &mut sequence.meter {
                        meter.booked(context.lease.booking(), decision.prefill_load(), now);
                    }
                    sequence.agree_with(&context.lease, now);
                }
                sequence.publish(now);
                fell = true;
                context.reply.is_used = true;
                if is_booked {
                    let (call, attempt) = (context.reply.call, context.reply.attempt);
                    drop(context);
                    let letter = Letter::Answered(attempt, Answer::Placed(decision));
                    self.send(Actor::Sequence(slot.0, generation.0), Actor::Caller(call), letter, around);
                }
            }
            Letter::Reconcile(lease) => {
                self.changed_at = now;
                if let Some(meter) = &mut sequence.meter {
                    meter.peers_are(sequence.entry.cells.peers.read(), now);
                }
                lease.clear_dirty();
                sequence.agree_with(&lease, now);
                sequence.publish(now);
                if sequence.active.is_empty() {
                    sequence.draining = None;
                }
                fell = true;
            }
            Letter::DrainSequence(ack) => {
                if !sequence.active.is_empty() {
                    sequence.draining = Some(ack);
                }
            }
            Letter::UndrainSequence => sequence.draining = None,
            Letter::RetireSequence(ack) => {
                self.changed_at = now;
                sequence.is_retired = true;
                for lease in self.directory.booked_on(slot, generation) {
                    lease.end();
                    self.directory.leave(&lease);
                    sequence.free(&lease, now);
                }
                sequence.publish(now);
                drop(ack);
            }
            _ => unreachable!("no message of a sequence actor"),
        }
        // Spurious wake-ups are permitted; only one of falling load is required.
        if fell && self.is_queueing() && self.wake.replace(false) {
            self.send(Actor::Sequence(slot.0, generation.0), Actor::Scheduler, Letter::Wake(None), around);
        }
    }
}

impl Sequence {
    fn on_load(&self, join: &LoadJoin, now: Timestamp) {
        let shared_blocks = join.prompts.iter().map(|prompt| self.active.project(prompt).shared_blocks).collect();
        let Entry { slot, generation, .. } = *self.entry;
        join.found.borrow_mut().push(LoadAnswer { slot, generation, load: self.active.load(now), shared_blocks });
    }

    fn book(&mut self, lease: &Lease, at: Timestamp) {
        let booked = self.active.book(lease.booking(), lease.prompt().clone(), lease.hint(), at);
        assert!(booked.is_ok() && self.known.insert(lease.booking()), "{} is booked twice", lease.request_id());
    }

    fn agree_with(&mut self, lease: &Lease, now: Timestamp) {
        let progress = lease.progress();
        if progress.prefill_completed {
            self.active.complete_prefill(lease.booking(), now);
        }
        if let Some(meter) = &mut self.meter {
            meter.reported(lease.booking(), progress.prefill_completed, progress.output.block_count(), now);
        }
        self.active.set_output(lease.booking(), &progress.output);
        match lease.state() {
            LeaseState::Booked { .. } => {}
            LeaseState::Pending | LeaseState::Ended => self.free(lease, now),
        }
    }

    fn free(&mut self, lease: &Lease, now: Timestamp) {
        let change = self.active.free(lease.booking(), now);
        assert!(
            (change == Change::Applied) == self.known.remove(&lease.booking()),
            "{} ends twice",
            lease.request_id()
        );
        if let Some(meter) = &mut self.meter {
            meter.ended(lease.booking(), now);
        }
    }

    fn publish(&mut self, now: Timestamp) {
        let board = BoardLoad::of(&self.active, self.incarnation, self.applied, now);
        if let Some(meter) = &mut self.meter {
            meter.load_is(self.active.load(now), now);
            meter.prefill_is(board.prefill.wait(now).0, now);
        }
        self.entry.cells.board.publish(&board);
    }
}
