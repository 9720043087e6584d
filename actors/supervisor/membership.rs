//! Membership: which ranks should run, and the ways out: removal and drain.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ractor::ActorProcessingErr;
use tokio::sync::oneshot;

use super::discovery::Departure;
use super::{DrainAck, RetireAck, Running, State, SupervisorMsg, Worker};
use crate::actors::health::HealthMsg;
use crate::actors::radix::{RadixMsg, shard_of};
use crate::actors::scheduler::SchedulerMsg;
use crate::actors::shared::RankEntry;
use crate::actors::views::worker::WorkerEntry;
use crate::error::MembershipError;
use crate::load::PromptLimits;
use crate::protocol::{Generation, Slot, WorkerConfig, WorkerConfigError, WorkerId, WorkerRank};
use crate::select::RankTraits;

/// Somebody who waits for ranks to be gone.
pub(super) struct Removal {
    pub(super) left: BTreeSet<(Slot, Generation)>,
    pub(super) answer: RemovalAnswer,
}

pub(super) enum RemovalAnswer {
    Removed(oneshot::Sender<Result<(), MembershipError>>),
    /// With the bookings that were cut off.
    Drained(oneshot::Sender<Result<usize, MembershipError>>, usize),
    /// A source has stopped naming the worker.
    Departed(Departure),
}

impl RemovalAnswer {
    fn done(self) {
        match self {
            Self::Removed(answer) => drop(answer.send(Ok(()))),
            Self::Drained(answer, cut_off) => drop(answer.send(Ok(cut_off))),
            Self::Departed(departure) => drop(departure),
        }
    }
}

/// A worker that is being drained.
pub(super) struct Draining {
    drain: u64,
    worker: WorkerId,
    /// Ranks that may have bookings left.
    left: BTreeSet<(Slot, Generation)>,
    answer: oneshot::Sender<Result<usize, MembershipError>>,
}

impl State {
    pub(super) async fn on_upsert(
        &mut self,
        worker: WorkerId,
        config: WorkerConfig,
        source: Option<usize>,
    ) -> Result<Result<(), MembershipError>, ActorProcessingErr> {
        if let Err(error) = self.check(&config) {
            return Ok(Err(MembershipError::Config { worker, error }));
        }
        if self.workers.get(&worker).is_some_and(|known| known.draining) {
            return Ok(Err(MembershipError::Draining(worker)));
        }
        // Another endpoint is another engine: what the old one held and ran is gone.
        let cordoned = self.workers.get(&worker).is_some_and(|known| known.cordoned);
        if self.workers.get(&worker).is_some_and(|known| known.config.endpoint != config.endpoint) {
            self.retire_worker(worker);
        }
        let wanted: BTreeSet<WorkerRank> = config.ranks(worker).collect();
        let running: BTreeMap<WorkerRank, Slot> =
            self.workers.get(&worker).map(|w| w.slots.clone()).unwrap_or_default();
        for (rank, slot) in running.iter().filter(|(rank, _)| !wanted.contains(rank)) {
            self.retire(*rank, *slot);
        }
        let mut slots: BTreeMap<_, _> = running.into_iter().filter(|(rank, _)| wanted.contains(rank)).collect();
        let endpoint = Arc::<str>::from(config.endpoint.as_str());
        let number = |rank: WorkerRank| match config.data_parallel_size {
            1 => RankEntry::ALONE,
            _ => rank.rank - config.data_parallel_start_rank,
        };
        let traits = Arc::new(RankTraits::of(&config));
        for (rank, slot) in &slots {
            self.describe(*slot, number(*rank), &traits);
        }
        for rank in wanted {
            if let std::collections::btree_map::Entry::Vacant(vacant) = slots.entry(rank) {
                vacant.insert(self.start_rank(rank, Arc::clone(&endpoint), number(rank), &traits).await?);
            }
        }
        self.drained.remove(&worker);
        if !self.workers.contains_key(&worker) {
            let (pool, source) = (self.shared.config.pool.as_str(), self.source_name(source));
            let (url, ranks) = (config.endpoint.as_str(), slots.len());
            tracing::info!(pool, worker = url, worker_id = %worker, ranks, source, "worker joined");
            self.report_unstated_capacity(&config);
        }
        #[cfg(feature = "zmq")]
        let ranks: Vec<Slot> = slots.values().copied().collect();
        self.workers.insert(worker, Worker { config, traits, draining: false, cordoned, slots, source });
        #[cfg(feature = "zmq")]
        for slot in ranks {
            self.read_events(slot).await?;
        }
        Ok(Ok(()))
    }

