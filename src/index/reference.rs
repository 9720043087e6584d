//! What the index means: the same answers, by the shortest way to say them.
//!
//! Owns, per rank and tier, a list of names with the prefix that each stands for, in the order in which they
//! came, and a list of blocks that wait. Promises nothing but to be plainly right: every question walks the
//! lists. Property tests hold [`super::Index`] to it after every event, and simulations may use it as an
//! oracle. Not for use in a router, hence hidden from the documentation.

use std::collections::{BTreeMap, VecDeque};

use super::{Applied, Extension, Hit};
use crate::protocol::{BlockHash, EngineHash, Generation, KvEvent, RouterEvent, Slot, StorageTier, StoredBlock};
use crate::protocol::{WorkerId, WorkerRank};

/// The model of an index, of all shards at once.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    ranks: BTreeMap<WorkerRank, Rank>,
}

/// One rank's overlap with a request, and the engine's name of the last block matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// The device tier's part.
    pub hit: Hit,
    /// The lower tiers' part.
    pub extension: Extension,
    /// The engine's name of the last block matched in any tier.
    pub last_matched: EngineHash,
}

#[derive(Clone, Debug)]
struct Rank {
    slot: Slot,
    generation: Generation,
    /// Names that stand for a prefix, oldest first. No name twice in a tier.
    named: BTreeMap<StorageTier, Vec<(EngineHash, Vec<BlockHash>)>>,
    /// Copies of a name's block beside the first.
    copies: BTreeMap<(StorageTier, EngineHash), u64>,
    /// Blocks whose parent no tier names: `(tier, name)` to `(parent, block hash)`.
    waiting: BTreeMap<(StorageTier, EngineHash), (EngineHash, BlockHash)>,
}

impl Reference {
    /// See [`super::Index::register`].
    pub fn register(&mut self, rank: WorkerRank, slot: Slot, generation: Generation) -> bool {
        if let Some((&occupant, seated)) = self.ranks.iter().find(|(_, seated)| seated.slot == slot) {
            if seated.generation > generation {
                return false;
            }
            if (occupant, seated.generation) == (rank, generation) {
                return true;
            }
            self.ranks.remove(&occupant);
        }
        self.ranks.insert(
            rank,
            Rank { slot, generation, named: BTreeMap::new(), copies: BTreeMap::new(), waiting: BTreeMap::new() },
        );
        true
    }

    /// See [`super::Index::remove_rank`].
    pub fn remove_rank(&mut self, rank: WorkerRank) -> bool {
        self.ranks.remove(&rank).is_some()
    }

    /// See [`super::Index::remove_worker`].
    pub fn remove_worker(&mut self, worker: WorkerId) -> usize {
        let before = self.ranks.len();
        self.ranks.retain(|rank, _| rank.worker != worker);
        before - self.ranks.len()
    }

    /// See [`super::Index::apply`].
    pub fn apply(&mut self, event: &RouterEvent) -> Applied {
        let Some(rank) = self.ranks.get_mut(&event.rank) else {
            return Applied { unknown_ranks: 1, ..Applied::default() };
        };
        match &event.data {
            KvEvent::Stored { parent, blocks } => rank.store(event.tier, *parent, blocks),
            KvEvent::Removed { blocks } => rank.remove(event.tier, blocks),
            KvEvent::Cleared => rank.clear(),
        }
    }

    /// Every rank's overlap that is not nothing, in slot order.
    #[must_use]
    pub fn overlaps(&self, hashes: &[BlockHash]) -> Vec<Match> {
        let mut matches: Vec<_> = self.ranks.values().filter_map(|rank| rank.overlap(hashes)).collect();
        matches.sort_by_key(|found| found.hit.slot);
        matches
    }

    /// The names that a rank's tier knows, oldest first, each with the prefix it stands for.
    #[must_use]
    pub fn named(&self, rank: WorkerRank, tier: StorageTier) -> &[(EngineHash, Vec<BlockHash>)] {
        self.ranks.get(&rank).and_then(|rank| rank.named.get(&tier)).map_or(&[], Vec::as_slice)
    }

    /// Number of blocks held: of distinct prefixes per rank and tier.
    #[must_use]
    pub fn held_blocks(&self) -> usize {
        let distinct = |named: &Vec<(EngineHash, Vec<BlockHash>)>| {
            let mut paths: Vec<_> = named.iter().map(|(_, path)| path).collect();
            paths.sort();
            paths.dedup();
            paths.len()
        };
        self.ranks.values().flat_map(|rank| rank.named.values()).map(distinct).sum()
    }
}

