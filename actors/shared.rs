//! What the handle, the placements and the supervisor share: addresses, the request directory, gates, read views.
//!
//! Owns the way from a lease to the actor that must look at it. Promises that ending a lease is told to its actor
//! exactly once, whoever ends it. Domain state stays with its owner: what is shared here are leases and views that
//! an owner publishes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use crate::actors::delivery::strand::Strand;
use crate::actors::engine_load::EngineLoads;
use crate::actors::handle::shared_cache::SharedCache;
use crate::actors::health::{Health, HealthMsg};
use crate::actors::io::clock::Clock;
use crate::actors::radix::{Radix, RadixMsg, shard_of};
use crate::actors::scheduler::{Scheduler, SchedulerMsg, WakeFlag};
use crate::actors::sequence::{Sequence, SequenceMsg};
use crate::actors::telemetry::Meters;
use crate::actors::views::kv_source::{Doubted, SourceCell};
use crate::actors::views::worker::WorkerEntry;
use crate::config::RouterConfig;
use crate::directory::{Directory, Ended, Lease};
use crate::engine_load::EngineLoadCell;
use crate::error::Down;
use crate::health::{Exclusions, Outcome};
use crate::index::Holdings;
use crate::load::{BoardSlot, OutputLengths, PromptLimits, SpeedCell};
use crate::membership::DiscoveryStatus;
use crate::predict::Kind;
use crate::protocol::{Generation, Slot, Timestamp, WorkerId, WorkerRank};
use crate::schedule::Extensions;
use crate::select::RankConditions;

/// Reports of outcomes that may wait for the health actor. While it stands still one more tells nothing that those do
/// not.
const OUTCOMES_MAX: usize = 1024;

/// Everything of a router but its supervisor.
pub(crate) struct Shared {
    pub(crate) config: RouterConfig,
    pub(crate) clock: Clock,
    pub(crate) directory: Arc<Directory>,
    pub(crate) scheduler: Arc<Strand<Scheduler>>,
    pub(crate) health: Arc<Strand<Health>>,
    pub(crate) engine_loads: Arc<Strand<EngineLoads>>,
    /// None where overlap counts for nothing.
    pub(crate) shards: Vec<Shard>,
    /// Whether requests may have to wait.
    pub(crate) queueing: bool,
    /// Whether decisions are guesses about caches.
    pub(crate) predicts: bool,
    /// Whether shards model caches that hold bookings, and so must hear of their ends.
    pub(crate) holds_bookings: bool,
    /// Requests waiting for an answer.
    pub(crate) waiting_room: Arc<Semaphore>,
    /// What the embedder put in place of the router's own judgement.
    pub(crate) extensions: Extensions,
    pub(crate) shared_cache: Option<Arc<dyn SharedCache>>,
    pub(crate) meters: Meters,
    /// How long outputs are, by session and tenant.
    pub(crate) output_lengths: OutputLengths,
    /// The [`PromptLimits`] of the present workers. Written by the supervisor.
    prompt_limits: AtomicU64,
    /// Up while requests wait for some rank's load to fall.
    pub(crate) wake: Arc<WakeFlag>,
    /// What the embedder knows of the ranks.
    pub(crate) conditions: Arc<Mutex<Arc<RankConditions>>>,
    /// Ranks whose sources are not trusted in full.
    pub(crate) doubted: Doubted,
    /// The ranks that requests keep away from for their health. Written by the health actor.
    pub(crate) exclusions: Arc<Mutex<Arc<Exclusions>>>,
    outcomes_gate: Arc<Semaphore>,
    /// By slot. Written by the supervisor.
    entries: RwLock<Vec<Option<Arc<RankEntry>>>>,
    /// Whether the router is up, and how often a part of it was restarted.
    pub(crate) status: watch::Sender<Status>,
    /// Read views, published by the supervisor.
    pub(crate) workers: watch::Sender<Arc<[WorkerEntry]>>,
    pub(crate) cold: watch::Sender<BTreeSet<WorkerRank>>,
    /// By source, in the order in which they were given.
    pub(crate) discovery: watch::Sender<Vec<DiscoveryStatus>>,
}

/// One index shard and the gate before it.
pub(crate) struct Shard {
    pub(crate) strand: Arc<Strand<Radix>>,
    /// Blocks that events waiting before it may name.
    pub(crate) gate: Arc<Semaphore>,
}