    /// Logs, once a router, that limits which are a share of `max_num_batched_tokens` rest on an assumption.
    fn report_unstated_capacity(&mut self, worker: &WorkerConfig) {
        let config = &self.shared.config;
        let assumes = worker.max_num_batched_tokens.is_none() && config.depends_on_batched_tokens();
        if assumes && !std::mem::replace(&mut self.unstated_capacity_reported, true) {
            let (pool, url) = (config.pool.as_str(), worker.endpoint.as_str());
            let assumed = config.batched_tokens_where_unstated();
            tracing::info!(pool, worker = url, assumed, "worker states no max_num_batched_tokens");
        }
    }

    fn check(&self, config: &WorkerConfig) -> Result<(), WorkerConfigError> {
        config.validate()?;
        #[cfg(not(feature = "zmq"))]
        if config.kv_events.is_some() {
            return Err(WorkerConfigError::NoReader);
        }
        let pool = self.shared.config.is_eagle;
        match config.is_eagle {
            Some(worker) if worker != pool => Err(WorkerConfigError::Eagle { worker, pool }),
            _ => Ok(()),
        }
    }

    pub(super) fn on_remove(&mut self, worker: WorkerId, answer: oneshot::Sender<Result<(), MembershipError>>) {
        if !self.workers.contains_key(&worker) {
            drop(answer.send(Err(MembershipError::UnknownWorker(worker))));
            return;
        }
        if self.is_named(worker) {
            self.drained.insert(worker); // until discovery is seen not to name it
        }
        let left = self.retire_worker(worker);
        self.publish_workers();
        self.show_removed();
        self.removals.push(Removal { left, answer: RemovalAnswer::Removed(answer) });
        self.finish_removals();
    }

    /// Shows what a rank's worker says of it now, and tells the scheduler.
    fn describe(&self, slot: Slot, number_at_worker: u32, traits: &Arc<RankTraits>) {
        if let Some(Some(running)) = self.entries.get(slot.index()) {
            running.entry.number_at_worker.store(number_at_worker, Ordering::Relaxed);
            let (generation, traits) = (running.entry.generation, Arc::clone(traits));
            self.register(&running.entry, &traits);
            self.shared.scheduler.tell(SchedulerMsg::Describe { slot, generation, traits });
        }
    }

    pub(super) fn on_drain(
        &mut self,
        worker: WorkerId,
        deadline: Duration,
        answer: oneshot::Sender<Result<usize, MembershipError>>,
    ) {
        let Some(known) = self.workers.get_mut(&worker) else {
            drop(answer.send(Err(MembershipError::UnknownWorker(worker))));
            return;
        };
        if std::mem::replace(&mut known.draining, true) {
            drop(answer.send(Err(MembershipError::Draining(worker))));
            return;
        }
        // Ranks that are being removed already are told so, and have an end of their own.
        let staying = self.entries.iter().flatten().filter(|running| !running.retiring).map(|running| &running.entry);
        let staying = staying.filter(|entry| entry.rank.worker == worker);
        let left: BTreeSet<(Slot, Generation)> = staying.map(|entry| (entry.slot, entry.generation)).collect();
        self.drains_started += 1;
        let drain = self.drains_started;
        self.drains.push(Draining { drain, worker, left: left.clone(), answer });
        self.publish_workers();
        for (slot, generation) in left {
            self.tell_drain(slot, generation);
        }
        let myself = self.myself.clone();
        tokio::spawn(async move {
            tokio::time::sleep(deadline).await;
            drop(myself.send_message(SupervisorMsg::DrainOver { worker, drain }));
        });
    }

