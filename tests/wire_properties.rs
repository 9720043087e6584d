//! Properties of the decoder: equal events in every dialect against a literal model of namespaces, and malformed
//! payloads with all allocated bytes counted.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::internals::wire::{Decoder, DecoderLimits, Finding, Report, WireConfig};
use pointsman::protocol::{EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerId, WorkerRank};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use stats_alloc::Region;

use crate::ALLOCATOR;
use crate::effort::effort;
use crate::msgpack::{Msg, batch};

const RANK: WorkerRank = WorkerRank::new(WorkerId(1), 0);
const BLOCK_SIZE: usize = 4;

fn decoder() -> Decoder {
    let block_size = NonZeroU32::new(BLOCK_SIZE as u32).expect("not zero");
    Decoder::new(WireConfig { rank: RANK, ranks: 0..2, block_size, is_eagle: false, limits: DecoderLimits::default() })
}

fn decode(payload: &[u8]) -> (Vec<RouterEvent>, Report) {
    let mut events = Vec::new();
    let report = decoder().decode(payload, &mut events);
    // All tiers are cleared if the end of the batch is lost.
    if report.lost_removals.is_some_and(|finding| report.findings.get(finding) > 0)
        && let Some(kept) = events.len().checked_sub(StorageTier::ALL.len())
        && events[kept..].iter().all(|event| event.data == KvEvent::TierCleared)
    {
        events.truncate(kept);
    }
    assert!(report.usable as usize + report.findings.iter().count() * 4 >= events.len());
    (singly(events), report)
}

/// The same events with one removal or copy per name: their grouping is not specified.
fn singly(events: Vec<RouterEvent>) -> Vec<RouterEvent> {
    let split = |RouterEvent { rank, tier, data }| {
        let data = match data {
            KvEvent::Removed { blocks } => {
                blocks.into_iter().map(|name| KvEvent::Removed { blocks: vec![name] }).collect()
            }
            KvEvent::GroupRemoved { group, blocks } => {
                blocks.into_iter().map(|name| KvEvent::GroupRemoved { group, blocks: vec![name] }).collect()
            }
            KvEvent::Offloaded { parent, mut blocks } => {
                let named = blocks.split_off(blocks.iter().take_while(|(_, hash)| hash.is_some()).count());
                let hashed = (!blocks.is_empty()).then_some(KvEvent::Offloaded { parent, blocks });
                let named = named.into_iter().map(|block| KvEvent::Offloaded { parent: None, blocks: vec![block] });
                hashed.into_iter().chain(named).collect()
            }
            KvEvent::Stored { .. } | KvEvent::Cleared | KvEvent::TierCleared | KvEvent::GroupStored { .. } => {
                vec![data]
            }
        };
        data.into_iter().map(move |data| RouterEvent { rank, tier, data })
    };
    events.into_iter().flat_map(split).collect()
}

/// An operation of an engine. Names are few, so they recur in other places.
#[derive(Clone, Debug)]
enum Op {
    Store {
        names: Vec<u64>,
        parent: Option<u64>,
        tokens: Vec<u32>,
        tier: StorageTier,
        salt: Option<&'static str>,
        lora: Option<&'static str>,
    },
    Remove {
        names: Vec<u64>,
        tier: StorageTier,
    },
    Clear,
}

/// Hashes of every width and either sign.
fn name() -> impl Strategy<Value = u64> {
    prop_oneof![0..6_u64, Just(u64::MAX), Just(1 << 63), Just(40_000), Just(1 << 40)]
}

fn tier() -> impl Strategy<Value = StorageTier> {
    prop_oneof![3 => Just(StorageTier::Device), 1 => Just(StorageTier::HostPinned), 1 => Just(StorageTier::Disk)]
}

