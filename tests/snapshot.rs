//! Snapshots: encoding, refusal of other bytes, and continuation of a stream after a restore.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::internals::index::{Index, Overlaps, RankDump};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::wire::{Decoder, DecoderLimits, DecoderState, GroupRecord, NamespaceRecord, WireConfig};
use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, Timestamp, WorkerId, WorkerRank,
};
use pointsman::{
    RestoreState, Snapshot, SnapshotError, StreamState,
    internals::ingest::{
        ColdPosition, DegradationReason, IngestEffect, IngestInput, Source, SourceConfig, SourcePosition,
    },
    internals::snapshot::{RankSnapshot, SnapshotLayout},
};
use pointsman_trial::engine::{self, Block, CacheEvent, Tier};
use pointsman_trial::kv_events::{Dialect, Encoder};
use proptest::prelude::*;

use crate::effort::effort;

const RANK: WorkerRank = WorkerRank::new(WorkerId(7), 1);
const BLOCK_SIZE: u32 = 2;

fn layout() -> SnapshotLayout {
    SnapshotLayout::new("llama", NonZeroU32::new(BLOCK_SIZE).expect("not zero"), false)
}

fn some_event(rank: WorkerRank) -> impl Strategy<Value = RouterEvent> {
    let block = (any::<u64>(), any::<u64>())
        .prop_map(|(name, hash)| StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(hash) });
    let stored = (proptest::option::of(any::<u64>()), proptest::collection::vec(block, 0..5))
        .prop_map(|(parent, blocks)| KvEvent::Stored { parent: parent.map(EngineHash), blocks });
    let copy = (any::<u64>(), proptest::option::of(any::<u64>()))
        .prop_map(|(name, hash)| (EngineHash(name), hash.map(BlockHash)));
    let offloaded = (proptest::option::of(any::<u64>()), proptest::collection::vec(copy, 0..5))
        .prop_map(|(parent, blocks)| KvEvent::Offloaded { parent: parent.map(EngineHash), blocks });
    let names = || proptest::collection::vec(any::<u64>().prop_map(EngineHash), 0..5);
    let removed = names().prop_map(|blocks| KvEvent::Removed { blocks });
    let window = any::<u32>().prop_map(|blocks| NonZeroU32::new(blocks).unwrap_or(NonZeroU32::MIN));
    let in_group =
        (any::<u8>(), window, any::<bool>(), names()).prop_map(|(group, window_blocks, starts_prompt, blocks)| {
            KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks }
        });
    let from_group = (any::<u8>(), names()).prop_map(|(group, blocks)| KvEvent::GroupRemoved { group, blocks });
    let of_group =
        prop_oneof![in_group, from_group].prop_map(move |data| RouterEvent { rank, tier: StorageTier::Device, data });
    let tier = proptest::sample::select(&StorageTier::ALL[..]);
    let of_tier = (prop_oneof![stored, offloaded, removed, Just(KvEvent::Cleared), Just(KvEvent::TierCleared)], tier)
        .prop_map(move |(data, tier)| RouterEvent { rank, tier, data });
    prop_oneof![3 => of_tier, 1 => of_group]
}

fn some_position() -> impl Strategy<Value = SourcePosition> {
    let cause = (0..4, any::<u64>(), any::<u64>()).prop_map(|(cause, from, first)| match cause {
        0 => DegradationReason::ReplayGap { from, first },
        1 => DegradationReason::ReplayHole { from },
        2 => DegradationReason::ReplayFailed { from },
        _ => DegradationReason::NoReplay { from },
    });
    let cold = (any::<u64>(), cause).prop_map(|(stored_blocks, cause)| ColdPosition { stored_blocks, cause });
    let hashes = proptest::collection::vec(any::<u64>(), 1..=SourcePosition::HASHES_MAX);
    (64..u64::MAX, hashes, proptest::option::of(cold)).prop_map(|(next, payload_hashes, cold)| SourcePosition {
        next,
        payload_hashes,
        cold,
    })
}

