//! Cached blocks of each rank, from the engines and from the router's index in one representation.
//!
//! The comparison is part of this module. Two holdings without differences have the same blocks in the same tiers of
//! the same ranks, each with equal content, depth and parent.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::successors;
use std::sync::Arc;

use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, WorkerRank};
use pointsman_trial::mock::{Block, MockEngine, Tier};

use super::workload::{BLOCK_SIZE, WorkloadRequest, block_hashes};

/// A rank and one of its tiers.
type Place = (WorkerRank, StorageTier);

/// One cached block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    block_hash: BlockHash,
    /// Number of blocks before it.
    depth: u32,
    parent: Parent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parent {
    None,
    Named(EngineHash),
    /// The parent exists but is not in this tier.
    OtherTier,
}

/// All blocks, by place and name.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    blocks: BTreeMap<Place, BTreeMap<EngineHash, Held>>,
    /// Window in blocks and names of the group beside the main one.
    beside: BTreeMap<WorkerRank, (u32, BTreeSet<EngineHash>)>,
}

impl Holdings {
    /// Adds the blocks that the ranks of an engine hold now: those with all their pages, under the name of the last.
    pub(crate) fn add_engine(&mut self, worker: pointsman::protocol::WorkerId, engine: &MockEngine) {
        let per_block = BLOCK_SIZE / engine.config().block_size;
        for rank in 0..engine.config().data_parallel_size {
            let beside = engine.held(rank, Tier::Beside).into_iter().map(|block| EngineHash(block.hash.as_u64()));
            let window = engine.config().dialect.beside_window_blocks();
            if window > 0 {
                self.beside.insert(WorkerRank::new(worker, rank.into()), (window, beside.collect()));
            }
            for (tier, named) in [(Tier::Device, StorageTier::Device), (Tier::Host, StorageTier::HostPinned)] {
                let held = self.blocks.entry((WorkerRank::new(worker, rank.into()), named)).or_default();
                let pages: BTreeMap<_, _> = engine.held(rank, tier).into_iter().map(|page| (page.hash, page)).collect();
                let is_last = |page: &&Arc<Block>| (page.depth + 1).is_multiple_of(per_block);
                for last in pages.values().filter(is_last) {
                    let before = |page: &&Arc<Block>| pages.get(&page.parent?);
                    let block: Vec<_> = successors(Some(last), before).take(per_block as usize).collect();
                    let tokens: Vec<u32> = block.iter().rev().flat_map(|page| page.tokens.iter().copied()).collect();
                    let hashes = block_hashes(&tokens, last.lora_name.as_deref(), last.cache_salt.as_deref());
                    let parent = block[block.len() - 1].parent;
                    let parent = parent.map_or(Parent::None, |name| Parent::Named(EngineHash(name.as_u64())));
                    let entry = Held { block_hash: hashes[0], depth: last.depth / per_block, parent };
                    assert_eq!(held.insert(EngineHash(last.hash.as_u64()), entry), None, "held twice");
                }
            }
        }
    }

    /// The content of an index from its dump, applied by the simplest possible implementation.
    ///
    /// # Panics
    /// Panics if a block that is not held is removed, or if the dump contains `Cleared`.
    pub(crate) fn from_dump(events: &[RouterEvent]) -> Self {
        let (mut holdings, mut further) = (Self::default(), BTreeMap::<_, u32>::new());
        for RouterEvent { rank, tier, data } in events {
            let held = holdings.blocks.entry((*rank, *tier)).or_default();
            match data {
                KvEvent::Stored { parent, blocks } => {
                    let mut behind = *parent;
                    for block in blocks {
                        let depth = match behind {
                            None => 0,
                            Some(name) => held.get(&name).map_or(u32::MAX, |parent| parent.depth + 1),
                        };
                        let parent = behind.map_or(Parent::None, Parent::Named);
                        held.insert(block.engine_hash, Held { block_hash: block.block_hash, depth, parent });
                        behind = Some(block.engine_hash);
                    }
                }
                // Further copies, and placeholders for blocks that the tier does not hold.
                KvEvent::Removed { blocks } => {
                    let is_copy = |name: &&EngineHash| {
                        let further = further.get_mut(&(*rank, *tier, **name)).filter(|further| **further > 0);
                        further.map(|further| *further -= 1).is_some()
                    };
                    let (_, blocks): (Vec<_>, Vec<_>) = blocks.iter().partition(is_copy);
                    for name in &blocks {
                        assert!(held.remove(name).is_some(), "block {name} of {rank} is not in the dump");
                    }
                    for block in held.values_mut() {
                        if matches!(block.parent, Parent::Named(name) if blocks.contains(&name)) {
                            block.parent = Parent::OtherTier;
                        }
                    }
                }
                KvEvent::Offloaded { blocks, .. } => {
                    blocks.iter().for_each(|(name, _)| *further.entry((*rank, *tier, *name)).or_default() += 1);
                }
                KvEvent::Cleared | KvEvent::TierCleared => panic!("dumps contain no clear"),
                KvEvent::GroupStored { blocks, window_blocks, .. } => {
                    let beside = holdings.beside.entry(*rank).or_insert((window_blocks.get(), BTreeSet::new()));
                    beside.1.extend(blocks);
                }
                KvEvent::GroupRemoved { .. } => panic!("dumps contain no removal from a group"),
            }
        }
        holdings
    }

