//! Membership: registered workers, their ranks and slots, block size, drains, discovery sources, KV event readers and
//! restarts.
//!
//! Pure state machine. [`Membership::step`] takes an input and the time and returns effects; the supervisor performs them
//! in order. Guarantees:
//!
//! - A slot has one rank at a time, and each assignment has a new generation.
//! - Each reply channel is used exactly once. A removal is acknowledged after all ranks of the worker have retired,
//!   ranks of an earlier configuration included.
//! - After [`MembershipInput::Reconcile`] the workers of discovery are those that its sources name, except workers that
//!   break a rule and workers that the embedder drained or removed. The source with the lowest number has precedence; a
//!   worker that the embedder added has precedence over all sources.
//! - A worker that its source drains is removed after its last booking or at a deadline, at once if no source names it
//!   any more, and stays if the source ends the drain before.
//! - A drained or cordoned worker gets no new requests, whatever its configuration becomes.
//! - A dead KV event reader costs no restart of the router.
//!
//! Performing effects, waiting and publishing belong to the supervisor actor.

mod block_size;
mod budget;
mod children;
mod drains;
mod hangs;
mod initial;
mod readers;
mod removals;
mod rules;
mod slots;
mod sources;
mod status;
#[cfg(test)]
mod tests;
mod types;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub use block_size::initial_block_size;
pub use budget::RestartBudget;
pub use hangs::{ActorSample, HangChange, HangDetector, WatchedActor};
pub use initial::initial_workers;
pub use rules::MembershipRules;
pub use status::DiscoveryStatus;
pub use types::{Child, MembershipEffect, MembershipInput, MembershipReport, RankDescription, SourceUpdate};

use crate::discovery::DesiredSets;
use crate::error::MembershipError;
use crate::protocol::{Generation, PoolBlockSize, Slot, Timestamp, WorkerConfig, WorkerId, WorkerRank};
use crate::select::RankTraits;
use readers::EventReader;
use removals::{PendingDrain, PendingRemoval};
use slots::SlotAssignments;

/// Name in logs of the embedder as the source of a worker.
pub const BY_HAND: &str = "by hand";

/// Registered worker.
#[derive(Clone, Debug)]
pub struct RegisteredWorker {
    /// Its configuration.
    pub config: WorkerConfig,
    /// Capacities and labels of its ranks.
    pub traits: Arc<RankTraits>,
    /// Slots of its ranks.
    pub slots: BTreeMap<WorkerRank, Slot>,
    /// Whether it leaves after its last booking.
    pub draining: bool,
    /// Whether it gets no new requests until the cordon is lifted.
    pub cordoned: bool,
    /// Number of the discovery source that added it; `None` for the embedder.
    pub source: Option<usize>,
    /// Tokens per block in its KV events, once they have stored a block.
    pub events_block_size: Option<u32>,
}

/// The machine. See the module.
///
/// ```
/// use pointsman::RouterConfig;
/// use pointsman::internals::membership::{Membership, MembershipEffect, MembershipInput, MembershipRules};
/// use pointsman::protocol::{Timestamp, WorkerConfig, WorkerId};
///
/// let mut membership = Membership::new(MembershipRules::of(&RouterConfig::default(), true));
/// let (worker, config) = (WorkerId(1), Box::new(WorkerConfig::at("http://10.0.0.1:8000")));
/// let effects = membership.step(MembershipInput::Upsert { worker, config, reply: "caller" }, Timestamp(0));
/// assert!(matches!(effects.first(), Some(MembershipEffect::UseBlockSize(_))));
/// assert!(effects.iter().any(|effect| matches!(effect, MembershipEffect::StartRank { .. })));
/// assert_eq!(effects.last(), Some(&MembershipEffect::Reply { to: "caller", result: Ok(0) }));
/// ```
#[derive(Debug)]
pub struct Membership<R> {
    rules: MembershipRules,
    block_size: PoolBlockSize,
    size_changes: RestartBudget,
    workers: BTreeMap<WorkerId, RegisteredWorker>,
    slots: SlotAssignments,
    drains: Vec<PendingDrain<R>>,
    drains_started: u64,
    removals: Vec<PendingRemoval<R>>,
    /// Last good set of each source.
    desired: DesiredSets,
    statuses: Vec<DiscoveryStatus>,
    /// Workers drained or removed by the embedder that discovery must not add again, until no source names them.
    withheld: BTreeSet<WorkerId>,
    /// Whether [`MembershipReport::CapacityUnstated`] was reported.
    capacity_reported: bool,
    readers: BTreeMap<Slot, EventReader>,
    cold: BTreeSet<WorkerRank>,
    restarts: BTreeMap<Child, u32>,
    budget: RestartBudget,
    outbox: Outbox<R>,
}

