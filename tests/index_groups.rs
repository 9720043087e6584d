//! Hybrid models: the overlap of a prompt is the prefix that the engine reuses, for any combination of cache groups.
//!
//! The model is an engine with several groups in one pool of slots, with the behavior of vLLM. Each group keeps what its
//! layers need: all blocks, a window, or a state. A hit is shortened group by group until no group shortens it. The
//! events pass the decoder as bytes.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;

use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::wire::{Decoder, DecoderLimits, Finding, WireConfig};
use pointsman::protocol::{BlockHash, WorkerId, WorkerRank};
use proptest::prelude::*;
use proptest::sample::Index as Pick;

use crate::effort::effort;
use crate::msgpack::{Msg, batch};

const RANK: WorkerRank = WorkerRank::new(WorkerId(1), 0);
const BLOCK_SIZE: u32 = 4;

/// Layers of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layers {
    Full,
    /// Attention to this number of tokens.
    Window(u64),
    /// A state, kept behind each block or behind the last one of a computation.
    State {
        is_dense: bool,
    },
}

#[derive(Clone, Debug)]
enum Op {
    /// A prompt that continues behind its last complete block, unless it is whole.
    Begin {
        prompt: Vec<u64>,
        is_whole: bool,
        reports_reused: bool,
    },
    /// The request generates another block.
    Generate {
        which: Pick,
        block: u64,
    },
    End {
        which: Pick,
    },
    /// All requests end, and the cache is cleared.
    Reset,
}

/// A request: its complete blocks, and its slots with their groups and positions.
struct Running {
    prompt: Vec<u64>,
    slots: Vec<(usize, usize, usize)>,
}

/// Group and prefix of a block.
type GroupedPrefix = (usize, Vec<u64>);

struct Engine {
    groups: Vec<Layers>,
    /// The block in each slot, and the number of its users.
    slots: Vec<(Option<GroupedPrefix>, usize)>,
    /// Unused slots. The first is taken next.
    free: VecDeque<usize>,
    /// By group and prefix: the slots that hold it, in the order in which they were filled.
    held: BTreeMap<GroupedPrefix, Vec<usize>>,
    running: Vec<Running>,
    events: Vec<Msg>,
}