fn token() -> impl Strategy<Value = u32> {
    prop_oneof![0..200_u32, 200..150_000_u32, any::<u32>()]
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = proptest::collection::vec(token(), BLOCK_SIZE * 4);
    let names = || proptest::collection::vec(name(), 1..=4);
    let salt = prop_oneof![2 => Just(None), 1 => Just(Some("s")), 1 => Just(Some("tenant-of-a-name-beyond-31-bytes"))];
    let lora = prop_oneof![3 => Just(None), 1 => Just(Some("a")), 1 => Just(Some("s"))];
    let store = (names(), proptest::option::of(name()), tokens, tier(), salt, lora).prop_map(
        |(names, parent, mut tokens, tier, salt, lora)| {
            tokens.truncate(names.len() * BLOCK_SIZE);
            Op::Store { names, parent, tokens, tier, salt, lora }
        },
    );
    let remove = (names(), tier()).prop_map(|(names, tier)| Op::Remove { names, tier });
    prop_oneof![8 => store, 4 => remove, 1 => Just(Op::Clear)]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Dialect {
    VllmArray,
    VllmMap,
    SglangArray,
    SglangMap,
}

/// Encoding of one publisher.
#[derive(Clone, Copy, Debug)]
struct Writer {
    dialect: Dialect,
    binary_hashes: bool,
}

impl Writer {
    fn hash(self, name: u64) -> Msg {
        match self.dialect {
            _ if self.binary_hashes => Msg::Bin([&[0xee; 24][..], &name.to_be_bytes()].concat()),
            Dialect::VllmArray | Dialect::VllmMap => Msg::Uint(name),
            Dialect::SglangArray | Dialect::SglangMap => Msg::Int(name.cast_signed()),
        }
    }

    fn medium(self, tier: StorageTier) -> Msg {
        let is_vllm = matches!(self.dialect, Dialect::VllmArray | Dialect::VllmMap);
        Msg::from(match tier {
            StorageTier::Device => "GPU",
            StorageTier::HostPinned if is_vllm => "CPU",
            StorageTier::HostPinned => "CPU_PINNED",
            StorageTier::Disk if is_vllm => "STORAGE",
            StorageTier::Disk => "DISK",
            StorageTier::External => "EXTERNAL",
        })
    }

    /// Encodes an event. For a store, `under` is the namespace from the model, which SGLang includes in every store.
    fn event(self, op: &Op, under: Under) -> Msg {
        match op {
            Op::Store { names, parent, tokens, tier, salt, .. } => {
                let n_blocks = names.len();
                let names: Msg = names.iter().map(|name| self.hash(*name)).collect();
                let parent_hash = parent.map_or(Msg::Nil, |name| self.hash(name));
                let tokens: Msg = tokens.iter().map(|token| u64::from(*token)).collect();
                let size = Msg::Uint(BLOCK_SIZE as u64);
                let medium = self.medium(*tier);
                let salt = salt.filter(|_| parent.is_none());
                let keys = |block: usize| {
                    let keys: Vec<_> = under.lora.into_iter().chain(salt.filter(|_| block == 0)).collect();
                    if keys.is_empty() { Msg::Nil } else { keys.into_iter().collect() }
                };
                let keys: Msg = (0..n_blocks).map(keys).collect();
                let tag = Msg::from("BlockStored");
                match self.dialect {
                    Dialect::VllmArray => {
                        let lora = under.lora.into();
                        Msg::Array(vec![tag, names, parent_hash, tokens, size, Msg::Nil, medium, lora, keys, 0.into()])
                    }
                    Dialect::SglangArray => {
                        let mut items = vec![tag, names, parent_hash, tokens, size, Msg::Nil, medium];
                        items.extend(under.salt.map(|salt| Msg::named([("cache_salt", salt.into())])));
                        Msg::Array(items)
                    }
                    Dialect::VllmMap | Dialect::SglangMap => {
                        let mut fields = vec![
                            ("type", tag),
                            ("block_hashes", names),
                            ("parent_block_hash", parent_hash),
                            ("token_ids", tokens),
                            ("block_size", size),
                            ("lora_id", Msg::Nil),
                            ("medium", medium),
                            ("lora_name", under.lora.into()),
                        ];
                        match self.dialect {
                            Dialect::VllmMap => fields.push(("extra_keys", keys)),
                            _ => fields.push(("cache_salt", under.salt.into())),
                        }
                        Msg::named(fields)
                    }
                }
            }
            Op::Remove { names, tier } => {
                let (tag, medium) = (Msg::from("BlockRemoved"), self.medium(*tier));
                let names = names.iter().map(|name| self.hash(*name)).collect();
                match self.dialect {
                    Dialect::VllmArray | Dialect::SglangArray => Msg::Array(vec![tag, names, medium]),
                    Dialect::VllmMap | Dialect::SglangMap => {
                        Msg::named([("type", tag), ("block_hashes", names), ("medium", medium)])
                    }
                }
            }
            Op::Clear => match self.dialect {
                Dialect::VllmArray | Dialect::SglangArray => Msg::from(["AllBlocksCleared"]),
                Dialect::VllmMap | Dialect::SglangMap => Msg::named([("type", "AllBlocksCleared".into())]),
            },
        }
    }
}

/// Adapter and salt of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Under {
    lora: Option<&'static str>,
    salt: Option<&'static str>,
}

