//! Fault injection at a kind of message: an actor panics at the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::faults::Fault;
use super::router::Router;
use crate::actors::delivery::fault::{FaultMoment, MessageFault};
use crate::actors::delivery::strand::Envelope;
use crate::actors::discovery::FollowerMsg;
use crate::actors::engine_load::{EngineLoadMsg, EngineLoads};
use crate::actors::health::{HealthActor, HealthMsg};
#[cfg(feature = "zmq")]
use crate::actors::ingest::IngestMsg;
use crate::actors::radix::{Radix, RadixMsg};
use crate::actors::scheduler::{Scheduler, SchedulerMsg};
use crate::actors::sequence::{Sequence, SequenceMsg};
use crate::actors::supervisor::SupervisorMsg;

/// Kinds of messages: name, and whether a message is of the kind.
type Kinds<M> = &'static [(&'static str, fn(&M) -> bool)];

/// Lists the kinds of an enum of messages, except those of injected faults. A kind in neither list does not compile.
macro_rules! kinds {
    ($name:ident, $msg:ident: $($(#[$cfg:meta])* $kind:ident),*; faults: $($(#[$of:meta])* $fault:ident),*) => {
        fn $name() -> Kinds<$msg> {
            let _: fn(&$msg) = |msg| match msg {
                $($(#[$cfg])* $msg::$kind { .. } => {})*
                $($(#[$of])* $msg::$fault { .. } => {})*
            };
            &[$($(#[$cfg])* (stringify!($kind), |msg| matches!(msg, $msg::$kind { .. }))),*]
        }
    };
    ($name:ident, $state:ident, $msg:ident: $($(#[$cfg:meta])* $kind:ident),*; queries: $($(#[$of:meta])* $query:ident),*) => {
        fn $name() -> Kinds<Envelope<$state>> {
            let _: fn(&$msg) = |msg| match msg {
                $($(#[$cfg])* $msg::$kind { .. } => {})*
            };
            &[
                $($(#[$cfg])* (stringify!($kind), |msg| matches!(msg, Envelope::Msg($msg::$kind { .. }))),)*
                $($(#[$of])* (stringify!($query), |msg| matches!(msg, Envelope::Query(stringify!($query), _))),)*
            ]
        }
    };
}

kinds! { scheduler, Scheduler, SchedulerMsg:
    Decide, Loads, Timeout, Cancel, Refreshed, Wake, Admit, Describe, Drain, Cordon, Retire, Conditions, Exclusions;
    queries: Applied, Pending, Session, ShowQueue, #[cfg(feature = "replicas")] ReceiveSessions, #[cfg(feature = "replicas")] ShareSessions
}
kinds! { radix, Radix, RadixMsg:
    Overlap, Apply, Proven, Register, Remove, Routed, Recorded, Released, Forget, RestoreEvicted;
    queries: Flush, Dump,
    #[cfg(feature = "replicas")] TakeRouted,
    #[cfg(feature = "zmq")] DumpRank,
    #[cfg(feature = "zmq")] Digest,
    #[cfg(feature = "zmq")] Names
}
kinds! { sequence, Sequence, SequenceMsg: Load, Book, Reconcile, Drain, Undrain, Retire; queries: }
kinds! { health, HealthActor, HealthMsg: MembersChanged, Probed, Outcome, Stalls, Wake, Report; queries: }
kinds! { engine_loads, EngineLoads, EngineLoadMsg: Reported; queries: }
kinds! { supervisor, SupervisorMsg:
    Membership, Follow, Reconcile, Drained, DrainTimedOut, Warmed, Ping, Hung,
    #[cfg(feature = "zmq")] Snapshot,
    #[cfg(feature = "zmq")] Restore;
    faults: Fault, Arm, #[cfg(feature = "zmq")] IngestFault, FaultOf, MissNext
}
kinds! { follower, FollowerMsg: Panicked; faults: Fault, Arm }
#[cfg(feature = "zmq")]
kinds! { ingest, IngestMsg: Resync, Snapshot, Restore, Died; faults: Fault, Arm }

fn names<M>(kinds: Kinds<M>) -> Vec<&'static str> {
    kinds.iter().map(|(name, _)| *name).collect()
}

impl Fault {
    /// Names of the kinds of messages that the actor handles, without those of injected faults.
    #[must_use]
    pub fn message_kinds(self) -> Vec<&'static str> {
        match self {
            Self::Supervisor => names(supervisor()),
            Self::Scheduler => names(scheduler()),
            Self::Radix(_) => names(radix()),
            Self::Sequence(_) => names(sequence()),
            Self::Health => names(health()),
            Self::EngineLoads => names(engine_loads()),
            #[cfg(feature = "zmq")]
            Self::Ingest(_) => names(ingest()),
            Self::Discovery(_) => names(follower()),
        }
    }
}

/// A panic at a kind of message, see [`Router::inject_at`].
#[derive(Clone, Debug)]
pub struct InjectedPanic {
    moment: FaultMoment,
    began: Arc<AtomicBool>,
}

impl InjectedPanic {
    /// Whether a message of the kind has arrived.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.began.load(Ordering::SeqCst)
    }

    fn at<M>(&self, kind: &str, kinds: Kinds<M>) -> Option<MessageFault<M>> {
        let (_, is_kind) = kinds.iter().find(|(name, _)| *name == kind)?;
        Some(MessageFault { is_kind: *is_kind, moment: self.moment, began: Arc::clone(&self.began) })
    }
}

impl Router {
    /// Makes an actor panic at its next message of this [kind](Fault::message_kinds). Replaces an earlier such fault of
    /// the actor. `None` if the actor or the kind does not exist.
    ///
    /// For fault tests on a router without production traffic.
    #[must_use]
    pub fn inject_at(&self, fault: Fault, kind: &str, moment: FaultMoment) -> Option<InjectedPanic> {
        let (panic, strands) = (InjectedPanic { moment, began: Arc::default() }, self.strands());
        let to_supervisor = |msg| self.supervisor().send_message(msg).ok();
        match fault {
            Fault::Supervisor => to_supervisor(SupervisorMsg::Arm(panic.at(kind, supervisor())?))?,
            Fault::Discovery(source) => {
                to_supervisor(SupervisorMsg::FaultOf(source, FollowerMsg::Arm(panic.at(kind, follower())?)))?;
            }
            #[cfg(feature = "zmq")]
            Fault::Ingest(rank) => {
                to_supervisor(SupervisorMsg::IngestFault(rank, IngestMsg::Arm(panic.at(kind, ingest())?)))?;
            }
            Fault::Scheduler => strands.scheduler.arm(panic.at(kind, scheduler())?),
            Fault::Radix(rank) => strands.shards.of(rank)?.arm(panic.at(kind, radix())?),
            Fault::Sequence(rank) => self.newest_sequence(rank)?.strand.arm(panic.at(kind, sequence())?),
            Fault::Health => strands.health.arm(panic.at(kind, health())?),
            Fault::EngineLoads => strands.engine_loads.arm(panic.at(kind, engine_loads())?),
        }
        Some(panic)
    }
}
