//! State of the supervisor: the membership machine, the running actors, and the dependencies to start them with.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ahash::AHashMap;
use metrics::Counter;
use ractor::{ActorId, ActorProcessingErr, ActorRef};
use tokio::sync::Mutex;

use super::dependencies::SupervisorDependencies;
use super::messages::{MembershipReply, SupervisorMsg};
use super::watchdog::WatchdogGuard;
use crate::actors::delivery::strand::Strand;
use crate::actors::discovery::{AnySource, FollowerMsg};
#[cfg(feature = "zmq")]
use crate::actors::ingest::IngestMsg;
use crate::actors::sequence::Sequence;
use crate::actors::strands::Strands;
use crate::actors::views::Views;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::status::RouterPhase;
use crate::membership::{Child, Membership, MembershipInput, RegisteredWorker};
use crate::protocol::{Generation, Slot, WorkerId};

pub(crate) struct SupervisorState {
    pub(super) dependencies: SupervisorDependencies,
    pub(super) myself: ActorRef<SupervisorMsg>,
    pub(super) membership: Membership<MembershipReply>,
    /// Ranks by slot, retiring ranks included.
    pub(super) ranks: BTreeMap<Slot, RankActor>,
    pub(super) children: AHashMap<ActorId, Child>,
    pub(super) sources: Vec<FollowedSource>,
    #[cfg(feature = "faults")]
    pub(super) misses_next_update: bool,
    #[cfg(feature = "zmq")]
    pub(super) readers: Readers,
    /// Number of the last handled ping of the watchdog.
    pub(super) pings_handled: Arc<AtomicU64>,
    /// Absent if hangs are not detected.
    pub(super) watchdog: Option<WatchdogGuard>,
    #[cfg(feature = "faults")]
    pub(super) armed: crate::actors::delivery::fault::ArmedFault<SupervisorMsg>,
    /// Dropped with the state, also by a panic.
    pub(super) _guard: FailGuard,
}

/// Rank and its sequence actor.
pub(super) struct RankActor {
    pub(super) entry: Arc<RankEntry>,
    pub(super) strand: Arc<Strand<Sequence>>,
    pub(super) actor: ActorId,
}

/// Enters the failed phase when the supervisor ends without a stop.
pub(super) struct FailGuard(pub(super) Views, pub(super) Strands);

impl Drop for FailGuard {
    fn drop(&mut self) {
        self.0.status.enter(RouterPhase::Failed);
        self.1.close();
        self.0.ranks.clear();
    }
}

/// Discovery source and the actor that follows it.
pub(super) struct FollowedSource {
    pub(super) source: Arc<Mutex<Box<dyn AnySource>>>,
    pub(super) errors: Counter,
    /// Receiver of injected faults.
    #[cfg_attr(not(feature = "faults"), allow(dead_code, reason = "receives injected faults only"))]
    pub(super) actor: ActorRef<FollowerMsg>,
}

/// Readers by slot, dead readers without restart budget included.
#[cfg(feature = "zmq")]
pub(super) type Readers = BTreeMap<Slot, ActorRef<IngestMsg>>;

impl SupervisorState {
    pub(super) async fn apply(&mut self, input: MembershipInput<MembershipReply>) -> Result<(), ActorProcessingErr> {
        for effect in self.membership.step(input, self.dependencies.clock.now()) {
            self.perform(effect).await?;
        }
        Ok(())
    }

    pub(super) async fn on_drained(&mut self, slot: Slot, generation: Generation) -> Result<(), ActorProcessingErr> {
        let rank_bookings = self.dependencies.directory.booked_on(slot, generation).len();
        let worker = self.ranks.get(&slot).map(|rank| rank.entry.rank.worker);
        let worker_bookings = worker.map_or(0, |worker| self.bookings_of(worker));
        let input = MembershipInput::RankDrained { slot, generation, rank_bookings, worker_bookings };
        self.apply(input).await
    }

    /// Bookings on all ranks of a worker, retiring ranks included.
    pub(super) fn bookings_of(&self, worker: WorkerId) -> usize {
        let slots = self.membership.slots_of(worker);
        slots.map(|(slot, generation)| self.dependencies.directory.booked_on(slot, generation).len()).sum()
    }

    /// Ranks that do not retire, with their workers.
    pub(super) fn running_ranks(&self) -> impl Iterator<Item = (&RankActor, &RegisteredWorker)> {
        self.ranks.iter().filter_map(|(slot, rank)| Some((rank, self.membership.worker_at(*slot)?)))
    }

    pub(super) fn ranks_of_shard(&self, shard: usize) -> impl Iterator<Item = (&Arc<RankEntry>, &RegisteredWorker)> {
        let shards = &self.dependencies.strands.shards;
        let ranks = self.running_ranks().map(|(rank, worker)| (&rank.entry, worker));
        ranks.filter(move |(entry, _)| shards.number_of(entry.rank) == shard)
    }
}
