//! Supervisor actor: starts and restarts the other actors, and performs the effects of the membership machine.
//!
//! Decisions belong to [`Membership`]. This actor converts messages, acknowledgements and deaths into its inputs, performs
//! the effects in order, and publishes the read views of workers, sources and cold ranks. When it ends without a stop, the
//! router has failed. No request passes through it.

mod children;
mod effects;
#[cfg(feature = "zmq")]
mod readers;
mod report;
mod sources;

use std::collections::BTreeMap;
use std::sync::Arc;

use ahash::AHashMap;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::oneshot;

use crate::actors::discovery::AnySource;
use crate::actors::radix::shard_of;
use crate::actors::shared::{Phase, RankEntry, Shared};
use crate::error::MembershipError;
use crate::membership::{Child, Membership, MembershipInput, MembershipRules, RegisteredWorker, SourceUpdate};
use crate::protocol::{Generation, Slot, WorkerId, WorkerRank};
use sources::FollowedSource;

/// Reply to a membership change: the number of bookings that a drain cut off, else 0.
pub(crate) type MembershipReply = oneshot::Sender<Result<usize, MembershipError>>;

pub(crate) enum SupervisorMsg {
    /// Change of the membership by the embedder, an acknowledgement or a timer.
    Membership(MembershipInput<MembershipReply>),
    /// Follows another discovery source.
    Follow { name: String, source: Box<dyn AnySource> },
    /// Value of a source. `done` is dropped after the value is applied.
    Reconcile { source: usize, update: SourceUpdate, done: Option<oneshot::Sender<()>> },
    /// Acknowledgement of a drained rank, or the loss of its sequence actor.
    Drained { slot: Slot, generation: Generation },
    /// Deadline of a drain.
    DrainTimedOut { worker: WorkerId, drain: u64 },
    /// The blocks of a cold rank were sent to this incarnation of its shard.
    Warmed { rank: WorkerRank, incarnation: u32 },
    /// Injected fault of the supervisor.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
    /// Injected fault of the KV event reader of a rank.
    #[cfg(all(feature = "faults", feature = "zmq"))]
    IngestFault(WorkerRank, crate::actors::delivery::fault::InjectedFault),
    /// Injected fault of the actor that follows a source.
    #[cfg(feature = "faults")]
    FaultOf(usize, crate::actors::delivery::fault::InjectedFault),
    /// Injected fault: the next value of a source is recorded and not applied.
    #[cfg(feature = "faults")]
    MissNext,
}

/// Sends [`MembershipInput::RankRetired`] when dropped.
pub(crate) struct RetireAck {
    supervisor: ActorRef<SupervisorMsg>,
    slot: Slot,
    generation: Generation,
}

impl Drop for RetireAck {
    fn drop(&mut self) {
        let retired = MembershipInput::RankRetired { slot: self.slot, generation: self.generation };
        drop(self.supervisor.send_message(SupervisorMsg::Membership(retired)));
    }
}

/// Sends [`SupervisorMsg::Drained`] when dropped, also by a dying actor: the supervisor counts the bookings that remain.
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

pub(crate) struct Supervisor;

pub(crate) struct State {
    shared: Arc<Shared>,
    myself: ActorRef<SupervisorMsg>,
    membership: Membership<MembershipReply>,
    /// Ranks by slot, retiring ranks included.
    ranks: BTreeMap<Slot, RankActor>,
    children: AHashMap<ActorId, Child>,
    sources: Vec<FollowedSource>,
    #[cfg(feature = "faults")]
    misses_next_update: bool,
    #[cfg(feature = "zmq")]
    readers: readers::Readers,
    /// Dropped with the state, also by a panic.
    _guard: FailGuard,
}

/// Rank and its sequence actor.
struct RankActor {
    entry: Arc<RankEntry>,
    actor: ActorId,
}

