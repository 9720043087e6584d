//! The supervisor: lifecycles, membership, addresses.
//!
//! Owns which ranks there are (see `membership`), which slot and generation each has, and the restart budget. Promises that desired and
//! running agree after each message, that what dies is restarted with what can be rebuilt, that a rank's removal is
//! acknowledged only when its last booking has ended, and that a router whose budget is spent fails whole and says
//! so. Leaves every request to the others: nothing of it passes here.

mod discovery;
#[cfg(feature = "zmq")]
mod ingests;
mod membership;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use ahash::AHashMap;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::actors::delivery::strand::{Step, Strand, StrandActor, Wake};
use crate::actors::discovery::{AnySource, News};
use crate::actors::engine_load::EngineLoads;
use crate::actors::health::{Health, HealthMsg};
use crate::actors::radix::speculation::SpeculationSender;
use crate::actors::radix::{Radix, RadixMsg, RegisteredRank, shard_of};
use crate::actors::scheduler::{Scheduler, SchedulerDependencies, SchedulerMsg, SequenceHandle};
use crate::actors::sequence::{Sequence, SequenceDependencies, Wakes};
use crate::actors::shared::{Phase, RankEntry, Shared, Status};
use crate::actors::telemetry::Restarts;
use crate::actors::views::kv_source::SourceCell;
use crate::config::UseKvEvents;
use crate::error::MembershipError;
use crate::protocol::{Generation, Slot, WorkerConfig, WorkerId, WorkerRank};
use crate::schedule::Admission;
use crate::select::RankTraits;
use crate::supervision::RestartBudget;
use discovery::Sources;
use membership::{Draining, Removal};

/// What the supervisor can be told.
pub(crate) enum SupervisorMsg {
    /// A worker joins or changes. Reply when it can be chosen.
    Upsert { worker: WorkerId, config: Box<WorkerConfig>, answer: oneshot::Sender<Result<(), MembershipError>> },
    /// A worker leaves. Reply when its last booking has ended.
    Remove { worker: WorkerId, answer: oneshot::Sender<Result<(), MembershipError>> },
    /// Follow another source of workers.
    Follow { name: String, source: Box<dyn AnySource> },
    /// A source has news. Reply when they are taken in; workers that were upserted by hand stay.
    Reconcile { source: usize, news: News, done: Option<oneshot::Sender<()>> },
    /// Compare what the sources want with what runs.
    Pass,
    /// A worker gets no new work and leaves when its last booking has ended, or when the deadline has passed. Reply
    /// with the bookings that were cut off then.
    Drain { worker: WorkerId, deadline: Duration, answer: oneshot::Sender<Result<usize, MembershipError>> },
    /// A worker gets no new work, or gets it again; its bookings and what the index has of it stay.
    Cordon { worker: WorkerId, cordoned: bool, answer: oneshot::Sender<Result<(), MembershipError>> },
    /// Undo a drain, or a removal of a worker that discovery names.
    Undrain { worker: WorkerId, answer: oneshot::Sender<Result<(), MembershipError>> },
    /// A draining rank has no bookings left, or its sequence actor was lost.
    Drained { slot: Slot, generation: Generation },
    /// A drain's deadline has passed.
    DrainOver { worker: WorkerId, drain: u64 },
    /// A rank's bookings have ended and no more will come.
    Retired { slot: Slot, generation: Generation },
    /// A cold rank is being sent again, to this incarnation of its shard.
    Warmed { rank: WorkerRank, incarnation: u32 },
    /// A drill: panic.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
    /// A drill, for the reader of a rank's events.
    #[cfg(all(feature = "faults", feature = "zmq"))]
    IngestFault(WorkerRank, crate::actors::delivery::fault::InjectedFault),
    /// A drill: let the actor that follows this source panic.
    #[cfg(feature = "faults")]
    FaultOf(usize, crate::actors::delivery::fault::InjectedFault),
    /// A drill: do nothing about the next news of a source.
    #[cfg(feature = "faults")]
    MissNext,
}

/// Tells the supervisor, by being dropped, that a rank has no bookings left and will get none.
pub(crate) struct RetireAck {
    supervisor: ActorRef<SupervisorMsg>,
    slot: Slot,
    generation: Generation,
}

impl Drop for RetireAck {
    fn drop(&mut self) {
        let Self { slot, generation, .. } = *self;
        drop(self.supervisor.send_message(SupervisorMsg::Retired { slot, generation }));
    }
}

