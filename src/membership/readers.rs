//! KV event reader of one rank.

use super::budget::RestartBudget;
use crate::protocol::{KvEventsConfig, WorkerConfig};

/// Reader of a rank's KV events.
#[derive(Debug)]
pub(super) struct EventReader {
    pub(super) settings: ReaderSettings,
    pub(super) budget: RestartBudget,
}

/// Parts of the configurations of worker and pool whose change restarts the readers of its ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ReaderSettings {
    kv_events: KvEventsConfig,
    start_rank: u32,
    ranks: u32,
    total_kv_blocks: Option<u32>,
    /// Of the pool.
    block_size: u32,
}

impl ReaderSettings {
    pub(super) fn of(worker: &WorkerConfig, block_size: u32) -> Option<Self> {
        Some(Self {
            kv_events: worker.kv_events.clone()?,
            start_rank: worker.data_parallel_start_rank,
            ranks: worker.data_parallel_size,
            total_kv_blocks: worker.total_kv_blocks,
            block_size,
        })
    }
}
