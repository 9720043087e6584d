//! Copies of a block: an engine without deduplication computes a block that it already holds, keeps both copies, and
//! removes each by a separate event under the same name.
//!
//! The model is the engine's cache, slot by slot, with the behavior of vLLM's block pool. After every batch of events
//! the index must find the same cached prefix of every prompt as the engine.

use std::collections::{BTreeMap, VecDeque};

use pointsman::internals::index::{Applied, Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, Timestamp, WorkerId, WorkerRank,
};
use proptest::prelude::*;

use crate::effort::effort;

pub(crate) const RANK: WorkerRank = WorkerRank::new(WorkerId(1), 0);

pub(crate) fn event(data: KvEvent) -> RouterEvent {
    RouterEvent { rank: RANK, tier: StorageTier::Device, data }
}

pub(crate) fn registered() -> Index {
    let mut index = Index::new();
    assert!(index.register(RANK, Slot(0), Generation(1)));
    index
}

/// The name of a prompt's last block.
pub(crate) fn name(prefix: &[u64]) -> EngineHash {
    EngineHash(
        prefix.iter().fold(7, |name: u64, block| (name ^ block).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)),
    )
}

/// A store of a prompt's blocks from the `from`-th on.
pub(crate) fn stored(prompt: &[u64], from: usize) -> KvEvent {
    let block = |at: usize| StoredBlock { engine_hash: name(&prompt[..=at]), block_hash: BlockHash(prompt[at]) };
    KvEvent::Stored {
        parent: (from > 0).then(|| name(&prompt[..from])),
        blocks: (from..prompt.len()).map(block).collect(),
    }
}

pub(crate) fn removed(prefix: &[u64]) -> KvEvent {
    KvEvent::Removed { blocks: vec![name(prefix)] }
}

pub(crate) fn apply(index: &mut Index, data: KvEvent) -> Applied {
    let applied = index.apply(&event(data));
    index.check_invariants();
    applied
}

pub(crate) fn held(index: &Index, prompt: &[u64]) -> usize {
    let hashes: Vec<_> = prompt.iter().copied().map(BlockHash).collect();
    let mut overlaps = Overlaps::default();
    index.overlaps(&hashes, &mut overlaps);
    overlaps.hits().first().map_or(0, |hit| hit.device_blocks as usize)
}

#[test]
fn evictions_remove_all_copies_of_a_block() {
    let mut index = registered();
    apply(&mut index, stored(&[1, 2, 3], 0));
    (0..4).for_each(|_| assert_eq!(apply(&mut index, stored(&[1, 2, 3], 2)).copies, 1));
    index.set_budget(Some(1));
    index.check_invariants();
    assert_eq!((index.held_blocks(), index.evicted_blocks_of(Slot(0))), (0, 3));
    assert_eq!(apply(&mut index, removed(&[1, 2, 3])).evicted_removals, 1);
}

/// Repeated stores of one block use no additional memory, and surplus removals have no effect.
#[test]
fn the_number_of_copies_is_bounded() {
    let mut index = registered();
    apply(&mut index, stored(&[1, 2], 0));
    apply(&mut index, stored(&[1, 2], 1));
    let bytes = index.bytes();
    let mut applied = Applied::default();
    (0..70_000).for_each(|_| applied += index.apply(&event(stored(&[1, 2], 1))));
    assert_eq!((applied.copies, applied.duplicates), (65_535, 4_465));
    assert_eq!(index.bytes(), bytes);
    (0..65_536).for_each(|_| _ = index.apply(&event(removed(&[1, 2]))));
    assert_eq!(held(&index, &[1, 2]), 2);
    apply(&mut index, removed(&[1, 2]));
    assert_eq!(held(&index, &[1, 2]), 1);
    assert_eq!(apply(&mut index, removed(&[1, 2])).unknown_removals, 1);
}

