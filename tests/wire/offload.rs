//! Stores in lower tiers: placeholders, chunks and copies without keys, as connectors publish them.

use super::*;
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
fn a_store_without_tokens_is_a_copy_of_the_known_block() {
    for placeholder in [
        sized(&[12], &[], 0, "CPU"),
        sized(&[12], &[], 0, "cpu"),
        sized(&[12], &TOKENS, 8, "CPU"),
        sized(&[12], &[7; 16], 16, "CPU"),
    ] {
        let mut stream = Stream::new();
        stream.apply([store([11, 12], None, &TOKENS, [])]);
        assert_eq!(stream.apply([placeholder.clone()]).stored, 1, "{placeholder:?}");
        assert_eq!(stream.plain(), [2, 0, 0]);
        stream.apply([gone(&[12], "GPU")]);
        assert_eq!(stream.plain(), [1, 1, 0], "{placeholder:?}");
        stream.apply([gone(&[12], "CPU")]);
        assert_eq!(stream.plain(), [1, 0, 0]);
    }
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
fn copies_without_keys_keep_the_namespace_of_their_block() {
    let salted = || store([11], None, &TOKENS[..4], vec![keys(vec![["A"].into()])]);
    let held = |stream: &Stream| [Some("A"), None, Some("B")].map(|salt| stream.held(&TOKENS, None, salt));
    let mut stream = Stream::new();
    stream.apply([salted()]);
    stream.apply([copy(&[11], None, &TOKENS[..4], vec![])]);
    assert_eq!(held(&stream), [[1, 0, 0], [0; 3], [0; 3]]);
    // The chain on the device keeps its salt, and so does a copy behind it that the device never had.
    stream.apply([store([12], Some(11), &TOKENS[4..], [])]);
    assert_eq!(held(&stream), [[2, 0, 0], [0; 3], [0; 3]]);
    stream.apply([gone(&[12, 11], "GPU"), copy(&[12], Some(11), &TOKENS[4..], vec![])]);
    assert_eq!(held(&stream), [[0, 2, 0], [0; 3], [0; 3]]);
    stream.apply([salted(), gone(&[11, 12], "CPU"), gone(&[11], "GPU")]);
    assert_eq!((held(&stream), stream.decoder.namespaces()), ([[0; 3]; 3], 0));

    // Mooncake and LMCache name no adapter either.
    let mut stream = Stream::new();
    stream.apply([store([11, 12], None, &TOKENS, vec![("lora_name", "ad".into())])]);
    stream.apply([copy(&[11, 12], None, &TOKENS, vec![]), gone(&[11, 12], "GPU")]);
    assert_eq!((stream.held(&TOKENS, Some("ad"), None), stream.plain()), ([0, 2, 0], [0; 3]));

    // An image, and the same token ids without it.
    let image = Msg::Array(vec![Msg::Array(vec!["img".into(), 0.into()])]);
    let mut stream = Stream::new();
    stream.apply([store([11, 12], None, &TOKENS, vec![keys(vec![Msg::Nil, image])])]);
    stream.apply([copy(&[11, 12], None, &TOKENS, vec![]), gone(&[12], "GPU")]);
    assert_eq!(stream.plain(), [1, 0, 0]);
    let objects = MmBlocks::listed([vec![], vec![MmSpan::hash_of_id("img").expect("an id")]]);
    let prompt: Vec<_> = requested_with(&TOKENS, None, None, &objects).into_iter().map(BlockHash).collect();
    let mut overlaps = Overlaps::default();
    stream.index.overlaps(&prompt, &mut overlaps);
    assert_eq!(overlaps.iter().next().map(|(hit, lower)| (hit.device_blocks, lower.blocks())), Some((1, 1)));
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

/// Chunks that share a prefix announce its blocks once each, and two stores of a tier hold a block each.
#[test]
fn copies_in_lower_tiers_are_counted() {
    let own = || vec![keys(vec![Msg::Nil, Msg::Nil])];
    let other = [1, 2, 3, 4, 9, 9, 9, 9];
    let mut stream = Stream::new();
    stream.apply([copy(&[11, 12], None, &TOKENS, own()), copy(&[11, 13], None, &other, own())]);
    stream.apply([gone(&[11, 12], "CPU")]);
    assert_eq!((stream.plain(), stream.held(&other, None, None)), ([0, 1, 0], [0, 2, 0]));
    stream.apply([gone(&[11, 13], "CPU")]);
    assert_eq!(stream.index.held_blocks(), 0);

    let stored = |owner: &'static str| sized(&[11], &[], 0, owner);
    stream.apply([store([11], None, &TOKENS[..4], [])]);
    stream.apply([stored("FS"), stored("OBJ"), gone(&[11], "GPU"), gone(&[11], "FS")]);
    assert_eq!(stream.plain(), [0, 0, 1]);
    stream.apply([gone(&[11], "OBJ")]);
    assert_eq!(stream.plain(), [0; 3]);
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

#[test]
fn names_of_one_tier_are_merged_within_a_batch() {
    let of = [
        copy(&[11], Some(10), &TOKENS[..4], vec![]),
        sized(&[12], &[], 0, "CPU"),
        sized(&[13], &[], 0, "CPU"),
        sized(&[14], &[], 0, "FS"),
        store([15], None, &TOKENS[..4], []),
    ];
    let (events, report) = next(&mut decoder(), of);
    let expected = [
        offloaded(HostPinned, Some(10), &[(11, Some(PLAIN[0])), (12, None), (13, None)]),
        offloaded(Disk, None, &[(14, None)]),
        stored(Device, None, &[(15, PLAIN[0])]),
    ];
    assert_eq!((&events[..], report.usable, report.stored_blocks), (&expected[..], 5, 1));
}
