//! Contents of snapshots that wait for the readers of their ranks.
//!
//! The handle adds the ranks of a snapshot; the reader of a rank takes its contents once. Ranks that no reader has taken
//! after [`RESTORE_WAIT`] are dropped: their contents would be too old to resume from, and they occupy memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::ingest::SourcePosition;
use crate::protocol::WorkerRank;
use crate::snapshot::RankSnapshot;

/// Time for which the contents of a rank wait for its registration.
pub(crate) const RESTORE_WAIT: Duration = Duration::from_secs(600);

/// Contents by rank.
#[derive(Default)]
pub(crate) struct PendingRestores(Mutex<BTreeMap<WorkerRank, Pending>>);

/// Contents of a rank, in blocks of this many tokens.
struct Pending {
    block_size: u32,
    rank: RankSnapshot,
}

impl PendingRestores {
    /// Adds ranks in blocks of `block_size` tokens, for [`RESTORE_WAIT`]. Contents that are pending for the same rank,
    /// publisher and block size are replaced if the new ones are newer. Must be called in a tokio runtime.
    pub(crate) fn add(self: &Arc<Self>, block_size: u32, ranks: Vec<RankSnapshot>) {
        let added: Vec<(WorkerRank, SourcePosition)> =
            ranks.iter().map(|rank| (rank.rank, rank.position.clone())).collect();
        let mut pending = self.pending();
        for rank in ranks {
            let is_superseded = pending.get(&rank.rank).is_some_and(|other| {
                other.block_size == block_size
                    && other.rank.endpoint == rank.endpoint
                    && !rank.position.is_newer_than(&other.rank.position)
            });
            if !is_superseded {
                pending.insert(rank.rank, Pending { block_size, rank });
            }
        }
        drop(pending);
        let restores = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(RESTORE_WAIT).await;
            let Some(restores) = restores.upgrade() else { return };
            let mut pending = restores.pending();
            for (rank, position) in added {
                if pending.get(&rank).is_some_and(|other| other.rank.position == position) {
                    pending.remove(&rank);
                }
            }
        });
    }

    /// Takes the contents of a rank, if they belong to the publisher at `endpoint` and have this block size. Others stay
    /// pending.
    pub(crate) fn take(&self, rank: WorkerRank, endpoint: &str, block_size: u32) -> Option<RankSnapshot> {
        let mut pending = self.pending();
        let is_same = |other: &Pending| other.rank.endpoint == endpoint && other.block_size == block_size;
        if !pending.get(&rank).is_some_and(is_same) {
            return None;
        }
        pending.remove(&rank).map(|taken| taken.rank)
    }

    /// Copies of all pending contents of this block size.
    pub(crate) fn all_of(&self, block_size: u32) -> Vec<RankSnapshot> {
        let pending = self.pending();
        pending.values().filter(|other| other.block_size == block_size).map(|other| other.rank.clone()).collect()
    }

    /// Drops contents of another block size, and returns their number.
    pub(crate) fn drop_other_sizes(&self, block_size: u32) -> usize {
        let mut pending = self.pending();
        let before = pending.len();
        pending.retain(|_, other| other.block_size == block_size);
        before - pending.len()
    }

    fn pending(&self) -> MutexGuard<'_, BTreeMap<WorkerRank, Pending>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
