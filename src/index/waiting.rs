//! Pending blocks: blocks stored behind a parent that no tier of the rank holds.
//!
//! Holds, for one rank, each pending block with its parent's name, and a lookup by parent. Engines report tiers
//! independently, so a host block may be announced before its parent in the device tier. A router that starts late has
//! missed the beginning of every conversation. Blocks of one parent are
//! returned ordered by tier and name, independent of hash-map order. Blocks stay pending until they are removed or
//! adopted, so their number is bounded by the stores without a removal. The cost per block is independent of the number
//! of blocks pending behind its parent, because each block records its position in the parent's list. [`super::Index`]
//! determines when a parent becomes known.

use std::mem::size_of;

use ahash::RandomState;
use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::protocol::{BlockHash, EngineHash, StorageTier, StoredBlock};

/// Tier and name of a pending block; names are separate in each tier.
pub(super) type TierName = (StorageTier, EngineHash);

/// Pending blocks of one rank.
#[derive(Debug)]
pub(super) struct PendingBlocks {
    blocks: HashMap<TierName, ListedBlock, RandomState>,
    /// By parent, unordered.
    children: HashMap<EngineHash, SmallVec<[TierName; 1]>, RandomState>,
    /// Blocks of the device tier by content: their number, and the exclusive or of their names.
    contents: HashMap<BlockHash, (u32, u64), RandomState>,
    /// Heap bytes of the lists that exceed the inline capacity.
    spilled: usize,
}

/// Number of blocks behind one parent that are compared with a prompt.
const SIBLINGS_MAX: usize = 64;

/// Parent and content of a pending block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingBlock {
    pub(super) parent: EngineHash,
    pub(super) block_hash: BlockHash,
}

/// A pending block and its position in the list of its parent's children.
#[derive(Clone, Copy, Debug)]
struct ListedBlock {
    block: PendingBlock,
    at: u32,
}