/// A block with a namespace.
#[derive(Debug, Default)]
struct Block {
    under: Under,
    /// Tiers of the copies.
    tiers: Vec<StorageTier>,
    /// Whether the device may have a further copy, since the block was stored again at the start of a prompt.
    is_doubted: bool,
}

/// Literal model of the namespaces of an engine's blocks.
#[derive(Debug, Default)]
struct Model {
    blocks: BTreeMap<u64, Block>,
    is_vllm: bool,
    /// Whether a connector of vLLM has announced copies.
    has_connector: bool,
}

impl Model {
    /// The decoded event, and the namespace of a store.
    fn apply(&mut self, op: &Op) -> (Under, RouterEvent) {
        let mut under = Under::default();
        let (tier, data) = match op {
            Op::Store { names, parent, tokens, tier, salt, lora } => {
                match parent {
                    Some(parent) => under = self.blocks.get(parent).map(|block| block.under).unwrap_or_default(),
                    None => under.salt = *salt,
                }
                under.lora = lora.or(under.lora);
                let block_size = NonZeroU32::new(BLOCK_SIZE as u32).expect("not zero");
                let scheme =
                    HashScheme { lora_name: under.lora, cache_salt: under.salt, ..HashScheme::new(block_size) };
                let hashes = BlockHasher::new(scheme).block_hashes(tokens, &MmBlocks::NONE);
                let is_stated = parent.is_some() || self.is_vllm || under.salt.is_some();
                for name in names {
                    if *tier != StorageTier::Device {
                        self.has_connector |= self.is_vllm;
                        match self.blocks.get_mut(name) {
                            Some(block) => block.tiers.push(*tier),
                            None if is_stated && under != Under::default() => {
                                self.blocks.insert(*name, Block { under, tiers: vec![*tier], is_doubted: false });
                            }
                            None => {}
                        }
                    } else if under == Under::default() {
                        self.blocks.remove(name);
                    } else {
                        let block = self.blocks.entry(*name).or_default();
                        block.under = under;
                        if !block.tiers.contains(tier) || parent.is_some() {
                            block.tiers.push(*tier);
                        } else {
                            block.is_doubted = true;
                        }
                    }
                }
                let block =
                    |(name, hash): (&u64, &_)| StoredBlock { engine_hash: EngineHash(*name), block_hash: *hash };
                let blocks = names.iter().zip(hashes.iter()).map(block);
                let parent = parent.map(EngineHash);
                let copy = |StoredBlock { engine_hash, block_hash }| (engine_hash, is_stated.then_some(block_hash));
                let data = match tier {
                    StorageTier::Device => KvEvent::Stored { parent, blocks: blocks.collect() },
                    _ => KvEvent::Offloaded { parent, blocks: blocks.map(copy).collect() },
                };
                (*tier, data)
            }
            Op::Remove { names, tier } => {
                for name in names {
                    let Some(block) = self.blocks.get_mut(name) else { continue };
                    match block.tiers.iter().position(|other| other == tier) {
                        Some(at) => _ = block.tiers.swap_remove(at),
                        None => block.is_doubted &= *tier != StorageTier::Device,
                    }
                    if block.tiers.is_empty() && !block.is_doubted {
                        self.blocks.remove(name);
                    }
                }
                (*tier, KvEvent::Removed { blocks: names.iter().copied().map(EngineHash).collect() })
            }
            Op::Clear if self.has_connector => {
                self.blocks.retain(|_, block| {
                    block.tiers.retain(|tier| *tier != StorageTier::Device);
                    block.is_doubted = false;
                    !block.tiers.is_empty()
                });
                (StorageTier::Device, KvEvent::TierCleared)
            }
            Op::Clear => {
                self.blocks.clear();
                (StorageTier::Device, KvEvent::Cleared)
            }
        };
        (under, RouterEvent { rank: RANK, tier, data })
    }
}

