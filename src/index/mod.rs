//! Prefix index: the prompt prefixes that each rank holds per storage tier, derived from KV events.
//!
//! One [`Index`] covers the ranks of one shard. For the block hashes of a request it returns the number of leading
//! blocks that each rank currently holds. A slow reference model, `tests/index_reference.rs`, defines the semantics;
//! property tests compare the index with the model after every event:
//!
//! - A *name* is an engine hash. Per rank and tier, each name refers to one prefix. A stored block extends the prefix
//!   of its parent's name; without a parent it starts a prompt. A rank holds a prefix while at least one name refers to
//!   it.
//! - A repeated store of a name at the same position, in the device tier and behind a parent, adds a copy; the name is
//!   removed with its last copy, or with the first removal (`copies.rs`). Behind an unknown parent, the same content is sufficient. In a lower tier, or in a list that starts a prompt, a repeated store has no effect
//!   (reason: `hold.rs`; with cache groups, `restrict.rs` distinguishes a copy from a report).
//! - An *offloaded* block adds a copy in any tier. If the rank holds its name in any tier, it is that block, whatever the
//!   event states; otherwise the event must state its content.
//! - Storing a name at another position moves it there, with one copy. A block with two names is held until both are
//!   removed. A removed name is no longer a valid parent.
//! - The overlap is the longest run of held leading blocks. Blocks behind a hole do not count until the hole is filled.
//! - Lower tiers extend a rank's device hit, each from the end of the nearer tier. Stores may name a parent in any tier
//!   of the rank, and are pending while the parent is unknown.
//! - Cache groups beside the main attention hold names without a position. They shorten the device hit: `groups.rs`.
//! - Answers prove blocks that no event has stored: `prove.rs`, or that may have a further copy: `doubt.rs`.
//!
//! Overlaps depend only on the held blocks, not on the order or batching of events or on the shape of the tree. No
//! event is an error; anomalies are counted in [`Applied`].
//!
//! Cost: a stored or removed block takes one hash-table probe and usually an append or a cut at the end of a list. A
//! query compares the prompt with a few runs and takes one step per rank that holds a part of them. Two cases are
//! expensive: if one rank removes the tail of a run block by block, each removal checks every other holder of the run;
//! and a rank with a single block deep in a long run spends eight bytes on each block before it.
//!
//! With a budget ([`Index::set_budget`]) the index may hold less than the events reported, for ranks with nonzero
//! [`Index::evicted_blocks_of`], and never more. This requires that a rank's name always refers to the same prefix, as
//! it does in current engines.
//!
//! Assignment of ranks to shards, detection of gaps in event streams, and weights of tiers are outside this module.

mod aliases;
mod applied;
mod arena;
mod budget;
mod check;
mod copies;
pub(crate) mod depth;
mod digest;
mod doubt;
mod doubts;
mod dump;
mod evict;
mod groups;
mod hold;
mod holdings;
mod lower;
mod names;
mod overlaps;
mod prove;
mod proven;
mod query;
mod rank;
mod residence;
mod restrict;
mod span;
mod steps;
mod table;
mod tree;
mod waiting;

use std::collections::BTreeMap;
use std::mem::size_of;

use ahash::RandomState;

pub use applied::Applied;
pub use budget::BudgetState;
pub use digest::BlockDigest;
pub use dump::RankDump;
pub use holdings::Holdings;
pub use overlaps::{Extension, Hit, Overlaps};

use crate::protocol::{BlockHash, WorkerRank};
use crate::protocol::{EngineHash, Generation, KvEvent, RepeatedStore, RouterEvent, Slot, StorageTier};
use crate::protocol::{StoredBlock, Timestamp, WorkerId};
use budget::Budget;
use copies::Copies;
use hold::HeldBlocks;
use rank::{RankBlocks, lower_idx};
use residence::Residence;
use tree::Tree;

