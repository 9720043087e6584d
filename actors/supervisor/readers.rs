//! Actors that read the KV events of ranks.

use std::sync::Arc;

use ractor::Actor;

use super::messages::SupervisorMsg;
use super::state::SupervisorState;
use crate::actors::delivery::ActorResult;
use crate::actors::ingest::{Arguments, Ingest, IngestDependencies, IngestMsg, ReaderCommand, SnapshotReply};
use crate::ingest::{DegradationReason, StreamState};
use crate::membership::{Child, MembershipInput};
use crate::protocol::{KvEvent, RouterEvent, Slot, StorageTier};

impl SupervisorState {
    pub(super) async fn start_reader(&mut self, slot: Slot) -> ActorResult {
        let (Some(worker), Some(rank)) = (self.shell.membership().worker_at(slot), self.shell.rank(slot)) else {
            return Ok(());
        };
        let arguments =
            match Arguments::of(&self.dependencies.config, self.ingest_dependencies(), &rank.entry, &worker.config) {
                Ok(Some(arguments)) => arguments,
                Ok(None) => return Ok(()),
                Err(error) => {
                    // Validated at the registration of the worker. An error here affects one rank only.
                    let (worker, rank) = (&*rank.entry.endpoint, rank.entry.rank.rank);
                    tracing::error!(worker, rank, %error, "KV event reader not started");
                    return Ok(());
                }
            };
        let (actor, _) = Actor::spawn_linked(None, Ingest, arguments, self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), Child::Reader(slot));
        self.readers.insert(slot, actor);
        Ok(())
    }

    fn ingest_dependencies(&self) -> IngestDependencies {
        let myself = self.myself.clone();
        IngestDependencies {
            clock: self.dependencies.clock,
            status: Arc::clone(&self.dependencies.views.status),
            shards: Arc::clone(&self.dependencies.strands.shards),
            meters: Arc::clone(&self.dependencies.meters),
            restores: Arc::clone(&self.dependencies.views.restores),
            on_block_size: Arc::new(move |slot, generation, tokens| {
                let sized = MembershipInput::EventsSized { slot, generation, tokens };
                drop(myself.send_message(SupervisorMsg::Membership(sized)));
            }),
        }
    }

    pub(super) fn stop_reader(&mut self, slot: Slot) {
        let Some(actor) = self.readers.remove(&slot) else { return };
        self.children.remove(&actor.get_id());
        actor.stop(None);
        if let Some(rank) = self.shell.rank(slot) {
            rank.entry.source.end();
        }
    }

    /// Clears the index entries of a rank after its reader has ended, since no event will remove them.
    pub(super) fn clear_blocks(&self, slot: Slot) {
        let Some(rank) = self.shell.rank(slot) else { return };
        let (status, shards) =
            (Arc::clone(&self.dependencies.views.status), Arc::clone(&self.dependencies.strands.shards));
        let entry = Arc::clone(&rank.entry);
        tokio::spawn(async move {
            if let Some(_unread) = entry.source.once_left().await {
                let event = RouterEvent { rank: entry.rank, tier: StorageTier::default(), data: KvEvent::Cleared };
                shards.apply_of(&entry, vec![event], &status).await;
            }
        });
    }

    pub(super) fn abandon_reader(&self, slot: Slot, deaths: u32, reason: &str) {
        let Some(rank) = self.shell.rank(slot) else { return };
        let (worker, number) = (&*rank.entry.endpoint, rank.entry.rank.rank);
        tracing::error!(
            worker,
            rank = number,
            reason,
            "KV event reader died and its restart budget is exhausted: events of the rank are no longer read"
        );
        rank.entry.source.set_state(StreamState::Mismatched, Some(DegradationReason::ReaderDied { deaths }));
    }

    /// Requests a replay for the ranks of a restarted index shard. A dead reader requests one when it starts.
    pub(super) fn request_replay(&self, shard: usize) {
        for (rank, _) in self.shell.of_shard(shard) {
            if let Some(reader) = self.readers.get(&rank.entry.slot) {
                drop(reader.send_message(IngestMsg::Command(ReaderCommand::Resync)));
            }
        }
    }

    /// Forwards a query for the contents of a rank. Without a reader the reply is dropped.
    pub(super) fn request_snapshot(&self, slot: Slot, reply: SnapshotReply) {
        if let Some(reader) = self.readers.get(&slot) {
            drop(reader.send_message(IngestMsg::Command(ReaderCommand::Snapshot(reply))));
        }
    }

    /// Notifies every reader that contents of a snapshot may be pending for its rank.
    pub(super) fn restore_readers(&self) {
        for reader in self.readers.values() {
            drop(reader.send_message(IngestMsg::Command(ReaderCommand::Restore)));
        }
    }

    /// Forwards an injected fault. Without a reader it is dropped, which ends it.
    #[cfg(feature = "faults")]
    pub(super) fn on_ingest_fault(&self, rank: crate::protocol::WorkerRank, fault: IngestMsg) {
        let slot = self.shell.running().find(|(actor, _)| actor.entry.rank == rank).map(|(actor, _)| actor.entry.slot);
        if let Some(reader) = slot.and_then(|slot| self.readers.get(&slot)) {
            drop(reader.send_message(fault));
        }
    }
}
