//! Dependencies shared by all readers of KV events.

use std::sync::Arc;

use crate::actors::io::clock::Clock;
use crate::actors::radix::shards::Shards;
use crate::actors::telemetry::Meters;
use crate::actors::views::restores::PendingRestores;
use crate::actors::views::status::RouterStatus;

/// Dependencies of every ingest actor.
#[derive(Clone)]
pub(crate) struct IngestDependencies {
    pub(crate) clock: Clock,
    pub(crate) status: Arc<RouterStatus>,
    pub(crate) shards: Arc<Shards>,
    pub(crate) meters: Arc<Meters>,
    pub(crate) restores: Arc<PendingRestores>,
}