/// A rank in its slot: one incarnation.
pub(crate) struct RankEntry {
    pub(crate) rank: WorkerRank,
    pub(crate) slot: Slot,
    pub(crate) generation: Generation,
    pub(crate) endpoint: Arc<str>,
    /// Its number among its worker's ranks, from 0, or [`RankEntry::ALONE`]. Written by the supervisor.
    pub(crate) number_at_worker: AtomicU32,
    /// When it joined.
    pub(crate) since: Timestamp,
    /// Where its sequence actor publishes its load.
    pub(crate) board: Arc<BoardSlot>,
    /// Where its index shard publishes what it holds.
    pub(crate) holdings: Arc<Holdings>,
    /// How far what it publishes is trusted.
    pub(crate) source: Arc<SourceCell>,
    /// Its learned speed, which outlives its sequence actor.
    pub(crate) speed: Arc<SpeedCell>,
    /// Where it is shown what its engine says of its load.
    pub(crate) engine_load: Arc<EngineLoadCell>,
    /// Whether failed requests count against it, so that one that goes well matters. Written by the health actor.
    pub(crate) failing: AtomicBool,
    pub(crate) strand: Arc<Strand<Sequence>>,
}

impl RankEntry {
    /// The number of a rank that is its worker's only one.
    pub(crate) const ALONE: u32 = u32::MAX;

    /// Names this incarnation among all that the router ever has.
    pub(crate) fn incarnation(&self) -> u64 {
        u64::from(self.slot.0) << 32 | u64::from(self.generation.0)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) phase: Phase,
    pub(crate) restarts: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    #[default]
    Serving,
    /// Finishing what is in flight; nothing new.
    Draining,
    Failed,
    Stopped,
}

impl Shared {
    pub(crate) fn new(
        config: RouterConfig,
        extensions: Extensions,
        shared_cache: Option<Arc<dyn SharedCache>>,
        clock: Clock,
    ) -> Self {
        let shards = if config.has_index() { config.index_shards } else { 0 };
        let gate = || Arc::new(Semaphore::new(config.event_blocks_max as usize));
        Self {
            clock,
            directory: Arc::default(),
            scheduler: Strand::closed(),
            health: Strand::closed(),
            engine_loads: Strand::closed(),
            shards: (0..shards).map(|_| Shard { strand: Strand::closed(), gate: gate() }).collect(),
            queueing: config.queueing(),
            predicts: Kind::of(&config).is_some(),
            holds_bookings: matches!(Kind::of(&config), Some(Kind::Lru { .. })),
            waiting_room: Arc::new(Semaphore::new(config.requests_max as usize)),
            extensions,
            meters: Meters::new(&config, shared_cache.is_some()),
            output_lengths: OutputLengths::default(),
            prompt_limits: AtomicU64::new(PromptLimits::default().to_word()),
            wake: Arc::default(),
            conditions: Arc::default(),
            doubted: Doubted::default(),
            exclusions: Arc::default(),
            outcomes_gate: Arc::new(Semaphore::new(OUTCOMES_MAX)),
            entries: RwLock::default(),
            status: watch::Sender::default(),
            workers: watch::Sender::new(Arc::new([])),
            cold: watch::Sender::default(),
            discovery: watch::Sender::default(),
            shared_cache,
            config,
        }
    }

    /// Whether the router takes new work.
    pub(crate) fn up(&self) -> Result<(), Down> {
        match self.status.borrow().phase {
            Phase::Serving => Ok(()),
            Phase::Failed => Err(Down::Failed),
            Phase::Draining | Phase::Stopped => Err(Down::Stopped),
        }
    }

    /// Returns when the router is down for good, and how.
    pub(crate) async fn down(&self) -> Down {
        let mut status = self.status.subscribe();
        let over = status.wait_for(|status| matches!(status.phase, Phase::Failed | Phase::Stopped)).await;
        match over.map(|status| status.phase) {
            Ok(Phase::Stopped) => Down::Stopped,
            Ok(Phase::Failed | Phase::Serving | Phase::Draining) | Err(_) => Down::Failed,
        }
    }

    /// What an actor answers; `None` when the answer was lost with the actor, or the router is down. A router that goes
    /// down ends every wait, also for an actor that is stuck.
    ///
    /// An answer that is there already costs no look at the router's state.
    pub(crate) async fn answer_of<T>(&self, answer: oneshot::Receiver<T>) -> Option<T> {
        tokio::select! {
            biased;
            answer = answer => answer.ok(),
            _ = self.down() => None,
        }
    }

    /// Moves on to a later phase; a router that has failed or stopped stays so.
    pub(crate) fn enter(&self, phase: Phase) {
        self.status.send_if_modified(|status| {
            let over = matches!(status.phase, Phase::Failed | Phase::Stopped);
            if !over {
                status.phase = phase;
            }
            !over
        });
    }

