//! The prefix index compared with its reference model after every event.
//!
//! Streams collide by construction: few ranks, few names and few block hashes make re-stores, aliases, moves, holes and
//! parents in other tiers frequent. Ranks are spread over several shards. `PROPTEST_CASES` sets the number of cases.

mod examples;

use std::num::NonZeroU32;

use crate::effort::effort;
use crate::index_reference::{Reference, ReferenceMatch};
use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerId, WorkerRank,
};
use proptest::prelude::*;
use proptest::sample::Index as Pick;

/// Parent of a stored list.
#[derive(Clone, Debug)]
enum Parent {
    Start,
    /// A block that the rank holds in this tier, if any; the tier may differ from the stored one.
    Known(StorageTier, Pick),
    Named(u64),
}

/// Naming of a stored list.
#[derive(Clone, Debug)]
enum Names {
    /// By prefix, as engines do: the same block always has the same name.
    ByPrefix,
    /// At random: names repeat, move, and coexist with others.
    Random(Vec<u64>),
}

#[derive(Clone, Debug)]
enum Op {
    Store {
        rank: usize,
        tier: StorageTier,
        parent: Parent,
        hashes: Vec<u64>,
        names: Names,
    },
    /// Removes blocks that the rank holds: an index into its names, and the number of neighbors removed with it.
    Evict {
        rank: usize,
        tier: StorageTier,
        from: Pick,
        count: usize,
        forward: bool,
    },
    Remove {
        rank: usize,
        tier: StorageTier,
        names: Vec<u64>,
    },
    /// Copies in a lower tier; `hashed` has one bit per block whose content is stated.
    Offload {
        rank: usize,
        tier: StorageTier,
        parent: Parent,
        hashes: Vec<u64>,
        names: Names,
        hashed: u8,
    },
    /// Copies of blocks that the rank holds in a tier, by name only.
    Copy {
        rank: usize,
        from: StorageTier,
        tier: StorageTier,
        first: Pick,
        count: usize,
    },
    /// Stores names of device blocks and other names in a cache group.
    StoreInGroup {
        rank: usize,
        group: u8,
        window_blocks: NonZeroU32,
        starts_prompt: bool,
        picks: Vec<Pick>,
        names: Vec<u64>,
    },
    RemoveFromGroup {
        rank: usize,
        group: u8,
        picks: Vec<Pick>,
        names: Vec<u64>,
    },
    Clear {
        rank: usize,
    },
    ClearTier {
        rank: usize,
        tier: StorageTier,
    },
    RemoveRank {
        rank: usize,
    },
    RemoveWorker {
        worker: u64,
    },
    Register {
        rank: usize,
        slot: u32,
        generation: u32,
    },
}

const RANKS: usize = 5;

fn rank_of(rank: usize) -> WorkerRank {
    WorkerRank::new(WorkerId(rank as u64 / 2), rank as u32 % 2)
}

fn tier() -> impl Strategy<Value = StorageTier> {
    prop_oneof![
        4 => Just(StorageTier::Device),
        2 => Just(StorageTier::HostPinned),
        1 => Just(StorageTier::Disk),
        1 => Just(StorageTier::External),
    ]
}