    /// Number of blocks, in all places.
    pub(crate) fn len(&self) -> usize {
        self.blocks.values().map(BTreeMap::len).sum()
    }

    /// Number of blocks in a tier of all ranks.
    pub(crate) fn tier_len(&self, tier: StorageTier) -> usize {
        self.blocks.iter().filter(|((_, of), _)| *of == tier).map(|(_, held)| held.len()).sum()
    }

    /// Differences between `index` and these holdings, which come from the engines.
    pub(crate) fn differences(&self, index: &Self) -> Vec<String> {
        let mut found = Vec::new();
        for (rank, (window, cached)) in &self.beside {
            let none = (*window, BTreeSet::new());
            let (indexed_window, indexed) = index.beside.get(rank).unwrap_or(&none);
            assert_eq!(window, indexed_window);
            let differing = indexed.symmetric_difference(cached);
            found.extend(differing.map(|name| {
                let place = if cached.contains(name) { "missing" } else { "indexed but evicted" };
                format!("{rank}: {name} of the group beside is {place}")
            }));
        }
        let none = BTreeMap::new();
        for place in self.blocks.keys().chain(index.blocks.keys().filter(|place| !self.blocks.contains_key(place))) {
            let (cached, indexed) = (self.blocks.get(place).unwrap_or(&none), index.blocks.get(place).unwrap_or(&none));
            let (rank, tier) = place;
            for (name, held) in cached {
                match indexed.get(name) {
                    None => found.push(format!("{rank} {tier:?}: {name} is missing: {held:?}")),
                    Some(known) if !held.agrees(known, cached) => {
                        found.push(format!("{rank} {tier:?}: {name} is {held:?}, indexed as {known:?}"));
                    }
                    Some(_) => {}
                }
            }
            let gone = indexed.iter().filter(|(name, _)| !cached.contains_key(name));
            found
                .extend(gone.map(|(name, known)| format!("{rank} {tier:?}: {name} is indexed but evicted: {known:?}")));
        }
        found
    }

    /// The same blocks, arranged for prompt lookups.
    pub(crate) fn chains(&self) -> Chains {
        let mut chains = Chains { beside: self.beside.clone(), ..Chains::default() };
        for (place, held) in &self.blocks {
            let links = held.iter().map(|(name, held)| ((held.parent.name(), held.block_hash), *name));
            chains.links.insert(*place, links.collect());
        }
        chains
    }
}

#[derive(Debug, Default)]
pub(crate) struct Chains {
    /// For each place: the block name by parent name and content.
    links: BTreeMap<Place, BTreeMap<(Option<EngineHash>, BlockHash), EngineHash>>,
    beside: BTreeMap<WorkerRank, (u32, BTreeSet<EngineHash>)>,
}

impl Chains {
    /// A rank's overlap with a prompt: leading blocks on the device, and further blocks from the host.
    pub(crate) fn overlap(&self, rank: WorkerRank, request: &WorkloadRequest) -> (u32, u32) {
        let hashes = request.block_hashes();
        let (mut at, mut counts, mut rest, mut names) = (None, [0; 2], hashes.as_slice(), Vec::new());
        for (count, tier) in counts.iter_mut().zip([StorageTier::Device, StorageTier::HostPinned]) {
            while let Some((hash, behind)) = rest.split_first()
                && let Some(name) = self.links.get(&(rank, tier)).and_then(|links| links.get(&(at, *hash)))
            {
                (at, rest) = (Some(*name), behind);
                *count += 1;
                names.push(*name);
            }
        }
        if let Some((window, held)) = self.beside.get(&rank) {
            let allows =
                |end: &usize| names[end.saturating_sub(*window as usize)..*end].iter().all(|name| held.contains(name));
            let reusable = names.len().min((request.reusable_tokens() / BLOCK_SIZE) as usize);
            counts[0] = (0..=reusable).rev().find(allows).expect("no block is always a hit") as u32;
        }
        (counts[0], counts[1])
    }
}

impl Held {
    fn agrees(&self, known: &Self, tier: &BTreeMap<EngineHash, Self>) -> bool {
        let same_parent = match (known.parent, self.parent) {
            (Parent::OtherTier, Parent::Named(name)) => !tier.contains_key(&name),
            (known, parent) => known == parent,
        };
        same_parent && (self.block_hash, self.depth) == (known.block_hash, known.depth)
    }
}

impl Parent {
    fn name(self) -> Option<EngineHash> {
        match self {
            Self::None | Self::OtherTier => None,
            Self::Named(name) => Some(name),
        }
    }
}
