//! Drains, and removals that wait for ranks to retire.

use std::collections::BTreeSet;
use std::time::Duration;

use super::removals::{Completion, PendingDrain, PendingRemoval};
use super::{Membership, MembershipEffect};
use crate::error::MembershipError;
use crate::protocol::{Generation, Slot, WorkerId};

impl<R> Membership<R> {
    pub(super) fn on_remove(&mut self, worker: WorkerId, reply: R) {
        if !self.workers.contains_key(&worker) {
            return self.outbox.reply(reply, Err(MembershipError::UnknownWorker(worker)));
        }
        if self.is_named(worker) {
            self.withheld.insert(worker);
        }
        self.remove(worker, Completion::Reply { to: reply, cut_off: 0 });
        self.refresh_removed();
    }

    pub(super) fn remove(&mut self, worker: WorkerId, completion: Completion<R>) {
        let left = self.unregister(worker);
        self.removals.push(PendingRemoval { left, completion });
        self.finish_removals();
    }

    pub(super) fn finish_removals(&mut self) {
        let done: Vec<PendingRemoval<R>> = self.removals.extract_if(.., |removal| removal.left.is_empty()).collect();
        for PendingRemoval { completion, .. } in done {
            match completion {
                Completion::Reply { to, cut_off } => self.outbox.reply(to, Ok(cut_off)),
                Completion::Departed { source, worker } => self.finish_departure(source, worker),
            }
        }
    }

    pub(super) fn on_drain(&mut self, worker: WorkerId, deadline: Duration, reply: R) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return self.outbox.reply(reply, Err(MembershipError::UnknownWorker(worker)));
        };
        if std::mem::replace(&mut known.draining, true) {
            return self.outbox.reply(reply, Err(MembershipError::Draining(worker)));
        }
        let left: BTreeSet<(Slot, Generation)> = self.slots.running_of(worker).collect();
        for (slot, generation) in left.iter().copied() {
            self.outbox.push(MembershipEffect::DrainRank { slot, generation });
        }
        self.drains_started += 1;
        let drain = self.drains_started;
        self.drains.push(PendingDrain { drain, worker, left, reply });
        self.outbox.push(MembershipEffect::StartDrainTimer { worker, drain, deadline });
        self.outbox.workers_changed = true;
    }

    /// Ends a drain in progress, or permits discovery to add the worker again.
    pub(super) fn on_undrain(&mut self, worker: WorkerId, reply: R) {
        let result = if let Some(known) = self.workers.get_mut(&worker) {
            if std::mem::replace(&mut known.draining, false) {
                let cordoned = known.cordoned;
                self.end_drain(worker, MembershipError::Undrained(worker));
                self.restrict_ranks(worker, cordoned);
                self.outbox.workers_changed = true;
                Ok(0)
            } else {
                Err(MembershipError::NotDraining(worker))
            }
        } else if self.withheld.remove(&worker) {
            self.reconcile();
            Ok(0)
        } else {
            Err(MembershipError::UnknownWorker(worker))
        };
        self.outbox.reply(reply, result);
    }

    /// Rejects the drain of a worker, if there is one.
    pub(super) fn end_drain(&mut self, worker: WorkerId, error: MembershipError) {
        if let Some(position) = self.drains.iter().position(|drain| drain.worker == worker) {
            let PendingDrain { reply, .. } = self.drains.remove(position);
            self.outbox.reply(reply, Err(error));
        }
    }

    pub(super) fn on_rank_drained(
        &mut self,
        slot: Slot,
        generation: Generation,
        rank_bookings: usize,
        worker_bookings: usize,
    ) {
        let place = (slot, generation);
        let Some(position) = self.drains.iter().position(|drain| drain.left.contains(&place)) else { return };
        if rank_bookings > 0 {
            // The acknowledgement was dropped with a dying sequence actor. Its successor restores the bookings.
            return self.outbox.push(MembershipEffect::DrainRank { slot, generation });
        }
        self.drains[position].left.remove(&place);
        if self.drains[position].left.is_empty() {
            self.finish_drain(position, worker_bookings);
        }
    }

    pub(super) fn on_drain_timed_out(&mut self, worker: WorkerId, drain: u64, worker_bookings: usize) {
        let timed_out = |known: &PendingDrain<R>| known.worker == worker && known.drain == drain;
        if let Some(position) = self.drains.iter().position(timed_out) {
            self.finish_drain(position, worker_bookings);
        }
    }

    fn finish_drain(&mut self, position: usize, cut_off: usize) {
        let PendingDrain { worker, reply, .. } = self.drains.remove(position);
        self.withheld.insert(worker);
        self.remove(worker, Completion::Reply { to: reply, cut_off });
        self.refresh_removed();
    }
}