    /// Takes over what the embedder says of the ranks. The scheduler must be told to look.
    pub(crate) fn set_conditions(&self, conditions: RankConditions) {
        *self.conditions.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(conditions);
        // Whoever is ejected may be needed now.
        self.health.tell(HealthMsg::MembersChanged);
    }

    /// What the embedder says of the ranks.
    pub(crate) fn conditions(&self) -> Arc<RankConditions> {
        Arc::clone(&self.conditions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The ranks that requests keep away from for their health.
    pub(crate) fn exclusions(&self) -> Arc<Exclusions> {
        Arc::clone(&self.exclusions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ranks that can serve: registered, neither draining nor cordoned, reachable and in service; 0 when the router is down.
    pub(crate) fn eligible_ranks(&self) -> usize {
        if self.up().is_err() {
            return 0;
        }
        let (conditions, exclusions, workers) = (self.conditions(), self.exclusions(), self.workers.borrow());
        let members = workers.iter().filter(|worker| worker.takes_requests()).flat_map(|worker| &worker.ranks);
        let reachable =
            members.filter(|rank| !conditions.unavailable.contains(rank) && !exclusions.down.contains(rank));
        let well = reachable.clone().filter(|rank| !exclusions.ejected.contains(rank)).count();
        // Where only ranks ejected on suspicion are left it is these that serve.
        if well > 0 { well } else { reachable.count() }
    }

    /// A request on the rank that was sent at `began` has ended so. What changes nothing costs nothing.
    pub(crate) fn report_outcome(&self, entry: &Arc<RankEntry>, outcome: Outcome, began: Option<Timestamp>) {
        let matters =
            if outcome.is_ok() { entry.failing.load(Ordering::Relaxed) } else { self.config.outcome_failures_max > 0 };
        if !matters {
            return;
        }
        if let Ok(permit) = Arc::clone(&self.outcomes_gate).try_acquire_owned() {
            self.health.tell(HealthMsg::Outcome { entry: Arc::clone(entry), outcome, began, permit });
        }
    }

    pub(crate) fn entry(&self, slot: Slot, generation: Generation) -> Option<Arc<RankEntry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.get(slot.index())?.as_ref().filter(|entry| entry.generation == generation).cloned()
    }

    /// Whether the index is known to have every block of the rank, and has any: only then is a prediction of 0 evidence.
    pub(crate) fn is_index_complete_for(&self, entry: &RankEntry) -> bool {
        entry.holdings.held_blocks() > 0 && entry.source.is_complete() && !self.cold.borrow().contains(&entry.rank)
    }

    /// The entry a rank has now. Visits every entry.
    pub(crate) fn entry_of(&self, rank: WorkerRank) -> Option<Arc<RankEntry>> {
        self.entries_of(rank.worker).into_iter().filter(|entry| entry.rank == rank).max_by_key(|entry| entry.since)
    }

    /// The entries of a worker's ranks, those on their way out included. Visits every entry.
    pub(crate) fn entries_of(&self, worker: WorkerId) -> Vec<Arc<RankEntry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.iter().flatten().filter(|entry| entry.rank.worker == worker).cloned().collect()
    }

    /// The ranks that are there, those on their way out included.
    pub(crate) fn entries(&self) -> Vec<Arc<RankEntry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.iter().flatten().cloned().collect()
    }

    pub(crate) fn set_entry(&self, slot: Slot, entry: Option<Arc<RankEntry>>) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.len() <= slot.index() {
            entries.resize(slot.index() + 1, None);
        }
        entries[slot.index()] = entry;
    }

