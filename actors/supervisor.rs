//! The supervisor: lifecycles, membership, addresses.
//!
//! Owns which ranks there are, which slot and generation each has, and the restart budget. Promises that desired and
//! running agree after each message, that what dies is restarted with what can be rebuilt, that a rank's removal is
//! acknowledged only when its last booking has ended, and that a router whose budget is spent fails whole and says
//! so. Leaves every request to the others: nothing of it passes here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::radix::{Radix, RadixMsg, shard_of};
use super::router::WorkerEntry;
use super::scheduler::{Peer, Scheduler, SchedulerMsg};
use super::sequence::Sequence;
use super::shared::{Phase, Seat, Shared, Status};
use super::turn::{Step, Turn, TurnActor, Wake};
use crate::config::PrefillModel;
use crate::error::MembershipError;
use crate::load::{BoardSlot, RateCell};
use crate::protocol::{Generation, Slot, WorkerConfig, WorkerConfigError, WorkerId, WorkerMap, WorkerRank};
use crate::supervision::RestartBudget;

/// What the supervisor can be told.
pub(crate) enum SupervisorMsg {
    /// A worker joins or changes. Answered when it can be chosen.
    Upsert { worker: WorkerId, config: WorkerConfig, answer: oneshot::Sender<Result<(), MembershipError>> },
    /// A worker leaves. Answered when its last booking has ended.
    Remove { worker: WorkerId, answer: oneshot::Sender<Result<(), MembershipError>> },
    /// These are the workers, says discovery; those that were upserted by hand stay.
    Reconcile { desired: WorkerMap, done: Option<oneshot::Sender<()>> },
    /// A rank's bookings have ended and no more will come.
    Retired { slot: Slot, generation: Generation },
    /// A cold rank is being sent again, to this incarnation of its shard.
    Warmed { rank: WorkerRank, incarnation: u32 },
    /// A drill: panic.
    #[cfg(feature = "faults")]
    Fault(super::faults::Trip),
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

/// The actor. See the module's head.
pub(crate) struct Supervisor;

/// What it keeps.
pub(crate) struct State {
    shared: Arc<Shared>,
    myself: ActorRef<SupervisorMsg>,
    workers: BTreeMap<WorkerId, Worker>,
    /// By slot.
    seats: Vec<Option<Running>>,
    generations: Vec<Generation>,
    free_slots: BTreeSet<Slot>,
    children: AHashMap<ActorId, Role>,
    removals: Vec<Removal>,
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
    slots: BTreeMap<WorkerRank, Slot>,
    from_discovery: bool,
}

/// A rank that runs.
struct Running {
    seat: Arc<Seat>,
    board: Arc<BoardSlot>,
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
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::Radix(_) => "radix",
            Self::Sequence(_) => "sequence",
        }
    }
}

/// Somebody who waits for ranks to be gone.
struct Removal {
    left: BTreeSet<(Slot, Generation)>,
    answer: oneshot::Sender<Result<(), MembershipError>>,
}

/// Marks the router failed when the supervisor goes without having stopped it.
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
            seats: Vec::new(),
            generations: Vec::new(),
            free_slots: BTreeSet::new(),
            children: AHashMap::new(),
            removals: Vec::new(),
            scheduler_incarnation: 0,
        };
        state.start_scheduler().await?;
        for shard in 0..state.shared.shards.len() {
            state.start_radix(shard, BTreeSet::new()).await?;
        }
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
                let result = state.on_upsert(worker, config, false).await?;
                state.publish_workers();
                drop(answer.send(result));
            }
            SupervisorMsg::Remove { worker, answer } => state.on_remove(worker, answer),
            SupervisorMsg::Reconcile { desired, done } => {
                state.on_reconcile(desired).await?;
                drop(done);
            }
            SupervisorMsg::Retired { slot, generation } => state.on_retired(slot, generation),
            SupervisorMsg::Warmed { rank, incarnation } => state.on_warmed(rank, incarnation),
            #[cfg(feature = "faults")]
            SupervisorMsg::Fault(trip) => trip.happen(),
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

// Membership: what should run.
impl State {
    async fn on_upsert(
        &mut self,
        worker: WorkerId,
        config: WorkerConfig,
        from_discovery: bool,
    ) -> Result<Result<(), MembershipError>, ActorProcessingErr> {
        if let Err(error) = self.check(&config) {
            return Ok(Err(MembershipError::Config { worker, error }));
        }
        // Another endpoint is another engine: what the old one held and ran is gone.
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
        let endpoint: Arc<str> = config.endpoint.as_str().into();
        for rank in wanted {
            if let std::collections::btree_map::Entry::Vacant(vacant) = slots.entry(rank) {
                vacant.insert(self.start_rank(rank, Arc::clone(&endpoint)).await?);
            }
        }
        self.workers.insert(worker, Worker { config, slots, from_discovery });
        Ok(Ok(()))
    }

    fn check(&self, config: &WorkerConfig) -> Result<(), WorkerConfigError> {
        config.validate()?;
        let pool = self.shared.config.is_eagle;
        match config.is_eagle {
            Some(worker) if worker != pool => Err(WorkerConfigError::Eagle { worker, pool }),
            _ => Ok(()),
        }
    }

