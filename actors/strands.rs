//! Addresses of the actors, for the supervisor, which opens and closes them, and for the handle.

use std::sync::Arc;

use crate::actors::delivery::strand::Strand;
use crate::actors::engine_load::EngineLoads;
use crate::actors::health::HealthActor;
use crate::actors::radix::shards::Shards;
use crate::actors::scheduler::Scheduler;
use crate::actors::sequence::table::SequenceTable;
use crate::config::RouterConfig;
use crate::shell::CurrentIncarnation;

/// The strands of one router.
#[derive(Clone)]
pub(crate) struct Strands {
    pub(crate) scheduler: Arc<Strand<Scheduler>>,
    pub(crate) scheduler_incarnation: Arc<CurrentIncarnation>,
    pub(crate) health: Arc<Strand<HealthActor>>,
    pub(crate) engine_loads: Arc<Strand<EngineLoads>>,
    pub(crate) shards: Arc<Shards>,
    pub(crate) sequences: Arc<SequenceTable>,
}

impl Strands {
    /// Strands without state; the supervisor opens them.
    pub(crate) fn new(config: &RouterConfig) -> Self {
        Self {
            scheduler: Strand::replaceable(),
            scheduler_incarnation: Arc::default(),
            health: Strand::closed(),
            engine_loads: Strand::closed(),
            shards: Arc::new(Shards::new(config.index_shards(), config.events.blocks_max)),
            sequences: Arc::default(),
        }
    }

    /// Closes every strand. Queued messages are dropped, which completes their replies as lost.
    pub(crate) fn close(&self) {
        self.scheduler.close();
        self.health.close();
        self.engine_loads.close();
        self.shards.close();
        self.sequences.take_all().iter().for_each(|address| address.strand.close());
    }
}
