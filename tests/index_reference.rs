//! Reference model of the index: the same results by the simplest algorithm.
//!
//! Keeps, per rank and tier, a list of names with their prefixes in order of arrival, and a list of pending blocks.
//! Every query scans the lists. Property tests compare the index with the model after every event.

use std::collections::{BTreeMap, VecDeque};

use pointsman::internals::index::{Applied, Extension, Hit};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerId, WorkerRank,
};

/// Model of the indexes of all shards.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reference {
    ranks: BTreeMap<WorkerRank, ReferenceRank>,
}

/// One rank's overlap with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReferenceMatch {
    /// The part of the device tier.
    pub(crate) hit: Hit,
    /// The part of the lower tiers.
    pub(crate) extension: Extension,
}

#[derive(Clone, Debug)]
struct ReferenceRank {
    slot: Slot,
    generation: Generation,
    /// Names and their prefixes, oldest first. Names are unique within a tier.
    named: BTreeMap<StorageTier, Vec<(EngineHash, Vec<BlockHash>)>>,
    /// Copies of a name's block beyond the first.
    copies: BTreeMap<(StorageTier, EngineHash), u64>,
    /// Pending blocks: `(tier, name)` to `(parent, block hash)`.
    waiting: BTreeMap<(StorageTier, EngineHash), (EngineHash, BlockHash)>,
    /// Window and names of each cache group beside the main attention, with the number of copies.
    groups: BTreeMap<u8, (u32, BTreeMap<EngineHash, u64>)>,
    /// Whether the last list at the start of a prompt was computed, not reported.
    has_computed: bool,
    /// Whether a list was certainly reported, because a shorter hit was possible too.
    has_reported: bool,
}

impl Reference {
    /// See `Index::register`.
    pub(crate) fn register(&mut self, rank: WorkerRank, slot: Slot, generation: Generation) -> bool {
        if let Some((&occupant, current)) = self.ranks.iter().find(|(_, current)| current.slot == slot) {
            if current.generation > generation {
                return false;
            }
            if (occupant, current.generation) == (rank, generation) {
                return true;
            }
            self.ranks.remove(&occupant);
        }
        self.ranks.insert(
            rank,
            ReferenceRank {
                slot,
                generation,
                named: BTreeMap::new(),
                copies: BTreeMap::new(),
                waiting: BTreeMap::new(),
                groups: BTreeMap::new(),
                has_computed: false,
                has_reported: false,
            },
        );
        true
    }

    /// See `Index::remove_rank`.
    pub(crate) fn remove_rank(&mut self, rank: WorkerRank) -> bool {
        self.ranks.remove(&rank).is_some()
    }

    /// See `Index::remove_worker`.
    pub(crate) fn remove_worker(&mut self, worker: WorkerId) -> usize {
        let before = self.ranks.len();
        self.ranks.retain(|rank, _| rank.worker != worker);
        before - self.ranks.len()
    }