impl PendingBlocks {
    pub(super) fn new(hasher: RandomState) -> Self {
        let (blocks, children) = (HashMap::with_hasher(hasher.clone()), HashMap::with_hasher(hasher.clone()));
        Self { blocks, children, contents: HashMap::with_hasher(hasher), spilled: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Number of leading blocks without a pending block of the same name or behind them.
    pub(super) fn unconcerned(&self, tier: StorageTier, blocks: &[StoredBlock]) -> usize {
        if self.is_empty() {
            return blocks.len();
        }
        let is_free = |block: &&StoredBlock| {
            let name = block.engine_hash;
            !self.blocks.contains_key(&(tier, name)) && !self.children.contains_key(&name)
        };
        blocks.iter().take_while(is_free).count()
    }

    /// The pending block with that name.
    pub(super) fn get(&self, name: TierName) -> Option<PendingBlock> {
        self.blocks.get(&name).map(|listed| listed.block)
    }

    /// Adds a pending block. Returns whether anything changed.
    pub(super) fn insert(&mut self, name: TierName, block: PendingBlock) -> bool {
        if self.blocks.get(&name).is_some_and(|listed| listed.block == block) {
            return false;
        }
        self.remove(name);
        let siblings = self.children.entry(block.parent).or_default();
        let before = spilled(siblings);
        self.blocks.insert(name, ListedBlock { block, at: siblings.len() as u32 });
        siblings.push(name);
        self.spilled += spilled(siblings) - before;
        if name.0 == StorageTier::Device {
            let (number, names) = self.contents.entry(block.block_hash).or_default();
            (*number, *names) = (*number + 1, *names ^ name.1.0);
        }
        true
    }

    /// Removes a block. Blocks pending behind it stay pending.
    pub(super) fn remove(&mut self, name: TierName) -> Option<PendingBlock> {
        let ListedBlock { block, at } = self.blocks.remove(&name)?;
        let siblings = self.children.get_mut(&block.parent).expect("a pending block is listed with its parent");
        siblings.swap_remove(at as usize);
        if let Some(moved) = siblings.get(at as usize) {
            self.blocks.get_mut(moved).expect("a listed block is pending").at = at;
        }
        if siblings.is_empty() {
            self.spilled -= spilled(siblings);
            self.children.remove(&block.parent);
        }
        self.forget_content(name, block.block_hash);
        self.shrink();
        Some(block)
    }

    /// Removes the blocks pending behind `parent`. Returns them sorted by name.
    pub(super) fn take_children(&mut self, parent: EngineHash) -> Vec<(TierName, PendingBlock)> {
        let Some(names) = self.children.remove(&parent) else { return Vec::new() };
        self.spilled -= spilled(&names);
        let block = |name| (name, self.blocks.remove(&name).expect("a listed block is pending").block);
        let mut children: Vec<_> = names.into_iter().map(block).collect();
        children.sort_unstable_by_key(|(name, _)| *name);
        children.iter().for_each(|(name, block)| self.forget_content(*name, block.block_hash));
        self.shrink();
        children
    }

    /// The parent of the only block of the device tier with the first of these contents, if it does not wait itself and
    /// blocks with the other contents follow.
    pub(super) fn unknown_parent(&self, contents: &[BlockHash]) -> Option<EngineHash> {
        let (first, rest) = contents.split_first()?;
        let (_, name) = self.contents.get(first).filter(|(number, _)| *number == 1)?;
        let mut name = (StorageTier::Device, EngineHash(*name));
        let parent = self.get(name)?.parent;
        if self.get((StorageTier::Device, parent)).is_some() {
            return None;
        }
        for content in rest {
            let is_next = |child: &&TierName| {
                child.0 == StorageTier::Device && self.get(**child).is_some_and(|block| block.block_hash == *content)
            };
            name = *self.children.get(&name.1)?.iter().take(SIBLINGS_MAX).find(is_next)?;
        }
        Some(parent)
    }

    fn forget_content(&mut self, (tier, name): TierName, content: BlockHash) {
        if tier == StorageTier::Device
            && let Some((number, names)) = self.contents.get_mut(&content)
        {
            (*number, *names) = (*number - 1, *names ^ name.0);
            if *number == 0 {
                self.contents.remove(&content);
            }
        }
    }

    /// Shrinks the maps.
    fn shrink(&mut self) {
        if self.blocks.len() < self.blocks.capacity() / 4 {
            self.blocks.shrink_to(self.blocks.len() * 2);
            self.children.shrink_to(self.children.len() * 2);
            self.contents.shrink_to(self.contents.len() * 2);
        }
    }

    /// Every name, in any order.
    pub(super) fn names(&self) -> impl Iterator<Item = TierName> {
        self.blocks.keys().copied()
    }

    /// Every block, sorted by name.
    pub(super) fn sorted(&self) -> Vec<(TierName, PendingBlock)> {
        let mut blocks: Vec<_> = self.blocks.iter().map(|(name, listed)| (*name, listed.block)).collect();
        blocks.sort_unstable_by_key(|(name, _)| *name);
        blocks
    }

    /// Heap bytes owned.
    pub(super) fn bytes(&self) -> usize {
        let maps = self.blocks.allocation_size() + self.children.allocation_size() + self.contents.allocation_size();
        maps + self.spilled
    }

    /// Checks the invariants of the type.
    pub(super) fn check_invariants(&self) {
        assert!(self.children.values().all(|children| !children.is_empty()), "lists of children are not empty");
        let listed = |(name, ListedBlock { block, at }): (&TierName, &ListedBlock)| {
            self.children[&block.parent].get(*at as usize) == Some(name)
        };
        assert!(self.blocks.iter().all(listed), "a pending block is listed with its parent");
        assert_eq!(
            self.spilled,
            self.children.values().map(spilled).sum::<usize>(),
            "counted bytes match the visited bytes"
        );
        assert_eq!(self.children.values().map(|children| children.len()).sum::<usize>(), self.blocks.len());
        let by_content = self.contents.values().map(|(number, _)| *number as usize).sum::<usize>();
        assert_eq!(by_content, self.names().filter(|(tier, _)| *tier == StorageTier::Device).count());
    }
}

fn spilled(names: &SmallVec<[TierName; 1]>) -> usize {
    if names.spilled() { names.capacity() * size_of::<TierName>() } else { 0 }
}
