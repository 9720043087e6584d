//! Invariants of a gateway, checked after every step.

use std::collections::{BTreeMap, BTreeSet};

use pointsman::internals::directory::LeaseState;
use pointsman::internals::protocol::{BookingId, Generation, Slot};
use pointsman::protocol::{Timestamp, WorkerRank};

use super::Gateway;
use crate::engine::Engine;
use crate::net::Actor;

impl Gateway {
    /// Checks the bounds, and the bookings and leases if the actor can change them.
    pub(super) fn check(&mut self, actor: Actor, now: Timestamp) {
        match actor {
            Actor::Caller(_) | Actor::Sequence(..) | Actor::Supervisor => self.check_bookings(actor, now),
            Actor::Scheduler | Actor::Shard(_) | Actor::Reader(..) | Actor::Health | Actor::Sharing => {}
        }
        if let Some(scheduler) = &self.scheduler {
            let (pending, permits) = (scheduler.shell.decider().pending(), self.permits.get());
            assert!(pending <= permits as usize, "{pending} requests wait with {permits} permits");
        }
        assert!(self.permits.get() <= self.settings.config.queue.requests_max, "requests without a reply are bounded");
    }

    /// Visits every lease.
    fn check_bookings(&mut self, actor: Actor, now: Timestamp) {
        let reconciling = &mut self.reconciling;
        reconciling.retain(|_, count| *count > 0);
        self.leases
            .retain(|booking, (_, lease)| lease.state() != LeaseState::Ended || reconciling.contains_key(booking));
        let mut booked: BTreeMap<(Slot, Generation), Vec<BookingId>> = BTreeMap::new();
        let mut open = 0;
        for (booking, (call, lease)) in &self.leases {
            match lease.state() {
                LeaseState::Booked { slot, generation } => booked.entry((slot, generation)).or_default().push(*booking),
                LeaseState::Pending => {}
                LeaseState::Ended => continue,
            }
            open += 1;
            assert!(self.owns(*call, lease), "request {call} has a lease without an owner");
        }
        assert_eq!(self.directory.len(), open, "leases in the directory");
        for (slot, (generation, sequence)) in &self.sequences {
            let here = booked.remove(&(*slot, *generation)).unwrap_or_default();
            let Some(sequence) = sequence else { continue };
            let held: BTreeSet<BookingId> = sequence.shell.active().bookings().collect();
            assert_eq!(sequence.shell.active().load(now).requests as usize, held.len(), "requests on slot {slot}");
            let lost = here.iter().find(|booking| !held.contains(booking));
            assert!(lost.is_none(), "booking {lost:?} on slot {slot} is lost");
            let is_explained = |booking: &&BookingId| here.contains(booking) || self.reconciling.contains_key(booking);
            let kept = held.iter().find(|booking| !is_explained(booking));
            assert!(kept.is_none(), "booking {kept:?} on slot {slot} outlives its lease");
        }
        assert!(booked.is_empty() || self.is_failed, "bookings on released slots: {booked:?}");
        if let Actor::Sequence(slot, _) = actor
            && let Some((_, Some(sequence))) = self.sequences.get(&Slot(slot))
        {
            sequence.shell.active().check_invariants();
        }
    }

    /// Requests booked by this gateway on a rank.
    pub(crate) fn requests_on(&self, rank: WorkerRank) -> u32 {
        let here = self.table().filter(|entry| entry.rank == rank);
        here.filter_map(|entry| entry.cells.board.read()).map(|board| board.requests).sum()
    }

    pub(crate) fn ranks(&self) -> Vec<WorkerRank> {
        self.membership().workers().values().flat_map(|worker| worker.slots.keys().copied()).collect()
    }

    /// Checks a gateway after a long time without faults and requests: no residue, and the index of every rank equals
    /// the cache of its engine.
    pub(crate) fn check_at_rest(&mut self, engines: &[Engine]) {
        let number = self.number;
        assert_eq!(self.calls(), 0, "calls at gateway {number} at rest");
        assert!(self.directory.is_empty(), "leases at gateway {number} at rest");
        assert_eq!(self.permits.get(), 0, "permits at gateway {number} at rest");
        assert!(self.admin_pending.is_empty(), "calls of the embedder without a reply: {:?}", self.admin_pending);
        assert!(!self.has_exclusions(), "ranks excluded at rest: {:?}", self.exclusions);
        let scheduler = self.scheduler.as_ref().expect("every dead actor is restarted");
        assert_eq!(scheduler.shell.decider().pending(), 0, "requests wait at rest");
        for (slot, (_, sequence)) in &self.sequences {
            let sequence = sequence.as_ref().expect("every dead actor is restarted");
            assert!(sequence.shell.active().is_empty(), "bookings on slot {slot} at rest");
            assert_eq!(
                self.entry(*slot).and_then(|entry| entry.cells.board.read()).map(|board| board.requests),
                Some(0),
                "board at rest"
            );
        }
        for rank in self.ranks() {
            assert_eq!(self.peer_requests_on(rank), 0, "load of other gateways on {rank} at rest");
            self.check_rank_at_rest(rank, engines);
        }
    }

    fn check_rank_at_rest(&self, rank: WorkerRank, engines: &[Engine]) {
        let entry = self.table().find(|entry| entry.rank == rank && self.membership().worker_at(entry.slot).is_some());
        let entry = entry.expect("a registered rank has an entry");
        let Some(reader) = self.readers.get(&entry.slot) else { return };
        let shard = self.shards[self.shard_of(rank)].as_ref().expect("every dead actor is restarted");
        let (engine, at_engine) = entry.engine();
        let source = reader.shell.source();
        // Without a replay socket, earlier messages are unknown before the first live one.
        let is_unheard = !self.settings.has_replay && source.position().is_none();
        let is_known = source.is_caught_up() || source.is_cold() || is_unheard;
        assert!(is_known, "source of {rank} at rest: {:?}, {:?}", source.state(), source.degradation());
        assert!(!shard.shell.is_cold(rank), "{rank} is cold at rest");
        if !self.settings.has_replay {
            return; // the last messages may be lost
        }
        let names = shard.shell.index().names_of(rank);
        let truth = engines[engine].present(at_engine);
        let is_held = names.iter().all(|(_, name)| truth.contains(&name.0));
        assert!(is_held, "index of {rank} at rest: {names:?}, engine {truth:?}, {source:?}");
        let tag = shard.tags.get(&rank).expect("the contents of a read rank are known");
        if tag.is_exact {
            assert_eq!(names.len(), truth.len(), "index of {rank} at rest: {names:?}, engine {truth:?}, {tag:?}");
        }
    }
}
