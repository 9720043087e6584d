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
pub(crate) struct PendingRestores(Mutex<BTreeMap<WorkerRank, RankSnapshot>>);

impl PendingRestores {
    /// Adds ranks, for [`RESTORE_WAIT`]. Contents that are pending for the same rank and publisher are replaced if the
    /// new ones are newer. Must be called in a tokio runtime.
    pub(crate) fn add(self: &Arc<Self>, ranks: Vec<RankSnapshot>) {
        let added: Vec<(WorkerRank, SourcePosition)> =
            ranks.iter().map(|rank| (rank.rank, rank.position.clone())).collect();
        let mut pending = self.pending();
        for rank in ranks {
            let is_superseded = pending
                .get(&rank.rank)
                .is_some_and(|other| other.endpoint == rank.endpoint && !rank.position.is_newer_than(&other.position));
            if !is_superseded {
                pending.insert(rank.rank, rank);
            }
        }
        drop(pending);
        let restores = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(RESTORE_WAIT).await;
            let Some(restores) = restores.upgrade() else { return };
            let mut pending = restores.pending();
            for (rank, position) in added {
                if pending.get(&rank).is_some_and(|other| other.position == position) {
                    pending.remove(&rank);
                }
            }
        });
    }

    /// Takes the contents of a rank, if they belong to the publisher at `endpoint`. Contents of another publisher stay
    /// pending.
    pub(crate) fn take(&self, rank: WorkerRank, endpoint: &str) -> Option<RankSnapshot> {
        let mut pending = self.pending();
        let is_same = pending.get(&rank).is_some_and(|snapshot| snapshot.endpoint == endpoint);
        if is_same { pending.remove(&rank) } else { None }
    }

    /// Copies of all pending contents.
    pub(crate) fn all(&self) -> Vec<RankSnapshot> {
        self.pending().values().cloned().collect()
    }

    fn pending(&self) -> MutexGuard<'_, BTreeMap<WorkerRank, RankSnapshot>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