/// Effects of the present step.
#[derive(Debug)]
struct Outbox<R> {
    effects: Vec<MembershipEffect<R>>,
    cold_changed: bool,
    sources_changed: bool,
    workers_changed: bool,
    replies: Vec<MembershipEffect<R>>,
}

impl<R> Outbox<R> {
    fn new() -> Self {
        let (effects, replies) = (Vec::new(), Vec::new());
        Self { effects, cold_changed: false, sources_changed: false, workers_changed: false, replies }
    }

    fn push(&mut self, effect: MembershipEffect<R>) {
        self.effects.push(effect);
    }

    fn report(&mut self, report: MembershipReport) {
        self.effects.push(MembershipEffect::Report(report));
    }

    fn reply(&mut self, to: R, result: Result<usize, MembershipError>) {
        self.replies.push(MembershipEffect::Reply { to, result });
    }

    /// Publications follow the effects on ranks, and precede replies. Sources precede workers: a worker that leaves is
    /// always in at least one of the two views.
    fn into_effects(self) -> Vec<MembershipEffect<R>> {
        let Self { mut effects, cold_changed, sources_changed, workers_changed, replies } = self;
        effects.extend(cold_changed.then_some(MembershipEffect::PublishCold));
        effects.extend(sources_changed.then_some(MembershipEffect::PublishSources));
        effects.extend(workers_changed.then_some(MembershipEffect::PublishWorkers));
        effects.extend(replies);
        effects
    }
}

impl<R> Membership<R> {
    /// Machine without workers and sources.
    #[must_use]
    pub fn new(rules: MembershipRules) -> Self {
        Self {
            budget: RestartBudget::new(rules.restarts_max, rules.restart_window),
            block_size: rules.block_size,
            size_changes: RestartBudget::new(block_size::EVENT_CHANGES_MAX, block_size::EVENT_CHANGES_WINDOW),
            rules,
            workers: BTreeMap::new(),
            slots: SlotAssignments::default(),
            drains: Vec::new(),
            drains_started: 0,
            removals: Vec::new(),
            desired: DesiredSets::default(),
            statuses: Vec::new(),
            withheld: BTreeSet::new(),
            capacity_reported: false,
            readers: BTreeMap::new(),
            cold: BTreeSet::new(),
            restarts: BTreeMap::new(),
            outbox: Outbox::new(),
        }
    }

    /// Applies one input and returns its effects. A reconciliation is linear in all workers and slots.
    pub fn step(&mut self, input: MembershipInput<R>, now: Timestamp) -> Vec<MembershipEffect<R>> {
        match input {
            MembershipInput::Upsert { worker, config, reply } => self.on_upsert(worker, *config, reply),
            MembershipInput::Remove { worker, reply } => self.on_remove(worker, reply),
            MembershipInput::Drain { worker, deadline, reply } => self.on_drain(worker, deadline, reply),
            MembershipInput::Undrain { worker, reply } => self.on_undrain(worker, reply),
            MembershipInput::Cordon { worker, cordoned, reply } => self.on_cordon(worker, cordoned, reply),
            MembershipInput::RankDrained { slot, generation, rank_bookings, worker_bookings } => {
                self.on_rank_drained(slot, generation, rank_bookings, worker_bookings);
            }
            MembershipInput::DrainTimedOut { worker, drain, worker_bookings } => {
                self.on_drain_timed_out(worker, drain, worker_bookings);
            }
            MembershipInput::RankRetired { slot, generation } => self.on_rank_retired(slot, generation),
            MembershipInput::SourceAdded(name) => self.on_source_added(name),
            MembershipInput::SourceUpdated { source, update } => self.on_source_updated(source, update, now),
            MembershipInput::Reconcile => self.reconcile(),
            MembershipInput::EventsSized { slot, generation, tokens } => {
                self.on_events_sized(slot, generation, tokens, now);
            }
            MembershipInput::RankWarmed { rank, shard, incarnation } => self.on_rank_warmed(rank, shard, incarnation),
            MembershipInput::ChildDied { child, reason, shard_ranks } => {
                self.on_child_died(child, reason, &shard_ranks, now);
            }
        }
        debug_assert_eq!(self.check_invariants(), Ok(()));
        std::mem::replace(&mut self.outbox, Outbox::new()).into_effects()
    }

