//! A simulated engine that stores, copies and evicts blocks, restarts, and keeps a replay buffer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use pointsman::EngineContents;
use pointsman::internals::ingest::{BlockName, DIGEST_REQUEST, NAMES_REQUEST};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerRank};
use pointsman::test_support::mix;

const CACHE_BLOCKS: usize = 400;

/// Deterministic draws.
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % end
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// A simulated engine: its cache, by the rule for copies, and its messages of this life.
#[derive(Default)]
pub(crate) struct SimulatedEngine {
    pub(crate) life: u64,
    copies: BTreeMap<BlockName, u32>,
    /// Conversations with the names of their held blocks, least recently used first.
    conversations: VecDeque<Vec<u64>>,
    pub(crate) messages: Vec<Vec<RouterEvent>>,
    /// Messages in the replay buffer.
    pub(crate) ring_max: usize,
    next_name: u64,
}

impl SimulatedEngine {
    pub(crate) fn new(ring_max: usize) -> Self {
        Self { ring_max, ..Self::default() }
    }

    pub(crate) fn names(&self) -> BTreeSet<BlockName> {
        self.copies.iter().filter(|(_, copies)| **copies > 0).map(|(name, _)| *name).collect()
    }

    pub(crate) fn ring_start(&self) -> usize {
        self.messages.len().saturating_sub(self.ring_max)
    }

    /// One request: evictions, then the new blocks of a conversation, sometimes with another copy of its last block.
    pub(crate) fn serve(&mut self, rank: WorkerRank, draws: &mut Draws) {
        let at = draws.below(self.conversations.len() as u64 + 1) as usize;
        let mut names = if at < self.conversations.len() && !draws.one_in(8) {
            self.conversations.remove(at).unwrap_or_default()
        } else {
            Vec::new()
        };
        let (parent, new) = (names.last().copied(), 1 + draws.below(6));
        let first = self.next_name;
        self.next_name += new;
        let mut events = Vec::new();
        while self.copies.len() + new as usize > CACHE_BLOCKS {
            let oldest = self.conversations.front_mut().expect("the cache is full of conversations");
            let evicted: Vec<u64> = oldest.split_off(oldest.len().saturating_sub(4));
            if oldest.is_empty() {
                self.conversations.pop_front();
            }
            let mut removals = Vec::new();
            for name in evicted {
                let copies = self.copies.remove(&(StorageTier::Device, EngineHash(name))).unwrap_or_default();
                removals.extend((0..copies).map(|_| EngineHash(name)));
            }
            events.push(event(rank, KvEvent::Removed { blocks: removals }));
        }
        let stored: Vec<u64> = (first..first + new).map(|n| mix(n ^ self.life << 40)).collect();
        events.push(stored_event(rank, parent, &stored));
        for name in &stored {
            self.copies.insert((StorageTier::Device, EngineHash(*name)), 1);
        }
        names.extend(&stored);
        if let [.., parent, last] = names[..]
            && draws.one_in(4)
        {
            events.push(stored_event(rank, Some(parent), &[last]));
            *self.copies.entry((StorageTier::Device, EngineHash(last))).or_default() += 1;
        }
        self.conversations.push_back(names);
        if draws.one_in(20_000) {
            (self.copies, self.conversations) = (BTreeMap::new(), VecDeque::new());
            events.push(event(rank, KvEvent::Cleared));
        }
        self.messages.push(events);
    }

    pub(crate) fn restart(&mut self) {
        let (life, next_name) = (self.life + 1, self.next_name);
        *self = Self { life, next_name, ring_max: self.ring_max, ..Self::default() };
    }

    /// Names that the engine held after the messages before `next`.
    pub(crate) fn held_at(&self, next: u64) -> BTreeSet<BlockName> {
        let mut copies: BTreeMap<BlockName, u32> = BTreeMap::new();
        for event in self.messages[..next as usize].iter().flatten() {
            match &event.data {
                KvEvent::Stored { parent, blocks } => {
                    for block in blocks {
                        let count = copies.entry((event.tier, block.engine_hash)).or_default();
                        *count += u32::from(parent.is_some() || *count == 0);
                    }
                }
                KvEvent::Removed { blocks } => {
                    for name in blocks {
                        copies.entry((event.tier, *name)).and_modify(|count| *count = count.saturating_sub(1));
                    }
                }
                KvEvent::Cleared => copies.clear(),
                other => panic!("an engine without offloading publishes no {other:?}"),
            }
        }
        copies.into_iter().filter(|(_, count)| *count > 0).map(|(name, _)| name).collect()
    }

    /// Reply to an audit request; `None` without support.
    pub(crate) fn reply(&self, request: u64) -> EngineContents {
        match request {
            DIGEST_REQUEST => EngineContents::Digest(self.names().into_iter().collect()),
            NAMES_REQUEST => EngineContents::Names(self.names()),
            other => panic!("{other} is no audit request"),
        }
    }
}

pub(crate) fn event(rank: WorkerRank, data: KvEvent) -> RouterEvent {
    RouterEvent { rank, tier: StorageTier::Device, data }
}

fn stored_event(rank: WorkerRank, parent: Option<u64>, names: &[u64]) -> RouterEvent {
    let block = |name: &u64| StoredBlock { engine_hash: EngineHash(*name), block_hash: BlockHash(mix(*name)) };
    event(rank, KvEvent::Stored { parent: parent.map(EngineHash), blocks: names.iter().map(block).collect() })
}