fn writer() -> impl Strategy<Value = Writer> {
    use Dialect::{SglangArray, SglangMap, VllmArray, VllmMap};
    (proptest::sample::select(&[VllmArray, VllmMap, SglangArray, SglangMap][..]), any::<bool>())
        .prop_map(|(dialect, binary_hashes)| Writer { dialect, binary_hashes })
}

/// A publisher's encoded stream, its expected events with single removals, and the number of namespace entries.
fn written(writer: Writer, ops: &[Op]) -> (Vec<Msg>, Vec<RouterEvent>, usize) {
    let is_vllm = matches!(writer.dialect, Dialect::VllmArray | Dialect::VllmMap);
    let mut model = Model { is_vllm, ..Model::default() };
    let mut events = Vec::new();
    let mut expected = Vec::new();
    for op in ops {
        let mut op = op.clone();
        if let (Op::Store { lora, .. }, Dialect::SglangArray) = (&mut op, writer.dialect) {
            *lora = None; // this dialect has no field for it
        }
        let (under, event) = model.apply(&op);
        events.push(writer.event(&op, under));
        expected.push(event);
    }
    (events, singly(expected), model.blocks.len())
}

/// Any well-formed item.
fn item() -> impl Strategy<Value = Msg> {
    const WORDS: [&str; 8] =
        ["BlockStored", "BlockRemoved", "type", "block_hashes", "token_ids", "extra_keys", "GPU", "x"];
    let leaf = prop_oneof![
        Just(Msg::Nil),
        any::<bool>().prop_map(Msg::Bool),
        any::<u64>().prop_map(Msg::Uint),
        (0..10_u64).prop_map(Msg::Uint),
        any::<i64>().prop_map(Msg::Int),
        any::<f64>().prop_map(Msg::Float),
        proptest::sample::select(&WORDS[..]).prop_map(Msg::from),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(Msg::Bin),
    ];
    leaf.prop_recursive(5, 60, 8, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..8).prop_map(Msg::Array),
            proptest::collection::vec((inner.clone(), inner), 0..8).prop_map(Msg::Map),
        ]
    })
}

/// A removal that is valid in every dialect.
fn neighbour(name: u64) -> (Msg, RouterEvent) {
    let event = KvEvent::Removed { blocks: vec![EngineHash(name)] };
    let msg = Msg::named([("type", "BlockRemoved".into()), ("block_hashes", [name].into())]);
    (msg, RouterEvent { rank: RANK, tier: StorageTier::Device, data: event })
}

/// Limit of the decoder's allocations for a batch of this length, including growth.
fn bytes_max(payload: &[u8]) -> usize {
    16_384 + 64 * payload.len()
}

/// Decodes and checks the total of allocated bytes.
fn decode_counted(payload: &[u8]) -> (Vec<RouterEvent>, Report) {
    let region = Region::new(ALLOCATOR);
    let decoded = decode(payload);
    let change = region.change();
    let bytes = change.bytes_allocated;
    assert!(bytes <= bytes_max(payload), "{bytes} bytes for a payload of {}", payload.len());
    decoded
}