fn some_rank(rank: WorkerRank) -> impl Strategy<Value = RankSnapshot> {
    let holds = any::<[u32; 5]>().prop_filter("held somewhere", |holds| *holds != [0; 5]);
    let record = (any::<[u64; 3]>(), holds).prop_map(|([name, lora, salt], holds)| NamespaceRecord {
        engine_hash: EngineHash(name),
        lora,
        salt,
        holds,
    });
    let group = any::<(u8, u32, bool)>().prop_map(|(group, window_blocks, is_main)| GroupRecord {
        group,
        window_blocks,
        is_main,
    });
    let identities = proptest::collection::vec(any::<(u64, u64)>(), 0..4);
    let groups = proptest::collection::vec(group, 0..4);
    let decoder = (groups, any::<bool>(), identities, proptest::collection::vec(record, 0..4)).prop_map(
        |(groups, has_connector, identities, namespaces)| DecoderState {
            groups,
            has_connector,
            identities,
            namespaces,
        },
    );
    let events = proptest::collection::vec(some_event(rank), 0..5);
    (".{0,12}", some_position(), decoder, events, any::<u64>()).prop_map(
        move |(endpoint, position, decoder, events, evicted_blocks)| RankSnapshot {
            rank,
            endpoint,
            position,
            decoder,
            events,
            evicted_blocks,
        },
    )
}

fn some_snapshot() -> impl Strategy<Value = Snapshot> {
    let ranks = proptest::collection::btree_set((any::<u64>(), any::<u32>()), 0..4).prop_flat_map(|ranks| {
        ranks.into_iter().map(|(worker, rank)| some_rank(WorkerRank::new(WorkerId(worker), rank))).collect::<Vec<_>>()
    });
    let layout = (".{0,12}", any::<u32>(), any::<bool>(), any::<u64>())
        .prop_map(|(pool, block_size, is_eagle, hash_seed)| SnapshotLayout { pool, block_size, is_eagle, hash_seed });
    (layout, any::<u64>(), ranks).prop_map(|(layout, created_ms, ranks)| Snapshot { layout, created_ms, ranks })
}

/// The bytes with a valid checksum.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let contents = bytes.len().saturating_sub(8);
    let checksum = xxh3(&bytes[..contents]);
    bytes.truncate(contents);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

/// Reads the correct checksum from the refusal of a wrong one.
fn xxh3(contents: &[u8]) -> u64 {
    let checked = [contents, &[0; 8]].concat();
    match Snapshot::decode(&checked) {
        Err(SnapshotError::Checksum { computed, .. }) => computed,
        Ok(_) | Err(_) => 0, // refused before the checksum, or the checksum is 0
    }
}