    fn on_remove(&mut self, worker: WorkerId, answer: oneshot::Sender<Result<(), MembershipError>>) {
        if !self.workers.contains_key(&worker) {
            drop(answer.send(Err(MembershipError::UnknownWorker(worker))));
            return;
        }
        let left = self.retire_worker(worker);
        self.publish_workers();
        if left.is_empty() {
            drop(answer.send(Ok(())));
        } else {
            self.removals.push(Removal { left, answer });
        }
    }

    async fn on_reconcile(&mut self, desired: WorkerMap) -> Result<(), ActorProcessingErr> {
        let gone =
            |(id, worker): (&WorkerId, &Worker)| (worker.from_discovery && !desired.contains_key(id)).then_some(*id);
        let gone: Vec<WorkerId> = self.workers.iter().filter_map(gone).collect();
        for worker in gone {
            self.retire_worker(worker);
        }
        for (worker, config) in desired {
            let stays = |known: &Worker| known.config == config || !known.from_discovery;
            if self.workers.get(&worker).is_some_and(stays) {
                continue; // as it is, or added by hand
            }
            if let Err(error) = self.on_upsert(worker, config, true).await? {
                tracing::warn!(%error, "discovery names a worker that cannot be used; it is left as it was");
            }
        }
        self.publish_workers();
        Ok(())
    }

    /// Starts to remove a worker; what must end before it is gone.
    fn retire_worker(&mut self, worker: WorkerId) -> BTreeSet<(Slot, Generation)> {
        for (rank, slot) in self.workers.remove(&worker).map(|known| known.slots).unwrap_or_default() {
            self.retire(rank, slot);
        }
        let seats = self.seats.iter().flatten().map(|running| &running.seat);
        seats.filter(|seat| seat.rank.worker == worker).map(|seat| (seat.slot, seat.generation)).collect()
    }

    /// The index forgets the rank at once; the scheduler passes the word on behind its last Book.
    fn retire(&mut self, rank: WorkerRank, slot: Slot) {
        let Some(Some(running)) = self.seats.get_mut(slot.index()) else { return };
        running.retiring = true;
        let generation = running.seat.generation;
        if let Some(shard) = self.shard(rank) {
            shard.tell(RadixMsg::Remove { rank });
        }
        self.warm(rank);
        let ack = RetireAck { supervisor: self.myself.clone(), slot, generation };
        self.shared.scheduler.tell(SchedulerMsg::Retire { slot, generation, ack });
    }

    fn on_retired(&mut self, slot: Slot, generation: Generation) {
        let here = |running: &&mut Option<Running>| running.as_ref().is_some_and(|r| r.seat.generation == generation);
        let Some(running) = self.seats.get_mut(slot.index()).filter(here).and_then(Option::take) else { return };
        self.children.remove(&running.actor);
        self.shared.set_seat(slot, None);
        running.seat.turn.close();
        // Whatever the actor did not live to end.
        for lease in self.shared.directory.booked_on(slot, generation) {
            self.shared.end(&lease);
        }
        self.free_slots.insert(slot);
        for removal in &mut self.removals {
            removal.left.remove(&(slot, generation));
        }
        for done in self.removals.extract_if(.., |removal| removal.left.is_empty()) {
            drop(done.answer.send(Ok(())));
        }
    }

    fn publish_workers(&self) {
        let entry = |(worker, known): (&WorkerId, &Worker)| WorkerEntry {
            worker: *worker,
            config: known.config.clone(),
            ranks: known.slots.keys().copied().collect(),
        };
        self.shared.workers.send_replace(self.workers.iter().map(entry).collect());
    }

    /// News of a shard that has died since would un-name a rank that is cold again.
    fn on_warmed(&self, rank: WorkerRank, incarnation: u32) {
        let shard = shard_of(rank, self.shared.shards.len());
        if self.radix_incarnations.get(shard) == Some(&incarnation) {
            self.warm(rank);
        }
    }

    fn warm(&self, rank: WorkerRank) {
        self.shared.cold.send_if_modified(|cold| cold.remove(&rank));
    }
}

// Lifecycles: what runs.
impl State {
    async fn start_rank(&mut self, rank: WorkerRank, endpoint: Arc<str>) -> Result<Slot, ActorProcessingErr> {
        let slot = self.free_slots.pop_first().unwrap_or(Slot(u32::try_from(self.seats.len())?));
        if self.seats.len() <= slot.index() {
            self.seats.resize_with(slot.index() + 1, || None);
            self.generations.resize(slot.index() + 1, Generation(0));
        }
        self.generations[slot.index()].0 += 1;
        let generation = self.generations[slot.index()];
        let board = Arc::new(BoardSlot::default());
        let rate = Arc::new(RateCell::default());
        let seat = Arc::new(Seat { rank, slot, generation, endpoint, rate: Arc::clone(&rate), turn: Turn::closed() });
        let actor = self.start_sequence(&seat, &board, 0).await?;
        self.shared.set_seat(slot, Some(Arc::clone(&seat)));
        let peer = Peer { rank, slot, generation, board: Arc::clone(&board), rate, turn: Arc::clone(&seat.turn) };
        self.seats[slot.index()] = Some(Running { seat, board, incarnation: 0, actor, retiring: false });
        if let Some(shard) = self.shard(rank) {
            shard.tell(RadixMsg::Register { rank, slot, generation });
        }
        self.shared.scheduler.tell(SchedulerMsg::Admit(peer));
        Ok(slot)
    }

