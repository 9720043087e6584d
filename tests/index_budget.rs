//! An index with a budget: evictions, their order, and the limits of its answers.
//!
//! The reference model has no budget. An index with a budget must never report more than the model, must report the
//! same for each rank without evictions, and must stay within its byte limit after every event.

use std::num::NonZeroU32;

use crate::effort::effort;
use crate::index_reference::Reference;
use pointsman::internals::index::{Applied, Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock};
use pointsman::test_support::{mix, rank as rank_of};
use proptest::prelude::*;

const RANKS: u64 = 4;

/// The blocks of a prompt, named by their prefix as engines do.
fn named(prompt: &[u64]) -> Vec<StoredBlock> {
    let name = prompt.iter().scan(1, |name, &hash| {
        *name = mix(*name ^ mix(hash));
        Some(StoredBlock { engine_hash: EngineHash(*name), block_hash: BlockHash(hash) })
    });
    name.collect()
}

/// Stores a prompt from its `from`-th block on.
fn stored(rank: u64, tier: StorageTier, prompt: &[u64], from: usize) -> RouterEvent {
    let mut blocks = named(prompt);
    let rest = blocks.split_off(from);
    let parent = blocks.last().map(|block| block.engine_hash);
    RouterEvent { rank: rank_of(rank), tier, data: KvEvent::Stored { parent, blocks: rest } }
}

/// Removes a prompt's blocks from its `from`-th on, last first.
fn removed(rank: u64, tier: StorageTier, prompt: &[u64], from: usize) -> RouterEvent {
    let blocks = named(prompt)[from..].iter().rev().map(|block| block.engine_hash).collect();
    RouterEvent { rank: rank_of(rank), tier, data: KvEvent::Removed { blocks } }
}

fn registered(ranks: u64) -> Index {
    let mut index = Index::new();
    for rank in 0..ranks {
        assert!(index.register(rank_of(rank), Slot(rank as u32), Generation(1)));
    }
    index
}

/// (slot, blocks of all tiers) of every hit.
fn ask(index: &Index, prompt: &[u64]) -> Vec<(u32, u32)> {
    let hashes: Vec<_> = prompt.iter().copied().map(BlockHash).collect();
    let mut overlaps = Overlaps::default();
    index.overlaps(&hashes, &mut overlaps);
    overlaps.iter().map(|(hit, more)| (hit.slot.0, hit.device_blocks + more.blocks())).collect()
}

fn ask_model(model: &Reference, prompt: &[u64]) -> Vec<(u32, u32)> {
    let hashes: Vec<_> = prompt.iter().copied().map(BlockHash).collect();
    let blocks = |found: &crate::index_reference::ReferenceMatch| found.hit.device_blocks + found.extension.blocks();
    model.overlaps(&hashes).iter().map(|found| (found.hit.slot.0, blocks(found))).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Store {
        rank: u64,
        tier: StorageTier,
        prompt: Vec<u64>,
        from: usize,
    },
    Remove {
        rank: u64,
        tier: StorageTier,
        prompt: Vec<u64>,
        from: usize,
    },
    /// Stores or removes the blocks in a cache group.
    InGroup {
        rank: u64,
        window_blocks: NonZeroU32,
        prompt: Vec<u64>,
        from: usize,
        stores: bool,
    },
    Ask {
        prompt: Vec<u64>,
    },
    Clear {
        rank: u64,
    },
    Leave {
        rank: u64,
    },
    Register {
        rank: u64,
    },
}

/// Prompts with shared prefixes: each choice stands for a few blocks, so that runs have several blocks and fork.
fn prompt() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec((0..3_u64, 1..9_u64), 1..7).prop_map(|choices| {
        let blocks = choices.iter().scan(0, |path, &(choice, blocks)| {
            *path = mix(*path ^ (choice + 1));
            let path = *path;
            Some((0..blocks).map(move |at| mix(path ^ at)))
        });
        blocks.flatten().collect()
    })
}

