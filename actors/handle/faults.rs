//! Fault injection: a panic or a hang in one actor of a running router.
//!
//! A fault is a message like any other, so the actor handles it in order with its other messages.

use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use super::router::Router;
use crate::actors::delivery::fault::{InjectedFault, InjectedHang};
use crate::actors::delivery::strand::{ActorState, Strand};
use crate::actors::discovery::FollowerMsg;
#[cfg(feature = "zmq")]
use crate::actors::ingest::{IngestMsg, ReaderCommand};
use crate::actors::sequence::table::SequenceAddress;
use crate::actors::supervisor::SupervisorMsg;
use crate::protocol::WorkerRank;

/// Actor that a fault affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The supervisor. Its loss fails the whole router.
    Supervisor,
    /// The scheduler.
    Scheduler,
    /// The index shard of this rank.
    Radix(WorkerRank),
    /// The sequence actor of this rank.
    Sequence(WorkerRank),
    /// The reader of this rank's KV events.
    #[cfg(feature = "zmq")]
    Ingest(WorkerRank),
    /// The health actor.
    Health,
    /// The actor that records the load reported by engines.
    EngineLoads,
    /// The actor that follows this source of workers, counted from 0.
    Discovery(usize),
}

impl Fault {
    /// Whether the sender of a message may handle it on its own thread.
    fn runs_on_its_sender(self) -> bool {
        match self {
            Self::Scheduler | Self::Radix(_) | Self::Sequence(_) | Self::Health | Self::EngineLoads => true,
            Self::Supervisor | Self::Discovery(_) => false,
            #[cfg(feature = "zmq")]
            Self::Ingest(_) => false,
        }
    }
}

/// Keeps an actor hung. Dropping it releases the actor and waits until its inbox has been drained.
#[derive(Debug)]
#[must_use = "dropping it ends the hang"]
pub struct Hang {
    release: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Hang {
    fn drop(&mut self) {
        drop(self.release.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic in that thread is the injected fault
        }
    }
}

impl Router {
    /// Makes an actor panic at its next message. Returns false if the actor does not exist.
    ///
    /// For fault tests on a router without production traffic.
    pub fn inject(&self, fault: Fault) -> bool {
        self.injected(fault, InjectedFault::Panic)
    }

    /// Makes an actor hang, with its strand locked, until the returned value is dropped. `None` if the actor does not
    /// exist.
    ///
    /// Blocks until the actor hangs. An actor that runs on the threads of its senders hangs on a thread of its own,
    /// outside the runtime.
    #[must_use]
    pub fn hang(&self, fault: Fault) -> Option<Hang> {
        let ((release, until_dropped), (stuck, is_stuck)) = (mpsc::channel(), mpsc::channel());
        let router = self.clone();
        let thread = thread::spawn(move || {
            let (returned, handled_elsewhere) = mpsc::channel();
            let thread = fault.runs_on_its_sender().then(|| thread::current().id());
            let hang = Box::new(InjectedHang { thread, stuck, returned, until_dropped });
            router.injected(fault, InjectedFault::Hang(hang));
            while let Ok(hang) = handled_elsewhere.recv() {
                router.injected(fault, InjectedFault::Hang(hang));
            }
        });
        is_stuck.recv().ok().map(|()| Hang { release: Some(release), thread: Some(thread) })
    }

    /// Makes the supervisor ignore the next change of a source of workers. Returns false if the supervisor has stopped.
    pub fn miss_next_discovery(&self) -> bool {
        self.supervisor().send_message(SupervisorMsg::MissNext).is_ok()
    }

    /// Address of a rank. Of two entries, the older one is retiring.
    pub(super) fn newest_sequence(&self, rank: WorkerRank) -> Option<Arc<SequenceAddress>> {
        let addresses = self.strands().sequences.select(|address| address.entry.rank == rank);
        addresses.into_iter().max_by_key(|address| address.entry.since)
    }

    fn injected(&self, fault: Fault, injected: InjectedFault) -> bool {
        let (strands, views) = (self.strands(), self.views());
        match fault {
            Fault::Supervisor => return self.supervisor().send_message(SupervisorMsg::Fault(injected)).is_ok(),
            Fault::Discovery(source) => {
                let is_followed = source < views.discovery.borrow().len();
                let fault = SupervisorMsg::FaultOf(source, FollowerMsg::Fault(injected));
                return is_followed && self.supervisor().send_message(fault).is_ok();
            }
            Fault::Scheduler => inject(&strands.scheduler, injected),
            Fault::Health => inject(&strands.health, injected),
            Fault::EngineLoads => inject(&strands.engine_loads, injected),
            Fault::Radix(rank) => match strands.shards.of(rank) {
                Some(shard) => inject(shard, injected),
                None => return false,
            },
            Fault::Sequence(rank) => match self.newest_sequence(rank) {
                Some(address) => inject(&address.strand, injected),
                None => return false,
            },
            #[cfg(feature = "zmq")]
            Fault::Ingest(rank) => {
                let is_read = self.kv_sources().iter().any(|source| source.rank == rank);
                let fault = SupervisorMsg::IngestFault(rank, IngestMsg::Command(ReaderCommand::Fault(injected)));
                return is_read && self.supervisor().send_message(fault).is_ok();
            }
        }
        true
    }
}

/// The fault happens in a step of the actor.
fn inject<S: ActorState>(strand: &Strand<S>, injected: InjectedFault) {
    strand.query(|_| {
        injected.apply();
        || {}
    });
}