/// The second of two requests with the same two blocks finds the first block held, of which a copy was removed before.
#[test]
fn a_copy_behind_a_removed_block_is_counted() {
    let mut index = registered();
    apply(&mut index, stored(&[0, 0], 0));
    apply(&mut index, stored(&[0], 0));
    apply(&mut index, removed(&[0]));
    assert_eq!((held(&index, &[0, 0]), index.held_blocks()), (0, 1));
    assert_eq!(apply(&mut index, stored(&[0, 0], 1)).copies, 1);
    let answer = [BlockHash(0); 2];
    assert_eq!(index.prove(RANK, &answer, 2, false, Timestamp::default()).proven, 1);
    apply(&mut index, removed(&[0, 0]));
    assert_eq!(held(&index, &[0, 0]), 2);
    apply(&mut index, removed(&[0, 0]));
    assert_eq!(held(&index, &[0, 0]), 1);
    // Another content under the name of a held block waits for its parent.
    let data = KvEvent::Stored {
        parent: Some(EngineHash(91)),
        blocks: vec![StoredBlock { engine_hash: name(&[0]), block_hash: BlockHash(92) }],
    };
    assert_eq!(apply(&mut index, data).copies, 0);
}

/// With a budget, the restored blocks can end all doubts.
#[test]
fn answers_restore_copies_within_the_budget() {
    let (mut index, prompt) = (registered(), (0..600).collect::<Vec<u64>>());
    let hashes: Vec<_> = prompt.iter().copied().map(BlockHash).collect();
    (0..2).for_each(|_| _ = apply(&mut index, stored(&prompt, 0)));
    apply(&mut index, KvEvent::Removed { blocks: (1..=600).rev().map(|len| name(&prompt[..len])).collect() });
    let bytes = index.bytes() as u64;
    index.set_budget(Some(bytes + 4_096));
    index.prove(RANK, &hashes, 600, false, Timestamp::default());
    index.check_invariants();
    assert!(index.bytes() as u64 <= bytes + 4_096);
}

/// Mode of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Plain,
    /// Reused blocks are announced again.
    ReportsReused,
    /// Nothing is reused, as for a request with prompt log-probabilities.
    Recomputes,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// A prompt, and whether more tokens follow its last complete block.
    Begin {
        prompt: Vec<u64>,
        is_partial: bool,
        mode: Mode,
    },
    /// The request generates another block.
    Generate {
        which: prop::sample::Index,
        block: u64,
    },
    End {
        which: prop::sample::Index,
    },
    /// All requests end, and the cache is cleared.
    Reset,
}

/// An engine's cache: each slot holds the last block of a complete prefix.
pub(crate) struct Cache {
    slots: Vec<(Option<Vec<u64>>, usize)>,
    /// Unused slots. The first is taken next.
    pub(crate) free: VecDeque<usize>,
    /// By prefix: the slots that hold it, in the order in which they were filled.
    pub(crate) held: BTreeMap<Vec<u64>, Vec<usize>>,
    pub(crate) running: Vec<(Vec<u64>, Vec<usize>)>,
    pub(crate) events: Vec<KvEvent>,
    /// Whether only the removal of the last copy is an event.
    pub(crate) removes_last_only: bool,
}

impl Cache {
    pub(crate) fn new(slots: usize) -> Self {
        let (running, events) = (Vec::new(), Vec::new());
        Self {
            slots: vec![(None, 0); slots],
            free: (0..slots).collect(),
            held: BTreeMap::new(),
            running,
            events,
            removes_last_only: false,
        }
    }

    pub(crate) fn hit(&self, prompt: &[u64]) -> usize {
        (1..=prompt.len()).take_while(|len| self.held.contains_key(&prompt[..*len])).count()
    }