    /// See `Index::apply`.
    pub(crate) fn apply(&mut self, event: &RouterEvent) -> Applied {
        let Some(rank) = self.ranks.get_mut(&event.rank) else {
            return Applied { unknown_ranks: 1, ..Applied::default() };
        };
        match &event.data {
            KvEvent::Stored { parent, blocks } => rank.store(event.tier, *parent, blocks),
            KvEvent::Removed { blocks } => rank.remove(event.tier, blocks),
            KvEvent::Offloaded { parent, blocks } => rank.offload(event.tier, *parent, blocks),
            KvEvent::Cleared => rank.clear(&StorageTier::ALL),
            KvEvent::TierCleared => rank.clear(&[event.tier]),
            KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks } => {
                rank.has_computed |= rank.groups.is_empty();
                let is_report = *starts_prompt && !rank.has_computed;
                let (window, names) = rank.groups.entry(*group).or_default();
                *window = window_blocks.get();
                let certain = if is_report { window_blocks.get() as usize } else { blocks.len() };
                for name in &blocks[blocks.len().saturating_sub(certain)..] {
                    let copies = names.entry(*name).or_default();
                    *copies += u64::from(!is_report || *copies == 0);
                }
                Applied { grouped: blocks.len() as u64, ..Applied::default() }
            }
            KvEvent::GroupRemoved { group, blocks } => {
                let mut grouped = 0;
                for name in blocks {
                    let copies = rank.groups.get_mut(group).and_then(|(_, names)| names.get_mut(name));
                    if let Some(copies) = copies.filter(|copies| **copies > 0) {
                        *copies -= 1;
                        grouped += 1;
                    }
                }
                Applied { grouped, ..Applied::default() }
            }
        }
    }

    /// Every nonzero overlap of a rank, in slot order.
    #[must_use]
    pub(crate) fn overlaps(&self, hashes: &[BlockHash]) -> Vec<ReferenceMatch> {
        let mut matches: Vec<_> = self.ranks.values().filter_map(|rank| rank.overlap(hashes)).collect();
        matches.sort_by_key(|found| found.hit.slot);
        matches
    }

    /// The names in a rank's tier with their prefixes, oldest first.
    #[must_use]
    pub(crate) fn named(&self, rank: WorkerRank, tier: StorageTier) -> &[(EngineHash, Vec<BlockHash>)] {
        self.ranks.get(&rank).and_then(|rank| rank.named.get(&tier)).map_or(&[], Vec::as_slice)
    }

    /// Number of held blocks: distinct prefixes per rank and tier.
    #[must_use]
    pub(crate) fn held_blocks(&self) -> usize {
        let distinct = |named: &Vec<(EngineHash, Vec<BlockHash>)>| {
            let mut paths: Vec<_> = named.iter().map(|(_, path)| path).collect();
            paths.sort();
            paths.dedup();
            paths.len()
        };
        self.ranks.values().flat_map(|rank| rank.named.values()).map(distinct).sum()
    }
}