    pub(super) fn on_cordon(&mut self, worker: WorkerId, cordoned: bool) -> Result<(), MembershipError> {
        let known = self.workers.get_mut(&worker).ok_or(MembershipError::UnknownWorker(worker))?;
        if known.draining {
            return Err(MembershipError::Draining(worker));
        }
        if std::mem::replace(&mut known.cordoned, cordoned) != cordoned {
            self.show_cordon(worker, cordoned);
            self.publish_workers();
        }
        Ok(())
    }

    /// Shows the scheduler whether the worker's ranks get new work.
    fn show_cordon(&self, worker: WorkerId, cordoned: bool) {
        let running = self.entries.iter().flatten().filter(|running| !running.retiring).map(|running| &running.entry);
        for entry in running.filter(|entry| entry.rank.worker == worker) {
            let (slot, generation) = (entry.slot, entry.generation);
            self.shared.scheduler.tell(SchedulerMsg::Cordon { slot, generation, cordoned });
        }
    }

    /// A drain under way ends, and the worker serves on; of a worker that has left, discovery is heard again.
    pub(super) async fn on_undrain(
        &mut self,
        worker: WorkerId,
    ) -> Result<Result<(), MembershipError>, ActorProcessingErr> {
        if let Some(known) = self.workers.get_mut(&worker) {
            if !std::mem::replace(&mut known.draining, false) {
                return Ok(Err(MembershipError::NotDraining(worker)));
            }
            let cordoned = known.cordoned;
            for Draining { answer, .. } in self.drains.extract_if(.., |drain| drain.worker == worker) {
                drop(answer.send(Err(MembershipError::Undrained(worker))));
            }
            self.show_cordon(worker, cordoned);
            self.publish_workers();
            return Ok(Ok(()));
        }
        if !self.drained.remove(&worker) {
            return Ok(Err(MembershipError::UnknownWorker(worker)));
        }
        self.reconcile().await?;
        Ok(Ok(()))
    }

    fn tell_drain(&self, slot: Slot, generation: Generation) {
        let ack = DrainAck { supervisor: self.myself.clone(), slot, generation };
        self.shared.scheduler.tell(SchedulerMsg::Drain { slot, generation, ack });
    }

    pub(super) fn on_drained(&mut self, slot: Slot, generation: Generation) {
        let Some(position) = self.drains.iter().position(|drain| drain.left.contains(&(slot, generation))) else {
            return;
        };
        if !self.shared.directory.booked_on(slot, generation).is_empty() {
            return self.tell_drain(slot, generation); // lost with its actor, not empty
        }
        self.drains[position].left.remove(&(slot, generation));
        if self.drains[position].left.is_empty() {
            self.finish_drain(position);
        }
    }

    pub(super) fn on_drain_over(&mut self, worker: WorkerId, drain: u64) {
        let over = |known: &Draining| known.worker == worker && known.drain == drain;
        if let Some(position) = self.drains.iter().position(over) {
            self.finish_drain(position);
        }
    }

    /// The worker leaves now, whatever is left on it.
    fn finish_drain(&mut self, position: usize) {
        let Draining { worker, answer, .. } = self.drains.remove(position);
        let booked =
            self.entries_of(worker).map(|(slot, generation)| self.shared.directory.booked_on(slot, generation));
        let cut_off = booked.map(|leases| leases.len()).sum();
        self.drained.insert(worker); // until discovery is seen not to name it
        let left = self.retire_worker(worker);
        self.publish_workers();
        self.show_removed();
        self.removals.push(Removal { left, answer: RemovalAnswer::Drained(answer, cut_off) });
        self.finish_removals();
    }