/// Prefix index of one shard. Single-threaded: the owner applies events and runs queries sequentially.
///
/// ```
/// use pointsman::internals::index::{Index, Overlaps};
/// use pointsman::internals::protocol::{Generation, Slot};
/// use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier};
/// use pointsman::protocol::{StoredBlock, WorkerId, WorkerRank};
///
/// let rank = WorkerRank::new(WorkerId(7), 0);
/// let mut index = Index::new();
/// index.register(rank, Slot(0), Generation(1));
/// let blocks = [(91, 1), (92, 2)].map(|(name, hash)| StoredBlock {
///     engine_hash: EngineHash(name),
///     block_hash: BlockHash(hash),
/// });
/// let applied = index.apply(&RouterEvent {
///     rank,
///     tier: StorageTier::Device,
///     data: KvEvent::Stored { parent: None, blocks: blocks.to_vec() },
/// });
/// assert_eq!(applied.stored, 2);
///
/// let mut overlaps = Overlaps::default();
/// index.overlaps(&[BlockHash(1), BlockHash(2), BlockHash(3)], &mut overlaps);
/// assert_eq!((overlaps.hits()[0].slot, overlaps.hits()[0].device_blocks), (Slot(0), 2));
/// ```
#[derive(Debug)]
pub struct Index {
    registry: BTreeMap<WorkerRank, Slot>,
    /// By slot.
    ranks: Vec<Option<Box<RankBlocks>>>,
    /// By slot; separate from `ranks` so that a query does not access each rank in its result.
    generations: Vec<Generation>,
    /// Slots of the ranks with several cache groups, ascending.
    grouped: Vec<Slot>,
    device: Tree,
    /// Host-pinned, disk and external; each is created by its first store.
    lower: [Option<Box<Tree>>; 3],
    budget: Option<Box<Budget>>,
    /// Time of the next turn of proven names, while there are any.
    proven_turn: Option<Timestamp>,
    hasher: RandomState,
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

impl Index {
    /// Creates an index without ranks.
    #[must_use]
    pub fn new() -> Self {
        let hasher = RandomState::new();
        Self {
            registry: BTreeMap::new(),
            ranks: Vec::new(),
            generations: Vec::new(),
            grouped: Vec::new(),
            device: Tree::new(hasher.clone()),
            lower: [None, None, None],
            budget: None,
            proven_turn: None,
            hasher,
        }
    }

    /// Registers `rank` in `slot` without blocks. Removes the previous rank of the slot and any earlier registration of
    /// the rank. Returns false without a change if the slot has a later generation. Repeating a registration has no
    /// effect.
    ///
    /// Slots are dense: the index allocates a few bytes per slot up to the highest.
    pub fn register(&mut self, rank: WorkerRank, slot: Slot, generation: Generation) -> bool {
        if self.ranks.len() <= slot.index() {
            self.ranks.resize_with(slot.index() + 1, || None);
            self.generations.resize(slot.index() + 1, Generation::default());
        }
        if let Some(occupant) = &self.ranks[slot.index()] {
            let current = self.generations[slot.index()];
            if current > generation || (current == generation && occupant.id == rank) {
                return current == generation;
            }
            let occupant = occupant.id;
            self.remove_rank(occupant);
        }
        self.remove_rank(rank);
        self.registry.insert(rank, slot);
        self.ranks[slot.index()] = Some(Box::new(RankBlocks::new(rank, &self.hasher)));
        self.generations[slot.index()] = generation;
        self.recount(slot);
        self.keep_within(None);
        true
    }

    /// Removes a rank and its blocks. Returns whether it was registered. Costs one step per run that the rank holds a
    /// part of.
    pub fn remove_rank(&mut self, rank: WorkerRank) -> bool {
        let Some(slot) = self.registry.remove(&rank) else { return false };
        self.clear(slot);
        let rank = self.ranks[slot.index()].take().expect("every registered slot has a rank");
        if let Some(budget) = &mut self.budget {
            budget.ranks_bytes -= rank.counted;
        }
        true
    }

    /// Removes every rank of a worker. Returns the number of registered ranks among them.
    pub fn remove_worker(&mut self, worker: WorkerId) -> usize {
        let ranks = WorkerRank::new(worker, 0)..=WorkerRank::new(worker, u32::MAX);
        let ranks: Vec<_> = self.registry.range(ranks).map(|(rank, _)| *rank).collect();
        ranks.into_iter().filter(|rank| self.remove_rank(*rank)).count()
    }

    /// The slot of a rank, if it is registered in this index.
    #[must_use]
    pub fn slot_of(&self, rank: WorkerRank) -> Option<Slot> {
        self.registry.get(&rank).copied()
    }

    /// Generation of the latest rank registered in `slot`; the default for an unused slot.
    #[must_use]
    pub fn generation(&self, slot: Slot) -> Generation {
        self.generations.get(slot.index()).copied().unwrap_or_default()
    }

    /// Applies one event. Events may arrive at any time; the result reports anomalies.
    pub fn apply(&mut self, event: &RouterEvent) -> Applied {
        let Some(slot) = self.slot_of(event.rank) else { return Applied { unknown_ranks: 1, ..Applied::default() } };
        if self.budget.is_some() { self.apply_within_budget(slot, event) } else { self.change(slot, event) }
    }

