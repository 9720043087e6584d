//! Drills: break one part of a running router on purpose and watch it mend.
//!
//! Owns nothing of the router. A fault travels as a message like any other, so it strikes where real work would be.

use std::sync::mpsc;
use std::thread::JoinHandle;

use super::engine_load::EngineLoadMsg;
use super::health::HealthMsg;
use super::radix::{RadixMsg, shard_of};
use super::router::Router;
use super::scheduler::SchedulerMsg;
use super::sequence::SequenceMsg;
use super::shared::Seat;
use super::supervisor::SupervisorMsg;
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

/// Holds a wedged actor; dropping it lets the actor go on, and waits until it has caught up.
#[derive(Debug)]
#[must_use = "dropping it ends the wedge"]
pub struct Wedge {
    release: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<bool>>,
}

impl Drop for Wedge {
    fn drop(&mut self) {
        drop(self.release.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there is the drill's own business
        }
    }
}

/// What happens when the message is handled.
pub(crate) enum Trip {
    Panic,
    Wedge { stuck: mpsc::Sender<()>, until_dropped: mpsc::Receiver<()> },
}

impl Trip {
    pub(crate) fn happen(self) {
        match self {
            Self::Panic => std::panic::panic_any("a drill"),
            Self::Wedge { stuck, until_dropped } => {
                let _ = stuck.send(());
                let _ = until_dropped.recv();
            }
        }
    }
}

#[cfg(feature = "zmq")]
impl Trip {
    /// As [`Trip::happen`], in a task: standing still takes none of the runtime's threads.
    pub(crate) async fn happen_aside(self) {
        match self {
            Self::Panic => self.happen(),
            Self::Wedge { .. } => drop(tokio::task::spawn_blocking(move || self.happen()).await),
        }
    }
}

impl Router {
    /// Makes a part panic at its next message. Returns whether there is such a part.
    ///
    /// For drills on a router that nobody depends on.
    pub fn inject(&self, fault: Fault) -> bool {
        self.trip(fault, Trip::Panic)
    }

    /// Makes a part stand still, holding its turn, until the answer is dropped. `None` when there is no such part.
    ///
    /// Blocks until it stands still. The part stands still on a thread of its own, outside the runtime.
    #[must_use]
    pub fn wedge(&self, fault: Fault) -> Option<Wedge> {
        let ((release, until_dropped), (stuck, is_stuck)) = (mpsc::channel(), mpsc::channel());
        let router = self.clone();
        let thread = std::thread::spawn(move || router.trip(fault, Trip::Wedge { stuck, until_dropped }));
        is_stuck.recv().ok().map(|()| Wedge { release: Some(release), thread: Some(thread) })
    }

    /// Lets the supervisor do nothing about the next news of a source of workers. Returns whether it is there to do so.
    pub fn miss_next_discovery(&self) -> bool {
        self.supervisor().send_message(SupervisorMsg::MissNext).is_ok()
    }

    fn trip(&self, fault: Fault, trip: Trip) -> bool {
        let shared = self.shared();
        match fault {
            Fault::Supervisor => return self.supervisor().send_message(SupervisorMsg::Fault(trip)).is_ok(),
            Fault::Discovery(source) => {
                let is_followed = source < shared.discovery.borrow().len();
                return is_followed && self.supervisor().send_message(SupervisorMsg::FaultOf(source, trip)).is_ok();
            }
            Fault::Scheduler => shared.scheduler.tell(SchedulerMsg::Fault(trip)),
            Fault::Health => shared.health.tell(HealthMsg::Fault(trip)),
            Fault::EngineLoads => shared.engine_loads.tell(EngineLoadMsg::Fault(trip)),
            Fault::Radix(rank) => match shared.shards.get(shard_of(rank, shared.shards.len())) {
                Some(shard) => shard.turn.tell(RadixMsg::Fault(trip)),
                None => return false,
            },
            Fault::Sequence(rank) => match shared.seat_of(rank) {
                Some(seat) => {
                    let Seat { turn, .. } = &*seat;
                    turn.tell(SequenceMsg::Fault(trip));
                }
                None => return false,
            },
            #[cfg(feature = "zmq")]
            Fault::Ingest(rank) => {
                let is_read = self.kv_sources().iter().any(|source| source.rank == rank);
                return is_read && self.supervisor().send_message(SupervisorMsg::IngestFault(rank, trip)).is_ok();
            }
        }
        true
    }
}