/// Tells the supervisor, by being dropped, that a draining rank has no bookings left; the supervisor looks for itself,
/// for it may have been dropped with a dying actor.
pub(crate) struct DrainAck {
    supervisor: ActorRef<SupervisorMsg>,
    slot: Slot,
    generation: Generation,
}

impl Drop for DrainAck {
    fn drop(&mut self) {
        let Self { slot, generation, .. } = *self;
        drop(self.supervisor.send_message(SupervisorMsg::Drained { slot, generation }));
    }
}

/// The actor. See the module's head.
pub(crate) struct Supervisor;

/// What it keeps.
pub(crate) struct State {
    shared: Arc<Shared>,
    myself: ActorRef<SupervisorMsg>,
    workers: BTreeMap<WorkerId, Worker>,
    /// By slot.
    entries: Vec<Option<Running>>,
    generations: Vec<Generation>,
    free_slots: BTreeSet<Slot>,
    children: AHashMap<ActorId, Role>,
    removals: Vec<Removal>,
    drains: Vec<Draining>,
    /// Drains so far.
    drains_started: u64,
    sources: Sources,
    /// Workers that were drained away or removed by hand, and that discovery has not stopped naming since.
    drained: BTreeSet<WorkerId>,
    /// Whether the log says that some worker states no `max_num_batched_tokens`.
    unstated_capacity_reported: bool,
    #[cfg(feature = "zmq")]
    ingests: ingests::Ingests,
    /// Restarts of the scheduler.
    scheduler_incarnation: u32,
    /// Restarts of each index shard.
    radix_incarnations: Vec<u32>,
    budget: RestartBudget,
    /// Dropped with the state, however that happens.
    _guard: FailGuard,
}

struct Worker {
    config: WorkerConfig,
    /// What its ranks offer.
    traits: Arc<RankTraits>,
    draining: bool,
    /// Whether it gets no new work until that is undone by hand.
    cordoned: bool,
    slots: BTreeMap<WorkerRank, Slot>,
    /// The source that names it; none where it was added by hand.
    source: Option<usize>,
}

/// A rank that runs.
struct Running {
    entry: Arc<RankEntry>,
    /// Restarts of its sequence actor.
    incarnation: u32,
    actor: ActorId,
    retiring: bool,
}

#[derive(Clone, Copy, Debug)]
enum Role {
    Scheduler,
    Radix(usize),
    Sequence(Slot),
    #[cfg(feature = "zmq")]
    Ingest(Slot),
    Health,
    EngineLoads,
    Discovery(usize),
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::Radix(_) => "radix",
            Self::Sequence(_) => "sequence",
            #[cfg(feature = "zmq")]
            Self::Ingest(_) => "ingest",
            Self::Health => "health",
            Self::EngineLoads => "engine_loads",
            Self::Discovery(_) => "discovery",
        }
    }

    fn counter(self, restarts: &Restarts) -> &metrics::Counter {
        match self {
            Self::Scheduler => &restarts.scheduler,
            Self::Radix(_) => &restarts.radix,
            Self::Sequence(_) => &restarts.sequence,
            #[cfg(feature = "zmq")]
            Self::Ingest(_) => &restarts.ingest,
            Self::Health => &restarts.health,
            Self::EngineLoads => &restarts.engine_loads,
            Self::Discovery(_) => &restarts.discovery,
        }
    }
}

/// PhaseTimestamps the router failed when the supervisor goes without having stopped it.
struct FailGuard(Arc<Shared>);

impl Drop for FailGuard {
    fn drop(&mut self) {
        self.0.enter(Phase::Failed);
        self.0.close();
    }
}

impl Actor for Supervisor {
    type Msg = SupervisorMsg;
    type State = State;
    type Arguments = Arc<Shared>;

    async fn pre_start(
        &self,
        myself: ActorRef<SupervisorMsg>,
        shared: Arc<Shared>,
    ) -> Result<State, ActorProcessingErr> {
        let window = Duration::from_millis(shared.config.restart_window_ms);
        let mut state = State {
            budget: RestartBudget::new(shared.config.restarts_max, window),
            radix_incarnations: vec![0; shared.shards.len()],
            _guard: FailGuard(Arc::clone(&shared)),
            shared,
            myself,
            workers: BTreeMap::new(),
            entries: Vec::new(),
            generations: Vec::new(),
            free_slots: BTreeSet::new(),
            children: AHashMap::new(),
            removals: Vec::new(),
            drains: Vec::new(),
            drains_started: 0,
            sources: Sources::default(),
            drained: BTreeSet::new(),
            unstated_capacity_reported: false,
            #[cfg(feature = "zmq")]
            ingests: ingests::Ingests::new(),
            scheduler_incarnation: 0,
        };
        state.start_scheduler().await?;
        for shard in 0..state.shared.shards.len() {
            state.start_radix(shard, BTreeSet::new()).await?;
        }
        state.start_health().await?;
        state.start_engine_loads().await?;
        Ok(state)
    }