fn tier() -> impl Strategy<Value = StorageTier> {
    prop_oneof![
        4 => Just(StorageTier::Device),
        1 => Just(StorageTier::HostPinned),
        1 => Just(StorageTier::Disk),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let part = || (0..RANKS, tier(), prompt(), prop_oneof![3 => Just(0.0), 2 => 0.0..1.0]);
    let at = |prompt: &[u64], part: f64| (prompt.len() as f64 * part) as usize;
    prop_oneof![
        20 => part().prop_map(move |(rank, tier, prompt, part)| {
            let from = at(&prompt, part);
            Op::Store { rank, tier, prompt, from }
        }),
        5 => part().prop_map(move |(rank, tier, prompt, part)| {
            let from = at(&prompt, part);
            Op::Remove { rank, tier, prompt, from }
        }),
        3 => (part(), 1..5_u32, any::<bool>()).prop_map(move |((rank, _, prompt, part), window, stores)| {
            let (window_blocks, from) = (NonZeroU32::MIN.saturating_add(window), at(&prompt, part));
            Op::InGroup { rank, window_blocks, prompt, from, stores }
        }),
        8 => prompt().prop_map(|prompt| Op::Ask { prompt }),
        1 => (0..RANKS).prop_map(|rank| Op::Clear { rank }),
        1 => (0..RANKS).prop_map(|rank| Op::Leave { rank }),
        2 => (0..RANKS).prop_map(|rank| Op::Register { rank }),
    ]
}

/// An index with a budget, and a model without one.
struct World {
    index: Index,
    model: Reference,
    evicted: u64,
}

impl World {
    fn new(budget: u64) -> Self {
        let (mut index, mut model) = (registered(RANKS), Reference::default());
        for rank in 0..RANKS {
            assert!(model.register(rank_of(rank), Slot(rank as u32), Generation(1)));
        }
        index.set_budget(Some(index.bytes_used() as u64 + budget));
        Self { index, model, evicted: 0 }
    }

    fn apply(&mut self, event: &RouterEvent) {
        let slot = self.index.slot_of(event.rank);
        let whole = slot.is_none_or(|slot| self.index.evicted_blocks_of(slot) == 0);
        let (applied, expected) = (self.index.apply(event), self.model.apply(event));
        self.evicted += applied.evicted;
        if whole && applied.evicted == 0 {
            assert_eq!(applied, expected, "reports agree on {event:?}");
        }
        if applied.evicted_removals > 0 {
            assert_eq!(applied.unknown_removals, 0);
        }
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Store { rank, tier, prompt, from } => self.apply(&stored(*rank, *tier, prompt, *from)),
            Op::Remove { rank, tier, prompt, from } => self.apply(&removed(*rank, *tier, prompt, *from)),
            Op::InGroup { rank, window_blocks, prompt, from, stores } => {
                let blocks = named(prompt)[*from..].iter().map(|block| block.engine_hash).collect();
                let (group, window_blocks, starts_prompt) = (1, *window_blocks, *from == 0);
                let data = match stores {
                    true => KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks },
                    false => KvEvent::GroupRemoved { group, blocks },
                };
                self.apply(&RouterEvent { rank: rank_of(*rank), tier: StorageTier::Device, data });
            }
            Op::Ask { prompt } => drop(ask(&self.index, prompt)),
            Op::Clear { rank } => {
                let (rank, tier) = (rank_of(*rank), StorageTier::Device);
                self.apply(&RouterEvent { rank, tier, data: KvEvent::Cleared });
            }
            Op::Leave { rank } => {
                assert_eq!(self.index.remove_rank(rank_of(*rank)), self.model.remove_rank(rank_of(*rank)));
            }
            Op::Register { rank } => {
                self.index.register(rank_of(*rank), Slot(*rank as u32), Generation(1));
                self.model.register(rank_of(*rank), Slot(*rank as u32), Generation(1));
            }
        }
        self.check();
    }

    fn check(&self) {
        self.index.check_invariants();
        let state = self.index.budget_state().expect("budget is set");
        assert!(state.evicted_blocks >= self.evicted, "registrations may evict");
        assert!(state.bytes <= state.bytes_max || self.index.held_blocks() == 0, "{state:?}");
        let held = (0..RANKS as u32).map(|slot| self.index.held_blocks_of(Slot(slot)));
        assert_eq!(held.sum::<usize>(), self.index.held_blocks());
    }

    fn check_answer(&self, prompt: &[u64]) {
        let (found, expected) = (ask(&self.index, prompt), ask_model(&self.model, prompt));
        for slot in 0..RANKS as u32 {
            let blocks = |hits: &[(u32, u32)]| hits.iter().find(|hit| hit.0 == slot).map_or(0, |hit| hit.1);
            let (found, expected) = (blocks(&found), blocks(&expected));
            assert!(found <= expected, "slot {slot} holds {expected}, not {found} blocks of {prompt:?}");
            if self.index.evicted_blocks_of(Slot(slot)) == 0 {
                assert_eq!(found, expected, "nothing was evicted from slot {slot}");
            }
        }
    }
}