impl Rank {
    /// A list is stored block by block, each behind the one before.
    fn store(&mut self, tier: StorageTier, parent: Option<EngineHash>, blocks: &[StoredBlock]) -> Applied {
        let mut applied = Applied::default();
        if tier == StorageTier::Device && self.resolve(tier, parent).is_none() {
            applied.unknown_parents = 1;
            return applied;
        }
        // A list that starts a prompt may only report again what is held.
        let adds_copies = tier == StorageTier::Device && parent.is_some();
        let mut parent = parent;
        for block in blocks {
            match self.resolve(tier, parent) {
                Some(mut path) => {
                    path.push(block.block_hash);
                    self.waiting.remove(&(tier, block.engine_hash));
                    if self.name(tier, block.engine_hash, path) {
                        applied.stored += 1;
                    } else if adds_copies {
                        *self.copies.entry((tier, block.engine_hash)).or_default() += 1;
                        applied.copies += 1;
                    } else {
                        applied.duplicates += 1;
                    }
                    applied.adopted += self.adopt(block.engine_hash);
                }
                None => {
                    let parent = parent.expect("the start of a prompt is always known");
                    let changed = self.path(tier, block.engine_hash).is_none()
                        && self.waiting.insert((tier, block.engine_hash), (parent, block.block_hash))
                            != Some((parent, block.block_hash));
                    *(if changed { &mut applied.waiting } else { &mut applied.duplicates }) += 1;
                }
            }
            parent = Some(block.engine_hash);
        }
        applied
    }

    fn remove(&mut self, tier: StorageTier, names: &[EngineHash]) -> Applied {
        let mut applied = Applied::default();
        for name in names {
            if let Some(copies) = self.copies.get_mut(&(tier, *name)).filter(|copies| **copies > 0) {
                *copies -= 1;
                applied.removed += 1;
                continue;
            }
            let named = self.named.entry(tier).or_default();
            if let Some(at) = named.iter().position(|(other, _)| other == name) {
                named.remove(at);
                applied.removed += 1;
            } else if self.waiting.remove(&(tier, *name)).is_some() {
                applied.removed += 1;
            } else {
                applied.unknown_removals += 1;
            }
        }
        applied
    }

    fn clear(&mut self) -> Applied {
        let names = self.named.values().map(Vec::len).sum::<usize>() + self.waiting.len();
        let removed = names as u64 + self.copies.values().sum::<u64>();
        self.named.clear();
        self.copies.clear();
        self.waiting.clear();
        Applied { removed, ..Applied::default() }
    }

    /// The longest run of leading blocks that the device holds, and what each lower tier adds to it.
    fn overlap(&self, hashes: &[BlockHash]) -> Option<Match> {
        let mut reached = 0;
        let mut last_matched = None;
        let mut blocks = [0; 4];
        for (tier, blocks) in StorageTier::ALL.into_iter().zip(&mut blocks) {
            while let Some(name) = hashes.get(..=reached).and_then(|prefix| self.name_of(tier, prefix)) {
                last_matched = Some(name);
                reached += 1;
                *blocks += 1;
            }
        }
        let [device_blocks, host_pinned_blocks, disk_blocks, external_blocks] = blocks;
        Some(Match {
            hit: Hit { slot: self.slot, generation: self.generation, device_blocks },
            extension: Extension { slot: self.slot, host_pinned_blocks, disk_blocks, external_blocks },
            last_matched: last_matched?,
        })
    }

    /// The prefix that blocks behind `parent` extend. A lower tier looks in every tier, its own first.
    fn resolve(&self, tier: StorageTier, parent: Option<EngineHash>) -> Option<Vec<BlockHash>> {
        let Some(parent) = parent else { return Some(Vec::new()) };
        let own = self.path(tier, parent);
        if tier == StorageTier::Device {
            return own;
        }
        own.or_else(|| StorageTier::ALL.into_iter().find_map(|tier| self.path(tier, parent)))
    }

    /// Lets a name stand for a prefix, and for no other. Returns whether that is new.
    fn name(&mut self, tier: StorageTier, name: EngineHash, path: Vec<BlockHash>) -> bool {
        let named = self.named.entry(tier).or_default();
        if named.iter().any(|(other, held)| *other == name && *held == path) {
            return false;
        }
        named.retain(|(other, _)| *other != name);
        self.copies.remove(&(tier, name));
        named.push((name, path));
        true
    }

    /// Stores what waited for `name`, by tier and name, then what waited for these.
    fn adopt(&mut self, name: EngineHash) -> u64 {
        let mut adopted = 0;
        let mut known = VecDeque::from([name]);
        while let Some(name) = known.pop_front() {
            while let Some((&(tier, child), &(_, block_hash))) =
                self.waiting.iter().find(|(_, (parent, _))| *parent == name)
            {
                self.waiting.remove(&(tier, child));
                let mut path = self.resolve(tier, Some(name)).expect("a block that was just stored is known");
                path.push(block_hash);
                self.name(tier, child, path);
                known.push_back(child);
                adopted += 1;
            }
        }
        adopted
    }

    fn path(&self, tier: StorageTier, name: EngineHash) -> Option<Vec<BlockHash>> {
        self.named.get(&tier)?.iter().find(|(other, _)| *other == name).map(|(_, path)| path.clone())
    }

    /// The name that has stood for a prefix longest.
    fn name_of(&self, tier: StorageTier, path: &[BlockHash]) -> Option<EngineHash> {
        self.named.get(&tier)?.iter().find(|(_, held)| held == path).map(|(name, _)| *name)
    }
}
