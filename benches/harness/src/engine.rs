//! The cache of one simulated engine rank: the newest blocks of the prompts it has served.
//!
//! Owns which blocks the rank holds. Promises that a held block's whole prefix is held, that what goes first is the
//! least recently used leaf, and that the same calls give the same changes. Keeps no block for being in flight: a
//! request is served in no time here.

use std::ops::Range;

use ahash::RandomState;
use lru::LruCache;
use pointsman::protocol::{BlockHash, EngineHash, StoredBlock};

use pointsman_trial::workload::mix;

/// Names a prompt's blocks as the engine would: each by its content and all that stands before it. The names are the
/// harness' own and agree with no hash of a router, as an engine's need not.
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

/// What serving one request did to a cache. Reused from call to call, for the allocation.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Leading blocks of the request that were held before: the hit.
    pub cached: usize,
    /// The request's blocks that are held only now. They follow the last cached block, if any was.
    pub stored: Range<usize>,
    /// What had to go first, to make room.
    pub removed: Vec<EngineHash>,
}

impl Change {
    /// The block that the first stored one follows.
    #[must_use]
    pub fn parent(&self, blocks: &[StoredBlock]) -> Option<EngineHash> {
        self.stored.start.checked_sub(1).map(|last| blocks[last].engine_hash)
    }

    /// Number of blocks that the change's events name.
    #[must_use]
    pub fn event_blocks(&self) -> usize {
        self.stored.len() + self.removed.len()
    }
}

/// One rank's cache.
///
/// Every use of a block is a use of its whole prefix, and the prefix is moved to the front last. So the plain order of
/// use always has a block behind all that it needs, its tail is always a leaf, and no tree need be kept.
#[derive(Debug)]
pub struct Engine {
    blocks: LruCache<EngineHash, (), RandomState>,
    blocks_max: usize,
}

impl Engine {
    /// An empty cache of `blocks_max` blocks.
    #[must_use]
    pub fn new(blocks_max: usize) -> Self {
        Self { blocks: LruCache::unbounded_with_hasher(RandomState::new()), blocks_max }
    }

    /// Blocks held now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.blocks.len()
    }

    /// Serves a request of `blocks` and says in `change` what that did. What does not fit the cache even alone is not
    /// held. About 0.1 µs a block.
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

    /// Holds each block with its parent and the time of its last use, and searches for the oldest leaf.
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
        fn serves_as_a_tree_that_evicts_its_oldest_leaf(
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

    #[test]
    fn names_tell_prefixes_apart() {
        let names = |hashes: &[u64]| name_blocks(&hashes.iter().map(|&hash| BlockHash(hash)).collect::<Vec<_>>());
        let (one, other) = (names(&[1, 2, 2]), names(&[1, 3, 2]));
        assert_eq!(one[0], other[0]);
        assert_ne!(one[1].engine_hash, one[2].engine_hash);
        assert_ne!(one[2].engine_hash, other[2].engine_hash);
        assert_eq!(one[2].block_hash, other[2].block_hash);
    }

    #[test]
    fn stored_blocks_follow_the_last_cached_one() {
        let blocks = name_blocks(&[BlockHash(1), BlockHash(2), BlockHash(3)]);
        let (mut engine, mut change) = (Engine::new(8), Change::default());
        engine.serve(&blocks[..1], &mut change);
        assert_eq!((change.parent(&blocks), change.stored.clone()), (None, 0..1));
        engine.serve(&blocks, &mut change);
        assert_eq!((change.parent(&blocks), change.stored.clone()), (Some(blocks[0].engine_hash), 1..3));
        assert_eq!(change.event_blocks(), 2);
    }
}
