//! Dependencies shared by all readers of KV events.

use std::sync::Arc;

use crate::actors::io::clock::Clock;
use crate::actors::radix::shards::Shards;
use crate::actors::telemetry::Meters;
use crate::actors::views::restores::PendingRestores;
use crate::actors::views::status::RouterStatus;
use crate::protocol::{Generation, Slot};

/// Dependencies of every ingest actor.
#[derive(Clone)]
pub(crate) struct IngestDependencies {
    pub(crate) clock: Clock,
    pub(crate) status: Arc<RouterStatus>,
    pub(crate) shards: Arc<Shards>,
    pub(crate) meters: Arc<Meters>,
    pub(crate) restores: Arc<PendingRestores>,
    /// Called with the block size of a rank's events.
    pub(crate) on_block_size: Arc<dyn Fn(Slot, Generation, u32) + Send + Sync>,
}