fn op(names: u64, hashes: u64) -> impl Strategy<Value = Op> {
    let rank = 0..RANKS;
    let parent = || {
        prop_oneof![
            3 => Just(Parent::Start),
            5 => (tier(), any::<Pick>()).prop_map(|(tier, pick)| Parent::Known(tier, pick)),
            2 => (0..names).prop_map(Parent::Named),
        ]
    };
    let named = |random: u32| {
        prop_oneof![
            3 => Just(Names::ByPrefix),
            random => prop::collection::vec(0..names, 8).prop_map(Names::Random),
        ]
    };
    let list = || prop::collection::vec(0..hashes, 0..8);
    let store = (rank.clone(), tier(), parent(), list(), named(2))
        .prop_map(|(rank, tier, parent, hashes, names)| Op::Store { rank, tier, parent, hashes, names });
    let offload = (rank.clone(), tier(), parent(), list(), named(1), any::<u8>()).prop_map(
        |(rank, tier, parent, hashes, names, hashed)| Op::Offload { rank, tier, parent, hashes, names, hashed },
    );
    let copy = (rank.clone(), tier(), tier(), any::<Pick>(), 1..6_usize)
        .prop_map(|(rank, from, tier, first, count)| Op::Copy { rank, from, tier, first, count });
    let evict = (rank.clone(), tier(), any::<Pick>(), 1..6_usize, any::<bool>())
        .prop_map(|(rank, tier, from, count, forward)| Op::Evict { rank, tier, from, count, forward });
    let remove = (rank.clone(), tier(), prop::collection::vec(0..names, 0..4))
        .prop_map(|(rank, tier, names)| Op::Remove { rank, tier, names });
    let picks = || prop::collection::vec(any::<Pick>(), 0..6);
    let others = || prop::collection::vec(0..names, 0..2);
    let window = prop_oneof![1..4_u32, Just(u32::MAX)].prop_map(|blocks| NonZeroU32::new(blocks).expect("not zero"));
    let store_in_group = (rank.clone(), 1..4_u8, window, any::<bool>(), picks(), others()).prop_map(
        |(rank, group, window_blocks, starts_prompt, picks, names)| Op::StoreInGroup {
            rank,
            group,
            window_blocks,
            starts_prompt,
            picks,
            names,
        },
    );
    let remove_from_group = (rank.clone(), 1..4_u8, picks(), others())
        .prop_map(|(rank, group, picks, names)| Op::RemoveFromGroup { rank, group, picks, names });
    prop_oneof![
        20 => store,
        6 => offload,
        6 => copy,
        7 => store_in_group,
        3 => remove_from_group,
        10 => evict,
        4 => remove,
        1 => rank.clone().prop_map(|rank| Op::Clear { rank }),
        1 => (rank.clone(), tier()).prop_map(|(rank, tier)| Op::ClearTier { rank, tier }),
        1 => rank.clone().prop_map(|rank| Op::RemoveRank { rank }),
        1 => (0..3_u64).prop_map(|worker| Op::RemoveWorker { worker }),
        2 => (rank, 0..6_u32, 0..3_u32).prop_map(|(rank, slot, generation)| Op::Register { rank, slot, generation }),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Few names and two hashes collide at every step; many names and three hashes build trees with more branches.
    (2..24_u64, 1..4_u64).prop_flat_map(|(names, hashes)| prop::collection::vec(op(names, hashes), 1..40))
}

/// The shards and their common reference model.
struct World {
    shards: Vec<Index>,
    model: Reference,
}

impl World {
    fn new(shards: usize) -> Self {
        let mut world = Self { shards: (0..shards).map(|_| Index::new()).collect(), model: Reference::default() };
        for rank in 0..RANKS {
            world.register(rank, rank as u32, 0);
        }
        world
    }

    /// The slot determines a rank's shard here, and a slot has one occupant across all shards.
    fn shard(&self, slot: u32) -> usize {
        slot as usize % self.shards.len()
    }

    fn register(&mut self, rank: usize, slot: u32, generation: u32) {
        let shard = self.shard(slot);
        let (rank, slot, generation) = (rank_of(rank), Slot(slot), Generation(generation));
        let accepted = self.shards[shard].register(rank, slot, generation);
        assert_eq!(accepted, self.model.register(rank, slot, generation));
        if accepted {
            for other in (0..self.shards.len()).filter(|other| *other != shard) {
                self.shards[other].remove_rank(rank);
            }
        }
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Store { rank, tier, parent, hashes, names } => {
                let (parent, blocks) = self.stored(rank_of(*rank), *tier, parent, hashes, names);
                self.apply(*rank, *tier, KvEvent::Stored { parent, blocks });
            }
            Op::Offload { rank, tier, parent, hashes, names, hashed } => {
                let (parent, blocks) = self.stored(rank_of(*rank), *tier, parent, hashes, names);
                let is_hashed = |at: usize| hashed >> at & 1 == 1;
                let offloaded =
                    |(at, block): (usize, StoredBlock)| (block.engine_hash, is_hashed(at).then_some(block.block_hash));
                let blocks = blocks.into_iter().enumerate().map(offloaded).collect();
                self.apply(*rank, *tier, KvEvent::Offloaded { parent, blocks });
            }
            Op::Copy { rank, from, tier, first, count } => {
                let mut named = self.model.named(rank_of(*rank), *from).to_vec();
                named.sort_by(|a, b| a.1.cmp(&b.1));
                let first = if named.is_empty() { 0 } else { first.index(named.len()) };
                let copies = named.iter().skip(first).take(*count);
                let blocks = copies.map(|(name, _)| (*name, None)).collect();
                self.apply(*rank, *tier, KvEvent::Offloaded { parent: None, blocks });
            }
            Op::Evict { rank, tier, from, count, forward } => {
                let mut named = self.model.named(rank_of(*rank), *tier).to_vec();
                if named.is_empty() {
                    return;
                }
                named.sort_by(|a, b| a.1.cmp(&b.1));
                let from = from.index(named.len());
                let mut blocks: Vec<_> = named.iter().skip(from).take(*count).map(|(name, _)| *name).collect();
                if !forward {
                    blocks.reverse();
                }
                self.apply(*rank, *tier, KvEvent::Removed { blocks });
            }
            Op::Remove { rank, tier, names } => {
                let blocks = names.iter().copied().map(EngineHash).collect();
                self.apply(*rank, *tier, KvEvent::Removed { blocks });
            }
            Op::StoreInGroup { rank, group, window_blocks, starts_prompt, picks, names } => {
                let blocks = self.picked(*rank, picks, names);
                let (group, window_blocks, starts_prompt) = (*group, *window_blocks, *starts_prompt);
                let data = KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks };
                self.apply(*rank, StorageTier::Device, data);
            }
            Op::RemoveFromGroup { rank, group, picks, names } => {
                let blocks = self.picked(*rank, picks, names);
                self.apply(*rank, StorageTier::Device, KvEvent::GroupRemoved { group: *group, blocks });
            }
            Op::Clear { rank } => self.apply(*rank, StorageTier::Device, KvEvent::Cleared),
            Op::ClearTier { rank, tier } => self.apply(*rank, *tier, KvEvent::TierCleared),
            Op::RemoveRank { rank } => {
                let removed =
                    self.shards.iter_mut().filter_map(|shard| shard.remove_rank(rank_of(*rank)).then_some(()));
                assert_eq!(removed.count() == 1, self.model.remove_rank(rank_of(*rank)));
            }
            Op::RemoveWorker { worker } => {
                let removed = self.shards.iter_mut().map(|shard| shard.remove_worker(WorkerId(*worker)));
                assert_eq!(removed.sum::<usize>(), self.model.remove_worker(WorkerId(*worker)));
            }
            Op::Register { rank, slot, generation } => self.register(*rank, *slot, *generation),
        }
    }

    /// Names of the rank's device blocks, and other names.
    fn picked(&self, rank: usize, picks: &[Pick], others: &[u64]) -> Vec<EngineHash> {
        let named = self.model.named(rank_of(rank), StorageTier::Device);
        let known = picks.iter().filter(|_| !named.is_empty()).map(|pick| named[pick.index(named.len())].0);
        known.chain(others.iter().copied().map(EngineHash)).collect()
    }

    fn apply(&mut self, rank: usize, tier: StorageTier, data: KvEvent) {
        let event = RouterEvent { rank: rank_of(rank), tier, data };
        let shard = self.shards.iter().position(|shard| shard.slot_of(event.rank).is_some()).unwrap_or(0);
        assert_eq!(self.shards[shard].apply(&event), self.model.apply(&event), "reports agree on {event:?}");
    }

    fn stored(
        &self,
        rank: WorkerRank,
        tier: StorageTier,
        parent: &Parent,
        hashes: &[u64],
        names: &Names,
    ) -> (Option<EngineHash>, Vec<StoredBlock>) {
        let parent = match parent {
            Parent::Start => None,
            Parent::Named(name) => Some(EngineHash(*name)),
            Parent::Known(tier, pick) => {
                let named = self.model.named(rank, *tier);
                (!named.is_empty()).then(|| named[pick.index(named.len())].0)
            }
        };
        let path = parent.and_then(|parent| {
            let mut tiers = std::iter::once(tier).chain(StorageTier::ALL);
            tiers.find_map(|tier| self.model.named(rank, tier).iter().find(|(name, _)| *name == parent))
        });
        let mut path = path.map(|(_, path)| path.clone()).unwrap_or_default();
        let blocks = hashes.iter().enumerate().map(|(at, hash)| {
            path.push(BlockHash(*hash));
            let name = match names {
                Names::ByPrefix => path.iter().fold(1000, |name: u64, hash| name * 5 % 1_000_003 + hash.0 + 1000),
                Names::Random(names) => names[at],
            };
            StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(*hash) }
        });
        (parent, blocks.collect())
    }

    /// Prompts to query: all short ones, all held ones, and extensions of those.
    fn prompts(&self) -> Vec<Vec<BlockHash>> {
        let mut prompts = vec![Vec::new()];
        for len in 1..=3_u32 {
            prompts.extend((0..3_u64.pow(len)).map(|n| (0..len).map(|at| BlockHash(n / 3_u64.pow(at) % 3)).collect()));
        }
        let tiers = (0..RANKS).flat_map(|rank| StorageTier::ALL.map(|tier| (rank_of(rank), tier)));
        for (_, path) in tiers.flat_map(|(rank, tier)| self.model.named(rank, tier)) {
            prompts.push(path.clone());
            prompts.extend([0, 1].map(|more| path.iter().copied().chain([BlockHash(more)]).collect()));
        }
        prompts.sort();
        prompts.dedup();
        prompts
    }

    fn check(&self) {
        self.shards.iter().for_each(Index::check_invariants);
        let held = self.shards.iter().map(Index::held_blocks).sum::<usize>();
        assert_eq!(held, self.model.held_blocks());
        let rebuilt: Vec<_> = self.shards.iter().map(rebuild).collect();
        rebuilt.iter().for_each(Index::check_invariants);
        for prompt in self.prompts() {
            let expected = self.model.overlaps(&prompt);
            assert_eq!(ask(&self.shards, &prompt), expected, "overlaps agree on {prompt:?}");
            assert_eq!(ask(&rebuilt, &prompt), expected, "a rebuilt index agrees on {prompt:?}");
        }
        for (shard, rebuilt) in self.shards.iter().zip(&rebuilt) {
            assert_eq!(sorted(shard.dump()), sorted(rebuilt.dump()), "a rebuilt index dumps the same");
            let in_group = |event: &RouterEvent| matches!(event.data, KvEvent::GroupStored { .. });
            assert!(shard.dump().iter().filter(|e| in_group(e)).eq(rebuilt.dump().iter().filter(|e| in_group(e))));
        }
    }
}

