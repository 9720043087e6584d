//! Blocks of lower tiers that were stored behind a parent nobody has named yet.
//!
//! Owns, for one rank, each such block with its parent's name, and the finding of blocks by the parent they
//! wait for. Engines report tiers independently, so a host block may be announced before the device block it
//! follows. Promises order: blocks of one parent are listed by tier and name, never by a hash map's whim. Never
//! drops a block by itself; it holds no more than was sent and not removed. Leaves to [`super::Index`] when a
//! parent becomes known.

use std::mem::size_of;

use ahash::RandomState;
use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::protocol::{BlockHash, EngineHash, StorageTier};

/// The name of a waiting block, which is its own in each tier.
pub(super) type Name = (StorageTier, EngineHash);

/// One rank's waiting blocks.
#[derive(Debug)]
pub(super) struct Waiting {
    blocks: HashMap<Name, Block, RandomState>,
    /// By parent; each list sorted.
    children: HashMap<EngineHash, SmallVec<[Name; 1]>, RandomState>,
    /// Heap bytes of the lists that are too long to be kept in the map.
    spilled: usize,
}

/// What is known of a waiting block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) parent: EngineHash,
    pub(super) block_hash: BlockHash,
}

impl Waiting {
    pub(super) fn new(hasher: RandomState) -> Self {
        Self { blocks: HashMap::with_hasher(hasher.clone()), children: HashMap::with_hasher(hasher), spilled: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Lets a block wait. Returns whether that changed anything.
    pub(super) fn insert(&mut self, name: Name, block: Block) -> bool {
        if self.blocks.get(&name) == Some(&block) {
            return false;
        }
        self.remove(name);
        self.blocks.insert(name, block);
        let siblings = self.children.entry(block.parent).or_default();
        let at = siblings.partition_point(|sibling| *sibling < name);
        let before = spilled(siblings);
        siblings.insert(at, name);
        self.spilled += spilled(siblings) - before;
        true
    }

    /// Forgets a block. Those that wait for it go on waiting.
    pub(super) fn remove(&mut self, name: Name) -> Option<Block> {
        let block = self.blocks.remove(&name)?;
        let siblings = self.children.get_mut(&block.parent).expect("a waiting block is listed with its parent");
        siblings.retain(|sibling| *sibling != name);
        if siblings.is_empty() {
            self.spilled -= spilled(siblings);
            self.children.remove(&block.parent);
        }
        if self.blocks.len() < self.blocks.capacity() / 4 {
            self.blocks.shrink_to(self.blocks.len() * 2);
            self.children.shrink_to(self.children.len() * 2);
        }
        Some(block)
    }

    /// The first of the blocks that wait for `parent`.
    pub(super) fn first_child(&self, parent: EngineHash) -> Option<Name> {
        self.children.get(&parent)?.first().copied()
    }

    /// Every block, sorted by name.
    pub(super) fn sorted(&self) -> Vec<(Name, Block)> {
        let mut blocks: Vec<_> = self.blocks.iter().map(|(name, block)| (*name, *block)).collect();
        blocks.sort_unstable_by_key(|(name, _)| *name);
        blocks
    }

    /// Heap bytes owned.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.allocation_size() + self.children.allocation_size() + self.spilled
    }

    /// Checks what the type promises.
    pub(super) fn check_invariants(&self) {
        let sorted = self.children.values().all(|children| !children.is_empty() && children.is_sorted());
        assert!(sorted, "children are listed in order");
        let listed = |(name, block): (&Name, &Block)| self.children[&block.parent].binary_search(name).is_ok();
        assert!(self.blocks.iter().all(listed), "a waiting block is listed with its parent");
        assert_eq!(self.spilled, self.children.values().map(spilled).sum::<usize>(), "no byte is missed");
        assert_eq!(self.children.values().map(|children| children.len()).sum::<usize>(), self.blocks.len());
    }
}

fn spilled(names: &SmallVec<[Name; 1]>) -> usize {
    if names.spilled() { names.capacity() * size_of::<Name>() } else { 0 }
}
