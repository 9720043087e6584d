//! Slow reference model of membership, without slots and effects.
//!
//! Each start of a rank has a number of its own. The model keeps complete sets and recomputes what follows from them.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::MembershipError;
use crate::membership::block_size::EVENT_CHANGES_MAX;
use crate::protocol::{
    BlockSizeOrigin, PoolBlockSize, WorkerConfig, WorkerConfigError, WorkerId, WorkerMap, WorkerRank,
};

/// Registered worker of the model.
pub(super) struct ModelWorker {
    pub(super) config: WorkerConfig,
    pub(super) source: Option<usize>,
    pub(super) cordoned: bool,
    pub(super) drain: Option<ModelDrain>,
    /// Start number of each rank.
    pub(super) ranks: BTreeMap<WorkerRank, u64>,
    /// Block size of its events.
    events_size: Option<u32>,
}

pub(super) struct ModelDrain {
    number: u64,
    /// None for a drain by the source.
    pub(super) reply: Option<u32>,
    left: BTreeSet<u64>,
}

enum Waiting {
    Reply(u32, usize),
    Departure(usize, WorkerId),
}

pub(super) struct Model {
    pub(super) size: PoolBlockSize,
    /// All at one time.
    size_changes: u32,
    pub(super) workers: BTreeMap<WorkerId, ModelWorker>,
    pub(super) sets: Vec<Option<WorkerMap>>,
    pub(super) refused: BTreeSet<(usize, WorkerId)>,
    pub(super) cold: BTreeSet<WorkerRank>,
    /// Replies so far, in any order within a step.
    pub(super) replies: Vec<(u32, Result<usize, MembershipError>)>,
    pub(super) drains: u64,
    withheld: BTreeSet<WorkerId>,
    starts: u64,
    retiring: BTreeMap<u64, WorkerId>,
    waiting: Vec<(BTreeSet<u64>, Waiting)>,
}

impl Model {
    pub(super) fn new(sources: usize) -> Self {
        Self {
            size: PoolBlockSize { tokens: 64, origin: BlockSizeOrigin::Awaited },
            size_changes: 0,
            workers: BTreeMap::new(),
            sets: vec![None; sources],
            refused: BTreeSet::new(),
            cold: BTreeSet::new(),
            replies: Vec::new(),
            drains: 0,
            withheld: BTreeSet::new(),
            starts: 0,
            retiring: BTreeMap::new(),
            waiting: Vec::new(),
        }
    }

    pub(super) fn upsert(&mut self, worker: WorkerId, config: &WorkerConfig, reply: u32) {
        let result = self.register(worker, config, None);
        self.replies.push((reply, result.map(|()| 0)));
    }

    fn register(
        &mut self,
        worker: WorkerId,
        config: &WorkerConfig,
        source: Option<usize>,
    ) -> Result<(), MembershipError> {
        let valid = if config.drain { Err(WorkerConfigError::Drain) } else { config.validate() };
        valid.map_err(|error| MembershipError::Config { worker, error })?;
        if self.workers.get(&worker).is_some_and(|old| old.drain.is_some()) {
            return Err(MembershipError::Draining(worker));
        }
        let events_size = self.events_size_of(worker, config);
        self.settle_size(worker, (events_size.or(config.block_size), events_size.is_some()));
        let old = self.workers.remove(&worker);
        let cordoned = old.as_ref().is_some_and(|old| old.cordoned);
        let mut old_ranks = BTreeMap::new();
        if let Some(old) = old {
            if old.config.endpoint == config.endpoint {
                old_ranks = old.ranks;
            } else {
                self.retire(old.ranks);
            }
        }
        let mut ranks = BTreeMap::new();
        for rank in config.ranks(worker) {
            self.starts += 1;
            ranks.insert(rank, old_ranks.remove(&rank).unwrap_or(self.starts));
        }
        self.retire(old_ranks);
        self.withheld.remove(&worker);
        let worker_now = ModelWorker { config: config.clone(), source, cordoned, drain: None, ranks, events_size };
        self.workers.insert(worker, worker_now);
        Ok(())
    }

    /// Size of the events that the engine at this configuration has published so far.
    fn events_size_of(&self, worker: WorkerId, config: &WorkerConfig) -> Option<u32> {
        let old = self.workers.get(&worker)?;
        let is_same = old.config.endpoint == config.endpoint && old.config.block_size == config.block_size;
        if is_same { old.events_size } else { None }
    }