    pub(crate) fn run(&mut self, op: &Op) {
        match op {
            Op::Begin { prompt, is_partial, mode } => self.begin(prompt, *is_partial, *mode),
            Op::Generate { which, block } if !self.running.is_empty() && !self.free.is_empty() => {
                let at = which.index(self.running.len());
                let (mut prompt, mut slots) = self.running.swap_remove(at);
                prompt.push(*block);
                self.compute(&prompt, prompt.len() - 1, &mut slots);
                self.running.push((prompt, slots));
            }
            Op::End { which } if !self.running.is_empty() => {
                let (_, slots) = self.running.swap_remove(which.index(self.running.len()));
                slots.into_iter().rev().for_each(|slot| self.release(slot));
            }
            Op::Reset => {
                let running = std::mem::take(&mut self.running);
                running.into_iter().flat_map(|(_, slots)| slots).for_each(|slot| self.release(slot));
                self.slots.iter_mut().for_each(|(block, _)| *block = None);
                self.held.clear();
                self.events.push(KvEvent::Cleared);
            }
            Op::Generate { .. } | Op::End { .. } => {}
        }
    }

    fn begin(&mut self, prompt: &[u64], is_partial: bool, mode: Mode) {
        let reusable = if is_partial { prompt.len() } else { prompt.len() - 1 };
        let hit = if mode == Mode::Recomputes { 0 } else { self.hit(&prompt[..reusable]) };
        let mut slots: Vec<_> = (1..=hit).map(|len| self.held[&prompt[..len]][0]).collect();
        let unused = slots.iter().filter(|slot| self.slots[**slot].1 == 0).count();
        if mode == Mode::ReportsReused && hit > 0 {
            self.events.push(stored(&prompt[..hit], 0)); // announced even if the request then finds no free slots
        }
        if self.free.len() - unused < prompt.len() - hit {
            return;
        }
        for &slot in &slots {
            self.free.retain(|free| *free != slot);
            self.slots[slot].1 += 1;
        }
        self.compute(prompt, hit, &mut slots);
        self.running.push((prompt.to_vec(), slots));
    }

    fn compute(&mut self, prompt: &[u64], from: usize, slots: &mut Vec<usize>) {
        for _ in from..prompt.len() {
            let slot = self.free.pop_front().expect("within the limit");
            if let Some(evicted) = self.slots[slot].0.take() {
                let copies = self.held.get_mut(&evicted).expect("a block is listed");
                copies.retain(|other| *other != slot);
                let is_last = copies.is_empty();
                if is_last {
                    self.held.remove(&evicted);
                }
                if is_last || !self.removes_last_only {
                    self.events.push(removed(&evicted));
                }
            }
            self.slots[slot].1 = 1;
            slots.push(slot);
        }
        for at in from..prompt.len() {
            self.slots[slots[at]].0 = Some(prompt[..=at].to_vec());
            self.held.entry(prompt[..=at].to_vec()).or_default().push(slots[at]);
        }
        if from < prompt.len() {
            self.events.push(stored(prompt, from));
        }
    }

    fn release(&mut self, slot: usize) {
        self.slots[slot].1 -= 1;
        if self.slots[slot].1 == 0 {
            self.free.push_back(slot);
        }
    }
}

/// Few different blocks, so that prompts and generated blocks repeat.
fn ops(modes: &'static [Mode], blocks_min: usize) -> impl Strategy<Value = Vec<Op>> {
    let prompt = prop::collection::vec(0..2_u64, blocks_min..5);
    let begin = (prompt, any::<bool>(), prop::sample::select(modes)).prop_map(|(prompt, is_partial, mode)| Op::Begin {
        prompt,
        is_partial,
        mode,
    });
    let which = any::<prop::sample::Index>();
    let op = prop_oneof![
        8 => begin,
        4 => (which, 0..2_u64).prop_map(|(which, block)| Op::Generate { which, block }),
        8 => any::<prop::sample::Index>().prop_map(|which| Op::End { which }),
        1 => Just(Op::Reset),
    ];
    prop::collection::vec(op, 1..120)
}

/// All prompts of up to five blocks.
fn prompts() -> impl Iterator<Item = Vec<u64>> {
    (1..=5_u32).flat_map(|len| (0..1_u64 << len).map(move |bits| (0..len).map(|at| bits >> at & 1).collect()))
}

