//! Recorded streams of real publishers with their expected events, and the effect of each field on an event's blocks.
//!
//! `data/frames.json` and `data/engine.json` were recorded from vLLM and SGLang.

mod batches;
mod fold;
mod namespaces;
mod offload;

use std::num::NonZeroU32;

use pointsman::hashing::{HashScheme, MmSpan};
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::internals::index::{Applied, Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::wire::{Decoder, DecoderLimits, Finding, Report, StoreMismatch, WireConfig};
use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerId, WorkerRank,
};
use serde_json::Value;

use crate::msgpack::{Msg, batch};

const RANK: WorkerRank = WorkerRank::new(WorkerId(3), 1);

fn config() -> WireConfig {
    let block_size = NonZeroU32::new(4).expect("not zero");
    WireConfig { rank: RANK, ranks: 1..2, block_size, is_eagle: false, limits: DecoderLimits::default() }
}

fn decoder() -> Decoder {
    Decoder::new(config())
}

/// Decodes one batch with an existing decoder.
fn next(decoder: &mut Decoder, events: impl IntoIterator<Item = Msg>) -> (Vec<RouterEvent>, Report) {
    let mut decoded = Vec::new();
    let report = decoder.decode(&batch(events), &mut decoded);
    (decoded, report)
}

fn found(report: &Report) -> Vec<(Finding, u64)> {
    report.findings.iter().collect()
}

/// The block hashes of a request for `tokens`.
fn requested(tokens: &[u32], lora_name: Option<&str>, cache_salt: Option<&str>) -> Vec<u64> {
    requested_with(tokens, lora_name, cache_salt, &MmBlocks::NONE)
}

fn requested_with(tokens: &[u32], lora_name: Option<&str>, cache_salt: Option<&str>, mm: &MmBlocks) -> Vec<u64> {
    let scheme = HashScheme { lora_name, cache_salt, ..HashScheme::new(config().block_size) };
    BlockHasher::new(scheme).block_hashes(tokens, mm).iter().map(|hash| hash.0).collect()
}

fn stored(tier: StorageTier, parent: Option<u64>, blocks: &[(u64, u64)]) -> RouterEvent {
    let block = |&(name, hash): &(u64, u64)| StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(hash) };
    let data = KvEvent::Stored { parent: parent.map(EngineHash), blocks: blocks.iter().map(block).collect() };
    RouterEvent { rank: RANK, tier, data }
}

/// Copies as pairs of a name and a content hash.
fn offloaded(tier: StorageTier, parent: Option<u64>, blocks: &[(u64, Option<u64>)]) -> RouterEvent {
    let block = |&(name, hash): &(u64, Option<u64>)| (EngineHash(name), hash.map(BlockHash));
    let blocks = blocks.iter().map(block).collect();
    RouterEvent { rank: RANK, tier, data: KvEvent::Offloaded { parent: parent.map(EngineHash), blocks } }
}

fn removed(tier: StorageTier, names: &[u64]) -> RouterEvent {
    let blocks = names.iter().copied().map(EngineHash).collect();
    RouterEvent { rank: RANK, tier, data: KvEvent::Removed { blocks } }
}

fn tier_cleared(tier: StorageTier) -> RouterEvent {
    RouterEvent { rank: RANK, tier, data: KvEvent::TierCleared }
}

fn cleared() -> RouterEvent {
    RouterEvent { rank: RANK, tier: StorageTier::Device, data: KvEvent::Cleared }
}

/// A store in map form: required fields and `more`.
fn store<'a>(
    names: impl IntoIterator<Item = u64>,
    parent: Option<u64>,
    tokens: &[u32],
    more: impl IntoIterator<Item = (&'a str, Msg)>,
) -> Msg {
    let least = [
        ("type", "BlockStored".into()),
        ("block_hashes", names.into_iter().collect()),
        ("parent_block_hash", parent.map_or(Msg::Nil, Msg::Uint)),
        ("token_ids", tokens.iter().map(|token| u64::from(*token)).collect()),
        ("block_size", 4.into()),
    ];
    Msg::named(least.into_iter().chain(more))
}

fn removal<'a>(names: impl IntoIterator<Item = u64>, more: impl IntoIterator<Item = (&'a str, Msg)>) -> Msg {
    let least = [("type", "BlockRemoved".into()), ("block_hashes", names.into_iter().collect())];
    Msg::named(least.into_iter().chain(more))
}