    async fn start_sequence(
        &mut self,
        seat: &Arc<Seat>,
        board: &Arc<BoardSlot>,
        incarnation: u32,
    ) -> Result<ActorId, ActorProcessingErr> {
        let actor = self.spawn(&seat.turn, Role::Sequence(seat.slot)).await?;
        let (id, place) = (actor.get_id(), (seat.slot, seat.generation));
        let (board, directory, clock) = (Arc::clone(board), Arc::clone(&self.shared.directory), self.shared.clock);
        let learns = self.shared.config.prefill_load_model == PrefillModel::Learned;
        let learns = learns.then(|| Arc::clone(&seat.rate));
        seat.turn.open(actor, || Sequence::restore(place, incarnation, board, learns, directory, clock));
        Ok(id)
    }

    async fn start_radix(&mut self, shard: usize, cold: BTreeSet<WorkerRank>) -> Result<(), ActorProcessingErr> {
        let turn = Arc::clone(&self.shared.shards[shard].turn);
        let actor = self.spawn(&turn, Role::Radix(shard)).await?;
        let ranks = self.ranks_of(shard).map(|seat| (seat.rank, seat.slot, seat.generation));
        let incarnation = self.radix_incarnations[shard];
        turn.open(actor, || Radix::new(ranks, incarnation, cold, self.myself.clone()));
        Ok(())
    }

    async fn start_scheduler(&mut self) -> Result<(), ActorProcessingErr> {
        let turn = Arc::clone(&self.shared.scheduler);
        let actor = self.spawn(&turn, Role::Scheduler).await?;
        let (config, clock, incarnation) = (self.shared.config.clone(), self.shared.clock, self.scheduler_incarnation);
        turn.open(actor, || {
            let mut scheduler = Scheduler::new(config, incarnation, clock, Handle::current(), &turn);
            for running in self.seats.iter().flatten().filter(|running| !running.retiring) {
                let Seat { rank, slot, generation, rate, turn, .. } = &*running.seat;
                let (board, rate, turn) = (Arc::clone(&running.board), Arc::clone(rate), Arc::clone(turn));
                scheduler.admit(Peer { rank: *rank, slot: *slot, generation: *generation, board, rate, turn });
            }
            scheduler
        });
        Ok(())
    }

    async fn spawn<S: Step>(
        &mut self,
        turn: &Arc<Turn<S>>,
        role: Role,
    ) -> Result<ActorRef<Wake<S>>, ActorProcessingErr> {
        let (actor, _) = Actor::spawn_linked(None, TurnActor::new(), Arc::clone(turn), self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), role);
        Ok(actor)
    }

    /// A child has died. Ours to restart, unless it was removed on purpose.
    async fn on_death(&mut self, actor: ActorId, reason: &str) -> Result<(), ActorProcessingErr> {
        let Some(role) = self.children.remove(&actor) else { return Ok(()) };
        metrics::counter!("pointsman_restarts_total", "role" => role.name()).increment(1);
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
        }
        self.shared.status.send_modify(|Status { restarts, .. }| *restarts += 1);
        Ok(())
    }

    /// A fresh shard knows its ranks and not what they hold: their embedder must send again.
    async fn restart_radix(&mut self, shard: usize) -> Result<(), ActorProcessingErr> {
        self.radix_incarnations[shard] += 1;
        let lost: BTreeSet<WorkerRank> = self.ranks_of(shard).map(|seat| seat.rank).collect();
        self.start_radix(shard, lost.clone()).await?;
        self.shared.cold.send_modify(|cold| cold.extend(lost));
        Ok(())
    }

    async fn restart_sequence(&mut self, slot: Slot) -> Result<(), ActorProcessingErr> {
        let Some(Some(running)) = self.seats.get_mut(slot.index()) else { return Ok(()) };
        running.incarnation += 1;
        let (seat, board, incarnation) = (Arc::clone(&running.seat), Arc::clone(&running.board), running.incarnation);
        let actor = self.start_sequence(&seat, &board, incarnation).await?;
        if let Some(Some(running)) = self.seats.get_mut(slot.index()) {
            running.actor = actor;
        }
        Ok(())
    }

    fn ranks_of(&self, shard: usize) -> impl Iterator<Item = &Arc<Seat>> {
        let shards = self.shared.shards.len();
        let running = self.seats.iter().flatten().filter(|running| !running.retiring).map(|running| &running.seat);
        running.filter(move |seat| shard_of(seat.rank, shards) == shard)
    }

    fn shard(&self, rank: WorkerRank) -> Option<&Turn<Radix>> {
        let shards = &self.shared.shards;
        shards.get(shard_of(rank, shards.len())).map(|shard| &*shard.turn)
    }
}
