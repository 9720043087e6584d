//! Fault injection: a panic or a hang in one actor of a running router.
//!
//! A fault is a message like any other, so the actor handles it in the order of its real work.

use std::sync::mpsc;
use std::thread::JoinHandle;

use super::router::Router;
use crate::actors::delivery::fault::InjectedFault;
use crate::actors::engine_load::EngineLoadMsg;
use crate::actors::health::HealthMsg;
use crate::actors::radix::RadixMsg;
use crate::actors::scheduler::SchedulerMsg;
use crate::actors::sequence::SequenceMsg;
use crate::actors::supervisor::SupervisorMsg;
use crate::protocol::WorkerRank;

/// Which part to break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The supervisor: the router fails whole.
    Supervisor,
    /// The scheduler.
    Scheduler,
    /// The index shard that keeps this rank.
    Radix(WorkerRank),
    /// The sequence actor of this rank.
    Sequence(WorkerRank),
    /// The reader of this rank's KV events.
    #[cfg(feature = "zmq")]
    Ingest(WorkerRank),
    /// The health actor.
    Health,
    /// The actor that takes in what engines say of their load.
    EngineLoads,
    /// The actor that follows this source of workers, counted from 0.
    Discovery(usize),
}

/// Keeps an actor hung. Dropping it releases the actor and waits until its inbox has been drained.
#[derive(Debug)]
#[must_use = "dropping it ends the hang"]
pub struct Hang {
    release: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<bool>>,
}

impl Drop for Hang {
    fn drop(&mut self) {
        drop(self.release.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there is the drill's own business
        }
    }
}

impl Router {
    /// Makes a part panic at its next message. Returns whether there is such a part.
    ///
    /// For drills on a router that nobody depends on.
    pub fn inject(&self, fault: Fault) -> bool {
        self.injected(fault, InjectedFault::Panic)
    }

    /// Makes a part hang, with its strand locked, until the returned value is dropped. `None` if there is no such part.
    ///
    /// Blocks until it stands still. The part stands still on a thread of its own, outside the runtime.
    #[must_use]
    pub fn hang(&self, fault: Fault) -> Option<Hang> {
        let ((release, until_dropped), (stuck, is_stuck)) = (mpsc::channel(), mpsc::channel());
        let router = self.clone();
        let thread = std::thread::spawn(move || router.injected(fault, InjectedFault::Hang { stuck, until_dropped }));
        is_stuck.recv().ok().map(|()| Hang { release: Some(release), thread: Some(thread) })
    }

    /// Lets the supervisor do nothing about the next news of a source of workers. Returns whether it is there to do so.
    pub fn miss_next_discovery(&self) -> bool {
        self.supervisor().send_message(SupervisorMsg::MissNext).is_ok()
    }

    fn injected(&self, fault: Fault, injected: InjectedFault) -> bool {
        let (strands, views) = (self.strands(), self.views());
        match fault {
            Fault::Supervisor => return self.supervisor().send_message(SupervisorMsg::Fault(injected)).is_ok(),
            Fault::Discovery(source) => {
                let is_followed = source < views.discovery.borrow().len();
                return is_followed && self.supervisor().send_message(SupervisorMsg::FaultOf(source, injected)).is_ok();
            }
            Fault::Scheduler => strands.scheduler.tell(SchedulerMsg::Fault(injected)),
            Fault::Health => strands.health.tell(HealthMsg::Fault(injected)),
            Fault::EngineLoads => strands.engine_loads.tell(EngineLoadMsg::Fault(injected)),
            Fault::Radix(rank) => match strands.shards.of(rank) {
                Some(shard) => shard.tell(RadixMsg::Fault(injected)),
                None => return false,
            },
            Fault::Sequence(rank) => match strands
                .sequences
                .select(|address| address.entry.rank == rank)
                .into_iter()
                .max_by_key(|address| address.entry.since)
            {
                Some(address) => address.strand.tell(SequenceMsg::Fault(injected)),
                None => return false,
            },
            #[cfg(feature = "zmq")]
            Fault::Ingest(rank) => {
                let is_read = self.kv_sources().iter().any(|source| source.rank == rank);
                return is_read && self.supervisor().send_message(SupervisorMsg::IngestFault(rank, injected)).is_ok();
            }
        }
        true
    }
}
