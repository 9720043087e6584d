//! Engines that publish KV events on real sockets, and the content of the index of a router that reads them.

use std::collections::BTreeSet;

use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, KvEventsConfig, RouterEvent, StorageTier, WorkerConfig, WorkerId, WorkerRank,
};
use pointsman::test_support::rank;
use pointsman::{KvSourceStatus, Router};
use pointsman_trial::kv_events::Dialect;

use crate::common::{BLOCK_SIZE, stored_in_blocks, tokens};
use crate::zmtp::{Publisher, batch};

pub(crate) type Held = BTreeSet<(WorkerRank, EngineHash, BlockHash)>;

/// The blocks that an event stores, in their order.
fn blocks_in(RouterEvent { rank, data, .. }: RouterEvent) -> Vec<(WorkerRank, EngineHash, BlockHash)> {
    let KvEvent::Stored { blocks, .. } = data else { return Vec::new() };
    blocks.into_iter().map(|b| (rank, b.engine_hash, b.block_hash)).collect()
}

pub(crate) fn engine_at(worker: WorkerId, kv_events: KvEventsConfig) -> WorkerConfig {
    WorkerConfig { kv_events: Some(kv_events), ..WorkerConfig::at(format!("http://engine-{}", worker.0)) }
}

pub(crate) async fn held(router: &Router) -> Held {
    held_in(router.dump_events().await.expect("up"))
}

pub(crate) fn held_in(events: Vec<RouterEvent>) -> Held {
    events.into_iter().flat_map(blocks_in).collect()
}

pub(crate) fn source(router: &Router, of: WorkerRank) -> Option<KvSourceStatus> {
    router.kv_sources().into_iter().find(|source| source.rank == of)
}

/// An engine rank and its cached prompts.
pub(crate) struct Engine {
    pub(crate) rank: WorkerRank,
    pub(crate) publisher: Publisher,
    dialect: Dialect,
    pub(crate) block_size: u32,
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) batches: u32,
}

impl Engine {
    pub(crate) async fn start(worker: u64, ring_max: usize) -> Self {
        let publisher = Publisher::start(ring_max, worker.is_multiple_of(2)).await;
        let dialect = if worker.is_multiple_of(2) { Dialect::VllmMap } else { Dialect::VllmArray };
        Self { rank: rank(worker), publisher, dialect, block_size: BLOCK_SIZE, prompts: Vec::new(), batches: 0 }
    }

    pub(crate) fn config(&self) -> WorkerConfig {
        engine_at(self.rank.worker, self.publisher.kv_events())
    }

    pub(crate) fn payload(&mut self, events: &[(RouterEvent, &[u32])]) -> Vec<u8> {
        self.batches += 1;
        batch(self.dialect, 1.7e9 + f64::from(self.batches), events)
    }

    /// A batch that stores a new unique prompt.
    pub(crate) fn stores(&mut self, blocks: u32) -> Vec<u8> {
        let blocks = blocks * self.block_size / BLOCK_SIZE;
        let prompt = tokens(self.batches * 64 + self.rank.worker.0 as u32 + 1, blocks);
        let payload = self.payload(&[(self.event_of(&prompt), &prompt)]);
        self.prompts.push(prompt);
        payload
    }

    /// A batch that removes the oldest prompt.
    pub(crate) fn drops_oldest(&mut self) -> Vec<u8> {
        let prompt = self.prompts.remove(0);
        let blocks = blocks_in(self.event_of(&prompt)).into_iter().rev().map(|(_, name, _)| name).collect();
        let data = KvEvent::Removed { blocks };
        self.payload(&[(RouterEvent { rank: self.rank, tier: StorageTier::Device, data }, &[])])
    }

    pub(crate) fn store(&mut self) {
        let payload = self.stores(3);
        self.publisher.publish(&payload);
    }

    /// Stores three prompts and removes the oldest one.
    pub(crate) fn work(&mut self) {
        for _ in 0..3 {
            self.store();
        }
        let payload = self.drops_oldest();
        self.publisher.publish(&payload);
    }

    fn event_of(&self, prompt: &[u32]) -> RouterEvent {
        stored_in_blocks(self.rank, prompt, self.block_size)
    }

    pub(crate) fn holds(&self) -> Held {
        self.prompts.iter().flat_map(|prompt| blocks_in(self.event_of(prompt))).collect()
    }
}