proptest! {
    #![proptest_config(effort(150, "tests/index_budget.proptest-regressions"))]

    #[test]
    fn overlaps_never_exceed_the_model_nor_bytes_the_budget(
        budget in 0..20_000_u64,
        ops in prop::collection::vec(op(), 1..60),
        prompts in prop::collection::vec(prompt(), 4),
    ) {
        let mut world = World::new(budget);
        for op in &ops {
            world.run(op);
            if let Op::Store { prompt, .. } | Op::Ask { prompt } = op {
                world.check_answer(prompt);
            }
        }
        for op in &ops {
            if let Op::Store { prompt, .. } | Op::Remove { prompt, .. } = op {
                world.check_answer(prompt);
            }
        }
        prompts.iter().for_each(|prompt| world.check_answer(prompt));
    }

    /// Names independent of the prefix that recur elsewhere. In lower tiers a parent with the same name would adopt
    /// such blocks, so this test covers the device tier only.
    #[test]
    fn a_block_moved_to_an_unknown_parent_leaves_its_old_place(
        budget in 0..3_000_u64,
        stores in prop::collection::vec((0..2_u64, prop::option::of(0..16_u64), prop::collection::vec((0..16_u64, 0..3_u64), 1..9)), 1..60),
    ) {
        let mut world = World::new(budget);
        for (rank, parent, blocks) in stores {
            let block = |(name, hash)| StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(hash) };
            let data = KvEvent::Stored {
                parent: parent.map(EngineHash),
                blocks: blocks.into_iter().map(block).collect(),
            };
            world.apply(&RouterEvent { rank: rank_of(rank), tier: StorageTier::Device, data });
            world.check();
            let named = (0..2).flat_map(|rank| world.model.named(rank_of(rank), StorageTier::Device));
            let prompts: Vec<Vec<_>> = named.map(|(_, path)| path.iter().map(|hash| hash.0).collect()).collect();
            prompts.iter().for_each(|prompt| world.check_answer(prompt));
            for first in 0..3 {
                (0..3).for_each(|second| world.check_answer(&[first, second, 0]));
            }
        }
    }
}

/// A prompt with the first `shared` blocks of `family`, followed by blocks unique to `own`.
fn prompt_of(family: u64, shared: u64, own: u64, len: u64) -> Vec<u64> {
    (0..len).map(|at| if at < shared { mix(family << 32 | at) } else { mix(mix(own) ^ at) }).collect()
}

fn store(index: &mut Index, rank: u64, prompt: &[u64]) -> Applied {
    let applied = index.apply(&stored(rank, StorageTier::Device, prompt, 0));
    index.check_invariants();
    applied
}

/// Stores prompts until the first eviction. Returns their number.
fn fill(index: &mut Index, rank: u64, first: u64, len: u64) -> u64 {
    let mut own = first;
    while index.apply(&stored(rank, StorageTier::Device, &prompt_of(0, 0, own, len), 0)).evicted == 0 {
        own += 1;
    }
    index.check_invariants();
    own - first
}

#[test]
fn budget_changes_take_effect_immediately() {
    let mut index = registered(2);
    for own in 0..200 {
        store(&mut index, own % 2, &prompt_of(0, 0, own, 50));
    }
    index.set_budget(Some(100_000));
    index.check_invariants();
    let state = index.budget_state().expect("budget is set");
    assert!(state.bytes <= 100_000 && state.bytes > 80_000, "{state:?}");
    assert_eq!(state.evicted_blocks + index.held_blocks() as u64, 10_000);
    index.set_budget(None);
    assert_eq!(store(&mut index, 0, &prompt_of(0, 0, 1_000, 5_000)).evicted, 0);
}

