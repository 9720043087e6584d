//! The rank entry table: what owners publish of each rank in its slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

use tokio::sync::Notify;

use super::kv_source::{DegradedSources, SourceCell};
use super::rank_counts::RankCounts;
use super::slot_table::SlotTable;
use crate::load::{ArrivalsCell, BoardChanges, StallCell};
use crate::protocol::{Generation, Slot, Timestamp, WorkerId, WorkerRank};
use crate::queue::QueueHeads;
use crate::schedule::RankCells;

/// One incarnation of a rank in its slot.
pub(crate) struct RankEntry {
    pub(crate) rank: WorkerRank,
    pub(crate) slot: Slot,
    pub(crate) generation: Generation,
    pub(crate) endpoint: Arc<str>,
    /// Number among its worker's ranks, from 0, or [`RankEntry::ALONE`]. Written by the supervisor.
    pub(crate) number_at_worker: AtomicU32,
    /// Time of joining.
    pub(crate) since: Timestamp,
    /// Cells that the scheduler reads. The learned speed outlives the sequence actor that writes it.
    pub(crate) cells: RankCells,
    /// State of the rank's KV event source, written by its ingest.
    pub(crate) source: Arc<SourceCell>,
    /// Time by which a first token is due, written by the sequence actor.
    pub(crate) stalls: Arc<StallCell>,
    /// Whether failed requests count against the rank, so that a success matters. Written by the health actor.
    pub(crate) failing: AtomicBool,
    /// Counts of its requests, added by the tasks of the callers.
    pub(crate) counts: RankCounts,
}

impl RankEntry {
    /// The number of a rank that is its worker's only one.
    pub(crate) const ALONE: u32 = u32::MAX;

    /// Identifies this incarnation among all ranks over the router's lifetime.
    pub(crate) fn incarnation(&self) -> u64 {
        u64::from(self.slot.0) << 32 | u64::from(self.generation.0)
    }
}

/// The rank entries by slot. Written by the supervisor.
#[derive(Default)]
pub(crate) struct RankEntries {
    slots: SlotTable<RankEntry>,
    /// Slots whose boards have changed, for the scheduler. Outlives it, because a board reports to one reader.
    pub(crate) board_changes: Arc<BoardChanges>,
    /// Arrivals of the pool, for the scheduler and the replica actor.
    pub(crate) arrivals: Arc<ArrivalsCell>,
    /// Longest-waiting requests of the replicas, for the scheduler and the replica actor.
    pub(crate) queue_heads: Arc<QueueHeads>,
    /// Notified after each booking, for the replica actor.
    pub(crate) booked: Arc<Notify>,
    /// Number of ranks whose KV event source is degraded.
    pub(crate) degraded: DegradedSources,
}

impl RankEntries {
    /// All entries, those of leaving ranks included.
    pub(crate) fn all(&self) -> Vec<Arc<RankEntry>> {
        self.slots.all()
    }

    /// The entries for which this holds.
    pub(crate) fn select(&self, holds: impl Fn(&RankEntry) -> bool) -> Vec<Arc<RankEntry>> {
        self.slots.select(holds)
    }

    /// Number of joined and left ranks so far. Entries read after this call include them.
    #[cfg(feature = "replicas")]
    pub(crate) fn version(&self) -> u64 {
        self.slots.version()
    }

    /// The entries of a worker's ranks, those of leaving ranks included. Visits every entry.
    pub(crate) fn of_worker(&self, worker: WorkerId) -> Vec<Arc<RankEntry>> {
        self.slots.select(|entry| entry.rank.worker == worker)
    }

    /// The newest entry of a rank. Visits every entry.
    pub(crate) fn of_rank(&self, rank: WorkerRank) -> Option<Arc<RankEntry>> {
        self.slots.select(|entry| entry.rank == rank).into_iter().max_by_key(|entry| entry.since)
    }

    pub(crate) fn insert(&self, entry: &Arc<RankEntry>) {
        self.slots.insert(entry.slot, entry.generation, Arc::clone(entry));
    }

    pub(crate) fn remove(&self, slot: Slot) {
        self.slots.remove(slot);
    }

    pub(crate) fn clear(&self) {
        drop(self.slots.take_all());
    }
}
