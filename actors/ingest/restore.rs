//! Snapshots of a reader's rank, and the restore of one.

use super::reader::Reader;
use super::snapshot_reply::SnapshotReply;
use crate::actors::radix::RadixMsg;
use crate::ingest::{Note, RestoreState};
use crate::protocol::KvEvent;
use crate::snapshot::RankSnapshot;

impl Reader {
    /// Records the position of the source, and queries the index for its contents there. The query follows the events
    /// of every message before the position, and the shard applies in order, so its reply contains exactly these.
    pub(super) fn snapshot(&self, reply: SnapshotReply) {
        if reply.is_closed() {
            return; // the caller no longer waits
        }
        let (rank, generation) = (self.entry.rank, self.entry.generation);
        let recorded = self.shell.record(rank, self.endpoint.clone());
        let Some((recorded, shard)) = recorded.zip(self.dependencies.shards.of(rank)) else {
            return; // dropping the reply leaves out the rank
        };
        let dumped = shard.ask(move |shard| shard.shell.dump_rank(rank, generation));
        drop(reply.send((recorded, dumped)));
    }

    /// Replaces the state of the source and the contents of the rank with those of a pending snapshot. Returns false,
    /// without any change, if none is pending, the publisher cannot be verified for lack of a replay endpoint, or the
    /// present contents are complete or newer.
    pub(super) async fn restore(&mut self) -> bool {
        let restores = &self.dependencies.restores;
        let Some(snapshot) = restores.take(self.entry.rank, &self.endpoint, self.block_size) else { return false };
        if !self.shell.restore(&snapshot, self.dependencies.clock.now()) {
            return false;
        }
        let blocks = snapshot.block_count();
        let RankSnapshot { position, events, evicted_blocks, .. } = snapshot;
        self.auditor.abort();
        self.entry.source.start_over();
        self.show(None);
        self.entry.source.facts().applied = Some(position.next - 1);
        self.on_note(Note::Restored);
        let (worker, rank, next) = (&*self.entry.endpoint, self.entry.rank.rank, position.next);
        tracing::debug!(worker, rank, blocks, next, "index contents restored from a snapshot");
        self.apply(vec![self.event(KvEvent::Cleared)]).await;
        if let Some(shard) = self.dependencies.shards.of(self.entry.rank).filter(|_| evicted_blocks > 0) {
            let (rank, generation) = (self.entry.rank, self.entry.generation);
            shard.tell(RadixMsg::RestoreEvicted { rank, generation, blocks: evicted_blocks });
        }
        if !events.is_empty() {
            self.apply(events).await;
        }
        self.entry.source.facts().restore = self.shell.source().restore();
        true
    }

    /// Counts a note, and logs the end of a restore.
    pub(super) fn on_note(&self, note: Note) {
        self.dependencies.meters.ingest.note(note);
        let (worker, rank) = (&*self.entry.endpoint, self.entry.rank.rank);
        match self.shell.source().restore() {
            Some(RestoreState::Resumed) if note == Note::RestoreResumed => {
                tracing::debug!(worker, rank, "KV event stream resumed from the snapshot");
            }
            Some(RestoreState::Dropped) if note == Note::RestoreDropped => tracing::warn!(
                worker,
                rank,
                "contents of the snapshot dropped: the publisher has restarted or no longer has the messages since then"
            ),
            Some(_) | None => {}
        }
    }
}