    /// A report with its kind: events, or a statement before them.
    fn settle_size(&mut self, worker: WorkerId, (size, by_events): (Option<u32>, bool)) {
        let PoolBlockSize { tokens, origin } = self.size;
        let size = size.map(PoolBlockSize::of_engine);
        let in_service = self.workers.iter().filter(|(other, known)| **other != worker && known.drain.is_none());
        let holds = |known: &ModelWorker| match known.events_size {
            Some(size) => PoolBlockSize::of_engine(size) == tokens,
            None => !by_events && known.config.block_size.map(PoolBlockSize::of_engine) == Some(tokens),
        };
        let holders = in_service.filter(|(_, known)| holds(known)).count();
        match size {
            None if origin == BlockSizeOrigin::Awaited => self.size.origin = BlockSizeOrigin::Assumed,
            None => {}
            Some(_) if origin == BlockSizeOrigin::Configured => {}
            Some(_) if origin == BlockSizeOrigin::Reported && holders > 0 => {}
            Some(size) => self.size = PoolBlockSize { tokens: size, origin: BlockSizeOrigin::Reported },
        }
    }

    /// The events of a rank with this block size were read.
    pub(super) fn events_sized(&mut self, worker: WorkerId, size: u32) {
        let known = self.workers.get_mut(&worker).filter(|known| known.config.block_size.unwrap_or(1) <= size);
        let Some(known) = known else { return };
        if PoolBlockSize::of_engine(size) != self.size.tokens {
            self.size_changes += 1;
            if self.size_changes > EVENT_CHANGES_MAX {
                return;
            }
        }
        known.events_size = Some(size);
        self.settle_size(worker, (Some(size), true));
    }

    fn retire(&mut self, ranks: BTreeMap<WorkerRank, u64>) {
        for (rank, start) in ranks {
            self.retiring.insert(start, rank.worker);
            self.cold.remove(&rank);
        }
    }

    fn leave(&mut self, worker: WorkerId, waiting: Waiting) {
        let left = self.workers.remove(&worker).expect("registered");
        if let Some(reply) = left.drain.and_then(|drain| drain.reply) {
            self.replies.push((reply, Err(MembershipError::UnknownWorker(worker))));
        }
        self.retire(left.ranks);
        let own = self.retiring.iter().filter(|(_, owner)| **owner == worker).map(|(start, _)| *start).collect();
        self.waiting.push((own, waiting));
    }

    pub(super) fn remove(&mut self, worker: WorkerId, reply: u32) {
        if !self.workers.contains_key(&worker) {
            return self.replies.push((reply, Err(MembershipError::UnknownWorker(worker))));
        }
        if self.named(worker).is_some() {
            self.withheld.insert(worker);
        }
        self.leave(worker, Waiting::Reply(reply, 0));
    }

    pub(super) fn drain(&mut self, worker: WorkerId, reply: u32) {
        let error = match self.workers.get_mut(&worker) {
            None => MembershipError::UnknownWorker(worker),
            Some(known) if known.drain.is_some() => MembershipError::Draining(worker),
            Some(_) => return self.start_drain(worker, Some(reply)),
        };
        self.replies.push((reply, Err(error)));
    }

    fn start_drain(&mut self, worker: WorkerId, reply: Option<u32>) {
        let known = self.workers.get_mut(&worker).expect("registered");
        self.drains += 1;
        let left = known.ranks.values().copied().collect();
        known.drain = Some(ModelDrain { number: self.drains, reply, left });
    }

    /// All bookings of the rank with this start number have ended.
    pub(super) fn drained(&mut self, start: u64, cut_off: usize) {
        let drains = self.workers.iter_mut().filter_map(|(worker, known)| Some((*worker, known.drain.as_mut()?)));
        let done = drains
            .into_iter()
            .find_map(|(worker, drain)| (drain.left.remove(&start) && drain.left.is_empty()).then_some(worker));
        if let Some(worker) = done {
            self.end_drain(worker, cut_off);
        }
    }

    pub(super) fn drain_timed_out(&mut self, worker: WorkerId, number: u64, cut_off: usize) {
        let drain = self.workers.get(&worker).and_then(|known| known.drain.as_ref());
        if drain.is_some_and(|drain| drain.number == number) {
            self.end_drain(worker, cut_off);
        }
    }

    fn end_drain(&mut self, worker: WorkerId, cut_off: usize) {
        let drain = self.workers.get_mut(&worker).and_then(|known| known.drain.take()).expect("draining");
        match drain.reply {
            Some(reply) => {
                if self.named(worker).is_some() {
                    self.withheld.insert(worker);
                }
                self.leave(worker, Waiting::Reply(reply, cut_off));
            }
            None => {
                let source = self.workers[&worker].source.expect("drained by its source");
                self.leave(worker, Waiting::Departure(source, worker));
            }
        }
    }

