//! Stores in lower tiers: placeholders, chunks and copies without keys, as connectors publish them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index as Pick;

use super::*;
use crate::effort::effort;
use StorageTier::{Device, Disk, HostPinned};

/// A store of another block size than the pool's.
fn sized(names: &[u64], tokens: &[u32], size: u64, medium: &str) -> Msg {
    let mut event = store(names.iter().copied(), None, tokens, [("medium", medium.into())]);
    let Msg::Map(fields) = &mut event else { unreachable!() };
    fields[4].1 = size.into();
    event
}

fn copy(names: &[u64], parent: Option<u64>, tokens: &[u32], more: Vec<(&'static str, Msg)>) -> Msg {
    store(names.iter().copied(), parent, tokens, [("medium", "CPU".into())].into_iter().chain(more))
}

fn keys(entries: Vec<Msg>) -> (&'static str, Msg) {
    ("extra_keys", Msg::Array(entries))
}

/// A decoder with its index.
struct Stream {
    decoder: Decoder,
    index: Index,
}

impl Stream {
    fn new() -> Self {
        let mut index = Index::new();
        assert!(index.register(RANK, Slot(0), Generation(1)));
        Self { decoder: decoder(), index }
    }

    /// Applies one batch. Returns the effects.
    fn apply(&mut self, events: impl IntoIterator<Item = Msg>) -> Applied {
        let (events, report) = next(&mut self.decoder, events);
        assert_eq!((found(&report), report.mismatch), (vec![], None));
        let mut applied = Applied::default();
        for event in &events {
            applied += self.index.apply(event);
            self.index.check_invariants();
        }
        applied
    }

    /// Cached blocks of a prompt in device, host and disk.
    fn held(&self, tokens: &[u32], lora: Option<&str>, salt: Option<&str>) -> [u32; 3] {
        let prompt: Vec<_> = requested(tokens, lora, salt).into_iter().map(BlockHash).collect();
        let mut overlaps = Overlaps::default();
        self.index.overlaps(&prompt, &mut overlaps);
        let found = overlaps.iter().next();
        found.map_or([0; 3], |(hit, lower)| [hit.device_blocks, lower.host_pinned_blocks, lower.disk_blocks])
    }

    fn plain(&self) -> [u32; 3] {
        self.held(&TOKENS, None, None)
    }
}

fn gone(names: &[u64], medium: &str) -> Msg {
    removal(names.iter().copied(), [("medium", medium.into())])
}

#[test]
fn a_copy_of_an_unknown_block_without_keys_matches_nobody() {
    for copy in [copy(&[11, 12], None, &TOKENS, vec![]), sized(&[11], &[], 0, "FS")] {
        let mut stream = Stream::new();
        let applied = stream.apply([copy.clone()]);
        assert_eq!((applied.stored, applied.unknown_contents > 0), (0, true), "{copy:?}");
        assert_eq!((stream.plain(), stream.index.held_blocks()), ([0; 3], 0));
        stream.apply([store([11, 12], None, &TOKENS, [])]);
        assert_eq!(stream.plain(), [2, 0, 0]);
    }
    let mut stream = Stream::new();
    stream.apply([copy(&[11, 12], None, &TOKENS, vec![keys(vec![Msg::Nil, Msg::Nil])])]);
    assert_eq!(stream.plain(), [0, 2, 0], "with stated keys");
}

#[test]
fn a_copy_behind_an_unknown_block_never_widens_its_namespace() {
    let mut stream = Stream::new();
    assert_eq!(stream.apply([copy(&[12], Some(11), &TOKENS[4..], vec![])]).waiting, 1);
    stream.apply([store([11], None, &TOKENS[..4], vec![keys(vec![["A"].into()])])]);
    assert_eq!((stream.plain(), stream.held(&TOKENS, None, Some("A"))), ([0; 3], [1, 0, 0]));
    let mut stream = Stream::new();
    stream.apply([copy(&[12], Some(11), &TOKENS[4..], vec![])]);
    stream.apply([store([11], None, &TOKENS[..4], [])]);
    assert_eq!(stream.plain(), [1, 1, 0], "behind a plain block");
}

#[test]
fn a_clear_leaves_what_the_engine_leaves() {
    let clear =
        |more: Vec<(&'static str, Msg)>| Msg::named([("type", "AllBlocksCleared".into())].into_iter().chain(more));
    let filled = |medium: &str| {
        let mut stream = Stream::new();
        let salt = [("cache_salt", "s".into())];
        stream.apply([store([11, 12], None, &TOKENS, []), store([21], None, &TOKENS[..4], salt)]);
        stream.apply([11, 12, 21].map(|name| sized(&[name], &[], 0, medium)));
        stream
    };
    let salted = |stream: &Stream| stream.held(&TOKENS[..4], None, Some("s"));
    let mut vllm = filled("CPU");
    vllm.apply([clear(vec![])]);
    assert_eq!((vllm.plain(), salted(&vllm)), ([0, 2, 0], [0, 1, 0]), "the pool of the device only");
    vllm.apply([clear(vec![("medium", "cpu".into())])]);
    assert_eq!((vllm.index.held_blocks(), vllm.decoder.namespaces()), (0, 0));
    let mut sglang = filled("CPU_PINNED");
    sglang.apply([clear(vec![])]);
    assert_eq!((sglang.index.held_blocks(), sglang.decoder.namespaces()), (0, 0), "all tiers");
}

/// An operation of an engine with a connector.
#[derive(Clone, Debug)]
enum Op {
    /// Computes a prompt under a salt.
    Compute {
        path: Vec<u32>,
        salt: Option<&'static str>,
    },
    /// Copies a held block to a lower tier: by name, in a larger chunk, or with tokens but without keys.
    Offload {
        which: Pick,
        tier: StorageTier,
        form: u8,
    },
    /// Removes a block without children from the device, or any copy from a lower tier.
    Evict {
        which: Pick,
        tier: StorageTier,
    },
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let path = prop::collection::vec(0..2_u32, 1..5);
    let salt = prop_oneof![2 => Just(None), 1 => Just(Some("a")), 1 => Just(Some("b"))];
    let lower = prop_oneof![2 => Just(HostPinned), 1 => Just(Disk)];
    let tier = prop_oneof![2 => Just(Device), 1 => Just(HostPinned), 1 => Just(Disk)];
    prop_oneof![
        4 => (path, salt).prop_map(|(path, salt)| Op::Compute { path, salt }),
        4 => (any::<Pick>(), lower, 0..4_u8).prop_map(|(which, tier, form)| Op::Offload { which, tier, form }),
        4 => (any::<Pick>(), tier).prop_map(|(which, tier)| Op::Evict { which, tier }),
        1 => Just(Op::Clear),
    ]
}

/// A salt and the path of a block.
type Place = (Option<&'static str>, Vec<u32>);

/// An engine: the number of copies of each block in each tier.
#[derive(Default)]
struct Engine(BTreeMap<(StorageTier, Place), u32>);

fn name((salt, path): &Place) -> u64 {
    let seed = salt.map_or(1, |salt| u64::from(salt.as_bytes()[0]) << 20);
    path.iter().fold(seed, |name, block| (name ^ u64::from(block + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

fn tokens_of(path: &[u32]) -> Vec<u32> {
    path.iter().flat_map(|block| [*block; 4]).collect()
}

fn parent((salt, path): &Place) -> Option<u64> {
    (path.len() > 1).then(|| name(&(*salt, path[..path.len() - 1].to_vec())))
}

impl Engine {
    fn holds(&self, tier: StorageTier, place: &Place) -> bool {
        self.0.contains_key(&(tier, place.clone()))
    }

    /// The event of an operation, if it is possible.
    fn run(&mut self, op: &Op) -> Option<Msg> {
        match op {
            Op::Compute { path, salt } => {
                let prefix = |len: usize| (*salt, path[..len].to_vec());
                let from = (1..=path.len()).take_while(|len| self.holds(Device, &prefix(*len))).count();
                let new: Vec<Place> = (from + 1..=path.len()).map(prefix).collect();
                let entry = |place: &Place| match salt.filter(|_| place.1.len() == 1) {
                    Some(salt) => [salt].into(),
                    None => Msg::Nil,
                };
                let keys = keys(new.iter().map(entry).collect());
                let event = store(new.iter().map(name), parent(new.first()?), &tokens_of(&path[from..]), [keys]);
                new.into_iter().for_each(|place| _ = self.0.insert((Device, place), 1));
                Some(event)
            }
            Op::Offload { which, tier, form } => {
                let held: Vec<Place> = self.0.keys().map(|(_, place)| place.clone()).collect();
                let place = held.get(which.index(held.len().max(1)))?.clone();
                let medium = if *tier == Disk { "FS" } else { "cpu" };
                let last = tokens_of(&place.1[place.1.len() - 1..]);
                let event = match form {
                    0 => sized(&[name(&place)], &[], 0, medium),
                    1 => sized(&[name(&place)], &tokens_of(&place.1), 16, medium),
                    _ => store([name(&place)], parent(&place), &last, [("medium", medium.into())]),
                };
                *self.0.entry((*tier, place)).or_default() += 1;
                Some(event)
            }
            Op::Evict { which, tier } => {
                let has_child =
                    |place: &Place| (0..2).any(|n| self.holds(*tier, &(place.0, [&place.1[..], &[n]].concat())));
                let held = self.0.keys().filter(|(of, place)| of == tier && (*tier != Device || !has_child(place)));
                let held: Vec<Place> = held.map(|(_, place)| place.clone()).collect();
                let place = held.get(which.index(held.len().max(1)))?.clone();
                let event = gone(
                    &[name(&place)],
                    match tier {
                        Disk => "FS",
                        HostPinned => "CPU",
                        _ => "GPU",
                    },
                );
                let copies = self.0.get_mut(&(*tier, place.clone()))?;
                *copies -= 1;
                if *copies == 0 {
                    self.0.remove(&(*tier, place));
                }
                Some(event)
            }
            Op::Clear => {
                self.0.retain(|(tier, _), _| *tier != Device);
                Some(Msg::named([("type", "AllBlocksCleared".into())]))
            }
        }
    }

    /// Cached blocks of a prompt in device, host and disk, each from the end of the nearer tier.
    fn cached(&self, salt: Option<&'static str>, path: &[u32]) -> [u32; 3] {
        let mut reached = 0;
        [Device, HostPinned, Disk].map(|tier| {
            let from = reached;
            while reached < path.len() && self.holds(tier, &(salt, path[..=reached].to_vec())) {
                reached += 1;
            }
            (reached - from) as u32
        })
    }
}

proptest! {
    #![proptest_config(effort(128, "tests/wire_offload.proptest-regressions"))]

    /// Copies without tokens or keys, chunks and clears, per tier and namespace.
    #[test]
    fn an_index_behind_the_decoder_equals_an_engine_with_a_connector(ops in prop::collection::vec(op(), 1..60)) {
        let (mut engine, mut stream) = (Engine::default(), Stream::new());
        for op in &ops {
            let Some(event) = engine.run(op) else { continue };
            let applied = stream.apply([event]);
            prop_assert_eq!((applied.unknown_contents, applied.unknown_removals, applied.waiting), (0, 0, 0));
            prop_assert_eq!(stream.index.held_blocks(), engine.0.len());
            for salt in [None, Some("a"), Some("b"), Some("c")] {
                for n in 0..16_u32 {
                    let path: Vec<u32> = (0..4).map(|bit| n >> bit & 1).collect();
                    prop_assert_eq!(stream.held(&tokens_of(&path), None, salt), engine.cached(salt, &path));
                }
            }
        }
    }
}