proptest! {
    #![proptest_config(effort(75, "tests/index_copies.proptest-regressions"))]

    /// A copy of a prompt's first blocks cannot be distinguished from a report of reused blocks. The index then
    /// underestimates, never overestimates. It is exact with answers, and after the engine has evicted the affected
    /// blocks.
    #[test]
    fn ambiguous_removals_are_underestimated_until_an_answer(
        slots in 5..16_usize,
        ops in ops(&[Mode::Plain, Mode::ReportsReused, Mode::Recomputes], 1),
        is_answered in any::<bool>(),
    ) {
        let (mut cache, mut index) = (Cache::new(slots), registered());
        index.set_pool(RANK, Some(slots as u32));
        for op in &ops {
            cache.run(op);
            cache.events.drain(..).for_each(|data| _ = index.apply(&event(data)));
            index.check_invariants();
            for prompt in prompts() {
                let hit = cache.hit(&prompt);
                if is_answered {
                    let hashes: Vec<_> = prompt.iter().copied().map(BlockHash).collect();
                    index.prove(RANK, &hashes, hit as u32, false, Timestamp::default());
                    index.check_invariants();
                    prop_assert_eq!(held(&index, &prompt), hit, "{:?} after {:?}", prompt, op);
                }
                prop_assert!(held(&index, &prompt) <= hit, "{:?} after {:?}", prompt, op);
            }
        }
        while !cache.running.is_empty() {
            cache.run(&Op::End { which: any_index() });
        }
        let others: Vec<u64> = (100..100 + slots as u64).collect();
        cache.run(&Op::Begin { prompt: others.clone(), is_partial: true, mode: Mode::Plain });
        cache.events.drain(..).for_each(|data| _ = index.apply(&event(data)));
        prop_assert_eq!((index.held_blocks(), held(&index, &others)), (slots, slots));
    }
}

proptest! {
    #![proptest_config(effort(75, "tests/index_copies.proptest-regressions"))]

    /// An engine that removes only last copies leaves blocks behind until the rank holds more than its pool has.
    /// Afterwards the index is exact, also as a copy of its dump.
    #[test]
    fn removals_of_last_copies_are_recognised(
        slots in 5..16_usize,
        ops in ops(&[Mode::Plain, Mode::ReportsReused, Mode::Recomputes], 1),
        later in ops(&[Mode::Plain, Mode::ReportsReused, Mode::Recomputes], 1),
        is_restored in any::<bool>(),
    ) {
        let (mut cache, mut index) = (Cache::new(slots), registered());
        cache.removes_last_only = true;
        index.set_pool(RANK, Some(slots as u32));
        let apply = |cache: &mut Cache, index: &mut Index| {
            let gone = cache.events.drain(..).map(|data| index.apply(&event(data)).gone).sum::<u64>();
            index.check_invariants();
            gone
        };
        for op in &ops {
            cache.run(op);
            apply(&mut cache, &mut index);
            prop_assert!(index.held_blocks() <= slots);
            prop_assert!(prompts().all(|prompt| held(&index, &prompt) >= cache.hit(&prompt)));
        }
        if is_restored {
            let mut restored = registered();
            restored.set_pool(RANK, Some(slots as u32));
            index.dump().iter().for_each(|data| _ = restored.apply(data));
            index = restored;
        }
        while !cache.running.is_empty() {
            cache.run(&Op::End { which: any_index() });
        }
        let has_surplus = index.held_blocks() > cache.held.len();
        cache.run(&Op::Begin { prompt: (100..100 + slots as u64).collect(), is_partial: true, mode: Mode::Plain });
        cache.run(&Op::End { which: any_index() });
        let gone = apply(&mut cache, &mut index);
        prop_assert_eq!(index.held_blocks(), slots);
        prop_assert!(gone > 0 || !has_surplus);
        for op in later.iter().filter(|op| has_surplus && !matches!(op, Op::Reset)) {
            cache.run(op);
            apply(&mut cache, &mut index);
            prop_assert_eq!(index.held_blocks(), cache.held.len());
            prop_assert!(prompts().all(|prompt| held(&index, &prompt) == cache.hit(&prompt)));
        }
    }
}

/// Picks any running request.
fn any_index() -> prop::sample::Index {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    any::<prop::sample::Index>().new_tree(&mut runner).expect("an index").current()
}
