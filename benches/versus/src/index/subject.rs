//! Common interface of the indexes under test.
//!
//! Each index is used like in its own benchmarks, by its cheapest public API: events in its own types, created before
//! the measured time; hashes that need no conversion; and a result that is dropped after the measured time.

use std::mem::take;

use dynamo_kv_router::indexer::RadixTree;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent as DynamoEvent, WorkerWithDpRank,
};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash};
use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerId, WorkerRank,
};

use super::load::Step;

/// An index under test. Ranks are numbered from 0.
pub trait Subject: Sized {
    /// Event in the index' own type.
    type Event;
    /// Prompt in the index' own type.
    type Query;
    /// Result of a query.
    type Answer;

    /// Creates an index with `ranks` empty ranks.
    fn new(ranks: u32) -> Self;

    /// Removal event of `step`.
    fn removal(step: &Step) -> Self::Event;

    /// Store event of `step`.
    fn store(step: &Step) -> Self::Event;

    /// Query for a prompt.
    fn query(prompt: &[BlockHash]) -> Self::Query;

    /// Applies an event.
    ///
    /// # Panics
    /// The index rejects the event, because the measurement would be invalid.
    fn apply(&mut self, event: Self::Event);

    /// Executes a query. Each query is executed once.
    fn run(&mut self, query: &mut Self::Query) -> Self::Answer;

    /// Result as pairs of a rank and its number of leading blocks, unordered.
    fn scores(&self, answer: &Self::Answer) -> Vec<(u32, u32)>;

    /// Reserved heap bytes that were never used, if the index reports them.
    fn reserved_bytes(&self) -> usize {
        0
    }
}

/// Pointsman's index.
#[derive(Debug)]
pub struct Pointsman {
    index: Index,
    overlaps: Overlaps,
}

fn rank_of(rank: u32) -> WorkerRank {
    WorkerRank::new(WorkerId(u64::from(rank)), 0)
}

impl Subject for Pointsman {
    type Event = RouterEvent;
    type Query = Vec<BlockHash>;
    type Answer = ();

    fn new(ranks: u32) -> Self {
        let mut index = Index::new();
        for rank in 0..ranks {
            index.register(rank_of(rank), Slot(rank), Generation(1));
        }
        Self { index, overlaps: Overlaps::default() }
    }

    fn removal(step: &Step) -> RouterEvent {
        let data = KvEvent::Removed { blocks: step.removed.clone() };
        RouterEvent { rank: rank_of(step.rank), tier: StorageTier::Device, data }
    }

    fn store(step: &Step) -> RouterEvent {
        let data = KvEvent::Stored { parent: step.parent, blocks: step.stored.clone() };
        RouterEvent { rank: rank_of(step.rank), tier: StorageTier::Device, data }
    }

    fn query(prompt: &[BlockHash]) -> Vec<BlockHash> {
        prompt.to_vec()
    }

    fn apply(&mut self, event: RouterEvent) {
        self.index.apply(&event);
    }

    fn run(&mut self, query: &mut Vec<BlockHash>) {
        self.index.overlaps(query, &mut self.overlaps);
    }

    fn scores(&self, (): &()) -> Vec<(u32, u32)> {
        self.overlaps.hits().iter().map(|hit| (hit.slot.0, hit.device_blocks)).collect()
    }
}

/// `ChainIndex` of `kv-index`, with the block map that it requires for each rank.
pub struct KvIndex {
    index: ChainIndex,
    maps: Vec<ChainBlockMap>,
    scores: Vec<(u32, u32)>,
}

/// An event for `kv-index`, which has functions but no type for it.
#[derive(Debug)]
pub enum KvIndexEvent {
    /// Blocks were removed.
    Removed {
        /// Number of the rank.
        rank: u32,
        /// Hashes of the blocks.
        blocks: Vec<SequenceHash>,
    },
    /// Blocks were stored.
    Stored {
        /// Number of the rank.
        rank: u32,
        /// Parent of the first block.
        parent: Option<SequenceHash>,
        /// Blocks in order.
        blocks: Vec<kv_index::StoredBlock>,
    },
}

fn sequence_hash(&EngineHash(name): &EngineHash) -> SequenceHash {
    SequenceHash(name)
}

impl Subject for KvIndex {
    type Event = KvIndexEvent;
    type Query = Vec<ContentHash>;
    type Answer = ();