/// Checks a property for this many cases.
fn check<S: Strategy>(cases: u32, strategy: S, property: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = effort(cases, "tests/wire_properties.proptest-regressions");
    if let Err(failure) = TestRunner::new(config).run(&strategy, property) {
        panic!("{failure}");
    }
}

#[test]
fn all_dialects_decode_to_equal_events() {
    alone!();
    check(128, (writer(), proptest::collection::vec(op(), 1..40), 1..5_usize), |(writer, ops, batches)| {
        let (events, expected, in_namespaces) = written(writer, &ops);
        let mut decoder = decoder();
        let mut decoded = Vec::new();
        for events in events.chunks(events.len().div_ceil(batches)) {
            let report = decoder.decode(&batch(events.iter().cloned()), &mut decoded);
            prop_assert!(report.findings.is_empty(), "{:?}", report);
            prop_assert_eq!((report.events, report.usable), (events.len() as u32, events.len() as u32));
        }
        prop_assert_eq!(singly(decoded), expected);
        prop_assert_eq!(decoder.namespaces(), in_namespaces);
        Ok(())
    });
}

#[test]
fn truncated_batches_keep_complete_events() {
    alone!();
    check(64, (writer(), proptest::collection::vec(op(), 1..8)), |(writer, ops)| {
        let (events, expected, _) = written(writer, &ops);
        let payload = batch(events);
        for len in 0..payload.len() {
            let (decoded, report) = decode_counted(&payload[..len]);
            prop_assert_eq!(&decoded[..], &expected[..decoded.len()]);
            prop_assert_eq!(report.lost_removals, Some(Finding::Truncated));
            prop_assert_eq!(report.findings.get(Finding::Truncated), 1, "{:?}", report);
        }
        Ok(())
    });
}

#[test]
fn events_beside_an_invalid_one_are_kept() {
    alone!();
    check(256, (item(), any::<u64>()), |(odd, name)| {
        let ((first, first_event), (last, last_event)) = (neighbour(name), neighbour(7));
        let (events, report) = decode_counted(&batch([first, odd, last]));
        prop_assert_eq!(events.first(), Some(&first_event));
        prop_assert_eq!(events.last(), Some(&last_event));
        prop_assert_eq!(report.events, 3);
        Ok(())
    });
}

#[test]
fn arbitrary_bytes_never_panic() {
    alone!();
    let flips = proptest::collection::vec((any::<proptest::sample::Index>(), 0..8_u8), 1..6);
    let noise = proptest::collection::vec(any::<u8>(), 0..200);
    check(128, (writer(), proptest::collection::vec(op(), 1..8), flips, noise), |(writer, ops, flips, noise)| {
        decode_counted(&noise);
        decode_counted(&[&[0x92, 0xc0, 0xdc, 0xff, 0xff][..], &noise].concat());
        let (events, expected, _) = written(writer, &ops);
        let mut payload = batch(events);
        let mut spoilt_from = payload.len();
        for (at, bit) in flips {
            let at = at.index(payload.len());
            payload[at] ^= 1 << bit;
            spoilt_from = spoilt_from.min(at);
        }
        let (decoded, _) = decode_counted(&payload);
        // Events that were complete before the first corrupted byte are decoded unchanged.
        let (before, _) = decode(&payload[..spoilt_from]);
        prop_assert_eq!(&decoded[..before.len()], &expected[..before.len()]);
        Ok(())
    });
}