/// The block hashes of the last store among `events`.
fn hashes(events: &[RouterEvent]) -> Vec<u64> {
    match events.last().map(|event| &event.data) {
        Some(KvEvent::Stored { blocks, .. }) => blocks.iter().map(|block| block.block_hash.0).collect(),
        other => panic!("expected a store, not {other:?}"),
    }
}

/// Block hashes and findings of one store in a new stream.
fn hashes_of(event: Msg) -> (Vec<u64>, Vec<(Finding, u64)>) {
    let (events, report) = next(&mut decoder(), [event]);
    (hashes(&events), found(&report))
}

fn data(name: &str) -> Value {
    let path = format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).expect("recorded")).expect("JSON")
}

fn unhex(text: &Value) -> Vec<u8> {
    let text = text.as_str().expect("hex digits");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex digits")).collect()
}

const TOKENS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const PLAIN: [u64; 2] = [14643705804678351452, 16777012769546811212];

mod recorded {
    use super::*;
    use StorageTier::{Device, HostPinned};

    /// Tokens 151643, 9, 10, 11.
    const OTHER: [u32; 4] = [151_643, 9, 10, 11];
    /// Names of the recorded hashes; for binary hashes their last bytes.
    const ONES: u64 = 0x0101_0101_0101_0101;
    const TWOS: u64 = 0x0202_0202_0202_0202;
    const THREES: u64 = 0x0303_0303_0303_0303;
    const NEGATIVE: u64 = -123_456_789_i64 as u64;

    /// Events and findings.
    type Frame = (Vec<RouterEvent>, Vec<(Finding, u64)>);

    struct Expected {
        /// Prefix of the publisher's name that identifies the dialect.
        publisher: &'static str,
        frames: Vec<Frame>,
    }

    fn vllm_array() -> Vec<Frame> {
        let child = stored(Device, Some(0x0123_4567_89ab_cdef), &[(0xfedc_ba98_7654_3210, 0)]);
        vec![
            (vec![stored(Device, None, &[(ONES, PLAIN[0]), (TWOS, PLAIN[1])])], vec![]),
            // Adapter 1 without a name.
            (vec![child], vec![(Finding::UnnamedLora, 1)]),
            (vec![stored(Device, None, &[(THREES, PLAIN[0])]), removed(Device, &[TWOS]), cleared()], vec![]),
            (vec![], vec![]),
        ]
    }

    fn vllm_map() -> Vec<Frame> {
        let adapted = requested(&OTHER, Some("adapterA"), None)[0];
        let salted = requested(&TOKENS[..4], None, Some("tenant-salt"))[0];
        vec![
            (vec![stored(Device, None, &[(ONES, PLAIN[0]), (TWOS, PLAIN[1])])], vec![]),
            (vec![stored(Device, Some(0x0123_4567_89ab_cdef), &[(0xfedc_ba98_7654_3210, adapted)])], vec![]),
            (vec![stored(Device, None, &[(THREES, salted)]), removed(Device, &[TWOS]), cleared()], vec![]),
            (vec![], vec![]),
        ]
    }

    fn sglang(child: u64, has_tiers: bool) -> Vec<Frame> {
        // A page size of 1 in a pool of 4: a copy by name in host memory, of no use on the device.
        let page = offloaded(HostPinned, None, &[(6, None)]);
        let (pages, findings) = if has_tiers { (vec![page], vec![]) } else { (vec![], vec![(Finding::BlockSize, 1)]) };
        let rest = [removed(Device, &[5]), cleared()];
        vec![
            (vec![stored(Device, None, &[(NEGATIVE, PLAIN[0]), (987_654_321, PLAIN[1])])], vec![]),
            (vec![stored(Device, Some(NEGATIVE), &[(5, child)])], vec![]),
            (pages.into_iter().chain(rest).collect(), findings),
        ]
    }