    pub(super) fn finish_removals(&mut self) {
        for done in self.removals.extract_if(.., |removal| removal.left.is_empty()) {
            done.answer.done();
        }
    }

    /// The entries of a worker's ranks, those on their way out included.
    fn entries_of(&self, worker: WorkerId) -> impl Iterator<Item = (Slot, Generation)> {
        let entries = self.entries.iter().flatten().map(|running| &running.entry);
        entries.filter(move |entry| entry.rank.worker == worker).map(|entry| (entry.slot, entry.generation))
    }

    /// Starts to remove a worker; what must end before it is gone.
    pub(super) fn retire_worker(&mut self, worker: WorkerId) -> BTreeSet<(Slot, Generation)> {
        if let Some(Worker { config, slots, source, .. }) = self.workers.remove(&worker) {
            let (pool, source) = (self.shared.config.pool.as_str(), self.source_name(source));
            let url = config.endpoint.as_str();
            tracing::info!(pool, worker = url, worker_id = %worker, ranks = slots.len(), source, "worker left");
            for (rank, slot) in slots {
                self.retire(rank, slot);
            }
        }
        if let Some(position) = self.drains.iter().position(|drain| drain.worker == worker) {
            // Removed while it was drained: the drain is over.
            let Draining { answer, .. } = self.drains.remove(position);
            drop(answer.send(Err(MembershipError::UnknownWorker(worker))));
        }
        self.entries_of(worker).collect()
    }

    /// The index forgets the rank at once; the scheduler passes the word on behind its last Book.
    fn retire(&mut self, rank: WorkerRank, slot: Slot) {
        let Some(Some(running)) = self.entries.get_mut(slot.index()) else { return };
        running.retiring = true;
        let generation = running.entry.generation;
        #[cfg(feature = "zmq")]
        self.stop_reading(slot);
        if let Some(shard) = self.shard(rank) {
            shard.tell(RadixMsg::Remove { rank });
        }
        self.warm(rank);
        let ack = RetireAck { supervisor: self.myself.clone(), slot, generation };
        self.shared.scheduler.tell(SchedulerMsg::Retire { slot, generation, ack });
    }

    pub(super) fn on_retired(&mut self, slot: Slot, generation: Generation) {
        let here = |running: &&mut Option<Running>| running.as_ref().is_some_and(|r| r.entry.generation == generation);
        let Some(running) = self.entries.get_mut(slot.index()).filter(here).and_then(Option::take) else { return };
        self.children.remove(&running.actor);
        self.shared.set_entry(slot, None);
        running.entry.strand.close();
        // Whatever the actor did not live to end.
        for lease in self.shared.directory.booked_on(slot, generation) {
            self.shared.end(&lease);
        }
        self.free_slots.insert(slot);
        for removal in &mut self.removals {
            removal.left.remove(&(slot, generation));
        }
        self.finish_removals();
    }

    pub(super) fn publish_workers(&self) {
        let entry = |(worker, known): (&WorkerId, &Worker)| WorkerEntry {
            worker: *worker,
            config: known.config.clone(),
            ranks: known.slots.keys().copied().collect(),
            draining: known.draining,
            cordoned: known.cordoned,
        };
        let configs = self.workers.values().map(|worker| &worker.config);
        self.shared.set_prompt_limits(PromptLimits::of(configs, self.shared.config.block_size));
        self.shared.workers.send_replace(self.workers.iter().map(entry).collect());
        self.shared.health.tell(HealthMsg::MembersChanged);
    }

    /// News of a shard that has died since would un-name a rank that is cold again.
    pub(super) fn on_warmed(&self, rank: WorkerRank, incarnation: u32) {
        let shard = shard_of(rank, self.shared.shards.len());
        if self.radix_incarnations.get(shard) == Some(&incarnation) {
            self.warm(rank);
        }
    }

    fn warm(&self, rank: WorkerRank) {
        self.shared.cold.send_if_modified(|cold| cold.remove(&rank));
    }
}
