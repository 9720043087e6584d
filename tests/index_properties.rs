//! The prefix index against its reference model, event by event.
//!
//! Streams are made to collide: few ranks, few names, few block hashes, so that re-stores, aliases, moves, holes
//! and parents of other tiers are the rule. Ranks are spread over several shards. The number of cases is taken
//! from `POINTSMAN_PROPTEST_CASES`.

use pointsman::index::reference::{Match, Reference};
use pointsman::index::{Index, Overlaps};
use pointsman::protocol::{
    BlockHash, EngineHash, Generation, KvEvent, RouterEvent, Slot, StorageTier, StoredBlock, WorkerId, WorkerRank,
};
use proptest::prelude::*;
use proptest::sample::Index as Pick;

/// Where a stored list goes.
#[derive(Clone, Debug)]
enum Parent {
    Start,
    /// Behind a block that the rank knows, if it knows any, in this tier or another.
    Known(StorageTier, Pick),
    Named(u64),
}

/// How a stored list is named.
#[derive(Clone, Debug)]
enum Names {
    /// By prefix, as engines do: the same block gets the same name again.
    ByPrefix,
    /// At random: names repeat, move, and stand beside others.
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
    /// Removes what the rank knows: `Pick`s into its names, and how many neighbours leave with it.
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
    Clear {
        rank: usize,
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
    let parent = prop_oneof![
        3 => Just(Parent::Start),
        5 => (tier(), any::<Pick>()).prop_map(|(tier, pick)| Parent::Known(tier, pick)),
        2 => (0..names).prop_map(Parent::Named),
    ];
    let named = prop_oneof![
        3 => Just(Names::ByPrefix),
        2 => prop::collection::vec(0..names, 8).prop_map(Names::Random),
    ];
    let list = prop::collection::vec(0..hashes, 0..8);
    let store = (rank.clone(), tier(), parent, list, named).prop_map(|(rank, tier, parent, hashes, names)| Op::Store {
        rank,
        tier,
        parent,
        hashes,
        names,
    });
    let evict = (rank.clone(), tier(), any::<Pick>(), 1..6_usize, any::<bool>())
        .prop_map(|(rank, tier, from, count, forward)| Op::Evict { rank, tier, from, count, forward });
    let remove = (rank.clone(), tier(), prop::collection::vec(0..names, 0..4))
        .prop_map(|(rank, tier, names)| Op::Remove { rank, tier, names });
    prop_oneof![
        20 => store,
        10 => evict,
        4 => remove,
        1 => rank.clone().prop_map(|rank| Op::Clear { rank }),
        1 => rank.clone().prop_map(|rank| Op::RemoveRank { rank }),
        1 => (0..3_u64).prop_map(|worker| Op::RemoveWorker { worker }),
        2 => (rank, 0..6_u32, 0..3_u32).prop_map(|(rank, slot, generation)| Op::Register { rank, slot, generation }),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Few names and two hashes collide at every step; many names and three hashes grow branchier trees.
    (2..24_u64, 1..4_u64).prop_flat_map(|(names, hashes)| prop::collection::vec(op(names, hashes), 1..40))
}

/// The shards and the model that they have to agree with.
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

    /// A rank's shard is a function of its slot here, and a slot has one occupant over all shards.
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
            Op::Clear { rank } => self.apply(*rank, StorageTier::Device, KvEvent::Cleared),
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

    /// Prompts worth asking for: all short ones, and whatever any rank holds, and a little more.
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
            assert_eq!(ask(&self.shards, &prompt), expected, "answers agree on {prompt:?}");
            assert_eq!(ask(&rebuilt, &prompt), expected, "a rebuilt index agrees on {prompt:?}");
        }
        for (shard, rebuilt) in self.shards.iter().zip(&rebuilt) {
            assert_eq!(sorted(shard.dump()), sorted(rebuilt.dump()), "a rebuilt index dumps the same");
        }
    }
}

/// A fresh index that only the dump knows about.
fn rebuild(index: &Index) -> Index {
    let mut rebuilt = Index::new();
    for rank in (0..RANKS).map(rank_of) {
        let Some(slot) = index.slot_of(rank) else { continue };
        assert!(rebuilt.register(rank, slot, index.generation(slot)));
    }
    for event in index.dump() {
        let applied = rebuilt.apply(&event);
        let odd = applied.duplicates + applied.unknown_ranks + applied.unknown_parents + applied.unknown_removals;
        assert_eq!((odd, applied.adopted), (0, 0), "a dump is in order: {event:?}");
    }
    rebuilt
}

/// Tree shape may differ after a rebuild, and with it which blocks come in one event: compare block by block.
fn sorted(events: Vec<RouterEvent>) -> Vec<(WorkerRank, StorageTier, Option<EngineHash>, EngineHash, BlockHash)> {
    let removed: Vec<_> = events
        .iter()
        .flat_map(|event| match &event.data {
            KvEvent::Removed { blocks } => blocks.iter().map(|name| (event.rank, event.tier, *name)).collect(),
            KvEvent::Stored { .. } | KvEvent::Cleared => Vec::new(),
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

/// Asks every shard, both ways, and joins the answers.
fn ask(shards: &[Index], prompt: &[BlockHash]) -> Vec<Match> {
    let mut overlaps = Overlaps::default();
    let mut matches = Vec::new();
    for shard in shards {
        shard.overlaps(prompt, &mut overlaps);
        let plain: Vec<_> = overlaps.iter().collect();
        assert!(overlaps.last_matched().is_empty());
        shard.overlaps_detailed(prompt, &mut overlaps);
        assert_eq!(overlaps.iter().collect::<Vec<_>>(), plain, "asking for more changes nothing");
        assert!(overlaps.hits().is_sorted_by_key(|hit| hit.slot));
        let last_matched = overlaps.last_matched().iter();
        matches.extend(plain.iter().zip(last_matched).map(|(&(hit, extension), &last_matched)| Match {
            hit,
            extension,
            last_matched,
        }));
    }
    matches.sort_by_key(|found| found.hit.slot);
    matches
}

#[expect(clippy::disallowed_methods, reason = "the number of cases is the caller's to choose")]
fn cases() -> u32 {
    std::env::var("POINTSMAN_PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(300)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

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
            let Op::Store { rank, tier, parent, hashes, names } = op else {
                whole.run(op);
                single.run(op);
                continue;
            };
            let (mut parent, blocks) = whole.stored(rank_of(*rank), *tier, parent, hashes, names);
            let known = whole.model.named(rank_of(*rank), *tier).iter().any(|(name, _)| parent == Some(*name));
            if *tier == StorageTier::Device && parent.is_some() && !known {
                continue; // a device list is refused whole: in parts, a part might be accepted
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
