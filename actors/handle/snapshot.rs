//! Snapshots of a running router, and their restore.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::router::Router;
use crate::actors::supervisor::SupervisorMsg;
use crate::actors::views::rank::RankEntry;
use crate::error::Down;
use crate::index::RankDump;
use crate::protocol::WorkerRank;
use crate::snapshot::{RankSnapshot, Snapshot, SnapshotError, SnapshotLayout};

/// Longest wait for the contents of one rank. Its reader and its shard reply after the work that precedes the query.
const RANK_REPLY_MAX: Duration = Duration::from_secs(5);

impl Router {
    /// Index contents of every rank whose KV events the router reads, with the position of each stream.
    ///
    /// Ranks are recorded one after the other, so that overlap queries wait for the contents of one rank at most. A rank
    /// without usable contents is left out: nothing applied yet, lost contents, events that do not match the pool, or no
    /// reply within 5 s. Restored contents of ranks that have not registered yet are included.
    ///
    /// # Errors
    /// When the router is down.
    pub async fn snapshot(&self) -> Result<Snapshot, Down> {
        self.snapshot_of(|_| true).await
    }

    /// [`Router::snapshot`] of one rank; without contents if it has none.
    ///
    /// # Errors
    /// When the router is down.
    pub async fn snapshot_of_rank(&self, rank: WorkerRank) -> Result<Snapshot, Down> {
        self.snapshot_of(|other| other == rank).await
    }

    async fn snapshot_of(&self, is_wanted: impl Fn(WorkerRank) -> bool) -> Result<Snapshot, Down> {
        self.views().status.up()?;
        #[expect(clippy::disallowed_methods, reason = "wall-clock time of creation, read by other processes")]
        let created_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let mut ranks = Vec::new();
        for entry in self.views().ranks.all() {
            if is_wanted(entry.rank) && entry.source.state().is_some() {
                ranks.extend(self.snapshot_of_entry(&entry).await);
                self.views().status.up()?;
            }
        }
        let block_size = self.block_size();
        ranks.extend(self.views().restores.all_of(block_size).into_iter().filter(|rank| is_wanted(rank.rank)));
        ranks.sort_by_key(|rank| rank.rank); // stable: recorded contents precede pending ones
        ranks.dedup_by_key(|rank| rank.rank);
        let layout = SnapshotLayout::of(&self.edge().config, block_size);
        Ok(Snapshot { layout, created_ms: u64::try_from(created_ms).unwrap_or(u64::MAX), ranks })
    }

    async fn snapshot_of_entry(&self, entry: &Arc<RankEntry>) -> Option<RankSnapshot> {
        let (reply, recorded) = oneshot::channel();
        self.supervisor().send_message(SupervisorMsg::Snapshot { slot: entry.slot, reply }).ok()?;
        let recorded = async {
            let (rank, contents) = recorded.await.ok()?;
            let RankDump { events, evicted_blocks } = contents.await.ok()??;
            Some(RankSnapshot { events, evicted_blocks, ..rank })
        };
        timeout(RANK_REPLY_MAX, recorded).await.ok().flatten()
    }

    /// Loads the contents of a snapshot, for each of its ranks that is registered, or registers within ten minutes, with
    /// the same event endpoint.
    ///
    /// The reader of the rank loads the contents and requests the messages since then from the publisher. If the
    /// publisher has restarted or no longer has these messages, the rank is cleared and recovers as without a snapshot.
    /// A rank without a replay endpoint, or whose index is complete or newer, keeps its contents. Progress is reported
    /// by [`KvSourceStatus::restore`](crate::KvSourceStatus::restore).
    ///
    /// While no worker has reported a block size ([`Router::block_size_origin`]), contents of any
    /// size wait for it, and those of another one are dropped then.
    ///
    /// Must be called in a tokio runtime.
    ///
    /// # Errors
    /// [`SnapshotError::Layout`]: the snapshot belongs to another pool, or its hashes match nothing here.
    pub fn restore(&self, snapshot: Snapshot) -> Result<(), SnapshotError> {
        let size = self.edge().block_size.get();
        let known_size = Some(size.tokens).filter(|_| size.origin.is_settled());
        snapshot.check_pool(&self.edge().config, known_size)?;
        self.views().restores.add(snapshot.layout.block_size, snapshot.ranks);
        let _ = self.supervisor().send_message(SupervisorMsg::Restore); // down: without effect
        Ok(())
    }
}
