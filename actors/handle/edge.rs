//! Dependencies that requests and placements share. Placements keep them alive after the router.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::Semaphore;

use crate::actors::delivery::strand::Strand;
use crate::actors::health::{HealthActor, HealthMsg};
use crate::actors::io::clock::Clock;
use crate::actors::lease_ender::LeaseEnder;
use crate::actors::radix::shards::Shards;
use crate::actors::telemetry::Meters;
use crate::actors::views::block_size::BlockSizeCell;
use crate::actors::views::rank::RankEntry;
use crate::config::RouterConfig;
use crate::health::Outcome;
use crate::protocol::Timestamp;

/// Maximum number of queued outcome reports. While the health actor hangs, further reports are dropped.
pub(super) const OUTCOMES_MAX: usize = 1024;

/// Shared dependencies of requests and placements.
pub(super) struct Edge {
    pub(super) config: Arc<RouterConfig>,
    pub(super) block_size: Arc<BlockSizeCell>,
    pub(super) clock: Clock,
    pub(super) meters: Arc<Meters>,
    pub(super) ender: Arc<LeaseEnder>,
    pub(super) shards: Arc<Shards>,
    pub(super) health: Arc<Strand<HealthActor>>,
    pub(super) outcomes_gate: Arc<Semaphore>,
}

impl Edge {
    /// Reports the outcome of a request sent to the rank at `began`. An outcome that changes no state sends no message.
    pub(super) fn report_outcome(&self, entry: &Arc<RankEntry>, outcome: Outcome, began: Option<Timestamp>) {
        let matters = if outcome.is_ok() {
            entry.failing.load(Ordering::Relaxed)
        } else {
            self.config.health.outcome_failures_max > 0
        };
        if !matters {
            return;
        }
        if let Ok(permit) = Arc::clone(&self.outcomes_gate).try_acquire_owned() {
            self.health.tell(HealthMsg::Outcome { entry: Arc::clone(entry), outcome, began, permit });
        }
    }
}
