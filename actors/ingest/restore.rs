//! Snapshots of a reader's rank, and the restore of one.

use super::reader::Reader;
use super::snapshot_reply::SnapshotReply;
use crate::actors::radix::RadixMsg;
use crate::ingest::{Note, RestoreState, Source};
use crate::protocol::KvEvent;
use crate::snapshot::RankSnapshot;
use crate::wire::Decoder;

impl Reader {
    /// Records the position of the source, and queries the index for its contents there. The query follows the events
    /// of every message before the position, and the shard applies in order, so its reply contains exactly these.
    pub(super) fn snapshot(&self, reply: SnapshotReply) {
        if reply.is_closed() {
            return; // the caller no longer waits
        }
        let (Some(position), Some(shard)) = (self.source.position(), self.dependencies.shards.of(self.entry.rank))
        else {
            return; // dropping the reply leaves out the rank
        };
        let (rank, generation) = (self.entry.rank, self.entry.generation);
        let dumped = shard.ask("DumpRank", move |shard| shard.shell.dump_rank(rank, generation));
        let endpoint = self.endpoint.clone();
        let recorded = RankSnapshot {
            rank,
            endpoint,
            position,
            decoder: self.decoder.state(),
            events: Vec::new(),
            evicted_blocks: 0,
        };
        drop(reply.send((recorded, dumped)));
    }

    /// Replaces the state of the source and the contents of the rank with those of a pending snapshot. Returns false,
    /// without any change, if none is pending, the publisher cannot be verified for lack of a replay endpoint, or the
    /// present contents are complete or newer.
    pub(super) async fn restore(&mut self) -> bool {
        let (config, wire) = &self.configs;
        let (restores, block_size) = (&self.dependencies.restores, wire.block_size.get());
        let Some(snapshot) = restores.take(self.entry.rank, &self.endpoint, block_size) else { return false };
        let is_superseded = self.source.is_caught_up() && !self.source.is_cold()
            || self.source.position().is_some_and(|present| !snapshot.position.is_newer_than(&present));
        if is_superseded || !config.has_replay {
            return false;
        }
        let blocks = snapshot.block_count();
        let RankSnapshot { position, decoder, events, evicted_blocks, .. } = snapshot;
        self.source = Source::resume(*config, self.dependencies.clock.now(), &position);
        self.decoder = Decoder::resume(wire.clone(), &decoder);
        self.effects.clear();
        self.auditor.abort();
        self.entry.source.start_over();
        self.show(None);
        self.entry.source.set_applied(position.next - 1);
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
        self.entry.source.set_restore(self.source.restore());
        true
    }

    /// Counts a note, and logs the end of a restore.
    pub(super) fn on_note(&self, note: Note) {
        self.dependencies.meters.ingest.note(note);
        let (worker, rank) = (&*self.entry.endpoint, self.entry.rank.rank);
        match self.source.restore() {
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