    fn change(&mut self, slot: Slot, event: &RouterEvent) -> Applied {
        match &event.data {
            KvEvent::Stored { parent, blocks } => {
                let mut applied = self.store(slot, event.tier, *parent, blocks);
                if event.tier == StorageTier::Device {
                    self.settle(slot, parent.is_none(), blocks, applied.duplicates > 0);
                    applied.gone = self.keep_within_pool(slot);
                }
                applied
            }
            KvEvent::Removed { blocks } => self.remove(slot, event.tier, blocks),
            KvEvent::Offloaded { parent, blocks } => self.offload(slot, event.tier, *parent, blocks),
            KvEvent::Cleared => Applied { removed: self.clear(slot) as u64, ..Applied::default() },
            KvEvent::TierCleared => Applied { removed: self.clear_tier(slot, event.tier) as u64, ..Applied::default() },
            KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks } => {
                self.store_in_group(slot, (*group, *window_blocks), *starts_prompt, blocks)
            }
            KvEvent::GroupRemoved { group, blocks } => self.remove_from_group(slot, *group, blocks),
        }
    }

    /// Sets the number of blocks in the device tier of a rank's engine, if known.
    pub fn set_pool(&mut self, rank: WorkerRank, blocks: Option<u32>) {
        if let Some(slot) = self.slot_of(rank) {
            self.rank_mut(slot).pool_blocks = blocks;
        }
    }

    /// Removes the names that are gone if the rank holds more blocks than its engine. Returns their number.
    fn keep_within_pool(&mut self, slot: Slot) -> u64 {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        if rank.evicted_blocks > 0 || !rank.exceeds_pool() {
            return 0;
        }
        let device = rank.residence_mut(StorageTier::Device, &self.hasher);
        let gone = device.copies_mut().map(Copies::end).unwrap_or_default();
        if gone.is_empty() {
            return 0;
        }
        rank.groups.iter_mut().for_each(|groups| groups.end_copies());
        self.blocks(slot, StorageTier::Device).forget(&gone) as u64
    }

    /// Updates proven and doubted blocks after a store in the device tier, which may have found blocks held.
    fn settle(&mut self, slot: Slot, starts_prompt: bool, blocks: &[StoredBlock], is_repeated: bool) {
        let rank = self.rank(slot);
        let is_ambiguous = starts_prompt && is_repeated && rank.groups.is_none() && rank.evicted_blocks == 0;
        let has_proven = rank.proven.is_some();
        if is_ambiguous || rank.doubts.is_some() {
            self.doubt_copies(slot, blocks, is_ambiguous);
        }
        if has_proven {
            self.supersede_proven(slot, blocks);
        }
    }

    /// Number of held blocks, each counted once per rank and tier. Pending blocks are excluded.
    #[must_use]
    pub fn held_blocks(&self) -> usize {
        self.ranks.iter().flatten().map(|rank| rank.held_blocks()).sum()
    }