/// A new index built from the dump only.
fn rebuild(index: &Index) -> Index {
    let mut rebuilt = Index::new();
    for rank in (0..RANKS).map(rank_of) {
        let Some(slot) = index.slot_of(rank) else { continue };
        assert!(rebuilt.register(rank, slot, index.generation(slot)));
    }
    for event in index.dump() {
        let applied = rebuilt.apply(&event);
        let unknown = applied.unknown_ranks + applied.unknown_parents + applied.unknown_contents;
        let odd = applied.duplicates + unknown + applied.unknown_removals;
        assert_eq!((odd, applied.adopted), (0, 0), "a dump is in order: {event:?}");
    }
    rebuilt
}

/// A rebuild may change the tree shape and the grouping of blocks in events, so the comparison is block by block.
fn sorted(events: Vec<RouterEvent>) -> Vec<(WorkerRank, StorageTier, Option<EngineHash>, EngineHash, BlockHash)> {
    let removed: Vec<_> = events
        .iter()
        .flat_map(|event| {
            let KvEvent::Removed { blocks } = &event.data else { return Vec::new() };
            blocks.iter().map(|name| (event.rank, event.tier, *name)).collect()
        })
        .collect();
    let mut stored = Vec::new();
    for event in &events {
        let KvEvent::Stored { parent, blocks } = &event.data else { continue };
        let mut parent = *parent;
        for block in blocks {
            let filler = |name| removed.contains(&(event.rank, event.tier, name));
            if !filler(block.engine_hash) {
                let StoredBlock { engine_hash, block_hash } = *block;
                let parent = parent.filter(|name| !filler(*name));
                stored.push((event.rank, event.tier, parent, engine_hash, block_hash));
            }
            parent = Some(block.engine_hash);
        }
    }
    stored.sort();
    stored
}