#[test]
fn the_least_recently_used_blocks_are_evicted_first() {
    let mut index = registered(1);
    index.set_budget(Some(200_000));
    let filled = fill(&mut index, 0, 0, 40);
    assert!(ask(&index, &prompt_of(0, 0, 0, 40)).is_empty(), "the oldest block was evicted");
    assert!(!ask(&index, &prompt_of(0, 0, filled, 40)).is_empty(), "the newest block stays");
    let favourite = prompt_of(0, 0, filled / 2, 40);
    for own in filled + 1..4 * filled {
        assert_eq!(ask(&index, &favourite), [(0, 40)], "queried blocks stay");
        store(&mut index, 0, &prompt_of(0, 0, own, 40));
    }
    assert!(ask(&index, &prompt_of(0, 0, filled / 2 + 1, 40)).is_empty());
}

#[test]
fn leaves_are_evicted_before_their_prefix() {
    let mut index = registered(1);
    index.set_budget(Some(200_000));
    let conversation = prompt_of(7, 30, 1, 60);
    store(&mut index, 0, &conversation);
    // Prompts with a shared prefix keep the prefix; their unused tails are evicted.
    for own in 2..400 {
        store(&mut index, 0, &prompt_of(7, 30, own, 60));
    }
    assert!(index.evicted_blocks_of(Slot(0)) > 0);
    assert_eq!(ask(&index, &conversation), [(0, 30)]);
}

#[test]
fn ranks_within_their_share_lose_no_blocks_to_others() {
    let mut index = registered(4);
    index.set_budget(Some(400_000));
    let small: Vec<_> = (0..20).map(|own| prompt_of(0, 0, 1_000_000 + own, 40)).collect();
    for prompt in &small {
        store(&mut index, 1, prompt);
    }
    // While alone, the large rank may exceed its share. Space for later prompts is taken from it.
    let filled = fill(&mut index, 0, 0, 40);
    assert!(filled * 40 * 30 > 200_000, "{filled} prompts");
    for own in 0..300 {
        store(&mut index, 0, &prompt_of(0, 0, 5_000 + own, 40));
        store(&mut index, 2, &prompt_of(0, 0, 9_000 + own, 40));
    }
    assert_eq!(index.evicted_blocks_of(Slot(1)), 0);
    assert!(small.iter().all(|prompt| ask(&index, prompt) == [(1, 40)]));
    let (large, other) = (index.held_blocks_of(Slot(0)), index.held_blocks_of(Slot(2)));
    assert!(large < 2 * other && other < 2 * large, "{large} and {other} blocks");
}

#[test]
fn removals_and_children_of_evicted_blocks_are_recognized() {
    let mut index = registered(1);
    index.set_budget(Some(100_000));
    fill(&mut index, 0, 0, 40);
    let gone = prompt_of(0, 0, 0, 40);
    let applied = index.apply(&removed(0, StorageTier::Device, &gone, 0));
    assert_eq!((applied.removed, applied.unknown_removals, applied.evicted_removals), (0, 0, 40));
    let longer: Vec<_> = gone.iter().copied().chain([1, 2]).collect();
    let applied = index.apply(&stored(0, StorageTier::Device, &longer, 40));
    assert_eq!((applied.stored, applied.unknown_parents), (0, 1), "coverage ends there");
    let applied = index.apply(&RouterEvent { rank: rank_of(0), tier: StorageTier::Device, data: KvEvent::Cleared });
    assert!(applied.removed > 0);
    assert_eq!(index.evicted_blocks_of(Slot(0)), 0, "a clear makes the index complete");
    assert_eq!(index.apply(&removed(0, StorageTier::Device, &gone, 0)).unknown_removals, 40);
}

/// Runs of one block consist of nodes and spans with reused numbers. Their freed memory must also be usable for blocks
/// on long runs.
#[test]
fn memory_of_short_runs_is_reused_for_long_ones() {
    let mut index = registered(2);
    index.set_budget(Some(500_000));
    for own in 0..10_000 {
        index.apply(&stored(own % 2, StorageTier::Device, &prompt_of(0, 0, own, 1), 0));
    }
    index.check_invariants();
    assert!(index.held_blocks() > 1_500, "{} blocks", index.held_blocks());
    for own in 10_000..10_400 {
        index.apply(&stored(own % 2, StorageTier::Device, &prompt_of(0, 0, own, 100), 0));
        assert!(index.bytes_used() <= 500_000);
    }
    index.check_invariants();
    assert!(index.held_blocks() > 9_000, "{} blocks", index.held_blocks());
}