proptest! {
    #![proptest_config(effort(256, "tests/snapshot.proptest-regressions"))]

    #[test]
    fn a_snapshot_survives_its_encoding(snapshot in some_snapshot()) {
        prop_assert_eq!(Snapshot::decode(&snapshot.encode()), Ok(snapshot));
    }

    #[test]
    fn damaged_bytes_are_refused(snapshot in some_snapshot(), at in any::<prop::sample::Index>(), flip in 1_u8..) {
        let bytes = snapshot.encode();
        let mut damaged = bytes.clone();
        damaged[at.index(bytes.len())] ^= flip;
        prop_assert!(Snapshot::decode(&damaged).is_err());
        prop_assert!(Snapshot::decode(&bytes[..at.index(bytes.len())]).is_err());
        prop_assert!(Snapshot::decode(&[&bytes[..], &[flip]].concat()).is_err());
    }

    /// Contents with a valid checksum are either refused or equal to what they encode.
    #[test]
    fn bytes_with_a_valid_checksum_have_one_meaning(
        snapshot in some_snapshot(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = snapshot.encode();
        for (at, value) in changes {
            let at = 12 + at.index(bytes.len() - 12); // behind magic and version
            bytes[at] = value;
        }
        let bytes = if cut.index(4) == 0 { bytes[..20 + cut.index(bytes.len() - 20)].to_vec() } else { bytes };
        let bytes = sealed(bytes);
        if let Ok(decoded) = Snapshot::decode(&bytes) {
            prop_assert_eq!(decoded.encode(), bytes);
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        prop_assert!(Snapshot::decode(&bytes).is_err());
    }

    /// Index and decoder that are restored at any message react to all later messages as if they had seen all of them.
    #[test]
    fn a_restored_stream_continues_exactly(
        batches in proptest::collection::vec(proptest::collection::vec(some_cache_event(), 1..6), 1..40),
        cut in any::<prop::sample::Index>(),
    ) {
        let encoder = Encoder { format: Dialect::VllmMap.into(), block_size: BLOCK_SIZE, rank: 1, lora_ids: Arc::default() };
        let payloads: Vec<_> = batches.iter().map(|events| encoder.batch(1.0, events)).collect();
        let (before, after) = payloads.split_at(cut.index(payloads.len()));
        let mut undisturbed = Stream::new();
        before.iter().for_each(|payload| undisturbed.apply(payload));
        let snapshot = undisturbed.snapshot(before.len() as u64 + 1);
        let decoded = Snapshot::decode(&snapshot.encode()).expect("valid");
        prop_assert_eq!(&decoded, &snapshot);
        let mut restored = Stream::restored(&decoded.ranks[0]);
        prop_assert_eq!(restored.overlaps(), undisturbed.overlaps());
        for payload in after {
            undisturbed.apply(payload);
            restored.apply(payload);
            prop_assert_eq!(restored.decoder.state(), undisturbed.decoder.state());
            prop_assert_eq!(restored.overlaps(), undisturbed.overlaps());
            prop_assert_eq!(restored.index.held_blocks(), undisturbed.index.held_blocks());
        }
        restored.index.check_invariants();
    }
}

/// Decoder and index of one rank.
struct Stream {
    decoder: Decoder,
    index: Index,
}

fn wire_config() -> WireConfig {
    WireConfig {
        rank: RANK,
        ranks: 0..2,
        block_size: NonZeroU32::new(BLOCK_SIZE).expect("not zero"),
        is_eagle: false,
        limits: DecoderLimits::default(),
    }
}

impl Stream {
    fn new() -> Self {
        let mut index = Index::new();
        assert!(index.register(RANK, Slot(3), Generation(1)));
        Self { decoder: Decoder::new(wire_config()), index }
    }

    fn restored(rank: &RankSnapshot) -> Self {
        let mut stream = Self { decoder: Decoder::resume(wire_config(), &rank.decoder), ..Self::new() };
        for event in &rank.events {
            stream.index.apply(event);
        }
        stream
    }

    fn apply(&mut self, payload: &[u8]) {
        let mut events = Vec::new();
        let report = self.decoder.decode(payload, &mut events);
        assert_eq!(report.usable, report.events, "{:?}", report.findings);
        for event in &events {
            self.index.apply(event);
        }
    }

    /// Matches of every prompt in all tiers.
    fn overlaps(&self) -> Vec<String> {
        let mut found = Overlaps::default();
        let prompts = (0..4).map(|prompt| {
            let blocks: Vec<_> = (0..7).map(|depth| block(prompt, depth)).collect();
            let salt = blocks[0].cache_salt.as_deref();
            let scheme = HashScheme { cache_salt: salt, ..HashScheme::new(wire_config().block_size) };
            let tokens: Vec<u32> = blocks.iter().flat_map(|block| block.tokens.iter().copied()).collect();
            let hashed = HashedPrompt::from_tokens(&BlockHasher::new(scheme), &tokens, &MmBlocks::NONE);
            self.index.overlaps(hashed.block_hashes(), &mut found);
            format!("{:?} {:?}", found.hits(), found.extensions())
        });
        prompts.collect()
    }

    fn snapshot(&self, next: u64) -> Snapshot {
        let contents = self.index.dump_rank(RANK).expect("registered");
        let rank = RankSnapshot {
            rank: RANK,
            endpoint: "tcp://engine:5557".to_owned(),
            position: SourcePosition { next, payload_hashes: vec![next], cold: None },
            decoder: self.decoder.state(),
            events: contents.events,
            evicted_blocks: contents.evicted_blocks,
        };
        Snapshot { layout: layout(), created_ms: 5, ranks: vec![rank] }
    }
}

/// Events about three short prompts, salted or not: stores, copies, other tiers, removals in any order, clears.
fn some_cache_event() -> impl Strategy<Value = CacheEvent> {
    let tier = || prop_oneof![4 => Just(Tier::Device), 1 => Just(Tier::Host)];
    let stored = (0_u8..4, 0_usize..4, 1_usize..4, tier()).prop_map(|(prompt, from, count, tier)| CacheEvent::Stored {
        tier,
        blocks: (from..from + count).map(|depth| block(prompt, depth)).collect(),
    });
    let removed = (0_u8..4, 0_usize..7, tier())
        .prop_map(|(prompt, depth, tier)| CacheEvent::Removed { tier, hash: name(prompt, depth) });
    prop_oneof![10 => stored, 6 => removed, 1 => Just(CacheEvent::Cleared)]
}

fn name(prompt: u8, depth: usize) -> engine::EngineHash {
    // Prompts 0 and 1 share their first two blocks.
    let prompt = if depth < 2 && prompt == 1 { 0 } else { prompt };
    let mut bytes = [0; 32];
    (bytes[30], bytes[31]) = (prompt, depth as u8 + 1);
    engine::EngineHash(bytes)
}

fn block(prompt: u8, depth: usize) -> Arc<Block> {
    let token = 100 * u32::from(if depth < 2 && prompt == 1 { 0 } else { prompt }) + depth as u32;
    Arc::new(Block {
        hash: name(prompt, depth),
        parent: (depth > 0).then(|| name(prompt, depth - 1)),
        depth: depth as u32,
        tokens: vec![token; BLOCK_SIZE as usize].into(),
        lora_name: None,
        cache_salt: (prompt > 1 && depth == 0).then(|| format!("salt-{prompt}").into()),
    })
}

#[test]
fn restored_contents_of_an_index_with_a_budget_count_as_incomplete() {
    let registered = || {
        let mut index = Index::new();
        index.set_budget(Some(64 << 10));
        assert!(index.register(RANK, Slot(0), Generation(1)));
        index
    };
    let block = |n: u64| StoredBlock { engine_hash: EngineHash(n), block_hash: BlockHash(n) };
    let event = |data| RouterEvent { rank: RANK, tier: StorageTier::Device, data };
    let mut index = registered();
    for n in 0..5_000 {
        index.apply(&event(KvEvent::Stored { parent: None, blocks: vec![block(n)] }));
    }
    let RankDump { events, evicted_blocks } = index.dump_rank(RANK).expect("registered");
    assert!(evicted_blocks > 0 && !events.is_empty());

    let mut restored = registered();
    restored.apply(&event(KvEvent::Cleared));
    restored.restore_evicted(RANK, evicted_blocks);
    for event in &events {
        restored.apply(event);
    }
    restored.check_invariants();
    for index in [&mut index, &mut restored] {
        assert!(index.evicted_blocks_of(Slot(0)) >= evicted_blocks);
        let removal = KvEvent::Removed { blocks: (0..5_000).map(EngineHash).collect() };
        let applied = index.apply(&event(removal));
        assert_eq!((applied.unknown_removals, applied.removed + applied.evicted_removals), (0, 5_000));
    }
}

#[test]
fn refusals_name_the_value_and_the_rule() {
    let snapshot = Snapshot { layout: layout(), created_ms: 5, ranks: Vec::new() };
    let bytes = snapshot.encode();
    let refusal = |bytes: &[u8]| {
        let error = Snapshot::decode(bytes).expect_err("refused");
        (error.name(), error.to_string())
    };
    let has = |(name, text): (&str, String), expected: &str, part: &str| {
        assert!(name == expected && text.contains(part), "{name}: {text}");
    };
    has(refusal(b""), "magic", "not a snapshot");
    has(refusal(b"PK\x03\x04"), "magic", "[50, 4b, 03, 04]");
    has(refusal(&bytes[..8]), "malformed", "end early");
    let mut newer = bytes.clone();
    newer[8] = 7;
    has(refusal(&newer), "version", "is 7, must be 6");
    has(refusal(&bytes[..bytes.len() - 1]), "checksum", "damaged or incomplete");
    has(refusal(&sealed([&bytes[..], &[0; 3]].concat())), "malformed", "break a rule");
    let mut eagle = bytes.clone();
    eagle[8 + 4 + 1 + 5 + 1] = 2;
    has(refusal(&sealed(eagle)), "malformed", "break a rule");
    let mut many = bytes.clone();
    let ranks = many.len() - 9;
    many[ranks] = 100;
    has(refusal(&sealed(many)), "malformed", "break a rule");

    let other = SnapshotLayout { block_size: 16, ..layout() };
    let error = snapshot.check_layout(&other).expect_err("another layout");
    has((error.name(), error.to_string()), "layout", "the block size is 2, must be 16");
    let error = snapshot.check_layout(&SnapshotLayout { pool: "qwen".to_owned(), ..layout() }).expect_err("another");
    has((error.name(), error.to_string()), "layout", "the pool is \"llama\", must be \"qwen\"");
    assert_eq!(snapshot.check_layout(&layout()), Ok(()));
}

type Payload = Vec<u8>;

/// A source that has applied the messages `0..count` of a life.
fn applied(config: SourceConfig, count: u8) -> Source<Payload> {
    let now = Timestamp::default();
    let (mut source, mut effects) = (Source::new(config, now), Vec::new());
    source.step(IngestInput::Connected, now, &mut effects);
    for sequence in 0..count {
        let replayed = IngestInput::Replayed { sequence: u64::from(sequence), payload: vec![1, sequence] };
        source.step(replayed, now, &mut effects);
        source.step(IngestInput::Applied(Default::default()), now, &mut effects);
    }
    source.step(IngestInput::ReplayEnded, now, &mut effects);
    source
}

/// Effects of inputs on a source that resumes behind message 4.
fn resumed(inputs: Vec<IngestInput<Payload>>) -> (Source<Payload>, Vec<IngestEffect<Payload>>) {
    let position = applied(SourceConfig::default(), 5).position().expect("five messages");
    assert_eq!((position.next, position.payload_hashes.len()), (5, 5));
    let mut source = Source::resume(SourceConfig::default(), Timestamp::default(), &position);
    assert_eq!(source.position().as_ref(), Some(&position));
    assert_eq!((source.state(), source.restore()), (StreamState::Recovering, Some(RestoreState::Unverified)));
    let mut effects = Vec::new();
    for input in inputs {
        source.step(input, Timestamp::default(), &mut effects);
        source.check_invariants();
    }
    effects.retain(|effect| !matches!(effect, IngestEffect::Noted(_) | IngestEffect::State(_)));
    (source, effects)
}

fn replayed(life: u8, sequence: u8) -> IngestInput<Payload> {
    IngestInput::Replayed { sequence: u64::from(sequence), payload: vec![life, sequence] }
}

#[test]
fn a_resumed_source_drops_the_contents_of_another_publisher() {
    for inputs in [
        vec![IngestInput::Connected, replayed(2, 4)],
        vec![IngestInput::Connected, IngestInput::ReplayEnded],
        vec![IngestInput::Connected, IngestInput::Live { sequence: 2, payload: vec![2, 2] }],
    ] {
        let (source, effects) = resumed(inputs);
        let expected = [IngestEffect::Replay { from: 4 }, IngestEffect::Clear, IngestEffect::Replay { from: 0 }];
        assert_eq!(effects, expected);
        assert_eq!(source.restore(), Some(RestoreState::Dropped));
        assert_eq!(source.position(), None, "without contents");
    }
}

#[test]
fn a_resumed_source_stays_cold() {
    let mut position = applied(SourceConfig::default(), 3).position().expect("three messages");
    let cause = DegradationReason::ReplayGap { from: 0, first: 2 };
    position.cold = Some(ColdPosition { stored_blocks: 4, cause });
    let config = SourceConfig { capacity_blocks: Some(6), ..SourceConfig::default() };
    let (mut source, mut effects) = (Source::resume(config, Timestamp::default(), &position), Vec::new());
    assert_eq!(source.position(), Some(position));
    for input in [IngestInput::Connected, replayed(1, 2), replayed(1, 3), IngestInput::ReplayEnded] {
        source.step(input, Timestamp::default(), &mut effects);
    }
    assert_eq!((source.state(), source.degradation()), (StreamState::Cold, Some(cause)));
    let batch = pointsman::internals::wire::Report { events: 1, usable: 1, stored_blocks: 2, ..Default::default() };
    source.step(IngestInput::Applied(batch), Timestamp::default(), &mut effects);
    assert_eq!(source.state(), StreamState::Live, "its cache has turned over");
}

#[test]
fn a_source_without_applied_contents_has_no_position() {
    let now = Timestamp::default();
    let mut source: Source<Payload> = Source::new(SourceConfig::default(), now);
    assert_eq!(source.position(), None);
    let mut effects = Vec::new();
    source.step(IngestInput::Connected, now, &mut effects);
    source.step(replayed(1, 0), now, &mut effects);
    assert_eq!(source.position(), None, "the message is not applied yet");
    source.step(IngestInput::Applied(Default::default()), now, &mut effects);
    assert_eq!(source.position().map(|position| position.next), Some(1));
    source.step(IngestInput::Resync, now, &mut effects);
    assert_eq!(source.position(), None, "the index has lost the contents");
}

#[test]
fn an_unverified_source_becomes_silent_without_a_connection() {
    let (mut source, mut effects) = (resumed(Vec::new()).0, Vec::new());
    let much_later = Timestamp(u64::try_from(Duration::from_secs(20).as_nanos()).expect("fits"));
    source.step(IngestInput::Tick, much_later, &mut effects);
    assert_eq!((source.state(), source.restore()), (StreamState::Silent, Some(RestoreState::Unverified)));
}