    #[test]
    fn frames_decode_to_their_documented_events() {
        let plain = requested(&OTHER, None, None)[0];
        let both = requested(&OTHER, Some("adapterA"), Some("tenant-salt"))[0];
        let expected = [
            Expected { publisher: "vLLM 0.11.2 (array", frames: vllm_array() },
            Expected { publisher: "vLLM 0.27.1 (map", frames: vllm_map() },
            Expected { publisher: "vLLM 0.33.0 (map", frames: vllm_map() },
            Expected { publisher: "SGLang 0.5.6.post2 (array", frames: sglang(plain, false) },
            Expected { publisher: "SGLang 0.5.12 / 0.5.18 (array", frames: sglang(plain, true) },
            Expected { publisher: "SGLang 0.5.23 (map", frames: sglang(both, true) },
        ];
        let recorded = data("frames.json");
        let recorded = recorded.as_array().expect("publishers");
        assert_eq!(recorded.len(), expected.len());
        for (publisher, expected) in recorded.iter().zip(expected) {
            let name = publisher["publisher"].as_str().expect("a name");
            assert!(name.starts_with(expected.publisher), "{name}");
            let mut decoder = decoder();
            let frames = publisher["frames"].as_array().expect("frames");
            assert_eq!(frames.len(), expected.frames.len(), "{name}");
            for (frame, (mut events, findings)) in frames.iter().zip(expected.frames) {
                let what = format!("{name}, {}", frame["label"]);
                let mut decoded = Vec::new();
                let report = decoder.decode(&unhex(&frame["payload"]), &mut decoded);
                if findings == [(Finding::UnnamedLora, 1)] {
                    // This namespace matches no request. The hash only has to differ from all others.
                    let own = hashes(&decoded)[0];
                    assert!(![plain, both].contains(&own) && own != requested(&OTHER, Some("1"), None)[0], "{what}");
                    events = vec![stored(Device, Some(0x0123_4567_89ab_cdef), &[(0xfedc_ba98_7654_3210, own)])];
                }
                assert_eq!(decoded, events, "{what}");
                assert_eq!(found(&report), findings, "{what}");
                let refused = report.findings.get(Finding::BlockSize);
                assert_eq!(u64::from(report.events), u64::from(report.usable) + refused, "{what}");
                let of_device = refused.saturating_sub(u64::from(report.side_events));
                assert_eq!(report.mismatch, (of_device > 0).then_some(StoreMismatch::BlockSize(1)), "{what}");
                assert_eq!(report.cleared, decoded.contains(&cleared()), "{what}");
            }
        }
    }

    /// Cached blocks of a prompt.
    fn held(index: &Index, tokens: &[u32], cache_salt: Option<&str>) -> u32 {
        let prompt: Vec<_> = requested(tokens, None, cache_salt).into_iter().map(BlockHash).collect();
        let mut overlaps = Overlaps::default();
        index.overlaps(&prompt, &mut overlaps);
        overlaps.hits().first().map_or(0, |hit| hit.device_blocks)
    }

    #[test]
    fn the_events_of_an_engine_rebuild_its_cache() {
        let recorded = data("engine.json");
        let prompt =
            |name: &str| -> Vec<u32> { serde_json::from_value(recorded["requests"][name].clone()).expect("token ids") };
        let prompts = [prompt("req1"), prompt("req2"), prompt("req3 (cache_salt tenantB)"), prompt("req4")];
        // After each step: cached blocks of the four unsalted prompts, and of the third one under its own salt. Under
        // another salt there are none.
        let expected = [
            ("req1 16 tokens = 4 full blocks", [4, 2, 2, 0], 0),
            ("free req1 -> no events", [4, 2, 2, 0], 0),
            ("req2 shares 2 blocks", [4, 3, 2, 0], 0),
            ("free req2 -> no events", [4, 3, 2, 0], 0),
            ("req3 same tokens, salted", [4, 3, 2, 0], 2),
            ("req4 needs eviction", [0, 0, 0, 6], 2),
            ("reset_prefix_cache", [0, 0, 0, 0], 0),
        ];
        let mut index = Index::new();
        assert!(index.register(RANK, Slot(0), Generation(1)));
        let mut decoder = decoder();
        let steps = recorded["batches"].as_array().expect("batches");
        assert_eq!(steps.len(), expected.len());
        for (step, (name, unsalted, salted)) in steps.iter().zip(expected) {
            assert_eq!(step["step"], name);
            if !step["payload"].is_null() {
                let mut events = Vec::new();
                let report = decoder.decode(&unhex(&step["payload"]), &mut events);
                assert_eq!((found(&report), report.usable), (vec![], report.events), "{name}");
                for event in &events {
                    let Applied { unknown_parents, unknown_removals, .. } = index.apply(event);
                    assert_eq!((unknown_parents, unknown_removals), (0, 0), "{name}");
                }
            }
            assert_eq!(prompts.each_ref().map(|prompt| held(&index, prompt, None)), unsalted, "{name}");
            assert_eq!(held(&index, &prompts[2], Some("tenantB")), salted, "{name}");
            assert_eq!(held(&index, &prompts[2], Some("tenantC")), 0, "{name}");
            assert_eq!(decoder.namespaces(), salted as usize, "{name}");
        }
        assert_eq!(index.held_blocks(), 0);
    }
}

