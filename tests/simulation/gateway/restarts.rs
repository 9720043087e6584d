//! Deaths and restarts of actors, within the restart budget.

use std::time::Duration;

use pointsman::internals::config::SupervisionConfig;
use pointsman::internals::membership::Child;
use pointsman::internals::protocol::Slot;
use pointsman::internals::shell::scheduler::SchedulerMsg;
use pointsman::internals::shell::supervisor::SupervisedRank;
use pointsman::protocol::WorkerRank;

use super::{EntrySource, Gateway, Surroundings};
use crate::letter::Letter;
use crate::net::Actor;

/// Actor that a fault ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Victim {
    Scheduler,
    /// The n-th of the running ones.
    Sequence(usize),
    Shard(usize),
    Reader(usize),
    Health,
}

impl Gateway {
    /// An actor panics: its state is lost, and the supervisor receives the death later.
    pub(crate) fn kill(&mut self, victim: Victim, around: &mut Surroundings<'_>) {
        let child = match victim {
            Victim::Scheduler => self.scheduler.take().map(|_| Child::Scheduler),
            Victim::Shard(shard) => {
                let shard = shard % self.shards.len();
                self.shards[shard].take().map(|_| Child::IndexShard(shard))
            }
            Victim::Health => self.health.take().map(|_| Child::Health),
            Victim::Sequence(nth) => {
                let mut alive = self.sequences.iter_mut().filter(|(_, (_, sequence))| sequence.is_some());
                let count = alive.by_ref().count().max(1);
                let alive = self.sequences.iter_mut().filter(|(_, (_, sequence))| sequence.is_some());
                alive
                    .skip(nth % count)
                    .map(|(slot, (_, sequence))| (*slot, sequence.take()))
                    .next()
                    .map(|(slot, _)| Child::Sequence(slot))
            }
            Victim::Reader(nth) => {
                let slot = self.readers.keys().nth(nth % self.readers.len().max(1)).copied();
                slot.inspect(|slot| drop(self.readers.remove(slot))).map(Child::Reader)
            }
        };
        let Some(child) = child else { return };
        let delay = Duration::from_micros(20 + around.net.draw(3_000));
        around.net.after(delay, self.place(Actor::Supervisor), Letter::Died(child));
        self.send_notices(Actor::Supervisor, around);
    }

    /// Performs a restart that the machine permits, and checks the budget against a count of its own.
    pub(super) fn restart(&mut self, child: Child, lost: &[WorkerRank], around: &mut Surroundings<'_>) {
        let now = around.net.now;
        self.restarts.retain(|at| now.since(*at) <= SupervisionConfig::RESTART_WINDOW);
        self.restarts.push(now);
        let restarts_max = self.settings.config.supervision.restarts_max as usize;
        assert!(self.restarts.len() <= restarts_max, "{} restarts within the window", self.restarts.len());
        let incarnation = self.membership().incarnation(child);
        match child {
            Child::Scheduler => self.start_scheduler(incarnation, around),
            Child::IndexShard(shard) => {
                let mut lost_ranks = self.supervisor.of_shard(shard).map(|(rank, _)| rank);
                let is_forgotten = |rank: &&EntrySource| rank.is_indexed() && !lost.contains(&rank.rank());
                let forgotten = lost_ranks.find(is_forgotten).map(SupervisedRank::rank);
                drop(lost_ranks);
                assert!(forgotten.is_none(), "{forgotten:?} is not cold after the loss of shard {shard}");
                self.start_shard(shard, incarnation, lost, now);
                self.resync(shard, around);
            }
            Child::Sequence(slot) => self.restart_sequence(slot, incarnation, around),
            Child::Health => self.start_health(around),
            Child::Reader(_) | Child::EngineLoads | Child::Source(_) => {}
        }
    }

    fn restart_sequence(&mut self, slot: Slot, incarnation: u32, around: &mut Surroundings<'_>) {
        let Some(entry) = self.entry(slot).cloned() else { return };
        self.start_sequence(&entry, incarnation, around.net.now);
        if self.is_queueing() {
            self.send(Actor::Supervisor, Actor::Scheduler, Letter::scheduler(SchedulerMsg::Wake { at: None }), around);
        }
    }

    /// Requests a replay for the ranks of a restarted shard.
    fn resync(&mut self, shard: usize, around: &mut Surroundings<'_>) {
        let slots: Vec<Slot> = self.readers.keys().copied().collect();
        for slot in slots {
            let is_here = self.entry(slot).is_some_and(|entry| self.shard_of(entry.rank) == shard);
            if let Some(reader) = self.reader_place(slot).filter(|_| is_here) {
                self.send(Actor::Supervisor, reader, Letter::Resync, around);
            }
        }
    }

    /// The restart budget is spent: the router ends, and every waiting caller gets an error.
    pub(super) fn fail_router(&mut self, around: &mut Surroundings<'_>) {
        let restarts_max = self.settings.config.supervision.restarts_max as usize;
        let now = around.net.now;
        self.restarts.retain(|at| now.since(*at) <= SupervisionConfig::RESTART_WINDOW);
        assert!(
            self.restarts.len() >= restarts_max,
            "the router fails with {} restarts left",
            restarts_max - self.restarts.len()
        );
        self.fail(around);
        (self.scheduler, self.health) = (None, None);
        self.shards.iter_mut().for_each(|shard| *shard = None);
        self.sequences.clear();
        self.readers.clear();
        self.supervisor = Self::new_supervisor(&self.settings, &self.directory);
        self.admin_pending.clear();
    }

    /// Takes a snapshot of every rank whose reader has a position.
    pub(crate) fn take_snapshot(&mut self, around: &mut Surroundings<'_>) {
        let slots: Vec<Slot> = self.readers.keys().copied().collect();
        for reader in slots.into_iter().filter_map(|slot| self.reader_place(slot)) {
            self.send(Actor::Supervisor, reader, Letter::TakeSnapshot, around);
        }
    }
}
