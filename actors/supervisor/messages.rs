//! Messages to the supervisor, and acknowledgements that become such messages.

use ractor::ActorRef;
use tokio::sync::oneshot;

use crate::actors::discovery::AnySource;
#[cfg(feature = "zmq")]
use crate::actors::ingest::SnapshotReply;
use crate::error::MembershipError;
use crate::membership::{Child, MembershipInput, SourceUpdate};
use crate::protocol::{Generation, Slot};
use crate::shell::supervisor::SupervisorInput;

/// Reply to a membership change: the number of bookings ended by a drain, else 0.
pub(crate) type MembershipReply = oneshot::Sender<Result<usize, MembershipError>>;

pub(crate) enum SupervisorMsg {
    /// Change of the membership by the embedder, an acknowledgement or a timer.
    Membership(MembershipInput<MembershipReply>),
    /// Follows another discovery source.
    Follow { name: String, source: Box<dyn AnySource> },
    /// Value of a source. `done` is dropped after the value is applied.
    Reconcile { source: usize, update: SourceUpdate, done: Option<oneshot::Sender<()>> },
    /// Another input of the shell: an acknowledgement or a deadline.
    Shell(SupervisorInput<MembershipReply>),
    /// Ping of the watchdog.
    Ping(u64),
    /// The actor has made no progress since `progress`, although work waits.
    Hung { child: Child, progress: u64 },
    /// Query for the index contents of a rank, for its reader.
    #[cfg(feature = "zmq")]
    Snapshot { slot: Slot, reply: SnapshotReply },
    /// Contents of a snapshot are pending for the readers.
    #[cfg(feature = "zmq")]
    Restore,
    /// Injected fault of the supervisor.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
    /// Injected fault of the KV event reader of a rank, as a message to it.
    #[cfg(all(feature = "faults", feature = "zmq"))]
    IngestFault(crate::protocol::WorkerRank, crate::actors::ingest::IngestMsg),
    /// Injected fault of the actor that follows a source, as a message to it.
    #[cfg(feature = "faults")]
    FaultOf(usize, crate::actors::discovery::FollowerMsg),
    /// Injected fault: the next value of a source is recorded and not applied.
    #[cfg(feature = "faults")]
    MissNext,
}

/// Sends [`MembershipInput::RankRetired`] when dropped.
pub(super) struct RetireAck {
    pub(super) supervisor: ActorRef<SupervisorMsg>,
    pub(super) slot: Slot,
    pub(super) generation: Generation,
}

impl Drop for RetireAck {
    fn drop(&mut self) {
        let retired = MembershipInput::RankRetired { slot: self.slot, generation: self.generation };
        drop(self.supervisor.send_message(SupervisorMsg::Membership(retired)));
    }
}

/// Sends [`SupervisorInput::Drained`] when dropped, also by a dying actor: the supervisor counts the bookings that remain.
pub(super) struct DrainAck {
    pub(super) supervisor: ActorRef<SupervisorMsg>,
    pub(super) slot: Slot,
    pub(super) generation: Generation,
}

impl Drop for DrainAck {
    fn drop(&mut self) {
        let Self { slot, generation, .. } = *self;
        drop(self.supervisor.send_message(SupervisorMsg::Shell(SupervisorInput::Drained { slot, generation })));
    }
}