    async fn handle(
        &self,
        _: ActorRef<SupervisorMsg>,
        msg: SupervisorMsg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match msg {
            SupervisorMsg::Upsert { worker, config, answer } => {
                let result = state.on_upsert(worker, *config, None).await?;
                state.publish_workers();
                state.show_removed();
                drop(answer.send(result));
            }
            SupervisorMsg::Remove { worker, answer } => state.on_remove(worker, answer),
            SupervisorMsg::Follow { name, source } => state.on_follow(name, source).await?,
            SupervisorMsg::Reconcile { source, news, done } => {
                state.on_news(source, news).await?;
                drop(done);
            }
            SupervisorMsg::Pass => state.reconcile().await?,
            SupervisorMsg::Drain { worker, deadline, answer } => state.on_drain(worker, deadline, answer),
            SupervisorMsg::Cordon { worker, cordoned, answer } => {
                drop(answer.send(state.on_cordon(worker, cordoned)));
            }
            SupervisorMsg::Undrain { worker, answer } => drop(answer.send(state.on_undrain(worker).await?)),
            SupervisorMsg::Drained { slot, generation } => state.on_drained(slot, generation),
            SupervisorMsg::DrainOver { worker, drain } => state.on_drain_over(worker, drain),
            SupervisorMsg::Retired { slot, generation } => state.on_retired(slot, generation),
            SupervisorMsg::Warmed { rank, incarnation } => state.on_warmed(rank, incarnation),
            #[cfg(feature = "faults")]
            SupervisorMsg::Fault(injected) => injected.apply(),
            #[cfg(all(feature = "faults", feature = "zmq"))]
            SupervisorMsg::IngestFault(rank, injected) => state.on_ingest_fault(rank, injected),
            #[cfg(feature = "faults")]
            SupervisorMsg::FaultOf(source, injected) => state.on_fault_of(source, injected),
            #[cfg(feature = "faults")]
            SupervisorMsg::MissNext => state.sources.misses_next = true,
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<SupervisorMsg>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(cell, error) => state.on_death(cell.get_id(), &error.to_string()).await,
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                state.on_death(cell.get_id(), reason.as_deref().unwrap_or("stopped")).await
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => Ok(()),
        }
    }

    async fn post_stop(&self, _: ActorRef<SupervisorMsg>, state: &mut State) -> Result<(), ActorProcessingErr> {
        state.shared.enter(Phase::Stopped);
        state.shared.close();
        Ok(())
    }
}

// Lifecycles: what runs.
impl State {
    async fn start_rank(
        &mut self,
        rank: WorkerRank,
        endpoint: Arc<str>,
        number_at_worker: u32,
        traits: &Arc<RankTraits>,
    ) -> Result<Slot, ActorProcessingErr> {
        let slot = self.free_slots.pop_first().unwrap_or(Slot(u32::try_from(self.entries.len())?));
        if self.entries.len() <= slot.index() {
            self.entries.resize_with(slot.index() + 1, || None);
            self.generations.resize(slot.index() + 1, Generation(0));
        }
        self.generations[slot.index()].0 += 1;
        let generation = self.generations[slot.index()];
        let entry = Arc::new(RankEntry {
            rank,
            slot,
            generation,
            endpoint,
            number_at_worker: AtomicU32::new(number_at_worker),
            since: self.shared.clock.now(),
            board: Arc::default(),
            speed: Arc::default(),
            holdings: Arc::default(),
            source: Arc::new(SourceCell::new(&self.shared.doubted)),
            engine_load: Arc::default(),
            failing: AtomicBool::new(false),
            strand: Strand::closed(),
        });
        let actor = self.start_sequence(&entry, 0).await?;
        self.shared.set_entry(slot, Some(Arc::clone(&entry)));
        self.register(&entry, traits);
        let cordoned = self.workers.get(&rank.worker).is_some_and(|known| known.cordoned);
        self.shared.scheduler.tell(SchedulerMsg::Admit(sequence_handle(&entry, traits, cordoned)));
        self.entries[slot.index()] = Some(Running { entry, incarnation: 0, actor, retiring: false });
        Ok(slot)
    }