    /// Registered workers, by id.
    #[must_use]
    pub fn workers(&self) -> &BTreeMap<WorkerId, RegisteredWorker> {
        &self.workers
    }

    /// Discovery sources, by number.
    #[must_use]
    pub fn sources(&self) -> &[DiscoveryStatus] {
        &self.statuses
    }

    /// Ranks whose index entries were lost with a shard and were not sent again.
    #[must_use]
    pub fn cold(&self) -> &BTreeSet<WorkerRank> {
        &self.cold
    }

    /// Registered worker of the rank in a slot, unless the rank retires.
    #[must_use]
    pub fn worker_at(&self, slot: Slot) -> Option<&RegisteredWorker> {
        let occupant = self.slots.get(slot).filter(|occupant| !occupant.retiring)?;
        self.workers.get(&occupant.rank.worker)
    }

    /// Slots of all ranks of a worker, retiring ranks included, with their generations. Visits every slot.
    pub fn slots_of(&self, worker: WorkerId) -> impl Iterator<Item = (Slot, Generation)> {
        self.slots.all_of(worker)
    }

    /// Restarts of an actor.
    #[must_use]
    pub fn incarnation(&self, child: Child) -> u32 {
        self.restarts.get(&child).copied().unwrap_or_default()
    }

    /// Checks what holds between steps.
    ///
    /// # Errors
    /// The first violated invariant, with its values.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.slots.check_invariants()?;
        let registered: BTreeMap<Slot, WorkerRank> =
            self.workers.values().flat_map(|worker| worker.slots.iter().map(|(rank, slot)| (*slot, *rank))).collect();
        let running = self.slots.iter().filter(|(_, occupant)| !occupant.retiring);
        let running: BTreeMap<Slot, WorkerRank> = running.map(|(slot, occupant)| (slot, occupant.rank)).collect();
        if registered != running {
            return Err(format!("registered ranks {registered:?}, running ranks {running:?}"));
        }
        let draining: Vec<WorkerId> =
            self.workers.iter().filter(|(_, worker)| worker.draining).map(|(worker, _)| *worker).collect();
        let mut drains: Vec<WorkerId> = self.drains.iter().map(|drain| drain.worker).collect();
        drains.sort_unstable();
        if draining != drains {
            return Err(format!("draining workers {draining:?}, pending drains {drains:?}"));
        }
        for drain in &self.drains {
            let mut left = drain.left.iter();
            if drain.left.is_empty() || !left.all(|place| self.slots.running_of(drain.worker).any(|p| p == *place)) {
                return Err(format!("drain of {} waits for {:?}", drain.worker, drain.left));
            }
        }
        let retires = |(slot, generation): &(Slot, Generation)| {
            self.slots.get(*slot).is_some_and(|occupant| occupant.retiring && occupant.generation == *generation)
        };
        if let Some(removal) = self.removals.iter().find(|removal| !removal.left.iter().all(retires)) {
            return Err(format!("a removal waits for {:?}, of which some do not retire", removal.left));
        }
        if let Some(slot) = self.readers.keys().find(|slot| !running.contains_key(slot)) {
            return Err(format!("slot {slot} has a reader and no running rank"));
        }
        match self.cold.iter().find(|rank| !running.values().any(|running| running == *rank)) {
            Some(rank) => Err(format!("rank {rank} is cold and does not run")),
            None => Ok(()),
        }
    }
}
