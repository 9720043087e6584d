//! KV event reader of one rank.

use super::budget::RestartBudget;
use crate::protocol::{KvEventsConfig, WorkerConfig, WorkerRank};

/// Reader of a rank's KV events.
#[derive(Debug)]
pub(super) struct EventReader {
    pub(super) settings: ReaderSettings,
    pub(super) budget: RestartBudget,
}

/// Parts of the configurations of worker and pool whose change restarts the reader of one rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ReaderSettings {
    /// Endpoints of the rank.
    kv_events: KvEventsConfig,
    /// Whether the worker has other ranks, whose events the reader must reject.
    has_others: bool,
    total_kv_blocks: Option<u32>,
    /// Of the pool.
    block_size: u32,
}

impl ReaderSettings {
    pub(super) fn of(worker: &WorkerConfig, rank: WorkerRank, block_size: u32) -> Option<Self> {
        Some(Self {
            kv_events: worker.kv_events_of(rank.rank).ok()??, // valid since its registration
            has_others: worker.data_parallel_size > 1,
            total_kv_blocks: worker.total_kv_blocks,
            block_size,
        })
    }
}
