//! Drains, and removals that wait for ranks to retire.

use std::collections::BTreeSet;
use std::time::Duration;

use super::removals::{Completion, DrainOrigin, PendingDrain, PendingRemoval};
use super::{Membership, MembershipEffect, MembershipReport};
use crate::error::MembershipError;
use crate::protocol::{Generation, Slot, WorkerId};

impl<R> Membership<R> {
    pub(super) fn on_remove(&mut self, worker: WorkerId, reply: R) {
        if !self.workers.contains_key(&worker) {
            return self.outbox.reply(reply, Err(MembershipError::UnknownWorker(worker)));
        }
        self.withhold(worker);
        self.remove(worker, Completion::Reply { to: reply, cut_off: 0 });
        self.refresh_removed();
    }

    /// Withholds a worker from its sources. One that no source names is forgotten: without sources no reconciliation would
    /// end its entry.
    fn withhold(&mut self, worker: WorkerId) {
        if self.is_named(worker) {
            self.withheld.insert(worker);
        }
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
        match self.workers.get(&worker) {
            None => self.outbox.reply(reply, Err(MembershipError::UnknownWorker(worker))),
            Some(known) if known.draining => self.outbox.reply(reply, Err(MembershipError::Draining(worker))),
            Some(_) => self.start_drain(worker, deadline, DrainOrigin::Caller(reply)),
        }
    }

    fn start_drain(&mut self, worker: WorkerId, deadline: Duration, origin: DrainOrigin<R>) {
        let Some(known) = self.workers.get_mut(&worker) else { return };
        known.draining = true;
        let left: BTreeSet<(Slot, Generation)> = self.slots.running_of(worker).collect();
        for (slot, generation) in left.iter().copied() {
            self.outbox.push(MembershipEffect::DrainRank { slot, generation });
        }
        self.drains_started += 1;
        let drain = self.drains_started;
        self.drains.push(PendingDrain { drain, worker, left, origin });
        self.outbox.push(MembershipEffect::StartDrainTimer { worker, drain, deadline });
        self.outbox.workers_changed = true;
    }

    /// Starts the drain of a worker that its source drains.
    pub(super) fn drain_by_source(&mut self, worker: WorkerId) {
        let Some(known) = self.workers.get(&worker) else { return };
        let (endpoint, source) = (known.config.endpoint.clone(), self.source_name(known.source));
        self.outbox.report(MembershipReport::Drains { worker, endpoint, source });
        self.start_drain(worker, self.rules.source_drain_timeout, DrainOrigin::Source);
    }

    /// Ends the drain of a worker that its source no longer drains.
    pub(super) fn undrain_by_source(&mut self, worker: WorkerId) {
        if let Some(known) = self.workers.get_mut(&worker) {
            known.draining = false;
            let cordoned = known.cordoned;
            self.drains.retain(|drain| drain.worker != worker);
            self.restrict_ranks(worker, cordoned);
            self.outbox.workers_changed = true;
        }
    }

    /// Whether the source of the worker drains it.
    pub(super) fn is_drained_by_source(&self, worker: WorkerId) -> bool {
        let is_it = |drain: &PendingDrain<R>| drain.worker == worker && matches!(drain.origin, DrainOrigin::Source);
        self.drains.iter().any(is_it)
    }

    /// Ends a drain in progress, or permits discovery to add the worker again.
    pub(super) fn on_undrain(&mut self, worker: WorkerId, reply: R) {
        let result = if self.is_drained_by_source(worker) {
            Err(MembershipError::DrainedBySource(worker))
        } else if let Some(known) = self.workers.get_mut(&worker) {
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

    /// Ends the drain of a worker, if there is one, with an error for its caller.
    pub(super) fn end_drain(&mut self, worker: WorkerId, error: MembershipError) {
        if let Some(position) = self.drains.iter().position(|drain| drain.worker == worker) {
            match self.drains.remove(position).origin {
                DrainOrigin::Caller(reply) => self.outbox.reply(reply, Err(error)),
                DrainOrigin::Source => {}
            }
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
        let PendingDrain { worker, origin, .. } = self.drains.remove(position);
        match origin {
            DrainOrigin::Caller(reply) => {
                self.withhold(worker);
                self.remove(worker, Completion::Reply { to: reply, cut_off });
                self.refresh_removed();
            }
            DrainOrigin::Source => {
                let known = self.workers.get(&worker);
                let (endpoint, source) = known.map(|known| (known.config.endpoint.clone(), known.source)).unzip();
                if cut_off > 0 {
                    self.outbox.report(MembershipReport::CutOff { worker, endpoint, bookings: cut_off });
                }
                self.depart(worker, source.flatten());
            }
        }
    }
}
