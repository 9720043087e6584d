//! Event sources: which ranks' KV events are read, and by whom.
//!
//! A source that dies is started again within a budget of its own: what one engine sends can never cost the router its
//! restarts. When that is spent the rank is no longer read, its overlap counts for nothing, and it says so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef};

use super::{Role, State};
use crate::actors::ingest::{Arguments, Ingest, IngestMsg};
use crate::ingest::{Doubt, Trust};
use crate::protocol::{KvEvent, KvEventsConfig, RouterEvent, Slot, StorageTier, WorkerConfig};
use crate::supervision::RestartBudget;

/// Deaths of one source's reader within [`DEATHS_WINDOW`] before it is left.
const DEATHS_MAX: u32 = 5;

const DEATHS_WINDOW: Duration = Duration::from_secs(60);

/// The ranks that are read, by slot.
pub(super) type Ingests = BTreeMap<Slot, Reading>;

/// What a rank's reading depends on.
#[derive(Clone, PartialEq)]
struct Wanted {
    kv_events: KvEventsConfig,
    start_rank: u32,
    ranks: u32,
    total_kv_blocks: Option<u32>,
}

impl Wanted {
    fn of(worker: &WorkerConfig) -> Option<Self> {
        Some(Self {
            kv_events: worker.kv_events.clone()?,
            start_rank: worker.data_parallel_start_rank,
            ranks: worker.data_parallel_size,
            total_kv_blocks: worker.total_kv_blocks,
        })
    }
}

/// A rank that is read.
pub(super) struct Reading {
    wanted: Wanted,
    actor: ActorRef<IngestMsg>,
    budget: RestartBudget,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.actor.stop(None);
    }
}

impl State {
    /// Brings the reading of a rank's events in line with what its worker says.
    pub(super) async fn read_events(&mut self, slot: Slot) -> Result<(), ActorProcessingErr> {
        let wanted = self.worker_of(slot).and_then(|worker| Wanted::of(&worker.config));
        if self.ingests.get(&slot).map(|reading| &reading.wanted) == wanted.as_ref() {
            return Ok(());
        }
        let was_read = self.ingests.contains_key(&slot);
        self.stop_reading(slot);
        match wanted {
            Some(wanted) => self.start_ingest(slot, wanted, new_budget()).await?,
            None if was_read => self.forget_events(slot),
            None => {}
        }
        Ok(())
    }

    /// Nobody will say any more what becomes of the blocks that were read of.
    fn forget_events(&self, slot: Slot) {
        let Some(Some(running)) = self.entries.get(slot.index()) else { return };
        let (shared, entry) = (Arc::clone(&self.shared), Arc::clone(&running.entry));
        tokio::spawn(async move {
            if let Some(_nobody_reads) = entry.source.once_left().await {
                let rank = entry.rank;
                shared
                    .apply_of(&entry, vec![RouterEvent { rank, tier: StorageTier::default(), data: KvEvent::Cleared }])
                    .await;
            }
        });
    }

    async fn start_ingest(
        &mut self,
        slot: Slot,
        wanted: Wanted,
        budget: RestartBudget,
    ) -> Result<(), ActorProcessingErr> {
        let (Some(worker), Some(Some(running))) = (self.worker_of(slot), self.entries.get(slot.index())) else {
            return Ok(());
        };
        let arguments = match Arguments::of(&self.shared, &running.entry, &worker.config) {
            Ok(Some(arguments)) => arguments,
            Ok(None) => return Ok(()),
            Err(error) => {
                // Checked when the worker joined; if that was not enough, one rank is not read.
                let (worker, rank) = (&*running.entry.endpoint, running.entry.rank.rank);
                tracing::error!(worker, rank, %error, "a rank's KV events cannot be read");
                return Ok(());
            }
        };
        let (actor, _) = Actor::spawn_linked(None, Ingest, arguments, self.myself.get_cell()).await?;
        self.children.insert(actor.get_id(), Role::Ingest(slot));
        self.ingests.insert(slot, Reading { wanted, actor, budget });
        Ok(())
    }

    /// The rank is not read any longer.
    pub(super) fn stop_reading(&mut self, slot: Slot) {
        if let Some(reading) = self.ingests.remove(&slot) {
            self.children.remove(&reading.actor.get_id());
            if let Some(Some(running)) = self.entries.get(slot.index()) {
                running.entry.source.end();
            }
        }
    }

    pub(super) async fn restart_ingest(
        &mut self,
        actor: ActorId,
        slot: Slot,
        reason: &str,
    ) -> Result<(), ActorProcessingErr> {
        let now = self.shared.clock.now();
        let Some(reading) = self.ingests.get_mut(&slot).filter(|reading| reading.actor.get_id() == actor) else {
            return Ok(());
        };
        let (wanted, mut budget) = (reading.wanted.clone(), reading.budget.clone());
        let entry = self.entries.get(slot.index()).and_then(Option::as_ref).map(|running| &running.entry);
        let (worker, rank) = (entry.map(|entry| &*entry.endpoint), entry.map(|entry| entry.rank.rank));
        if budget.spend(now) {
            tracing::warn!(worker, rank, reason, "the reader of a rank's KV events died and is restarted");
            return self.start_ingest(slot, wanted, budget).await;
        }
        tracing::error!(worker, rank, reason, "the reader of a rank's KV events dies again and again: left alone");
        if let Some(Some(running)) = self.entries.get(slot.index()) {
            running.entry.source.set_trust(Trust::Mismatched, Some(Doubt::ReaderDied { deaths: DEATHS_MAX + 1 }));
        }
        Ok(())
    }

    /// A shard has lost what it knew: those of its ranks that are read are asked for it again.
    pub(super) fn resync_ingests(&self, shard: usize) {
        for entry in self.ranks_of(shard) {
            if let Some(reading) = self.ingests.get(&entry.slot) {
                drop(reading.actor.send_message(IngestMsg::Resync)); // a dead one starts from nothing anyway
            }
        }
    }

    /// A drill. Where the rank is not read it is dropped, which ends it.
    #[cfg(feature = "faults")]
    pub(super) fn on_ingest_fault(
        &self,
        rank: crate::protocol::WorkerRank,
        injected: crate::actors::delivery::fault::InjectedFault,
    ) {
        let mut running = self.entries.iter().flatten().filter(|running| !running.retiring);
        let slot = running.find(|running| running.entry.rank == rank).map(|running| running.entry.slot);
        if let Some(reading) = slot.and_then(|slot| self.ingests.get(&slot)) {
            drop(reading.actor.send_message(IngestMsg::Fault(injected)));
        }
    }

    fn worker_of(&self, slot: Slot) -> Option<&super::Worker> {
        let running = self.entries.get(slot.index())?.as_ref()?;
        self.workers.get(&running.entry.rank.worker)
    }
}

fn new_budget() -> RestartBudget {
    RestartBudget::new(DEATHS_MAX, DEATHS_WINDOW)
}