#[test]
fn declared_lengths_reserve_no_memory() {
    alone!();
    const MOST: [u8; 4] = [0xff; 4];
    let endless = |marker: u8| Msg::Raw([&[marker][..], &MOST].concat());
    let stored = |at: usize, endless: Msg| {
        let mut items = vec![Msg::from("BlockStored"), [1_u64].into(), Msg::Nil, [1_u64, 2, 3, 4].into(), 4.into()];
        items.extend([Msg::Nil, "GPU".into(), Msg::Nil, Msg::Nil]);
        items[at] = endless;
        Msg::Array(items)
    };
    let (first, first_event) = neighbour(1);
    // Arrays, maps, strings, bytes and extensions, in each field of an event and in place of an event.
    for marker in [0xdd, 0xdf, 0xdb, 0xc6, 0xc9] {
        for event in (0..9).map(|at| stored(at, endless(marker))).chain([endless(marker)]) {
            let (events, report) = decode_counted(&batch([first.clone(), event.clone()]));
            assert_eq!(events[..], *std::slice::from_ref(&first_event), "{event:?}");
            let cut = report.findings.get(Finding::Truncated);
            assert_eq!((cut, report.usable), (1, 1), "{event:?} {report:?}");
        }
    }
    for head in [&[0xdd][..], &[0x92, 0xc0, 0xdd], &[0x92, 0xdd]] {
        let (events, report) = decode_counted(&[head, &MOST].concat());
        assert_eq!((events.len(), report.findings.get(Finding::Truncated)), (0, 1));
    }
}

#[test]
fn ten_million_hashes_cost_their_event_and_no_memory() {
    alone!();
    let many = |count: usize| Msg::Raw([&[0xdd][..], &(count as u32).to_be_bytes(), &vec![1; count]].concat());
    let (first, first_event) = neighbour(1);
    let (last, last_event) = neighbour(2);
    for field in ["block_hashes", "token_ids"] {
        let huge = Msg::named([("type", "BlockStored".into()), (field, many(10_000_000))]);
        let payload = batch([first.clone(), huge, last.clone()]);
        let region = Region::new(ALLOCATOR);
        let (events, report) = decode(&payload);
        let bytes = region.change().bytes_allocated;
        assert!(bytes < 8_192, "{bytes} bytes");
        assert_eq!(events, [first_event.clone(), last_event.clone()]);
        assert_eq!(report.findings.iter().collect::<Vec<_>>(), [(Finding::TooLarge, 1)]);
    }
    let (events, report) = decode(&vec![0x92; (16 << 20) + 1]);
    assert_eq!((events.len(), report.findings.get(Finding::TooLarge)), (0, 1));
}

#[test]
fn memory_of_a_large_batch_is_released() {
    alone!();
    let mut decoder = decoder();
    let mut events = Vec::new();
    let region = Region::new(ALLOCATOR);
    let names = 0..60_000_u64;
    let tokens = (0..240_000_u64).collect();
    let event = Msg::named([
        ("type", "BlockStored".into()),
        ("block_hashes", names.collect()),
        ("token_ids", tokens),
        ("block_size", 4.into()),
    ]);
    let payload = batch([event]);
    let report = decoder.decode(&payload, &mut events);
    assert_eq!(report.stored_blocks, 60_000);
    drop((payload, events));
    let change = region.change();
    let kept = change.bytes_allocated as isize - change.bytes_deallocated as isize;
    assert!(kept < 512 * 1024, "{kept} bytes kept");
}

#[test]
fn nesting_of_any_depth_is_skipped() {
    alone!();
    let (first, first_event) = neighbour(1);
    let (last, last_event) = neighbour(2);
    for (depth, marker) in [(200_000, 0x91), (200_000, 0x81)] {
        let tower = match marker {
            0x91 => [vec![0x91; depth], vec![0xc0]].concat(),
            _ => [[0x81, 0xc0].repeat(depth), vec![0xc0]].concat(),
        };
        let inside = Msg::named([("type", "BlockRemoved".into()), ("block_hashes", Msg::Raw(tower.clone()))]);
        for odd in [Msg::Raw(tower.clone()), inside] {
            let (events, report) = decode_counted(&batch([first.clone(), odd, last.clone()]));
            let cleared =
                report.lost_removals.map(|_| RouterEvent { data: KvEvent::TierCleared, ..last_event.clone() });
            let expected: Vec<_> =
                [Some(first_event.clone()), cleared, Some(last_event.clone())].into_iter().flatten().collect();
            assert_eq!((events, report.usable), (expected, 2));
        }
    }
}