    /// A place before a shard for so many blocks. Waits while the shard is behind.
    pub(crate) async fn pass_gate(&self, shard: usize, blocks: usize) -> Result<OwnedSemaphorePermit, Down> {
        // A batch larger than the gate takes all of it; an event that names no block still takes a place.
        let weight = u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, self.config.event_blocks_max);
        let gate: Arc<Semaphore> = Arc::clone(&self.shards[shard].gate);
        tokio::select! {
            biased;
            permit = gate.acquire_many_owned(weight) => permit.map_err(|_| Down::Stopped),
            down = self.down() => Err(down),
        }
    }

    /// Tells a rank's shard of events of this rank, in this entry and no other. Waits while the shard is behind.
    #[cfg(feature = "zmq")]
    pub(crate) async fn apply_of(&self, entry: &RankEntry, events: Vec<crate::protocol::RouterEvent>) {
        let shard = shard_of(entry.rank, self.shards.len());
        let blocks = events.iter().map(|event| event.data.block_count().max(1)).sum();
        if let Ok(permit) = self.pass_gate(shard, blocks).await {
            let only = Some((entry.slot, entry.generation));
            self.shards[shard].strand.tell(RadixMsg::Apply { events, only, permit });
        }
    }

    /// Notes that the lease's prefill has been computed, and tells its actor.
    pub(crate) fn prefill_completed(&self, entry: &RankEntry, lease: &Arc<Lease>) {
        if lease.prompt().block_count() > 0 {
            entry.source.prompt_served();
        }
        self.reconcile(entry, lease);
    }

    /// Tells the lease's actor that it has changed, unless a look is on its way that will see it.
    pub(crate) fn reconcile(&self, entry: &RankEntry, lease: &Arc<Lease>) {
        if lease.mark_dirty() {
            entry.strand.tell(SequenceMsg::Reconcile(Arc::clone(lease)));
        }
    }

    /// Ends a lease, frees what it held and gives its request id back.
    pub(crate) fn end(&self, lease: &Arc<Lease>) {
        self.end_as(lease, true);
    }

    /// As [`Shared::end`]; `may_wait` unless it is known that the request is not in the queue.
    fn end_as(&self, lease: &Arc<Lease>, may_wait: bool) {
        let ended = lease.end();
        self.directory.leave(lease);
        match ended {
            Ended::Booked(slot, generation) => {
                self.learn_output_length(lease);
                if let Some(entry) = self.entry(slot, generation) {
                    self.reconcile(&entry, lease);
                    self.release(entry.rank, lease);
                }
            }
            // It may be waiting: a request whose caller has gone stops counting at once.
            Ended::Pending if may_wait && self.queueing => {
                self.scheduler.tell(SchedulerMsg::Cancel(lease.booking()));
            }
            Ended::Pending | Ended::Already => {}
        }
    }

    /// How long a prompt may be, and how much it may weigh.
    pub(crate) fn prompt_limits(&self) -> PromptLimits {
        PromptLimits::from_word(self.prompt_limits.load(Ordering::Relaxed))
    }

    pub(crate) fn set_prompt_limits(&self, limits: PromptLimits) {
        self.prompt_limits.store(limits.to_word(), Ordering::Relaxed);
    }

    /// Learns how long an output was. One that never began says nothing.
    fn learn_output_length(&self, lease: &Lease) {
        let keys = lease.length_keys();
        if keys.is_empty() {
            return;
        }
        let progress = lease.progress();
        let blocks = progress.output.block_count();
        if blocks > 0 || progress.prefill_completed && self.config.track_output_blocks {
            self.output_lengths.observe(keys, (f64::from(blocks) + 0.5) * f64::from(self.config.block_size));
        }
    }

    /// Tells the rank's shard that a booking has ended, where a modelled cache holds it. A rank without a entry has
    /// left, and what it held with it.
    fn release(&self, rank: WorkerRank, lease: &Lease) {
        if self.holds_bookings {
            let output_blocks = lease.progress().output.block_count();
            let shard = &self.shards[shard_of(rank, self.shards.len())];
            shard.strand.tell(RadixMsg::Released { booking: lease.booking(), output_blocks });
        }
    }

    /// Returns when no lease is left. Looks again and again, so that no request pays for the end of the router.
    pub(crate) async fn at_rest(&self) {
        while !self.directory.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Closes every strand: what waits anywhere is dropped, and so answered as lost.
    pub(crate) fn close(&self) {
        self.scheduler.close();
        self.health.close();
        self.engine_loads.close();
        for shard in &self.shards {
            shard.strand.close();
        }
        let entries = std::mem::take(&mut *self.entries.write().unwrap_or_else(PoisonError::into_inner));
        for entry in entries.into_iter().flatten() {
            entry.strand.close();
        }
    }
}

/// A lease in its holder's hand: dropping it ends the booking.
pub(crate) struct LeaseGuard {
    shared: Arc<Shared>,
    lease: Arc<Lease>,
    /// Cleared when the booking is left to its request id.
    ends_lease: bool,
    /// Cleared when the request has been refused, and so has left the queue.
    may_wait: bool,
}

impl LeaseGuard {
    pub(crate) fn new(shared: &Arc<Shared>, lease: Arc<Lease>) -> Self {
        Self { shared: Arc::clone(shared), lease, ends_lease: true, may_wait: true }
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The request has been refused: ending its lease need not be told to the queue.
    pub(crate) fn was_refused(mut self) {
        self.may_wait = false;
    }

    /// Leaves the booking to its request id: it lasts until it is freed by that, or falls silent.
    pub(crate) fn detach(mut self) {
        self.lease.leave(self.shared.clock.now());
        self.ends_lease = false;
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if self.ends_lease {
            self.shared.end_as(&self.lease, self.may_wait);
        }
    }
}