/// Enters the failed phase when the supervisor ends without a stop.
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
        let mut state = State {
            membership: Membership::new(MembershipRules::of(&shared.config, cfg!(feature = "zmq"))),
            _guard: FailGuard(Arc::clone(&shared)),
            shared,
            myself,
            ranks: BTreeMap::new(),
            children: AHashMap::new(),
            sources: Vec::new(),
            #[cfg(feature = "faults")]
            misses_next_update: false,
            #[cfg(feature = "zmq")]
            readers: readers::Readers::new(),
        };
        state.start_scheduler().await?;
        for shard in 0..state.shared.shards.len() {
            state.start_radix(shard, &[]).await?;
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
            SupervisorMsg::Membership(input) => state.apply(input).await,
            SupervisorMsg::Follow { name, source } => state.on_follow(name, source).await,
            SupervisorMsg::Reconcile { source, update, done } => {
                state.on_source_update(source, update).await?;
                drop(done);
                Ok(())
            }
            SupervisorMsg::Drained { slot, generation } => state.on_drained(slot, generation).await,
            SupervisorMsg::DrainTimedOut { worker, drain } => {
                let worker_bookings = state.bookings_of(worker);
                state.apply(MembershipInput::DrainTimedOut { worker, drain, worker_bookings }).await
            }
            SupervisorMsg::Warmed { rank, incarnation } => {
                let shard = shard_of(rank, state.shared.shards.len());
                state.apply(MembershipInput::RankWarmed { rank, shard, incarnation }).await
            }
            #[cfg(feature = "faults")]
            SupervisorMsg::Fault(injected) => {
                injected.apply();
                Ok(())
            }
            #[cfg(all(feature = "faults", feature = "zmq"))]
            SupervisorMsg::IngestFault(rank, injected) => {
                state.on_ingest_fault(rank, injected);
                Ok(())
            }
            #[cfg(feature = "faults")]
            SupervisorMsg::FaultOf(source, injected) => {
                state.on_fault_of(source, injected);
                Ok(())
            }
            #[cfg(feature = "faults")]
            SupervisorMsg::MissNext => {
                state.misses_next_update = true;
                Ok(())
            }
        }
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<SupervisorMsg>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(cell, error) => state.on_death(cell.get_id(), error.to_string()).await,
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                state.on_death(cell.get_id(), reason.unwrap_or_else(|| "stopped".to_owned())).await
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

impl State {
    async fn apply(&mut self, input: MembershipInput<MembershipReply>) -> Result<(), ActorProcessingErr> {
        for effect in self.membership.step(input, self.shared.clock.now()) {
            self.perform(effect).await?;
        }
        Ok(())
    }

    async fn on_drained(&mut self, slot: Slot, generation: Generation) -> Result<(), ActorProcessingErr> {
        let rank_bookings = self.shared.directory.booked_on(slot, generation).len();
        let worker = self.ranks.get(&slot).map(|rank| rank.entry.rank.worker);
        let worker_bookings = worker.map_or(0, |worker| self.bookings_of(worker));
        let input = MembershipInput::RankDrained { slot, generation, rank_bookings, worker_bookings };
        self.apply(input).await
    }

    /// Bookings on all ranks of a worker, retiring ranks included.
    fn bookings_of(&self, worker: WorkerId) -> usize {
        let slots = self.membership.slots_of(worker);
        slots.map(|(slot, generation)| self.shared.directory.booked_on(slot, generation).len()).sum()
    }

    /// Ranks that do not retire, with their workers.
    fn running_ranks(&self) -> impl Iterator<Item = (&Arc<RankEntry>, &RegisteredWorker)> {
        self.ranks.iter().filter_map(|(slot, rank)| Some((&rank.entry, self.membership.worker_at(*slot)?)))
    }

    fn ranks_of_shard(&self, shard: usize) -> impl Iterator<Item = (&Arc<RankEntry>, &RegisteredWorker)> {
        let shards = self.shared.shards.len();
        self.running_ranks().filter(move |(entry, _)| shard_of(entry.rank, shards) == shard)
    }
}