mod hashes_and_tokens {
    use super::*;
    use StorageTier::Device;

    #[test]
    fn all_forms_of_one_hash_agree() {
        let hash = 0x8123_4567_89ab_cdef_u64;
        let binary = [&[7; 24][..], &hash.to_be_bytes()].concat();
        for name in [Msg::Uint(hash), Msg::Int(hash as i64), Msg::Bin(binary), Msg::Bin(hash.to_be_bytes().to_vec())] {
            let event = Msg::named([
                ("type", "BlockStored".into()),
                ("block_hashes", [name.clone()].into()),
                ("parent_block_hash", name.clone()),
                ("token_ids", [1_u64, 2, 3, 4].into()),
                ("block_size", 4.into()),
            ]);
            let (events, report) = next(&mut decoder(), [event]);
            assert_eq!(events, [stored(Device, Some(hash), &[(hash, PLAIN[0])])], "{name:?}");
            assert!(report.findings.is_empty());
        }
    }

    #[test]
    fn an_invalid_hash_ends_a_store_and_skips_a_removal() {
        let names = || Msg::Array(vec![11.into(), Msg::Bin(vec![1; 7]), 13.into(), Msg::Nil, 14.into()]);
        let mut event = store([], None, &[1; 20], []);
        let Msg::Map(pairs) = &mut event else { unreachable!() };
        pairs[1].1 = names();
        let removal = Msg::named([("type", "BlockRemoved".into()), ("block_hashes", names())]);
        let (events, report) = next(&mut decoder(), [event, removal]);
        let hash = requested(&[1; 4], None, None)[0];
        assert_eq!(events, [stored(Device, None, &[(11, hash)]), removed(Device, &[11, 13, 14])]);
        assert_eq!((found(&report), report.usable), (vec![(Finding::BadHash, 3)], 2));
    }

    #[test]
    fn blocks_without_tokens_are_rejected_after_the_complete_ones() {
        let (events, report) = next(&mut decoder(), [store([11, 12], None, &TOKENS[..7], [])]);
        assert_eq!(events, [stored(Device, None, &[(11, PLAIN[0])])]);
        assert_eq!((found(&report), report.usable, report.stored_blocks), (vec![(Finding::TokensMissing, 1)], 1, 1));
        let (events, report) = next(&mut decoder(), [store([11], None, &TOKENS[..3], [])]);
        assert_eq!((events.len(), report.usable, found(&report)), (0, 0, vec![(Finding::TokensMissing, 1)]));
        let bad = [1_u64, 2, 3, 4, 5, 1 << 32, 7, 8].into();
        let mut event = store([11, 12], None, &[], []);
        let Msg::Map(pairs) = &mut event else { unreachable!() };
        pairs[3].1 = bad;
        let (events, report) = next(&mut decoder(), [event]);
        assert_eq!(events, [stored(Device, None, &[(11, PLAIN[0])])]);
        assert_eq!(found(&report), [(Finding::BadToken, 1)]);
    }

    fn pairs_of(tokens: &[u32]) -> Msg {
        tokens.windows(2).map(|pair| [u64::from(pair[0]), u64::from(pair[1])]).collect()
    }

    fn eagle_store(names: &[u64], pairs: Msg) -> Msg {
        let mut event = store(names.iter().copied(), None, &[], []);
        let Msg::Map(fields) = &mut event else { unreachable!() };
        fields[3].1 = pairs;
        event
    }

