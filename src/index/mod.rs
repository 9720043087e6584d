//! The prefix index: which rank holds which prompt prefixes, per storage tier, as its KV events tell.
//!
//! Owns one shard's knowledge: the ranks assigned to it and what each said it stored and removed. Answers, for
//! the block hashes of a request, how many leading blocks each rank holds *now*. What that means is defined by
//! a slow literal model, `reference.rs`, and property tests hold this index to it after every event:
//!
//! - A rank holds a prefix in a tier while some engine hash of that rank and tier stands for it. A stored block
//!   extends the prefix that its parent's engine hash stands for; without a parent it starts a prompt.
//! - Storing a name again in its place, on the device and behind a parent, adds a copy: the name is forgotten at the
//!   removal of its last copy. In a lower tier, or in a list that starts a prompt, it changes nothing (why: `hold.rs`).
//! - Storing a name elsewhere moves it, with one copy. A block with two names is held until both are removed. A
//!   removed name is forgotten, also as a parent.
//! - An overlap is the longest run of leading blocks held. A hole hides what lies behind it; healing it brings
//!   that back.
//! - Lower tiers extend a rank's device hit, each from where the one before ended. Their stores may name a
//!   parent of any tier of the rank, and wait for one that is not known yet. Device stores do not wait.
//!
//! Promises that answers depend on what is held and on nothing else: not on the order of events, their
//! batching, or the shape of the tree. No event is an error: what is odd is counted in [`Applied`].
//!
//! Costs: a stored or removed block one probe of a hash table and, in the common case, an append or a cut at
//! the end of a list; an answer the comparison of the prompt with a few runs, plus one step per rank that holds
//! part of them. Where it loses: a run's tail that one rank alone gives up block by block is checked against
//! every other holder of the run each time, and a rank with a single block far down a long run spends eight
//! bytes on each block before it.
//!
//! With a budget ([`Index::set_budget`]) it may know less than it was told, of ranks that [`Index::evicted_blocks_of`]
//! names, and never more. That assumes what engines do: a rank's name stands for the same prefix whenever it is used.
//!
//! Does not spread ranks over shards, detect gaps in event streams, or weigh tiers against each other.

mod applied;
mod arena;
mod budget;
mod check;
pub(crate) mod depth;
mod dump;
mod evict;
mod hold;
mod holdings;
mod lower;
mod overlaps;
mod query;
mod rank;
#[doc(hidden)]
pub mod reference;
mod residence;
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
pub use holdings::Holdings;
pub use overlaps::{Extension, Hit, Overlaps};

use crate::protocol::{BlockHash, WorkerRank};
use crate::protocol::{EngineHash, Generation, KvEvent, RouterEvent, Slot, StorageTier, StoredBlock, WorkerId};
use budget::Budget;
use hold::Again;
use rank::{Rank, lower_idx};
use tree::Tree;

/// One shard's prefix index. Single-threaded: its owner applies events and asks questions in turn.
///
/// ```
/// use pointsman::index::{Index, Overlaps};
/// use pointsman::protocol::{BlockHash, EngineHash, Generation, KvEvent, RouterEvent, Slot, StorageTier};
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
    ranks: Vec<Option<Box<Rank>>>,
    /// By slot, apart from `ranks` so that an answer need not visit each rank it names.
    generations: Vec<Generation>,
    device: Tree,
    /// Host-pinned, disk and external, each from its first store on.
    lower: [Option<Box<Tree>>; 3],
    budget: Option<Box<Budget>>,
    hasher: RandomState,
}

/// How large a tier's tree is, for tests and metrics.
///
/// ```
/// use pointsman::index::Index;
/// use pointsman::protocol::StorageTier;
///
/// assert_eq!(Index::new().shape(StorageTier::Device).runs, 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Runs of consecutive blocks.
    pub runs: usize,
    /// Blocks in all runs together: distinct prefixes, however many ranks hold each.
    pub run_blocks: usize,
    /// Pairs of a run and a rank that holds part of it.
    pub holders: usize,
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