    /// Tells a rank's shard of it, or of its capacity.
    pub(super) fn register(&self, entry: &RankEntry, traits: &RankTraits) {
        if let Some(shard) = self.shard(entry.rank) {
            shard.tell(RadixMsg::Register(RegisteredRank::of(entry, traits)));
        }
    }

    async fn start_sequence(
        &mut self,
        entry: &Arc<RankEntry>,
        incarnation: u32,
    ) -> Result<ActorId, ActorProcessingErr> {
        let actor = self.spawn(&entry.strand, Role::Sequence(entry.slot)).await?;
        let (id, place) = (actor.get_id(), (entry.slot, entry.generation));
        let learns = self.shared.config.learns_speed();
        let dependencies = SequenceDependencies {
            board: Arc::clone(&entry.board),
            learns: learns.then(|| Arc::clone(&entry.speed)),
            block_size: self.shared.config.block_size,
            wakes: self
                .shared
                .config
                .queueing()
                .then(|| Wakes { flag: Arc::clone(&self.shared.wake), scheduler: Arc::clone(&self.shared.scheduler) }),
            directory: Arc::clone(&self.shared.directory),
            clock: self.shared.clock,
        };
        entry.strand.open(actor, || Sequence::restore(place, incarnation, dependencies));
        Ok(id)
    }

    async fn start_radix(&mut self, shard: usize, cold: BTreeSet<WorkerRank>) -> Result<(), ActorProcessingErr> {
        let strand = Arc::clone(&self.shared.shards[shard].strand);
        let actor = self.spawn(&strand, Role::Radix(shard)).await?;
        let tenants = self.ranks_of(shard).map(|entry| RegisteredRank::of(entry, &self.traits_of(entry.rank)));
        let place = (shard, self.radix_incarnations[shard]);
        strand.open(actor, || Radix::new(&self.shared, place, tenants, cold, self.myself.clone()));
        Ok(())
    }

    async fn start_scheduler(&mut self) -> Result<(), ActorProcessingErr> {
        let strand = Arc::clone(&self.shared.scheduler);
        let actor = self.spawn(&strand, Role::Scheduler).await?;
        let shared = &self.shared;
        let dependencies = SchedulerDependencies {
            shards: shared.shards.iter().map(|shard| Arc::clone(&shard.strand)).collect(),
            speculation: SpeculationSender::of(shared),
            wake: Arc::clone(&shared.wake),
            conditions: Arc::clone(&shared.conditions),
            exclusions: Arc::clone(&shared.exclusions),
            clock: shared.clock,
            runtime: Handle::current(),
        };
        strand.open(actor, || {
            let (config, extensions) = (shared.config.clone(), shared.extensions.clone());
            let mut scheduler = Scheduler::new(config, self.scheduler_incarnation, extensions, dependencies, &strand);
            for running in self.entries.iter().flatten().filter(|running| !running.retiring) {
                let rank = running.entry.rank;
                let draining = self.workers.get(&rank.worker).is_some_and(|known| known.draining || known.cordoned);
                scheduler.admit(sequence_handle(&running.entry, &self.traits_of(rank), draining));
            }
            scheduler.load_conditions();
            scheduler.load_exclusions();
            scheduler
        });
        Ok(())
    }

    /// What was held against ranks is lost with it: all of them are in service again, and start slowly.
    async fn start_health(&mut self) -> Result<(), ActorProcessingErr> {
        let strand = Arc::clone(&self.shared.health);
        let actor = self.spawn(&strand, Role::Health).await?;
        strand.open(actor, || Health::new(&self.shared, Handle::current()));
        strand.tell(HealthMsg::MembersChanged);
        Ok(())
    }

    async fn start_engine_loads(&mut self) -> Result<(), ActorProcessingErr> {
        let strand = Arc::clone(&self.shared.engine_loads);
        let actor = self.spawn(&strand, Role::EngineLoads).await?;
        strand.open(actor, || EngineLoads::new(&self.shared));
        Ok(())
    }

    fn traits_of(&self, rank: WorkerRank) -> Arc<RankTraits> {
        self.workers.get(&rank.worker).map(|known| Arc::clone(&known.traits)).unwrap_or_default()
    }