impl ReferenceRank {
    /// Stores a list block by block, each behind the previous one.
    fn store(&mut self, tier: StorageTier, parent: Option<EngineHash>, blocks: &[StoredBlock]) -> Applied {
        let mut applied = Applied::default();
        // A list that starts a prompt may be a repeated announcement of held blocks. With several cache groups it is one
        // only if the groups allow a hit of all its blocks, and the engine has certainly reported or the list has one.
        let list: Vec<_> = blocks.iter().map(|block| block.block_hash).collect();
        let is_start = tier == StorageTier::Device && parent.is_none() && !self.groups.is_empty();
        if is_start {
            let is_held = (1..=list.len()).all(|end| self.name_of(tier, &list[..end]).is_some());
            let is_possible = is_held && self.groups_allow(&list);
            self.has_reported |= is_possible && (1..list.len()).any(|end| self.groups_allow(&list[..end]));
            self.has_computed = !(is_possible && (self.has_reported || list.len() == 1));
        }
        let adds_copies = tier == StorageTier::Device && (parent.is_some() || is_start && self.has_computed);
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
                    let unknown = parent.expect("the start of a prompt is always a valid parent");
                    let held = self.path(tier, block.engine_hash);
                    if adds_copies && held.as_ref().and_then(|path| path.last()) == Some(&block.block_hash) {
                        *self.copies.entry((tier, block.engine_hash)).or_default() += 1;
                        applied.copies += 1;
                        parent = Some(block.engine_hash);
                        continue;
                    }
                    let changed = held.is_none()
                        && self.waiting.insert((tier, block.engine_hash), (unknown, block.block_hash))
                            != Some((unknown, block.block_hash));
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

    /// Stores copies block by block, each behind the previous one. A known name determines the content.
    fn offload(
        &mut self,
        tier: StorageTier,
        mut parent: Option<EngineHash>,
        blocks: &[(EngineHash, Option<BlockHash>)],
    ) -> Applied {
        let mut applied = Applied::default();
        for &(name, block_hash) in blocks {
            let tiers = || std::iter::once(tier).chain(StorageTier::ALL);
            let known = tiers().find_map(|of| self.path(of, name));
            let resolved = self.resolve(tier, parent);
            let pending = tiers().find_map(|of| self.waiting.get(&(of, name)).copied());
            if let Some(path) = known.or_else(|| Some([resolved.clone()?, vec![block_hash?]].concat())) {
                self.waiting.remove(&(tier, name));
                if self.name(tier, name, path) {
                    applied.stored += 1;
                } else {
                    *self.copies.entry((tier, name)).or_default() += 1;
                    applied.copies += 1;
                }
                applied.adopted += self.adopt(name);
            } else if let Some(waits) = parent.zip(block_hash).or(pending) {
                let changed = self.waiting.insert((tier, name), waits) != Some(waits);
                *(if changed { &mut applied.waiting } else { &mut applied.duplicates }) += 1;
            } else {
                applied.unknown_contents += 1;
            }
            parent = Some(name);
        }
        applied
    }

    fn clear(&mut self, tiers: &[StorageTier]) -> Applied {
        let held = |rank: &Self| {
            let names = rank.named.values().map(Vec::len).sum::<usize>() + rank.waiting.len();
            names as u64 + rank.copies.values().sum::<u64>()
        };
        let before = held(self);
        self.named.retain(|tier, _| !tiers.contains(tier));
        self.copies.retain(|(tier, _), _| !tiers.contains(tier));
        self.waiting.retain(|(tier, _), _| !tiers.contains(tier));
        if tiers.contains(&StorageTier::Device) {
            self.groups.clear();
            (self.has_computed, self.has_reported) = (false, false);
        }
        Applied { removed: before - held(self), ..Applied::default() }
    }

    /// The longest run of leading blocks in the device tier, and the blocks that each lower tier adds.
    fn overlap(&self, hashes: &[BlockHash]) -> Option<ReferenceMatch> {
        let mut reached = 0;
        let mut blocks = [0; 4];
        for (tier, blocks) in StorageTier::ALL.into_iter().zip(&mut blocks) {
            while hashes.get(..=reached).and_then(|prefix| self.name_of(tier, prefix)).is_some() {
                reached += 1;
                *blocks += 1;
            }
            if tier == StorageTier::Device {
                reached = (0..=reached).rev().find(|end| self.groups_allow(&hashes[..*end])).unwrap_or(0);
                *blocks = reached as u32;
            }
        }
        let [device_blocks, host_pinned_blocks, disk_blocks, external_blocks] = blocks;
        (blocks != [0; 4]).then_some(ReferenceMatch {
            hit: Hit { slot: self.slot, generation: self.generation, device_blocks },
            extension: Extension { slot: self.slot, host_pinned_blocks, disk_blocks, external_blocks },
        })
    }

    /// Whether each cache group holds the blocks of its window at the end of a device hit.
    fn groups_allow(&self, hit: &[BlockHash]) -> bool {
        let holds = |names: &BTreeMap<EngineHash, u64>, end: usize| {
            let of_block = self.named[&StorageTier::Device].iter().filter(|(_, path)| *path == hit[..end]);
            of_block.into_iter().any(|(name, _)| names.get(name).is_some_and(|copies| *copies > 0))
        };
        self.groups
            .values()
            .all(|(window, names)| (1..=hit.len()).rev().take(*window as usize).all(|end| holds(names, end)))
    }

    /// The prefix of `parent`. Searches every tier, its own first.
    fn resolve(&self, tier: StorageTier, parent: Option<EngineHash>) -> Option<Vec<BlockHash>> {
        let Some(parent) = parent else { return Some(Vec::new()) };
        let own = self.path(tier, parent);
        own.or_else(|| StorageTier::ALL.into_iter().find_map(|tier| self.path(tier, parent)))
    }

    /// Assigns a name to a prefix and removes its earlier prefix. Returns whether the assignment is new.
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

    /// Stores the blocks pending behind `name`, by tier and name, then the blocks pending behind these.
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

    /// The oldest name of a prefix.
    fn name_of(&self, tier: StorageTier, path: &[BlockHash]) -> Option<EngineHash> {
        self.named.get(&tier)?.iter().find(|(_, held)| held == path).map(|(name, _)| *name)
    }
}