impl Index {
    /// An index that knows no rank.
    #[must_use]
    pub fn new() -> Self {
        let hasher = RandomState::new();
        Self {
            registry: BTreeMap::new(),
            ranks: Vec::new(),
            generations: Vec::new(),
            device: Tree::new(hasher.clone()),
            lower: [None, None, None],
            budget: None,
            hasher,
        }
    }

    /// Lets `rank` sit in `slot` from now on, holding nothing. Whoever sat there leaves, and so does the rank
    /// from wherever it sat. Returns false, and changes nothing, when a later generation sits in the slot.
    /// Saying the same again changes nothing either.
    ///
    /// Slots are dense: the index keeps a few bytes for each up to the highest.
    pub fn register(&mut self, rank: WorkerRank, slot: Slot, generation: Generation) -> bool {
        if self.ranks.len() <= slot.index() {
            self.ranks.resize_with(slot.index() + 1, || None);
            self.generations.resize(slot.index() + 1, Generation::default());
        }
        if let Some(occupant) = &self.ranks[slot.index()] {
            let seated = self.generations[slot.index()];
            if seated > generation || (seated == generation && occupant.id == rank) {
                return seated == generation;
            }
            let occupant = occupant.id;
            self.remove_rank(occupant);
        }
        self.remove_rank(rank);
        self.registry.insert(rank, slot);
        self.ranks[slot.index()] = Some(Box::new(Rank::new(rank, &self.hasher)));
        self.generations[slot.index()] = generation;
        self.recount(slot);
        self.keep_within(None);
        true
    }

    /// Forgets a rank and all it holds. Returns whether it was registered. Costs a step per run it holds part of.
    pub fn remove_rank(&mut self, rank: WorkerRank) -> bool {
        let Some(slot) = self.registry.remove(&rank) else { return false };
        self.clear(slot);
        let rank = self.ranks[slot.index()].take().expect("every registered slot has a rank");
        if let Some(budget) = &mut self.budget {
            budget.ranks_bytes -= rank.counted;
        }
        true
    }

    /// Forgets every rank of a worker. Returns how many were registered.
    pub fn remove_worker(&mut self, worker: WorkerId) -> usize {
        let ranks = WorkerRank::new(worker, 0)..=WorkerRank::new(worker, u32::MAX);
        let ranks: Vec<_> = self.registry.range(ranks).map(|(rank, _)| *rank).collect();
        ranks.into_iter().filter(|rank| self.remove_rank(*rank)).count()
    }

    /// Whether a rank is registered here, and where.
    #[must_use]
    pub fn slot_of(&self, rank: WorkerRank) -> Option<Slot> {
        self.registry.get(&rank).copied()
    }

    /// The generation of the latest rank that sat in `slot`; the default for a slot that nobody sat in.
    #[must_use]
    pub fn generation(&self, slot: Slot) -> Generation {
        self.generations.get(slot.index()).copied().unwrap_or_default()
    }

    /// Takes in one event. Any event may come at any time; what was odd about it is in the report.
    pub fn apply(&mut self, event: &RouterEvent) -> Applied {
        let Some(slot) = self.slot_of(event.rank) else { return Applied { unknown_ranks: 1, ..Applied::default() } };
        if self.budget.is_some() { self.apply_within_budget(slot, event) } else { self.change(slot, event) }
    }

    fn change(&mut self, slot: Slot, event: &RouterEvent) -> Applied {
        match &event.data {
            KvEvent::Stored { parent, blocks } => self.store(slot, event.tier, *parent, blocks),
            KvEvent::Removed { blocks } => self.remove(slot, event.tier, blocks),
            KvEvent::Cleared => Applied { removed: self.clear(slot) as u64, ..Applied::default() },
        }
    }

    /// Number of blocks held, each counted once per rank and tier. Waiting blocks are not held.
    #[must_use]
    pub fn held_blocks(&self) -> usize {
        self.ranks.iter().flatten().map(|rank| rank.held_blocks()).sum()
    }