    async fn spawn<S: Step>(
        &mut self,
        strand: &Arc<Strand<S>>,
        role: Role,
    ) -> Result<ActorRef<Wake<S>>, ActorProcessingErr> {
        let (actor, _) =
            Actor::spawn_linked(None, StrandActor::new(), Arc::clone(strand), self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), role);
        Ok(actor)
    }

    /// A child has died. Ours to restart, unless it was removed on purpose.
    async fn on_death(&mut self, actor: ActorId, reason: &str) -> Result<(), ActorProcessingErr> {
        let Some(role) = self.children.remove(&actor) else { return Ok(()) };
        role.counter(&self.shared.meters.restarts).increment(1);
        #[cfg(feature = "zmq")]
        if let Role::Ingest(slot) = role {
            return self.restart_ingest(actor, slot, reason).await;
        }
        if !self.budget.spend(self.shared.clock.now()) {
            tracing::error!(
                role = role.name(),
                reason,
                "an actor died and the restart budget is spent: the router fails"
            );
            self.shared.enter(Phase::Failed);
            self.myself.stop(Some("restart budget spent".to_owned()));
            self.shared.close();
            return Ok(());
        }
        tracing::warn!(role = role.name(), reason, "an actor died and is restarted");
        match role {
            Role::Scheduler => {
                self.scheduler_incarnation += 1;
                self.start_scheduler().await?;
            }
            Role::Radix(shard) => self.restart_radix(shard).await?,
            Role::Sequence(slot) => self.restart_sequence(slot).await?,
            #[cfg(feature = "zmq")]
            Role::Ingest(_) => {} // above
            Role::Health => self.start_health().await?,
            Role::EngineLoads => self.start_engine_loads().await?,
            Role::Discovery(source) => self.restart_follower(source).await?,
        }
        self.shared.status.send_modify(|Status { restarts, .. }| *restarts += 1);
        Ok(())
    }

    /// A fresh shard knows its ranks and not what they guard: their embedder must send again. Where no events are used,
    /// its next decisions tell it.
    async fn restart_radix(&mut self, shard: usize) -> Result<(), ActorProcessingErr> {
        self.radix_incarnations[shard] += 1;
        let is_lost = |entry: &&Arc<RankEntry>| match self.shared.config.use_kv_events {
            UseKvEvents::No => false,
            UseKvEvents::Yes => true,
            UseKvEvents::Auto => entry.holdings.changed_at().is_some(),
        };
        let lost: BTreeSet<WorkerRank> = self.ranks_of(shard).filter(is_lost).map(|entry| entry.rank).collect();
        self.start_radix(shard, lost.clone()).await?;
        self.shared.cold.send_modify(|cold| cold.extend(lost));
        #[cfg(feature = "zmq")]
        self.resync_ingests(shard);
        Ok(())
    }

    async fn restart_sequence(&mut self, slot: Slot) -> Result<(), ActorProcessingErr> {
        let Some(Some(running)) = self.entries.get_mut(slot.index()) else { return Ok(()) };
        running.incarnation += 1;
        let (entry, incarnation) = (Arc::clone(&running.entry), running.incarnation);
        let actor = self.start_sequence(&entry, incarnation).await?;
        if let Some(Some(running)) = self.entries.get_mut(slot.index()) {
            running.actor = actor;
        }
        if self.shared.config.queueing() {
            // What ended while nobody looked has ended unheard.
            self.shared.scheduler.tell(SchedulerMsg::Wake { at: None });
        }
        Ok(())
    }

    fn ranks_of(&self, shard: usize) -> impl Iterator<Item = &Arc<RankEntry>> {
        let shards = self.shared.shards.len();
        let running = self.entries.iter().flatten().filter(|running| !running.retiring).map(|running| &running.entry);
        running.filter(move |entry| shard_of(entry.rank, shards) == shard)
    }

    fn shard(&self, rank: WorkerRank) -> Option<&Strand<Radix>> {
        let shards = &self.shared.shards;
        shards.get(shard_of(rank, shards.len())).map(|shard| &*shard.strand)
    }
}

/// A rank as the scheduler is told of it.
fn sequence_handle(entry: &RankEntry, traits: &Arc<RankTraits>, draining: bool) -> SequenceHandle {
    let admission = Admission {
        rank: entry.rank,
        slot: entry.slot,
        generation: entry.generation,
        board: Arc::clone(&entry.board),
        speed: Arc::clone(&entry.speed),
        holdings: Arc::clone(&entry.holdings),
        engine_load: Arc::clone(&entry.engine_load),
        traits: Arc::clone(traits),
        since: entry.since,
        draining,
    };
    SequenceHandle { admission, strand: Arc::clone(&entry.strand) }
}
