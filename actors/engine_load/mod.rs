//! Engine load actor: records the load that engines report, in cells that the scheduler reads without a message.
//!
//! Is the writer of each rank's [`EngineLoadCell`](crate::engine_load::EngineLoadCell). A report about a removed engine
//! is not recorded for its successor. `src/engine_load` parses pages and messages, and one task per worker polls them
//! or subscribes to them (features `discovery` and `zmq`). Readers compute the age of a report, so a report without a
//! successor becomes stale without a timer.

#[cfg(feature = "discovery")]
mod scrape;
#[cfg(feature = "zmq")]
mod socket;

use std::sync::Arc;
use std::time::Duration;

use crate::actors::delivery::strand::{ActorState, DeferredReply, Strand};
use crate::actors::health::{HealthActor, HealthMsg};
use crate::actors::io::clock::Clock;
#[cfg(feature = "discovery")]
use crate::actors::io::http::EngineClient;
use crate::actors::scheduler::{Scheduler, SchedulerMsg};
use crate::actors::telemetry::Meters;
use crate::actors::views::fleet::Fleet;
use crate::actors::views::published::Published;
use crate::actors::views::rank::{RankEntries, RankEntry};
use crate::actors::views::status::RouterStatus;
use crate::config::RouterConfig;
use crate::engine_load::{EngineLoad, EngineReading, EngineSleep};
use crate::health::Exclusions;
use crate::protocol::{Timestamp, WorkerId, WorkerRank};

/// Messages to the engine load actor.
pub(crate) enum EngineLoadMsg {
    /// Load report of an engine for its ranks, requested or received at `polled_at`.
    Reported { worker: WorkerId, readings: Vec<(u32, EngineReading)>, polled_at: Timestamp },
}

/// State of the actor: only the dependencies to reach the cells, and the health actor after a change of sleep.
pub(crate) struct EngineLoads {
    pub(crate) ranks: Arc<RankEntries>,
    pub(crate) clock: Clock,
    pub(crate) exclusions: Arc<Published<Exclusions>>,
    pub(crate) health: Arc<Strand<HealthActor>>,
}

/// No replies: messages to this actor have none.
pub(crate) struct Nothing;

impl DeferredReply for Nothing {
    fn deliver(self) {}
}

impl EngineLoads {
    fn publish(&self, entry: &RankEntry, reading: EngineReading) {
        let was_emptied = entry.cells.engine_load.sleep() == Some(EngineSleep::Emptied);
        entry.cells.engine_load.publish(&EngineLoad { reading, at: self.clock.now() });
        if reading.sleep == Some(EngineSleep::Emptied) && !was_emptied {
            entry.source.emptied();
        }
        let is_asleep = reading.sleep > Some(EngineSleep::Awake);
        if is_asleep != self.exclusions.get().asleep.contains(&entry.rank) {
            self.health.tell(HealthMsg::MembersChanged);
        }
    }
}

impl ActorState for EngineLoads {
    type Msg = EngineLoadMsg;
    type Deferred = Nothing;

    fn step(&mut self, msg: EngineLoadMsg) -> Option<Nothing> {
        match msg {
            EngineLoadMsg::Reported { worker, readings, polled_at } => {
                for entry in self.ranks.of_worker(worker).iter().filter(|entry| entry.since <= polled_at) {
                    if let Some((_, reading)) = readings.iter().find(|(rank, _)| *rank == entry.rank.rank) {
                        self.publish(entry, *reading);
                    }
                }
            }
        }
        None
    }
}

/// Dependencies of the tasks that poll engines or subscribe to them.
#[derive(Clone)]
#[cfg_attr(not(any(feature = "discovery", feature = "zmq")), expect(dead_code, reason = "no source is built in"))]
pub(crate) struct EngineLoadSources {
    pub(crate) config: Arc<RouterConfig>,
    #[cfg(feature = "discovery")]
    pub(crate) client: Arc<dyn EngineClient>,
    pub(crate) clock: Clock,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) status: Arc<RouterStatus>,
    pub(crate) meters: Arc<Meters>,
    pub(crate) engine_loads: Arc<Strand<EngineLoads>>,
    pub(crate) scheduler: Arc<Strand<Scheduler>>,
}

impl EngineLoadSources {
    /// Starts the tasks of the configured sources. They end with the router.
    pub(crate) fn watch(self) {
        #[cfg(feature = "discovery")]
        scrape::watch(&self);
        #[cfg(feature = "zmq")]
        socket::watch(&self);
        let config = &self.config;
        let limits = config.overload.engine_waiting.is_some() || config.overload.engine_kv_usage.is_some();
        if limits && config.queue.is_enabled() {
            let (stale, interval) = (config.engine_load.stale_ms, config.engine_load.interval_ms);
            let period = Duration::from_millis((stale / 2).min(interval.max(1)).max(50));
            tokio::spawn(wake_waiting(self.status, self.scheduler, period));
        }
    }
}

/// Makes the scheduler re-evaluate waiting requests: a new load report can open a rank, and so can a stale one.
async fn wake_waiting(status: Arc<RouterStatus>, scheduler: Arc<Strand<Scheduler>>, period: Duration) {
    loop {
        tokio::select! {
            biased;
            _ = status.down() => return,
            () = tokio::time::sleep(period) => scheduler.tell(SchedulerMsg::Wake { at: None }),
        }
    }
}

/// Passes one rank's reading to the actor.
pub(crate) fn report(engine_loads: &Strand<EngineLoads>, clock: Clock, rank: WorkerRank, reading: EngineReading) {
    if !reading.is_empty() {
        let (worker, readings) = (rank.worker, vec![(rank.rank, reading)]);
        engine_loads.tell(EngineLoadMsg::Reported { worker, readings, polled_at: clock.now() });
    }
}