/// Queries every shard and joins the results.
fn ask(shards: &[Index], prompt: &[BlockHash]) -> Vec<ReferenceMatch> {
    let mut overlaps = Overlaps::default();
    let mut matches = Vec::new();
    for shard in shards {
        shard.overlaps(prompt, &mut overlaps);
        assert!(overlaps.hits().is_sorted_by_key(|hit| hit.slot));
        matches.extend(overlaps.iter().map(|(hit, extension)| ReferenceMatch { hit, extension }));
    }
    matches.sort_by_key(|found| found.hit.slot);
    matches
}

proptest! {
    #![proptest_config(effort(150, "tests/index_properties.proptest-regressions"))]

    #[test]
    fn every_event_leaves_the_index_equal_to_its_model(shards in 1..4_usize, ops in ops()) {
        let mut world = World::new(shards);
        for op in &ops {
            world.run(op);
            world.check();
        }
    }

    #[test]
    fn batching_of_stores_changes_nothing(ops in ops()) {
        let (mut whole, mut single) = (World::new(1), World::new(1));
        for op in &ops {
            if matches!(op, Op::StoreInGroup { .. }) {
                continue; // with groups, the whole list determines the meaning of repeated blocks
            }
            let Op::Store { rank, tier, parent, hashes, names } = op else {
                whole.run(op);
                single.run(op);
                continue;
            };
            let (mut parent, blocks) = whole.stored(rank_of(*rank), *tier, parent, hashes, names);
            // Held or pending.
            let known = whole.shards.iter().flat_map(|shard| shard.names_of(rank_of(*rank)));
            let is_again = { known }.any(|(_, name)| blocks.iter().any(|block| block.engine_hash == name));
            if *tier == StorageTier::Device && parent.is_none() && is_again {
                continue; // blocks reported again from a prompt's start are no copies; in parts, later ones would be
            }
            whole.apply(*rank, *tier, KvEvent::Stored { parent, blocks: blocks.clone() });
            for block in blocks {
                single.apply(*rank, *tier, KvEvent::Stored { parent, blocks: vec![block] });
                parent = Some(block.engine_hash);
            }
            for prompt in whole.prompts() {
                assert_eq!(ask(&whole.shards, &prompt), ask(&single.shards, &prompt));
            }
        }
    }
}