    /// Heap bytes that the index owns. Visits every run and every holder; not for hot paths.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let ranks =
            self.ranks.iter().flatten().map(|rank| size_of::<RankBlocks>() + rank.bytes_visited()).sum::<usize>();
        let lower = self.lower.iter().flatten().map(|tree| tree.bytes_visited()).sum::<usize>();
        self.container_bytes() + ranks + self.device.bytes_visited() + lower
    }

    /// Size of a tier's tree: runs of consecutive blocks, blocks in them, and pairs of a run and a rank that holds a part of
    /// it. Visits every run.
    #[must_use]
    pub fn shape(&self, tier: StorageTier) -> [usize; 3] {
        let nodes = self.tree(tier).into_iter().flat_map(|tree| tree.iter().map(|(_, node)| node));
        nodes.fold([0; 3], |[runs, blocks, holders], node| {
            [runs + 1, blocks + node.run.len(), holders + node.holders.len()]
        })
    }

    /// Heap bytes of the containers of ranks and trees.
    fn container_bytes(&self) -> usize {
        // The node sizes of a B-tree are not accessible; nodes are assumed to be two thirds full.
        let registry = self.registry.len() * size_of::<(WorkerRank, Slot)>() * 3 / 2;
        let slots = self.ranks.capacity() * size_of::<Option<Box<RankBlocks>>>()
            + self.generations.capacity() * size_of::<Generation>()
            + self.grouped.capacity() * size_of::<Slot>();
        let lower = self.lower.iter().flatten().count() * size_of::<Tree>();
        registry + slots + lower + self.budget.as_ref().map_or(0, |_| size_of::<Budget>())
    }

    /// Number of runs in all tiers.
    fn runs(&self) -> usize {
        self.device.len() + self.lower.iter().flatten().map(|tree| tree.len()).sum::<usize>()
    }

    /// Stores blocks up to the next one that concerns pending blocks together, and that one by itself.
    fn store(
        &mut self,
        slot: Slot,
        tier: StorageTier,
        mut parent: Option<EngineHash>,
        mut blocks: &[StoredBlock],
    ) -> Applied {
        let has_groups = !self.grouped.is_empty() && self.rank(slot).groups.is_some();
        let repeated = match RepeatedStore::of(tier, parent.is_some(), has_groups) {
            RepeatedStore::ByGroups => self.repeated_at_start(slot, blocks),
            known => known,
        };
        let mut applied = Applied::default();
        while !blocks.is_empty() {
            let at = self.point_behind(slot, tier, parent);
            if at.is_none() && tier == StorageTier::Device && self.rank(slot).evicted_blocks > 0 {
                return Applied { unknown_parents: 1, ..applied };
            }
            let free = self.rank(slot).waiting().map_or(blocks.len(), |waiting| waiting.unconcerned(tier, blocks));
            let done = match at.filter(|_| free > 0) {
                Some(at) => {
                    applied += self.blocks(slot, tier).store(at, &blocks[..free], repeated);
                    free
                }
                None => {
                    applied += self.store_one(slot, tier, parent, &blocks[0], repeated);
                    1
                }
            };
            parent = Some(blocks[done - 1].engine_hash);
            blocks = &blocks[done..];
        }
        applied
    }

    fn remove(&mut self, slot: Slot, tier: StorageTier, names: &[EngineHash]) -> Applied {
        let not_pending = self.remove_waiting(slot, tier, names);
        let others = not_pending.as_deref().unwrap_or(names);
        if tier == StorageTier::Device {
            self.doubt_removals(slot, others);
        }
        let known = if self.rank(slot).residence(tier).is_some() { self.blocks(slot, tier).remove(others) } else { 0 };
        let unknown = others.len() - known;
        Applied { removed: (names.len() - unknown) as u64, unknown_removals: unknown as u64, ..Applied::default() }
    }

    /// Removes all blocks of a rank in every tier. Returns the number of names and further copies.
    fn clear(&mut self, slot: Slot) -> usize {
        let rank = self.ranks[slot.index()].as_deref_mut().expect("every registered slot has a rank");
        let names = rank.removable();
        for (tier, residence) in rank.residences() {
            match lower_idx(tier) {
                None => hold::clear(&mut self.device, residence, slot),
                Some(idx) => {
                    let tree = self.lower[idx].as_mut().expect("a tier with held blocks has a tree");
                    hold::clear(tree, residence, slot);
                }
            }
        }
        rank.reset(&self.hasher);
        self.grouped.retain(|other| *other != slot);
        names
    }

    /// Removes all blocks of a rank in one tier. Returns the number of names and further copies.
    fn clear_tier(&mut self, slot: Slot, tier: StorageTier) -> usize {
        let pending = self.rank(slot).waiting_names().filter(|(of, _)| *of == tier).map(|(_, name)| name);
        let pending: Vec<_> = pending.collect();
        self.remove_waiting(slot, tier, &pending);
        if tier == StorageTier::Device {
            self.forget_groups(slot);
            let rank = self.rank_mut(slot);
            (rank.proven, rank.doubts) = (None, None);
        }
        let names = self.rank(slot).residence(tier).map_or(0, Residence::removable);
        if names == 0 {
            return pending.len();
        }
        let empty = Residence::new(tier, self.hasher.clone());
        let HeldBlocks { tree, residence, slot } = self.blocks(slot, tier);
        hold::clear(tree, residence, slot);
        *residence = empty;
        pending.len() + names
    }

    fn rank(&self, slot: Slot) -> &RankBlocks {
        self.ranks[slot.index()].as_ref().expect("every registered slot has a rank")
    }

    fn rank_mut(&mut self, slot: Slot) -> &mut RankBlocks {
        self.ranks[slot.index()].as_mut().expect("every registered slot has a rank")
    }

    fn tree(&self, tier: StorageTier) -> Option<&Tree> {
        match lower_idx(tier) {
            None => Some(&self.device),
            Some(idx) => self.lower[idx].as_deref(),
        }
    }

    /// A tier's tree and a rank's residence in it; creates missing ones.
    fn blocks(&mut self, slot: Slot, tier: StorageTier) -> HeldBlocks<'_> {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let hasher = &self.hasher;
        let tree = match lower_idx(tier) {
            None => &mut self.device,
            Some(idx) => self.lower[idx].get_or_insert_with(|| Box::new(Tree::new(hasher.clone()))),
        };
        HeldBlocks { tree, residence: rank.residence_mut(tier, hasher), slot }
    }
}