    #[test]
    fn eagle_pairs_hash_like_requests() {
        let mut decoder = Decoder::new(WireConfig { is_eagle: true, ..config() });
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        let (events, report) = next(&mut decoder, [eagle_store(&[11, 12], pairs_of(&tokens))]);
        assert_eq!(hashes(&events), [1914873892905420881, 1929047464662796003]);
        assert!(report.findings.is_empty());
        // First one pair short of the second block, then a pair that does not continue the previous one.
        let (events, report) = next(&mut decoder, [eagle_store(&[11, 12], pairs_of(&tokens[..8]))]);
        assert_eq!((hashes(&events).len(), found(&report)), (1, vec![(Finding::TokensMissing, 1)]));
        let torn: Msg = [[1_u64, 2], [2, 3], [3, 4], [4, 5], [6, 7], [7, 8], [8, 9], [9, 10]].into();
        let (events, report) = next(&mut decoder, [eagle_store(&[11, 12], torn)]);
        assert_eq!((hashes(&events).len(), found(&report)), (1, vec![(Finding::BadToken, 1)]));
    }

    /// vLLM 0.33 publishes the token behind each block, which its hash includes, in a field of its own.
    #[test]
    fn tokens_behind_the_blocks_complete_the_pairs_of_vllm() {
        let tokens: Vec<u32> = (100..108).collect();
        let ahead = |parent, names: &[u64], tokens: &[u32], ahead: Msg| {
            store(names.iter().copied(), parent, tokens, [("lookahead_token_ids", ahead)])
        };
        let both: Msg = [[104_u64], [500]].into();
        let mut decoder = Decoder::new(WireConfig { is_eagle: true, ..config() });
        let (events, report) = next(&mut decoder, [ahead(None, &[11, 12], &tokens, both.clone())]);
        assert!(report.findings.is_empty());
        let pairs = |last: &[u32]| pairs_of(&[&tokens, last].concat());
        let (expected, _) = next(&mut decoder, [eagle_store(&[11, 12], pairs(&[500]))]);
        assert_eq!(events, expected);
        let (events, _) = next(&mut decoder, [ahead(Some(11), &[13], &tokens[4..], [[600_u64]].into())]);
        let (expected, _) = next(&mut decoder, [eagle_store(&[11, 13], pairs(&[600]))]);
        assert_eq!(hashes(&events)[..], hashes(&expected)[1..]);
        for unusable in [Msg::Nil, Msg::Array(Vec::new()), [0_u64].into(), [Msg::Nil].into()] {
            let (events, report) = next(&mut decoder, [ahead(None, &[11, 12], &tokens, unusable)]);
            assert_eq!((events.len(), found(&report)), (0, vec![(Finding::Eagle, 1)]));
        }
        let (events, _) = next(&mut super::decoder(), [ahead(None, &[11, 12], &tokens, both)]);
        assert_eq!(hashes(&events), requested(&tokens, None, None));
    }

    #[test]
    fn token_ids_in_a_pool_of_pairs_are_reported() {
        let mut decoder = Decoder::new(WireConfig { is_eagle: true, ..config() });
        let (events, report) = next(&mut decoder, [store([11], None, &TOKENS, [])]);
        assert_eq!((events.len(), found(&report)), (0, vec![(Finding::Eagle, 1)]));
    }

    #[test]
    fn another_block_size_is_rejected_and_reported() {
        let event = Msg::named([
            ("type", "BlockStored".into()),
            ("block_hashes", [1_u64].into()),
            ("token_ids", [1_u64].into()),
            ("block_size", 16.into()),
        ]);
        let (events, report) = next(&mut decoder(), [event]);
        assert_eq!((events.len(), report.mismatch), (0, Some(StoreMismatch::BlockSize(16))));
        assert_eq!((found(&report), report.side_events), (vec![(Finding::BlockSize, 1)], 0));
    }

    #[test]
    fn events_of_other_tiers_and_groups_prove_nothing_about_the_block_size() {
        let sized = |size: u64, medium: &str| {
            let mut event = store([11], None, &TOKENS, [("medium", medium.into())]);
            let Msg::Map(fields) = &mut event else { unreachable!() };
            fields[4].1 = size.into();
            event
        };
        let window = [("group_idx", Msg::Uint(1)), ("kv_cache_spec_kind", "sliding_window".into())];
        let of = [sized(0, "GPU"), sized(4, "TAPE"), store([11], None, &TOKENS, window), store([11], None, &[], [])];
        let (events, report) = next(&mut decoder(), of);
        assert_eq!((events.len(), report.usable, report.side_events, report.mismatch), (0, 0, 2, None));
    }
}