    pub(super) fn undrain(&mut self, worker: WorkerId, reply: u32) {
        let is_by_source = |known: &mut ModelWorker| known.drain.as_ref().is_some_and(|drain| drain.reply.is_none());
        if self.workers.get_mut(&worker).is_some_and(is_by_source) {
            return self.replies.push((reply, Err(MembershipError::DrainedBySource(worker))));
        }
        let result = match self.workers.get_mut(&worker).map(|known| known.drain.take()) {
            Some(Some(drain)) => {
                let caller = drain.reply.expect("not by the source");
                self.replies.push((caller, Err(MembershipError::Undrained(worker))));
                Ok(0)
            }
            Some(None) => Err(MembershipError::NotDraining(worker)),
            None if self.withheld.remove(&worker) => {
                self.reconcile();
                Ok(0)
            }
            None => Err(MembershipError::UnknownWorker(worker)),
        };
        self.replies.push((reply, result));
    }

    pub(super) fn cordon(&mut self, worker: WorkerId, cordoned: bool, reply: u32) {
        let result = match self.workers.get_mut(&worker) {
            None => Err(MembershipError::UnknownWorker(worker)),
            Some(known) if known.drain.is_some() => Err(MembershipError::Draining(worker)),
            Some(known) => {
                known.cordoned = cordoned;
                Ok(0)
            }
        };
        self.replies.push((reply, result));
    }

    /// First source that names the worker, with its configuration.
    fn named(&self, worker: WorkerId) -> Option<(usize, WorkerConfig)> {
        let sets = self.sets.iter().enumerate();
        sets.filter_map(|(source, set)| Some((source, set.as_ref()?.get(&worker)?.clone()))).next()
    }

    pub(super) fn reconcile(&mut self) {
        self.refused.clear();
        let sets: Vec<WorkerMap> = self.sets.iter().flatten().cloned().collect();
        let everyone: BTreeSet<WorkerId> =
            sets.iter().flat_map(WorkerMap::keys).chain(self.workers.keys()).chain(&self.withheld).copied().collect();
        let mut changed = Vec::new();
        for worker in everyone {
            let Some((source, config)) = self.named(worker) else {
                self.withheld.remove(&worker);
                if let Some(source) = self.workers.get(&worker).and_then(|known| known.source) {
                    self.leave(worker, Waiting::Departure(source, worker));
                }
                continue;
            };
            match self.workers.get_mut(&worker) {
                None if config.drain || self.withheld.contains(&worker) => continue,
                None => {}
                Some(known) if known.source.is_none() => continue,
                Some(ModelWorker { drain: Some(ModelDrain { reply: Some(_), .. }), .. }) => continue,
                Some(known) => {
                    known.source = Some(source);
                    if config.drain {
                        if known.drain.is_none() {
                            self.start_drain(worker, None);
                        }
                        continue;
                    }
                    known.drain = None;
                    if known.config == config {
                        continue;
                    }
                }
            }
            changed.push((worker, source, config));
        }
        for (worker, source, config) in changed {
            if self.register(worker, &config, Some(source)).is_err() {
                self.refused.insert((source, worker));
            }
        }
    }

    pub(super) fn retired(&mut self, start: u64) {
        self.retiring.remove(&start);
    }

    /// Ends all waits whose ranks have retired. Call after each step.
    pub(super) fn settle(&mut self) {
        let retiring = &self.retiring;
        for (_, waiting) in self.waiting.extract_if(.., |(left, _)| left.iter().all(|s| !retiring.contains_key(s))) {
            if let Waiting::Reply(reply, cut_off) = waiting {
                self.replies.push((reply, Ok(cut_off)));
            }
        }
    }

    pub(super) fn running(&self) -> BTreeMap<WorkerRank, u64> {
        self.workers.values().flat_map(|worker| worker.ranks.clone()).collect()
    }

    pub(super) fn leaving(&self, source: usize) -> BTreeSet<WorkerId> {
        let departures = self.waiting.iter().filter_map(|(_, waiting)| match waiting {
            Waiting::Departure(of, worker) if *of == source => Some(*worker),
            Waiting::Departure(..) | Waiting::Reply(..) => None,
        });
        departures.collect()
    }

    pub(super) fn removed(&self, source: usize) -> BTreeSet<WorkerId> {
        let named = self.sets[source].iter().flat_map(WorkerMap::keys);
        named.filter(|worker| self.withheld.contains(worker)).copied().collect()
    }
}
