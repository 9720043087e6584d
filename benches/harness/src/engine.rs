//! Cache of one simulated engine rank: the most recently used blocks of its prompts.
//!
//! The whole prefix of a held block is held. Eviction removes the least recently used leaf. The same calls give the
//! same changes. Requests take no time here, so no block is pinned by a request in flight.

use std::ops::Range;

use ahash::RandomState;
use lru::LruCache;
use pointsman::protocol::{BlockHash, EngineHash, StoredBlock};

use pointsman_trial::workload::mix;

/// Computes engine hashes of a prompt's blocks, each from its content and all blocks before it. Like those of a real
/// engine, these hashes differ from the router's.
#[must_use]
pub fn name_blocks(hashes: &[BlockHash]) -> Box<[StoredBlock]> {
    let mut previous = 0x656e_6769_6e65;
    hashes
        .iter()
        .map(|&block_hash| {
            previous = mix(mix(previous).wrapping_add(block_hash.0));
            StoredBlock { engine_hash: EngineHash(previous), block_hash }
        })
        .collect()
}

/// Changes of a cache by one request. Reused between calls to avoid allocations.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Number of leading blocks that were held before: the hit.
    pub cached: usize,
    /// Newly stored blocks of the request. They follow the last cached block, if any.
    pub stored: Range<usize>,
    /// Blocks evicted to make room.
    pub removed: Vec<EngineHash>,
}

impl Change {
    /// Parent of the first stored block.
    #[must_use]
    pub fn parent(&self, blocks: &[StoredBlock]) -> Option<EngineHash> {
        self.stored.start.checked_sub(1).map(|last| blocks[last].engine_hash)
    }

    /// Number of blocks in the events of this change.
    #[must_use]
    pub fn event_blocks(&self) -> usize {
        self.stored.len() + self.removed.len()
    }
}

/// Cache of one rank.
///
/// Every use of a block is a use of its whole prefix, and the prefix is moved to the front after its children.
/// Therefore a block is always behind its ancestors in the plain LRU order, the tail is always a leaf, and no tree is
/// needed.
#[derive(Debug)]
pub struct Engine {
    blocks: LruCache<EngineHash, (), RandomState>,
    blocks_max: usize,
}

impl Engine {
    /// Creates an empty cache of `blocks_max` blocks.
    #[must_use]
    pub fn new(blocks_max: usize) -> Self {
        Self { blocks: LruCache::unbounded_with_hasher(RandomState::new()), blocks_max }
    }

    /// Number of held blocks.
    #[must_use]
    pub fn held(&self) -> usize {
        self.blocks.len()
    }

    /// Serves a request of `blocks` and writes the changes to `change`. Blocks beyond the capacity of the cache are not
    /// held. Takes about 0.1 µs per block.
    pub fn serve(&mut self, blocks: &[StoredBlock], change: &mut Change) {
        let blocks = &blocks[..blocks.len().min(self.blocks_max)];
        let cached = blocks.iter().take_while(|block| self.blocks.contains(&block.engine_hash)).count();
        for block in blocks.iter().rev() {
            self.blocks.put(block.engine_hash, ());
        }
        change.cached = cached;
        change.stored = cached..blocks.len();
        change.removed.clear();
        while self.blocks.len() > self.blocks_max {
            let Some((oldest, ())) = self.blocks.pop_lru() else { break };
            change.removed.push(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reference model: stores each block with its parent and time of last use, and searches for the oldest leaf.
    #[derive(Default)]
    struct Naive(Vec<(EngineHash, Option<EngineHash>, usize)>);

    impl Naive {
        fn serve(&mut self, now: usize, blocks: &[StoredBlock], blocks_max: usize) -> Change {
            let blocks = &blocks[..blocks.len().min(blocks_max)];
            let mut change = Change::default();
            let mut parent = None;
            for block in blocks {
                let name = block.engine_hash;
                if let Some(held) = self.0.iter_mut().find(|held| held.0 == name) {
                    held.2 = now;
                    change.cached += 1;
                } else {
                    self.0.push((name, parent, now));
                }
                parent = Some(name);
            }
            change.stored = change.cached..blocks.len();
            while self.0.len() > blocks_max {
                let leaf = |name| self.0.iter().all(|held| held.1 != Some(name));
                let oldest = self.0.iter().filter(|held| leaf(held.0)).min_by_key(|held| held.2);
                let name = oldest.expect("a finite tree has a leaf").0;
                change.removed.push(name);
                self.0.retain(|held| held.0 != name);
            }
            change
        }
    }

    proptest! {
        /// Prompts are random walks in a small tree, so that they share prefixes.
        #[test]
        fn cache_equals_a_tree_that_evicts_its_oldest_leaf(
            prompts in prop::collection::vec(prop::collection::vec(0_u64..3, 0..12), 1..60),
            blocks_max in 1_usize..40,
        ) {
            let (mut engine, mut naive, mut change) = (Engine::new(blocks_max), Naive::default(), Change::default());
            for (now, prompt) in prompts.iter().enumerate() {
                let blocks = name_blocks(&prompt.iter().map(|&content| BlockHash(content)).collect::<Vec<_>>());
                engine.serve(&blocks, &mut change);
                prop_assert_eq!(&change, &naive.serve(now, &blocks, blocks_max));
                prop_assert_eq!(engine.held(), naive.0.len());
                prop_assert!(engine.held() <= blocks_max);
            }
        }
    }
}