    fn new(ranks: u32) -> Self {
        let index = ChainIndex::with_max_workers(ranks as usize);
        for rank in 0..ranks {
            let id = index.intern_worker(&format!("rank-{rank}")).expect("the index has capacity for all ranks");
            assert_eq!(id, rank, "numbers are handed out in order");
        }
        Self { index, maps: (0..ranks).map(|_| ChainBlockMap::new()).collect(), scores: Vec::new() }
    }

    fn removal(step: &Step) -> KvIndexEvent {
        KvIndexEvent::Removed { rank: step.rank, blocks: step.removed.iter().map(sequence_hash).collect() }
    }

    fn store(step: &Step) -> KvIndexEvent {
        let block = |block: &StoredBlock| kv_index::StoredBlock {
            seq_hash: sequence_hash(&block.engine_hash),
            content_hash: ContentHash(block.block_hash.0),
        };
        KvIndexEvent::Stored {
            rank: step.rank,
            parent: step.parent.as_ref().map(sequence_hash),
            blocks: step.stored.iter().map(block).collect(),
        }
    }

    fn query(prompt: &[BlockHash]) -> Vec<ContentHash> {
        prompt.iter().map(|&BlockHash(hash)| ContentHash(hash)).collect()
    }

    fn apply(&mut self, event: KvIndexEvent) {
        match event {
            KvIndexEvent::Removed { rank, blocks } => {
                self.index.apply_removed(rank, &blocks, &mut self.maps[rank as usize]);
            }
            KvIndexEvent::Stored { rank, parent, blocks } => {
                let map = &mut self.maps[rank as usize];
                self.index.apply_stored(rank, &blocks, parent, map).expect("a parent is stored before its children");
            }
        }
    }

    fn run(&mut self, query: &mut Vec<ContentHash>) {
        let Self { index, scores, .. } = self;
        scores.clear();
        index.score_into(query, |hash| hash.0, false, |rank, blocks| scores.push((rank, blocks)));
    }

    fn scores(&self, (): &()) -> Vec<(u32, u32)> {
        self.scores.clone()
    }

    /// The index allocates chunks of 8 MiB, and headers by the thousand.
    fn reserved_bytes(&self) -> usize {
        let stats = self.index.stats();
        (stats.arena_chunk_bytes - stats.arena_bytes) + (stats.slab_bytes - stats.header_bytes)
    }
}

/// `RadixTree` of `dynamo-kv-router`.
pub struct Radix(RadixTree);

fn dynamo_event(rank: u32, data: KvCacheEventData) -> DynamoEvent {
    DynamoEvent::new(u64::from(rank), KvCacheEvent { event_id: 1, data, dp_rank: 0 })
}

fn external_hash(&EngineHash(name): &EngineHash) -> ExternalSequenceBlockHash {
    ExternalSequenceBlockHash(name)
}

impl Subject for Radix {
    type Event = DynamoEvent;
    type Query = Vec<LocalBlockHash>;
    type Answer = OverlapScores;

    fn new(_ranks: u32) -> Self {
        Self(RadixTree::new())
    }

    fn removal(step: &Step) -> DynamoEvent {
        let block_hashes = step.removed.iter().map(external_hash).collect();
        dynamo_event(step.rank, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
    }

    fn store(step: &Step) -> DynamoEvent {
        let block = |block: &StoredBlock| KvCacheStoredBlockData {
            block_hash: external_hash(&block.engine_hash),
            tokens_hash: LocalBlockHash(block.block_hash.0),
            mm_extra_info: None,
        };
        let data = KvCacheStoreData {
            parent_hash: step.parent.as_ref().map(external_hash),
            start_position: None,
            blocks: step.stored.iter().map(block).collect(),
        };
        dynamo_event(step.rank, KvCacheEventData::Stored(data))
    }

    fn query(prompt: &[BlockHash]) -> Vec<LocalBlockHash> {
        prompt.iter().map(|&BlockHash(hash)| LocalBlockHash(hash)).collect()
    }

    fn apply(&mut self, event: DynamoEvent) {
        self.0.apply_event(event).expect("a parent is stored before its children");
    }

    fn run(&mut self, query: &mut Vec<LocalBlockHash>) -> OverlapScores {
        self.0.find_matches(take(query), false)
    }

    fn scores(&self, answer: &OverlapScores) -> Vec<(u32, u32)> {
        let score = |(rank, blocks): (&WorkerWithDpRank, &u32)| (rank.worker_id as u32, *blocks);
        let mut scores: Vec<_> = answer.scores.iter().map(score).collect();
        scores.sort_unstable();
        scores
    }
}