    /// Heap bytes that the index owns. Visits every run and every rank's part of it: not for hot paths.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let ranks = self.ranks.iter().flatten().map(|rank| size_of::<Rank>() + rank.bytes_visited()).sum::<usize>();
        let lower = self.lower.iter().flatten().map(|tree| tree.bytes_visited()).sum::<usize>();
        self.bytes_around() + ranks + self.device.bytes_visited() + lower
    }

    /// How large a tier's tree is. Visits every run.
    #[must_use]
    pub fn shape(&self, tier: StorageTier) -> Shape {
        let Some(tree) = self.tree(tier) else { return Shape::default() };
        tree.iter().fold(Shape::default(), |shape, (_, node)| Shape {
            runs: shape.runs + 1,
            run_blocks: shape.run_blocks + node.run.len(),
            holders: shape.holders + node.holders.len(),
        })
    }

    /// Heap bytes of what ranks and trees are kept in.
    fn bytes_around(&self) -> usize {
        // A B-tree's nodes cannot be seen; they are two thirds full or so.
        let registry = self.registry.len() * size_of::<(WorkerRank, Slot)>() * 3 / 2;
        let slots = self.ranks.capacity() * size_of::<Option<Box<Rank>>>()
            + self.generations.capacity() * size_of::<Generation>();
        let lower = self.lower.iter().flatten().count() * size_of::<Tree>();
        registry + slots + lower + self.budget.as_ref().map_or(0, |_| size_of::<Budget>())
    }

    /// Number of runs in all tiers.
    fn runs(&self) -> usize {
        self.device.len() + self.lower.iter().flatten().map(|tree| tree.len()).sum::<usize>()
    }

    fn store(&mut self, slot: Slot, tier: StorageTier, parent: Option<EngineHash>, blocks: &[StoredBlock]) -> Applied {
        if blocks.is_empty() && tier != StorageTier::Device {
            return Applied::default();
        }
        let known = self.point_behind(slot, tier, parent);
        if known.is_none() && tier == StorageTier::Device {
            return Applied { unknown_parents: 1, ..Applied::default() };
        }
        let Some(at) = known.filter(|_| !self.rank(slot).has_waiting()) else {
            return self.store_each(slot, tier, parent, blocks);
        };
        let (tree, residence) = self.parts(slot, tier);
        hold::store(tree, residence, slot, at, blocks, Again::of(tier, parent))
    }

    fn remove(&mut self, slot: Slot, tier: StorageTier, names: &[EngineHash]) -> Applied {
        let kept_from_waiting = self.remove_waiting(slot, tier, names);
        let others = kept_from_waiting.as_deref().unwrap_or(names);
        let known = if self.rank(slot).residence(tier).is_some() {
            let (tree, residence) = self.parts(slot, tier);
            hold::remove(tree, residence, slot, others)
        } else {
            0
        };
        let unknown = others.len() - known;
        Applied { removed: (names.len() - unknown) as u64, unknown_removals: unknown as u64, ..Applied::default() }
    }

    /// Gives up all that a rank holds, in every tier. Returns the number of names and further copies.
    fn clear(&mut self, slot: Slot) -> usize {
        let rank = self.ranks[slot.index()].as_deref_mut().expect("every registered slot has a rank");
        let names = rank.removable();
        for (tier, residence) in rank.residences() {
            match lower_idx(tier) {
                None => hold::clear(&mut self.device, residence, slot),
                Some(idx) => {
                    let tree = self.lower[idx].as_mut().expect("a rank that holds blocks of a tier made its tree");
                    hold::clear(tree, residence, slot);
                }
            }
        }
        rank.reset(&self.hasher);
        names
    }

    fn rank(&self, slot: Slot) -> &Rank {
        self.ranks[slot.index()].as_ref().expect("every registered slot has a rank")
    }

    fn tree(&self, tier: StorageTier) -> Option<&Tree> {
        match lower_idx(tier) {
            None => Some(&self.device),
            Some(idx) => self.lower[idx].as_deref(),
        }
    }

    /// A tier's tree and a rank's residence in it, made if need be.
    fn parts(&mut self, slot: Slot, tier: StorageTier) -> (&mut Tree, &mut residence::Residence) {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let hasher = &self.hasher;
        let tree = match lower_idx(tier) {
            None => &mut self.device,
            Some(idx) => self.lower[idx].get_or_insert_with(|| Box::new(Tree::new(hasher.clone()))),
        };
        (tree, rank.residence_mut(tier, hasher))
    }
}
