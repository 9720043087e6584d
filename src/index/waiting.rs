//! Blocks of lower tiers that were stored behind a parent nobody has named yet.
//!
//! Owns, for one rank, each such block with its parent's name, and the finding of blocks by the parent they
//! wait for. Engines report tiers independently, so a host block may be announced before the device block it
//! follows. Promises order: blocks of one parent are handed out by tier and name, never by a hash map's whim. Never
//! drops a block by itself; it holds no more than was sent and not removed. A block costs the same however many wait
//! for its parent: each knows its place in the parent's list. Leaves to [`super::Index`] when a parent becomes known.

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
    blocks: HashMap<Name, Listed, RandomState>,
    /// By parent, in no order.
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

/// A waiting block and its place in the list of its parent's children.
#[derive(Clone, Copy, Debug)]
struct Listed {
    block: Block,
    at: u32,
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
        if self.blocks.get(&name).is_some_and(|listed| listed.block == block) {
            return false;
        }
        self.remove(name);
        let siblings = self.children.entry(block.parent).or_default();
        let before = spilled(siblings);
        self.blocks.insert(name, Listed { block, at: siblings.len() as u32 });
        siblings.push(name);
        self.spilled += spilled(siblings) - before;
        true
    }

    /// Forgets a block. Those that wait for it go on waiting.
    pub(super) fn remove(&mut self, name: Name) -> Option<Block> {
        let Listed { block, at } = self.blocks.remove(&name)?;
        let siblings = self.children.get_mut(&block.parent).expect("a waiting block is listed with its parent");
        siblings.swap_remove(at as usize);
        if let Some(moved) = siblings.get(at as usize) {
            self.blocks.get_mut(moved).expect("what is listed waits").at = at;
        }
        if siblings.is_empty() {
            self.spilled -= spilled(siblings);
            self.children.remove(&block.parent);
        }
        self.settle();
        Some(block)
    }

    /// Forgets the blocks that wait for `parent`. Returns them sorted by name.
    pub(super) fn take_children(&mut self, parent: EngineHash) -> Vec<(Name, Block)> {
        let Some(names) = self.children.remove(&parent) else { return Vec::new() };
        self.spilled -= spilled(&names);
        let block = |name| (name, self.blocks.remove(&name).expect("what is listed waits").block);
        let mut children: Vec<_> = names.into_iter().map(block).collect();
        children.sort_unstable_by_key(|(name, _)| *name);
        self.settle();
        children
    }

    /// Gives back memory that few blocks do not need.
    fn settle(&mut self) {
        if self.blocks.len() < self.blocks.capacity() / 4 {
            self.blocks.shrink_to(self.blocks.len() * 2);
            self.children.shrink_to(self.children.len() * 2);
        }
    }

    /// Every block, sorted by name.
    pub(super) fn sorted(&self) -> Vec<(Name, Block)> {
        let mut blocks: Vec<_> = self.blocks.iter().map(|(name, listed)| (*name, listed.block)).collect();
        blocks.sort_unstable_by_key(|(name, _)| *name);
        blocks
    }

    /// Heap bytes owned.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.allocation_size() + self.children.allocation_size() + self.spilled
    }

    /// Checks what the type promises.
    pub(super) fn check_invariants(&self) {
        assert!(self.children.values().all(|children| !children.is_empty()), "no list is empty");
        let listed = |(name, Listed { block, at }): (&Name, &Listed)| {
            self.children[&block.parent].get(*at as usize) == Some(name)
        };
        assert!(self.blocks.iter().all(listed), "a waiting block is listed with its parent");
        assert_eq!(self.spilled, self.children.values().map(spilled).sum::<usize>(), "no byte is missed");
        assert_eq!(self.children.values().map(|children| children.len()).sum::<usize>(), self.blocks.len());
    }
}

fn spilled(names: &SmallVec<[Name; 1]>) -> usize {
    if names.spilled() { names.capacity() * size_of::<Name>() } else { 0 }
}
