//! State of the supervisor: its shell, the running actors, and the dependencies to start them with.

#[cfg(feature = "zmq")]
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ahash::AHashMap;
use metrics::Counter;
use ractor::{ActorId, ActorRef};
use tokio::sync::Mutex;

use super::dependencies::SupervisorDependencies;
use super::messages::{MembershipReply, SupervisorMsg};
use super::watchdog::WatchdogGuard;
use crate::actors::delivery::ActorResult;
use crate::actors::delivery::strand::Strand;
use crate::actors::discovery::{AnySource, FollowerMsg};
#[cfg(feature = "zmq")]
use crate::actors::ingest::IngestMsg;
use crate::actors::sequence::Sequence;
use crate::actors::strands::Strands;
use crate::actors::views::Views;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::status::RouterPhase;
use crate::membership::{Child, MembershipInput};
#[cfg(feature = "zmq")]
use crate::protocol::Slot;
use crate::protocol::{Generation, WorkerRank};
use crate::shell::supervisor::{SupervisedRank, SupervisorInput, SupervisorShell};

pub(crate) struct SupervisorState {
    pub(super) dependencies: SupervisorDependencies,
    pub(super) myself: ActorRef<SupervisorMsg>,
    pub(super) shell: SupervisorShell<MembershipReply, RankActor>,
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

impl SupervisedRank for RankActor {
    fn rank(&self) -> WorkerRank {
        self.entry.rank
    }

    fn generation(&self) -> Generation {
        self.entry.generation
    }

    fn is_indexed(&self) -> bool {
        self.entry.cells.holdings.changed_at().is_some()
    }
}

impl SupervisorState {
    pub(super) async fn apply(&mut self, input: SupervisorInput<MembershipReply>) -> ActorResult {
        for effect in self.shell.step(input, self.dependencies.clock.now()) {
            self.perform(effect).await?;
        }
        Ok(())
    }

    pub(super) async fn apply_membership(&mut self, input: MembershipInput<MembershipReply>) -> ActorResult {
        self.apply(SupervisorInput::Membership(input)).await
    }
}