/// The name of a prompt's last block.
fn name(prefix: &[u64]) -> u64 {
    prefix.iter().fold(7, |name: u64, block| (name ^ block).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

fn tokens(prompt: &[u64]) -> Vec<u32> {
    prompt.iter().flat_map(|block| (0..BLOCK_SIZE).map(move |at| (*block as u32) * 10 + at)).collect()
}

fn kind(layers: Layers) -> (&'static str, Msg) {
    match layers {
        Layers::Full => ("full_attention", Msg::Nil),
        Layers::Window(tokens) => ("sliding_window", tokens.into()),
        Layers::State { .. } => ("mamba", Msg::Nil),
    }
}

impl Engine {
    fn new(groups: Vec<Layers>, slots: usize) -> Self {
        let (held, running, events) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { groups, slots: vec![(None, 0); slots], free: (0..slots).collect(), held, running, events }
    }

    fn holds(&self, group: usize, prefix: &[u64]) -> bool {
        self.held.contains_key(&(group, prefix.to_vec()))
    }

    /// Length of the prefix that a request with this prompt reuses.
    fn hit(&self, prompt: &[u64]) -> usize {
        let mut hit = prompt.len();
        loop {
            let before = hit;
            for group in 0..self.groups.len() {
                hit = self.hit_of(group, &prompt[..hit]);
            }
            if hit == before {
                return hit;
            }
        }
    }

    fn hit_of(&self, group: usize, prompt: &[u64]) -> usize {
        let holds = |end: &usize| self.holds(group, &prompt[..*end]);
        match self.groups[group] {
            Layers::Full => (1..=prompt.len()).take_while(holds).count(),
            Layers::State { .. } => (1..=prompt.len()).rev().find(holds).unwrap_or(0),
            Layers::Window(tokens) => {
                let mut found = 0;
                for end in (1..=prompt.len()).rev() {
                    found = if holds(&end) { found + 1 } else { 0 };
                    if found == needed(tokens) {
                        return end - 1 + found;
                    }
                }
                found
            }
        }
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Begin { prompt, is_whole, reports_reused } => self.begin(prompt, *is_whole, *reports_reused),
            Op::Generate { which, block } if !self.running.is_empty() && self.free.len() >= self.groups.len() => {
                let mut running = self.running.swap_remove(which.index(self.running.len()));
                running.prompt.push(*block);
                self.compute(&mut running, 1);
                self.slide(&mut running);
                self.running.push(running);
            }
            Op::End { which } if !self.running.is_empty() => {
                let running = self.running.swap_remove(which.index(self.running.len()));
                running.slots.into_iter().rev().for_each(|(_, _, slot)| self.release(slot));
            }
            Op::Reset => {
                let running = std::mem::take(&mut self.running);
                running.into_iter().flat_map(|running| running.slots).for_each(|(_, _, slot)| self.release(slot));
                self.slots.iter_mut().for_each(|(block, _)| *block = None);
                self.held.clear();
                self.events.push(Msg::named([("type", "AllBlocksCleared".into())]));
            }
            Op::Generate { .. } | Op::End { .. } => {}
        }
    }

    fn begin(&mut self, prompt: &[u64], is_whole: bool, reports_reused: bool) {
        let hit = self.hit(&prompt[..prompt.len() - usize::from(is_whole && prompt.len() > 1)]);
        let groups = 0..self.groups.len();
        if reports_reused && hit > 0 {
            groups.clone().for_each(|group| self.store(group, &prompt[..hit], 0, (0..hit).collect()));
        }
        let reused: Vec<_> = groups
            .flat_map(|group| reused(self.groups[group], hit).map(move |at| (group, at)))
            .map(|(group, at)| (group, at, self.held[&(group, prompt[..=at].to_vec())][0]))
            .collect();
        let unused = reused.iter().filter(|(_, _, slot)| self.slots[*slot].1 == 0).count();
        if self.free.len() - unused < (prompt.len() - hit) * self.groups.len() {
            return;
        }
        for &(_, _, slot) in &reused {
            self.free.retain(|free| *free != slot);
            self.slots[slot].1 += 1;
        }
        let mut running = Running { prompt: prompt.to_vec(), slots: reused };
        self.compute(&mut running, prompt.len() - hit);
        self.slide(&mut running);
        self.running.push(running);
    }

    /// Computes the last `blocks` of a request: takes the slots, then publishes the blocks, group after group.
    fn compute(&mut self, running: &mut Running, blocks: usize) {
        let from = running.prompt.len() - blocks;
        let kept = |layers: &Layers| match layers {
            Layers::State { is_dense: false } => (running.prompt.len() - blocks.min(1)..running.prompt.len()).collect(),
            Layers::Full | Layers::Window(_) | Layers::State { .. } => (from..running.prompt.len()).collect::<Vec<_>>(),
        };
        let kept: Vec<_> = self.groups.iter().map(kept).collect();
        let first = running.slots.len();
        for (group, positions) in kept.iter().enumerate() {
            for position in positions {
                let slot = self.take_slot();
                running.slots.push((group, *position, slot));
            }
        }
        for (group, position, slot) in &running.slots[first..] {
            let block = (*group, running.prompt[..=*position].to_vec());
            self.slots[*slot].0 = Some(block.clone());
            self.held.entry(block).or_default().push(*slot);
        }
        for (group, positions) in kept.into_iter().enumerate().filter(|_| blocks > 0) {
            self.store(group, &running.prompt, from, positions);
        }
    }

    /// Publishes a computation from the block `from` on, of which the group keeps some positions.
    fn store(&mut self, group: usize, prompt: &[u64], from: usize, positions: Vec<usize>) {
        let (kind, window) = kind(self.groups[group]);
        self.events.push(Msg::named([
            ("type", "BlockStored".into()),
            ("block_hashes", positions.into_iter().map(|at| name(&prompt[..=at])).collect()),
            ("parent_block_hash", if from > 0 { name(&prompt[..from]).into() } else { Msg::Nil }),
            ("token_ids", tokens(&prompt[from..]).into_iter().map(u64::from).collect()),
            ("block_size", u64::from(BLOCK_SIZE).into()),
            ("medium", "GPU".into()),
            ("group_idx", (group as u64).into()),
            ("kv_cache_spec_kind", kind.into()),
            ("kv_cache_spec_sliding_window", window),
        ]));
    }

    fn take_slot(&mut self) -> usize {
        let slot = self.free.pop_front().expect("within the limit");
        if let Some((group, prefix)) = self.slots[slot].0.take() {
            let copies = self.held.get_mut(&(group, prefix.clone())).expect("a block is listed");
            copies.retain(|other| *other != slot);
            if copies.is_empty() {
                self.held.remove(&(group, prefix.clone()));
            }
            self.events.push(Msg::named([
                ("type", "BlockRemoved".into()),
                ("block_hashes", [name(&prefix)].into()),
                ("medium", "GPU".into()),
                ("group_idx", (group as u64).into()),
            ]));
        }
        self.slots[slot].1 = 1;
        slot
    }

    /// Releases the blocks that the next token does not need.
    fn slide(&mut self, running: &mut Running) {
        let needs = |group: usize, position: usize| match self.groups[group] {
            Layers::Full => true,
            layers => reused(layers, running.prompt.len()).contains(&position),
        };
        let (kept, left): (Vec<_>, Vec<_>) =
            running.slots.iter().copied().partition(|(group, position, _)| needs(*group, *position));
        running.slots = kept;
        left.into_iter().for_each(|(_, _, slot)| self.release(slot));
    }

    fn release(&mut self, slot: usize) {
        self.slots[slot].1 -= 1;
        if self.slots[slot].1 == 0 {
            self.free.push_back(slot);
        }
    }
}

/// Number of blocks that a hit needs in a window.
fn needed(tokens: u64) -> usize {
    ((tokens - 1).div_ceil(u64::from(BLOCK_SIZE)) as usize).max(1)
}

/// Positions of the blocks that a group needs behind a prefix.
fn reused(layers: Layers, hit: usize) -> std::ops::Range<usize> {
    match layers {
        Layers::Full => 0..hit,
        Layers::Window(tokens) => hit.saturating_sub(needed(tokens))..hit,
        Layers::State { .. } => hit.saturating_sub(1)..hit,
    }
}

/// The index behind a decoder, and the blocks of prompts.
struct Router {
    decoder: Decoder,
    index: Index,
    findings: BTreeMap<&'static str, u64>,
}

impl Router {
    fn new() -> Self {
        let mut index = Index::new();
        assert!(index.register(RANK, Slot(0), Generation(1)));
        Self { decoder: Decoder::new(config()), index, findings: BTreeMap::new() }
    }

    fn apply(&mut self, events: Vec<Msg>) {
        let mut decoded = Vec::new();
        let report = self.decoder.decode(&batch(events), &mut decoded);
        for (finding, count) in report.findings.iter() {
            *self.findings.entry(finding.name()).or_default() += count;
        }
        decoded.iter().for_each(|event| _ = self.index.apply(event));
        self.index.check_invariants();
    }

    fn overlap(&self, prompt: &[BlockHash]) -> usize {
        self.overlap_within(prompt, u32::MAX)
    }

    fn overlap_within(&self, prompt: &[BlockHash], reusable_blocks: u32) -> usize {
        let mut overlaps = Overlaps::default();
        self.index.reusable_overlaps(prompt, reusable_blocks, &mut overlaps);
        overlaps.hits().first().map_or(0, |hit| hit.device_blocks as usize)
    }
}

fn config() -> WireConfig {
    let block_size = NonZeroU32::new(BLOCK_SIZE).expect("not zero");
    WireConfig { rank: RANK, ranks: 0..1, block_size, is_eagle: false, limits: DecoderLimits::default() }
}

/// All prompts of up to six blocks of two kinds, with their hashes.
fn prompts() -> Vec<(Vec<u64>, Vec<BlockHash>)> {
    let hasher = BlockHasher::new(HashScheme::new(config().block_size));
    let prompts = (1..=6_u32)
        .flat_map(|len| (0..1_u64 << len).map(move |bits| (0..len).map(|at| bits >> at & 1).collect::<Vec<_>>()));
    prompts.map(|prompt| (prompt.clone(), hasher.block_hashes(&tokens(&prompt), &MmBlocks::NONE).to_vec())).collect()
}

fn some_layers() -> impl Strategy<Value = Layers> {
    prop_oneof![
        2 => Just(Layers::Full),
        3 => (1..20_u64).prop_map(Layers::Window),
        1 => Just(Layers::State { is_dense: true }),
        2 => Just(Layers::State { is_dense: false }),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let prompt = prop::collection::vec(0..2_u64, 1..6);
    let op = prop_oneof![
        8 => (prompt, prop::bool::weighted(0.2), prop::bool::weighted(0.2))
            .prop_map(|(prompt, is_whole, reports_reused)| Op::Begin { prompt, is_whole, reports_reused }),
        4 => (any::<Pick>(), 0..2_u64).prop_map(|(which, block)| Op::Generate { which, block }),
        8 => any::<Pick>().prop_map(|which| Op::End { which }),
        1 => Just(Op::Reset),
    ];
    prop::collection::vec(op, 1..100)
}

proptest! {
    #![proptest_config(effort(60, "tests/index_groups.proptest-regressions"))]

    /// One group with full attention at any position among the others. Reports of reused blocks contain blocks that a
    /// window does not hold, so only engines with full attention alone publish them here.
    #[test]
    fn overlaps_are_the_hits_of_a_hybrid_engine(
        mut groups in prop::collection::vec(some_layers(), 0..4),
        at in any::<Pick>(),
        slots in 6..40_usize,
        mut ops in ops(),
    ) {
        groups.insert(at.index(groups.len() + 1), Layers::Full);
        let is_full = groups.iter().all(|layers| *layers == Layers::Full);
        let (mut engine, mut router, prompts) = (Engine::new(groups, slots), Router::new(), prompts());
        for op in &mut ops {
            if let Op::Begin { reports_reused, .. } = op {
                *reports_reused &= is_full;
            }
            engine.run(op);
            router.apply(std::mem::take(&mut engine.events));
            for (prompt, hashes) in &prompts {
                let (hit, overlap) = (engine.hit(prompt), router.overlap(hashes));
                prop_assert!(overlap == hit, "{overlap} of {hit} blocks of {prompt:?} after {op:?}");
                // The engine computes the last block of a whole prompt, and then needs a hit before it.
                let reusable = prompt.len() - 1;
                let (hit, overlap) = (engine.hit(&prompt[..reusable]), router.overlap_within(hashes, reusable as u32));
                prop_assert!(overlap.min(reusable) == hit, "{overlap} of {hit} blocks before the last one of {prompt:?}");
            }
        }
        prop_assert!(router.findings.is_empty(), "{:?}", router.findings);
    }

    /// Without full attention, the first group with every block stands for it: never too much, and not nothing.
    #[test]
    fn engines_without_full_attention_are_underestimated(
        groups in prop::collection::vec((1..20_u64).prop_map(Layers::Window), 1..4),
        ops in ops(),
    ) {
        let (mut engine, mut router, prompts) = (Engine::new(groups, 40), Router::new(), prompts());
        let began = ops.iter().filter_map(|op| if let Op::Begin { prompt, .. } = op { Some(prompt) } else { None });
        for (at, op) in began.enumerate() {
            engine.run(&Op::Begin { prompt: op.clone(), is_whole: false, reports_reused: false });
            engine.run(&Op::End { which: any_index() });
            router.apply(std::mem::take(&mut engine.events));
            for (prompt, hashes) in &prompts {
                prop_assert!(router.overlap(hashes) <= engine.hit(prompt), "{prompt:?} after {op:?}");
            }
            let begun = prompts.iter().find(|(prompt, _)| prompt == op).expect("a short prompt");
            prop_assert!(at > 0 || router.overlap(&begun.1) == op.len(), "the first prompt is held");
        }
        prop_assert!(router.findings.keys().all(|finding| *finding == Finding::NoMainAttention.name()));
    }
}

/// Picks any running request.
fn any_index() -> Pick {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    any::<Pick>().new_tree(&mut runner).expect("an index").current()
}

/// Streams from public reports about routing of hybrid models.
mod examples {
    use super::*;

    /// A store of the last `names` of a prompt's blocks.
    fn stored(group: u64, kind: &str, window: Option<u64>, prompt: &[u64], from: usize, names: &[usize]) -> Msg {
        Msg::named([
            ("type", "BlockStored".into()),
            ("block_hashes", names.iter().map(|len| name(&prompt[..*len])).collect()),
            ("parent_block_hash", if from > 0 { name(&prompt[..from]).into() } else { Msg::Nil }),
            ("token_ids", tokens(&prompt[from..]).into_iter().map(u64::from).collect()),
            ("block_size", u64::from(BLOCK_SIZE).into()),
            ("group_idx", group.into()),
            ("kv_cache_spec_kind", kind.into()),
            ("kv_cache_spec_sliding_window", window.map_or(Msg::Nil, Msg::Uint)),
        ])
    }

    fn removed(group: u64, prefix: &[u64]) -> Msg {
        let hashes = [name(prefix)].into();
        Msg::named([("type", "BlockRemoved".into()), ("block_hashes", hashes), ("group_idx", group.into())])
    }

    fn full(group: u64, prompt: &[u64]) -> Msg {
        let names: Vec<_> = (1..=prompt.len()).collect();
        stored(group, "full_attention", None, prompt, 0, &names)
    }

    fn overlap(router: &Router, prompt: &[u64]) -> usize {
        let hasher = BlockHasher::new(HashScheme::new(config().block_size));
        router.overlap(&hasher.block_hashes(&tokens(prompt), &MmBlocks::NONE))
    }

    /// Without a single state the group is still known.
    #[test]
    fn a_store_without_blocks_makes_the_group_known() {
        let (mut router, prompt) = (Router::new(), [0, 1]);
        router.apply(vec![stored(0, "mamba", None, &prompt, 0, &[]), full(1, &prompt)]);
        assert_eq!(overlap(&router, &prompt), 0);
    }

    #[test]
    fn a_model_with_windows_only_has_overlaps() {
        let (mut router, prompt) = (Router::new(), [0, 1, 2, 3]);
        router.apply(vec![stored(0, "sliding_window", Some(4096), &prompt, 0, &[1, 2, 3, 4])]);
        router.apply(vec![stored(0, "sliding_window", Some(4096), &[0, 1, 2, 3, 4], 4, &[5])]);
        router.apply(vec![removed(0, &[0, 1, 2, 3, 4])]);
        assert_eq!(overlap(&router, &[0, 1, 2, 3, 4]), 4);
        assert_eq!(router.findings, BTreeMap::from([("no_main_attention", 2)]));
        // Full attention replaces the substitute.
        router.apply(vec![full(1, &prompt)]);
        assert_eq!((overlap(&router, &prompt), router.index.held_blocks()), (4, 4));
    }

    /// Main attention of one block size beside windows of smaller blocks, whose stores leave out blocks.
    #[test]
    fn groups_of_another_block_size_restrict_nothing() {
        let (mut router, prompt) = (Router::new(), [0, 1, 2, 3]);
        let smaller = |group: u64| {
            let Msg::Map(mut pairs) = stored(group, "sliding_window_mla", Some(4), &prompt, 0, &[4]) else { panic!() };
            pairs.iter_mut().filter(|(key, _)| *key == "block_size".into()).for_each(|pair| pair.1 = 2.into());
            Msg::Map(pairs)
        };
        router.apply(vec![full(0, &prompt), smaller(1), smaller(2), removed(1, &prompt), removed(2, &prompt[..1])]);
        assert_eq!((overlap(&router, &prompt), &router.findings), (4, &BTreeMap::from([("not_main_attention", 2)])));
    }

    #[test]
    fn groups_of_unknown_type_delete_nothing() {
        let (mut router, prompt) = (Router::new(), [0, 1]);
        router.apply(vec![full(1, &prompt), removed(0, &prompt), removed(2, &prompt)]);
        router.apply(vec![stored(3, "chunked_local_attention", None, &prompt, 0, &[1]), removed(3, &prompt)]);
        assert_eq!((overlap(&router, &prompt), &router.findings), (2, &BTreeMap::from([("not_main_attention", 4)])));
        // Nor does an event of the main group with such a type.
        router.apply(vec![stored(1, "quantum", None, &[7, 8], 0, &[1, 2]), removed(0, &prompt)]);
        router.apply(vec![full(1, &[0, 2]), removed(1, &[0, 2])]);
        assert_eq!((overlap(&router, &prompt), overlap(&router, &[7, 8])), (2, 0));
    }

    /// Removals of the main group would no longer apply to its blocks.
    #[test]
    fn a_main_group_of_another_type_leaves_no_stale_blocks() {
        let (mut router, prompt) = (Router::new(), [0, 1]);
        router.apply(vec![full(0, &prompt)]);
        router.apply(vec![
            stored(0, "mamba", None, &prompt, 0, &[2]),
            stored(1, "sliding_window", Some(9), &prompt, 0, &[1, 2]),
        ]);
        router.apply(vec![removed(0, &prompt), removed(0, &prompt[..1])]);
        assert_eq!(overlap(&router, &prompt), 0);
        router.apply(vec![full(2, &prompt)]);
        assert_eq!(router.index.held_blocks(), 2);
    }

    /// A restarted engine publishes its groups in another order.
    #[test]
    fn groups_may_swap_roles_after_a_restart() {
        let (mut router, prompt) = (Router::new(), [0, 1]);
        router.apply(vec![full(0, &prompt), stored(1, "sliding_window", Some(9), &prompt, 0, &[1, 2])]);
        router.apply(vec![Msg::named([("type", "AllBlocksCleared".into())])]);
        router.decoder.forget();
        router.apply(vec![stored(0, "sliding_window", Some(9), &prompt, 0, &[1, 2]), full(1, &prompt)]);
        router.apply(vec![removed(0, &prompt[..1])]);
        assert_eq!(overlap(&router, &prompt), 0);
        router.apply(vec![stored(0, "sliding_window", Some(9), &prompt, 0, &[1])]);
        assert_eq!(overlap(&router, &prompt), 2);
    }

    #[test]
    fn a_resumed_decoder_knows_the_groups() {
        let (mut router, prompt) = (Router::new(), [0, 1]);
        router.apply(vec![stored(0, "mamba", None, &prompt, 0, &[2]), full(1, &prompt)]);
        router.decoder = Decoder::resume(config(), &router.decoder.state());
        router.apply(vec![removed(0, &prompt)]);
        assert_eq!(overlap(&router, &prompt), 0);
    }
}
