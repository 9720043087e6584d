//! The actor that takes in what engines say of their load, and shows it where the scheduler reads it without a message.
//!
//! Owns the writing side of each rank's [`EngineLoadCell`](crate::engine_load::EngineLoadCell). Promises that what is
//! said of an engine that has gone is not shown as its successor's. Leaves reading pages and messages to
//! `src/engine_load`, asking and listening to tasks for each worker (features `discovery` and `zmq`), and age to whoever looks: what nobody says
//! any more grows old by itself.

#[cfg(feature = "discovery")]
mod scrape;
#[cfg(feature = "zmq")]
mod socket;

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::actors::delivery::strand::{DeferredReply, Step};
use crate::actors::scheduler::SchedulerMsg;
use crate::actors::shared::{Phase, Shared};
use crate::engine_load::{EngineLoad, EngineReading};
use crate::protocol::{Timestamp, WorkerId, WorkerRank};

/// What the actor can be told.
pub(crate) enum EngineLoadMsg {
    /// An engine was asked then, or spoke, and says this of its ranks.
    Said { worker: WorkerId, readings: Vec<(u32, EngineReading)>, asked_at: Timestamp },
    /// A drill: panic, or hold the turn until told to go on.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
}

/// The actor's state: none but the way to the cells.
pub(crate) struct EngineLoads {
    shared: Weak<Shared>,
}

/// Nobody waits for it.
pub(crate) struct Nothing;

impl DeferredReply for Nothing {
    fn deliver(self) {}
}

impl EngineLoads {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::downgrade(shared) }
    }
}

impl Step for EngineLoads {
    type Msg = EngineLoadMsg;
    type Deferred = Nothing;

    fn step(&mut self, msg: EngineLoadMsg) -> Option<Nothing> {
        match msg {
            EngineLoadMsg::Said { worker, readings, asked_at } => {
                let shared = self.shared.upgrade()?;
                let at = shared.clock.now();
                for entry in shared.entries_of(worker).iter().filter(|entry| entry.since <= asked_at) {
                    if let Some((_, reading)) = readings.iter().find(|(rank, _)| *rank == entry.rank.rank) {
                        entry.engine_load.publish(&EngineLoad { reading: *reading, at });
                    }
                }
            }
            #[cfg(feature = "faults")]
            EngineLoadMsg::Fault(injected) => injected.apply(),
        }
        None
    }
}

/// Starts to ask the workers, where that is wanted. It ends with the router.
pub(crate) fn watch(shared: &Arc<Shared>) {
    #[cfg(feature = "discovery")]
    scrape::watch(shared);
    #[cfg(feature = "zmq")]
    socket::watch(shared);
    let config = &shared.config;
    let limits = config.overload_engine_waiting.is_some() || config.overload_engine_kv_usage.is_some();
    if limits && config.queueing() {
        let (stale, interval) = (config.engine_load_stale_ms, config.engine_load_interval_ms);
        let period = Duration::from_millis((stale / 2).min(interval.max(1)).max(50));
        tokio::spawn(wake_waiting(Arc::downgrade(shared), period));
    }
}

/// Has the scheduler look at those who wait: what an engine says can open a rank, and so can its silence.
async fn wake_waiting(shared: Weak<Shared>, period: Duration) {
    loop {
        tokio::time::sleep(period).await;
        let Some(shared) = shared.upgrade() else { return };
        if matches!(shared.status.borrow().phase, Phase::Failed | Phase::Stopped) {
            return;
        }
        shared.scheduler.tell(SchedulerMsg::Wake { at: None });
    }
}

/// A rank's engine has just said this.
pub(crate) fn said(shared: &Shared, rank: WorkerRank, reading: EngineReading) {
    if !reading.is_empty() {
        let (worker, readings) = (rank.worker, vec![(rank.rank, reading)]);
        shared.engine_loads.tell(EngineLoadMsg::Said { worker, readings, asked_at: shared.clock.now() });
    }
}
