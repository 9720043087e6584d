//! What real publishers sent, and what it must come to; and what each part of an event does to its blocks.
//!
//! `data/frames.json` and `data/engine.json` were recorded from vLLM and SGLang.

#[path = "common/msgpack.rs"]
mod msgpack;

use std::num::NonZeroU32;

use msgpack::{Msg, batch};
use pointsman::hashing::{BlockHasher, HashScheme, MmBlocks, mm_hash_of_id};
use pointsman::index::{Applied, Index, Overlaps};
use pointsman::protocol::{
    BlockHash, EngineHash, Generation, KvEvent, RouterEvent, Slot, StorageTier, StoredBlock, WorkerId, WorkerRank,
};
use pointsman::wire::{Decoder, Finding, Limits, Report, WireConfig};
use serde_json::Value;

const RANK: WorkerRank = WorkerRank::new(WorkerId(3), 1);

fn config() -> WireConfig {
    let block_size = NonZeroU32::new(4).expect("not zero");
    WireConfig { rank: RANK, ranks: 1..2, block_size, is_eagle: false, limits: Limits::default() }
}

fn decoder() -> Decoder {
    Decoder::new(config())
}

/// One batch after others of the same stream.
fn next(decoder: &mut Decoder, events: impl IntoIterator<Item = Msg>) -> (Vec<RouterEvent>, Report) {
    let mut decoded = Vec::new();
    let report = decoder.decode(&batch(events), &mut decoded);
    (decoded, report)
}

fn found(report: &Report) -> Vec<(Finding, u64)> {
    report.findings.iter().collect()
}

/// What a request for `tokens` is matched by.
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

fn removed(tier: StorageTier, names: &[u64]) -> RouterEvent {
    let blocks = names.iter().copied().map(EngineHash).collect();
    RouterEvent { rank: RANK, tier, data: KvEvent::Removed { blocks } }
}

fn cleared() -> RouterEvent {
    RouterEvent { rank: RANK, tier: StorageTier::Device, data: KvEvent::Cleared }
}

/// A store in map form: the least that there must be, and what else is given.
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
        other => panic!("no store but {other:?}"),
    }
}

/// The block hashes of one store, and what was found, in a stream of its own.
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
    use StorageTier::Device;

    /// Tokens 151643, 9, 10, 11.
    const OTHER: [u32; 4] = [151_643, 9, 10, 11];
    /// The names that the recorded hashes have: of binary ones the end.
    const ONES: u64 = 0x0101_0101_0101_0101;
    const TWOS: u64 = 0x0202_0202_0202_0202;
    const THREES: u64 = 0x0303_0303_0303_0303;
    const NEGATIVE: u64 = -123_456_789_i64 as u64;

    /// Events and findings.
    type Frame = (Vec<RouterEvent>, Vec<(Finding, u64)>);

    struct Expected {
        /// As far as it tells the dialect.
        publisher: &'static str,
        frames: Vec<Frame>,
    }

    fn vllm_array() -> Vec<Frame> {
        let child = stored(Device, Some(0x0123_4567_89ab_cdef), &[(0xfedc_ba98_7654_3210, 0)]);
        vec![
            (vec![stored(Device, None, &[(ONES, PLAIN[0]), (TWOS, PLAIN[1])])], vec![]),
            // Adapter 1, but what its name is it does not say.
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

    fn sglang(child: u64) -> Vec<Frame> {
        vec![
            (vec![stored(Device, None, &[(NEGATIVE, PLAIN[0]), (987_654_321, PLAIN[1])])], vec![]),
            (vec![stored(Device, Some(NEGATIVE), &[(5, child)])], vec![]),
            // A page size of 1 in a pool of 4.
            (vec![removed(Device, &[5]), cleared()], vec![(Finding::BlockSize, 1)]),
        ]
    }

    #[test]
    fn frames_decode_to_what_they_say() {
        let plain = requested(&OTHER, None, None)[0];
        let both = requested(&OTHER, Some("adapterA"), Some("tenant-salt"))[0];
        let expected = [
            Expected { publisher: "vLLM 0.11.2 (array", frames: vllm_array() },
            Expected { publisher: "vLLM 0.27.1 (map", frames: vllm_map() },
            Expected { publisher: "vLLM 0.33.0 (map", frames: vllm_map() },
            Expected { publisher: "SGLang 0.5.6.post2 (array", frames: sglang(plain) },
            Expected { publisher: "SGLang 0.5.12 / 0.5.18 (array", frames: sglang(plain) },
            Expected { publisher: "SGLang 0.5.23 (map", frames: sglang(both) },
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
                    // In a namespace that no request names: all that counts is that the hash is not another's.
                    let own = hashes(&decoded)[0];
                    assert!(![plain, both].contains(&own) && own != requested(&OTHER, Some("1"), None)[0], "{what}");
                    events = vec![stored(Device, Some(0x0123_4567_89ab_cdef), &[(0xfedc_ba98_7654_3210, own)])];
                }
                assert_eq!(decoded, events, "{what}");
                assert_eq!(found(&report), findings, "{what}");
                let refused = report.findings.get(Finding::BlockSize);
                assert_eq!(u64::from(report.events), u64::from(report.usable) + refused, "{what}");
                assert_eq!(report.engine_block_size, (refused > 0).then_some(1), "{what}");
                assert_eq!(report.cleared, decoded.contains(&cleared()), "{what}");
            }
        }
    }

    /// Blocks that the rank holds of a prompt.
    fn held(index: &Index, tokens: &[u32], cache_salt: Option<&str>) -> u32 {
        let prompt: Vec<_> = requested(tokens, None, cache_salt).into_iter().map(BlockHash).collect();
        let mut overlaps = Overlaps::default();
        index.overlaps(&prompt, &mut overlaps);
        overlaps.hits().first().map_or(0, |hit| hit.device_blocks)
    }

    #[test]
    fn an_engines_life_leaves_the_index_as_its_cache() {
        let recorded = data("engine.json");
        let prompt =
            |name: &str| -> Vec<u32> { serde_json::from_value(recorded["requests"][name].clone()).expect("token ids") };
        let prompts = [prompt("req1"), prompt("req2"), prompt("req3 (cache_salt tenantB)"), prompt("req4")];
        // After each step: blocks held of the four prompts, unsalted; of the third under its own salt and another's.
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
    fn a_bad_hash_ends_a_store_and_costs_a_removal_itself() {
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
    fn blocks_without_their_tokens_are_refused_behind_the_complete_ones() {
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
    fn eagle_pairs_hash_as_requests_do() {
        let mut decoder = Decoder::new(WireConfig { is_eagle: true, ..config() });
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        let (events, report) = next(&mut decoder, [eagle_store(&[11, 12], pairs_of(&tokens))]);
        assert_eq!(hashes(&events), [1914873892905420881, 1929047464662796003]);
        assert!(report.findings.is_empty());
        // One pair short of the second block; a pair that does not follow from the one before it.
        let (events, report) = next(&mut decoder, [eagle_store(&[11, 12], pairs_of(&tokens[..8]))]);
        assert_eq!((hashes(&events).len(), found(&report)), (1, vec![(Finding::TokensMissing, 1)]));
        let torn: Msg = [[1_u64, 2], [2, 3], [3, 4], [4, 5], [6, 7], [7, 8], [8, 9], [9, 10]].into();
        let (events, report) = next(&mut decoder, [eagle_store(&[11, 12], torn)]);
        assert_eq!((hashes(&events).len(), found(&report)), (1, vec![(Finding::BadToken, 1)]));
    }

    #[test]
    fn pools_and_engines_that_differ_about_eagle_are_told() {
        let pairs = eagle_store(&[11], pairs_of(&TOKENS));
        let (events, report) = next(&mut decoder(), [pairs]);
        assert_eq!((events.len(), found(&report)), (0, vec![(Finding::Eagle, 1)]));
        let mut decoder = Decoder::new(WireConfig { is_eagle: true, ..config() });
        let (events, report) = next(&mut decoder, [store([11], None, &TOKENS, [])]);
        assert_eq!((events.len(), found(&report)), (0, vec![(Finding::Eagle, 1)]));
    }

    #[test]
    fn another_block_size_is_refused_and_told() {
        let event = Msg::named([
            ("type", "BlockStored".into()),
            ("block_hashes", [1_u64].into()),
            ("token_ids", [1_u64].into()),
            ("block_size", 16.into()),
        ]);
        let (events, report) = next(&mut decoder(), [event]);
        assert_eq!((events.len(), report.engine_block_size), (0, Some(16)));
        assert_eq!(found(&report), [(Finding::BlockSize, 1)]);
    }
}

mod namespaces {
    use super::*;

    fn keys(entries: Vec<Msg>) -> [(&'static str, Msg); 1] {
        [("extra_keys", Msg::Array(entries))]
    }

    #[test]
    fn a_salt_on_the_first_block_reaches_what_follows() {
        for salt in ["tenantB", "dynamo-cache-salt:tenantB"] {
            let mut decoder = decoder();
            let expected = requested(&TOKENS, None, Some("tenantB"));
            let root = store([11, 12], None, &TOKENS, keys(vec![[salt].into(), Msg::Nil]));
            assert_eq!(hashes(&next(&mut decoder, [root]).0), expected);
            let (events, report) = next(&mut decoder, [store([13], Some(12), &TOKENS[..4], keys(vec![Msg::Nil]))]);
            assert_eq!(hashes(&events), expected[..1]);
            assert!(report.findings.is_empty());
            assert_eq!(decoder.namespaces(), 3);
            // Stored again without: everybody's.
            next(&mut decoder, [store([12], None, &TOKENS[..4], [])]);
            assert_eq!(hashes(&next(&mut decoder, [store([14], Some(12), &TOKENS[..4], [])]).0), PLAIN[..1]);
        }
    }

    #[test]
    fn a_namespace_lasts_as_long_as_a_tier_has_the_block() {
        let child = || store([12], Some(11), &TOKENS[..4], []);
        let root =
            |medium: &str| store([11], None, &TOKENS[..4], [("cache_salt", "s".into()), ("medium", medium.into())]);
        let gone = |medium: &str| removal([11], [("medium", medium.into())]);
        let salted = requested(&TOKENS[..4], None, Some("s"));
        let mut decoder = decoder();
        next(&mut decoder, [root("GPU"), root("CPU"), gone("GPU")]);
        assert_eq!(hashes(&next(&mut decoder, [child()]).0), salted);
        next(&mut decoder, [gone("CPU")]);
        assert_eq!(hashes(&next(&mut decoder, [child()]).0), PLAIN[..1]);
        next(&mut decoder, [root("GPU"), Msg::named([("type", "AllBlocksCleared".into())])]);
        assert_eq!(hashes(&next(&mut decoder, [child()]).0), PLAIN[..1]);
        next(&mut decoder, [root("GPU")]);
        decoder.forget();
        assert_eq!((hashes(&next(&mut decoder, [child()]).0), decoder.namespaces()), (PLAIN[..1].to_vec(), 0));
    }

    #[test]
    fn adapters_are_told_from_salts() {
        let lora = ("lora_name", Msg::from("a"));
        let adapted = |keys| store([11], None, &TOKENS[..4], [lora.clone(), ("extra_keys", keys)]);
        let under = |salt| (requested(&TOKENS[..4], Some("a"), salt), vec![]);
        assert_eq!(hashes_of(adapted([["a"]].into())), under(None));
        assert_eq!(hashes_of(adapted([["a", "tenant"]].into())), under(Some("tenant")));
        // A tenant that calls itself as the adapter is called does not get out of its namespace.
        assert_eq!(hashes_of(adapted([["a", "a"]].into())), under(Some("a")));
        // A child that does not name the adapter follows its parent.
        let mut decoder = decoder();
        next(&mut decoder, [adapted([["a", "tenant"]].into())]);
        let (events, _) = next(&mut decoder, [store([12], Some(11), &TOKENS[..4], [])]);
        assert_eq!(hashes(&events), requested(&TOKENS[..4], Some("a"), Some("tenant")));
    }

    #[test]
    fn an_adapter_without_a_name_has_its_own_blocks() {
        let numbered = |id: u64| hashes_of(store([11], None, &TOKENS[..4], [("lora_id", id.into())]));
        assert_eq!(numbered(0), (PLAIN[..1].to_vec(), vec![]), "no adapter has the number 0");
        let (first, findings) = numbered(1);
        assert_eq!(findings, [(Finding::UnnamedLora, 1)]);
        let (second, _) = numbered(2);
        assert!(first != second && first != PLAIN[..1] && first != requested(&TOKENS[..4], Some("1"), None));
    }

    #[test]
    fn sglang_names_its_salt_with_each_store() {
        let salt = || [("cache_salt", Msg::from("s"))];
        let mut decoder = decoder();
        let (events, report) =
            next(&mut decoder, [store([11], None, &TOKENS[..4], salt()), store([12], Some(11), &TOKENS[4..], salt())]);
        assert_eq!(hashes(&events), requested(&TOKENS, None, Some("s"))[1..]);
        assert!(report.findings.is_empty());
        // As an array it has stood where vLLM has the adapter.
        let names: Msg = [11_u64].into();
        let tokens: Msg = [1_u64, 2, 3, 4].into();
        let salt = Msg::named([("cache_salt", "s".into())]);
        let event =
            Msg::Array(vec!["BlockStored".into(), names, Msg::Nil, tokens, 4.into(), Msg::Nil, "GPU".into(), salt]);
        assert_eq!(hashes_of(event), (requested(&TOKENS[..4], None, Some("s")), vec![]));
    }

    #[test]
    fn objects_are_told_from_salts() {
        let mm = |ids: [&[&str]; 2]| {
            MmBlocks::listed(ids.map(|ids| ids.iter().filter_map(|id| mm_hash_of_id(id)).collect::<Vec<_>>()))
        };
        let image = || Msg::Array(vec!["img-1".into(), 2.into()]);
        let with = |first: Vec<Msg>, second: Vec<Msg>| {
            hashes_of(store([11, 12], None, &TOKENS, keys(vec![Msg::Array(first), Msg::Array(second)])))
        };
        let expected = |salt, ids| (requested_with(&TOKENS, None, salt, &mm(ids)), vec![]);
        assert_eq!(with(vec![image()], vec!["img-2".into()]), expected(None, [&["img-1"], &["img-2"]]));
        assert_eq!(
            with(vec![image(), "t".into()], vec![image(), image()]),
            expected(Some("t"), [&["img-1"], &["img-1"]])
        );
        assert_eq!(with(vec![], vec!["b".into(), "a".into()]), expected(None, [&[], &["a", "b"]]));
    }

    #[test]
    fn keys_of_unknown_meaning_make_a_namespace_of_their_own() {
        let cases = [
            (Msg::from(["x", "y"]), Finding::AmbiguousNamespace),
            (["y", "x"].into(), Finding::AmbiguousNamespace),
            ([5_u64].into(), Finding::UnknownNamespace),
            (Msg::Array(vec![Msg::Bin(vec![5])]), Finding::UnknownNamespace),
            (Msg::Array(vec![Msg::named([("salt", "x".into())])]), Finding::UnknownNamespace),
            (Msg::Array(vec![Msg::from(["x", "y", "z"])]), Finding::UnknownNamespace),
            ("x".into(), Finding::UnknownNamespace),
            (6.into(), Finding::UnknownNamespace),
        ];
        let mut seen = vec![requested(&TOKENS, None, None), requested(&TOKENS, None, Some("x"))];
        for (entry, finding) in cases {
            let (hashes, findings) = hashes_of(store([11, 12], None, &TOKENS, keys(vec![entry.clone(), Msg::Nil])));
            assert_eq!(findings, [(finding, 1)], "{entry:?}");
            assert!(seen.iter().all(|other| other[0] != hashes[0] && other[1] != hashes[1]), "{entry:?}");
            seen.push(hashes);
        }
        // Nor does a list of another form leave the blocks to everybody.
        for (odd, n) in [(Msg::Bool(true), 1), (Msg::from("x"), 1)] {
            let (hashes, findings) = hashes_of(store([11, 12], None, &TOKENS, [("extra_keys", odd.clone())]));
            assert_eq!(findings, [(Finding::UnknownNamespace, n)], "{odd:?}");
            assert!(hashes[0] != PLAIN[0] && hashes[1] != PLAIN[1]);
        }
    }

    #[test]
    fn further_keys_combine_with_what_is_inherited() {
        let child = |parent| store([20], Some(parent), &TOKENS[..4], keys(vec![[7_u64].into()]));
        let mut decoder = decoder();
        let root = |name, salt: &str| store([name], None, &TOKENS[..4], keys(vec![[salt].into()]));
        next(&mut decoder, [root(11, "s"), root(12, "t"), store([13], None, &TOKENS[..4], [])]);
        let (events, report) = next(&mut decoder, [child(11), child(12), child(13), child(11)]);
        assert_eq!(found(&report), [(Finding::UnknownNamespace, 4)]);
        let of = |at: usize| hashes(&events[at..=at]);
        assert!(of(0) != of(1) && of(0) != of(2) && of(1) != of(2) && of(0) == of(3));
        // Within one store they hold from their block on.
        let (mixed, _) = hashes_of(store([11, 12], None, &TOKENS, keys(vec![Msg::Nil, [7_u64].into()])));
        assert!(mixed[0] == PLAIN[0] && mixed[1] != PLAIN[1]);
    }

    #[test]
    fn over_the_bound_a_store_is_refused_and_nobody_elses() {
        let limits = Limits { namespaces_max: 2, ..Limits::default() };
        let mut decoder = Decoder::new(WireConfig { limits, ..config() });
        let salted = |names: [u64; 2]| store(names, None, &TOKENS, [("cache_salt", "s".into())]);
        let (events, report) =
            next(&mut decoder, [salted([1, 2]), salted([2, 3]), salted([1, 2]), store([9, 8], None, &TOKENS, [])]);
        assert_eq!((events.len(), report.usable, decoder.namespaces()), (3, 3, 2));
        assert_eq!(found(&report), [(Finding::NamespacesFull, 1)]);
        assert_eq!(hashes(&events), PLAIN);
    }
}

mod batches {
    use super::*;
    use StorageTier::{Device, Disk, External, HostPinned};

    fn decode(payload: &[u8]) -> (Vec<RouterEvent>, Report) {
        let mut events = Vec::new();
        let report = decoder().decode(payload, &mut events);
        (events, report)
    }

    fn good(name: u64) -> Msg {
        removal([name], [])
    }

    #[test]
    fn media_of_every_engine_are_tiers() {
        let cases = [
            (Msg::Nil, Device),
            ("GPU".into(), Device),
            ("CPU".into(), HostPinned),
            ("CPU_PINNED".into(), HostPinned),
            ("STORAGE".into(), Disk),
            ("DISK".into(), Disk),
            ("EXTERNAL".into(), External),
        ];
        for (medium, tier) in cases {
            let medium = [("medium", medium)];
            let of = [store([11], None, &TOKENS[..4], medium.clone()), removal([11], medium)];
            let (events, report) = next(&mut decoder(), of);
            assert_eq!(events, [stored(tier, None, &[(11, PLAIN[0])]), removed(tier, &[11])]);
            assert!(report.findings.is_empty());
        }
        let (events, report) = next(&mut decoder(), [removal([11], [("medium", "TAPE".into())]), good(1)]);
        assert_eq!((events, found(&report)), (vec![removed(Device, &[1])], vec![(Finding::UnknownMedium, 1)]));
    }

    #[test]
    fn a_bad_event_costs_itself() {
        let bad = [
            (Msg::Nil, Finding::WrongType),
            (Msg::Array(vec![]), Finding::WrongShape),
            (Msg::Map(vec![]), Finding::WrongShape),
            (Msg::named([("kind", "BlockRemoved".into())]), Finding::WrongShape),
            (Msg::from(["BlockRemoved"]), Finding::WrongShape),
            (Msg::from([5_u64]), Finding::WrongType),
            (Msg::from(["BlockMoved", "x"]), Finding::UnknownEvent),
            (removal([1], [("medium", 5.into())]), Finding::WrongType),
            (removal([1], [("locality", "remote".into())]), Finding::NonLocal),
            (Msg::Array(vec!["BlockRemoved".into(), 5.into()]), Finding::WrongType),
            (store([1], None, &TOKENS, [("lora_name", 5.into())]), Finding::WrongType),
            (store([1], None, &TOKENS, [("parent_block_hash", "x".into())]), Finding::BadHash),
            (removal([1], [("note", Msg::Raw([vec![0x91; 40], vec![0x01]].concat()))]), Finding::TooDeep),
        ];
        for (event, finding) in bad {
            let (events, report) = next(&mut decoder(), [good(1), event.clone(), good(2)]);
            assert_eq!(events, [removed(Device, &[1]), removed(Device, &[2])], "{event:?}");
            assert_eq!((found(&report), report.events, report.usable), (vec![(finding, 1)], 3, 2), "{event:?}");
        }
    }

    #[test]
    fn what_is_new_and_not_needed_costs_nothing() {
        let more = [
            ("ownership", Msg::from([5_u64])),
            ("session_id", "s".into()),
            ("lookahead_token_ids", [7_u64].into()),
            ("locality", "LOCAL".into()),
            ("from tomorrow", Msg::named([("x", Msg::Bool(true))])),
        ];
        let late_type = Msg::Map(vec![
            (Msg::from([1_u64]), Msg::Nil),
            ("block_hashes".into(), [3_u64].into()),
            ("type".into(), "BlockRemoved".into()),
        ]);
        let long: Msg = [Msg::from("BlockRemoved"), [4_u64].into(), "CPU".into(), 0.into(), Msg::Nil, Msg::Nil]
            .into_iter()
            .chain([Msg::from("local"), Msg::Nil, 17.into()])
            .collect();
        let ignored = Msg::from(["Ignored", "x"]);
        let of = [store([11], None, &TOKENS[..4], more.clone()), removal([2], more), late_type, long, ignored];
        let (events, report) = next(&mut decoder(), of);
        let expected = [
            stored(Device, None, &[(11, PLAIN[0])]),
            removed(Device, &[2]),
            removed(Device, &[3]),
            removed(HostPinned, &[4]),
        ];
        assert_eq!((&events[..], found(&report), report.usable), (&expected[..], vec![], 5));
    }

    #[test]
    fn the_tail_of_an_array_may_be_of_another_release() {
        let with = |tail: Vec<Msg>| {
            let least = [
                Msg::from("BlockStored"),
                [11_u64].into(),
                Msg::Nil,
                [1_u64, 2, 3, 4].into(),
                4.into(),
                Msg::Nil,
                "GPU".into(),
            ];
            hashes_of(least.into_iter().chain(tail).collect())
        };
        let salted = requested(&TOKENS[..4], Some("a"), Some("t"));
        let full = vec!["a".into(), [["a", "t"]].into(), 0.into(), "full_attention".into(), Msg::Nil, "local".into()];
        assert_eq!(with(full), (salted, vec![]));
        let odd = vec![Msg::Nil, Msg::Nil, "?".into(), 5.into(), "?".into(), Msg::Array(vec![])];
        assert_eq!(with(odd), (PLAIN[..1].to_vec(), vec![(Finding::WrongType, 3)]));
        // What stands where adapters and salts are named is never nothing.
        for tail in [vec![5.into()], vec![Msg::named([("salt", "s".into())])], vec![Msg::Nil, Msg::Bool(true)]] {
            let (hashes, findings) = with(tail);
            assert!(hashes[0] != PLAIN[0] && findings == [(Finding::UnknownNamespace, 1)]);
        }
    }

    #[test]
    fn only_the_main_attentions_blocks_count() {
        let kind = |idx: u64, kind: &str| [("group_idx", idx.into()), ("kv_cache_spec_kind", kind.into())];
        let group = |idx: u64| [("group_idx", Msg::Uint(idx))];
        let mut decoder = decoder();
        let (events, report) = next(
            &mut decoder,
            [
                store([11], None, &TOKENS[..4], kind(0, "sliding_window")),
                store([11], None, &TOKENS[..4], kind(1, "full_attention")),
                removal([11], group(0)),
                removal([11], group(1)),
                removal([12], []),
                removal([13], group(2)),
            ],
        );
        let expected = [stored(Device, None, &[(11, PLAIN[0])]), removed(Device, &[11]), removed(Device, &[12])];
        assert_eq!((&events[..], found(&report)), (&expected[..], vec![(Finding::NotMainAttention, 3)]));
        decoder.forget();
        let (events, _) = next(&mut decoder, [removal([11], group(0)), removal([11], group(1))]);
        assert_eq!(events, [removed(Device, &[11])]);
    }

    #[test]
    fn another_ranks_batch_leaves_no_trace() {
        let salted = |name| store([name], None, &TOKENS[..4], [("cache_salt", "s".into())]);
        let clear = || Msg::named([("type", "AllBlocksCleared".into())]);
        let of_rank = |rank: Msg, events: Vec<Msg>| Msg::Array(vec![Msg::Float(1.0), Msg::Array(events), rank]).bytes();
        let mut decoder = Decoder::new(WireConfig { ranks: 0..2, ..config() });
        let mut events = Vec::new();
        for rank in [Msg::Nil, 1.into()] {
            let report = decoder.decode(&of_rank(rank, vec![salted(11), salted(12)]), &mut events);
            assert_eq!((report.foreign_rank, report.usable), (None, 2));
        }
        assert_eq!((events.len(), decoder.namespaces()), (4, 2));
        let trace = vec![
            salted(13),
            removal([11], []),
            store([12], None, &TOKENS, []),
            clear(),
            salted(14),
            removal([12], [("group_idx", 1.into()), ("kv_cache_spec_kind", "full_attention".into())]),
        ];
        for (rank, told) in
            [(Msg::Uint(0), 0), (257.into(), 257), (u64::MAX.into(), u32::MAX), (Msg::Int(-1), u32::MAX)]
        {
            let report = decoder.decode(&of_rank(rank, trace.clone()), &mut events);
            assert_eq!((report.foreign_rank, report.events, report.usable, report.cleared), (Some(told), 6, 0, false));
            assert_eq!((events.len(), found(&report)), (4, vec![(Finding::ForeignRank, 1)]));
            assert_eq!(decoder.namespaces(), 2);
        }
        let child = |parent| store([20], Some(parent), &TOKENS[..4], []);
        let group = removal([1], [("group_idx", 1.into())]);
        let report = decoder.decode(&of_rank(Msg::Nil, vec![child(11), child(12), group]), &mut events);
        assert_eq!(found(&report), [(Finding::NotMainAttention, 1)]);
        let salted = requested(&TOKENS[..4], None, Some("s"));
        assert!(hashes(&events[4..5]) == salted && hashes(&events[5..6]) == salted);
        // A worker with one rank may number it as it likes.
        let mut decoder = Decoder::new(config());
        let report = decoder.decode(&of_rank(9.into(), vec![good(1)]), &mut events);
        assert_eq!((report.foreign_rank, report.usable), (None, 1));
    }

    #[test]
    fn what_is_around_the_events_may_be_odd() {
        let events = || Msg::Array(vec![good(1)]);
        let batch = |items: Vec<Msg>| decode(&Msg::Array(items).bytes());
        let cases = [
            (batch(vec![Msg::Float(f64::NAN), events()]), vec![(Finding::NotFinite, 1)]),
            (batch(vec![5.into(), events(), Msg::Nil, "more".into()]), vec![]),
            (batch(vec!["now".into(), events(), "rank".into()]), vec![(Finding::WrongType, 2)]),
            (decode(&[super::batch([good(1)]), vec![0]].concat()), vec![(Finding::TrailingBytes, 1)]),
        ];
        for ((events, report), findings) in cases {
            assert_eq!((events, found(&report)), (vec![removed(Device, &[1])], findings));
        }
        let none = [
            (decode(&[]), Finding::Truncated),
            (decode(&[0xc1]), Finding::Malformed),
            (decode(b"\x80"), Finding::WrongType),
            (batch(vec![Msg::Float(1.0)]), Finding::WrongShape),
            (batch(vec![Msg::Float(1.0), 5.into()]), Finding::WrongType),
        ];
        for ((events, report), finding) in none {
            assert_eq!((events.len(), report.usable, found(&report)), (0, 0, vec![(finding, 1)]));
        }
    }

    #[test]
    fn limits_cost_what_is_beyond_them() {
        let limits =
            Limits { payload_bytes_max: 400, events_max: 3, hashes_max: 2, tokens_max: 8, ..Limits::default() };
        let mut decoder = Decoder::new(WireConfig { limits, ..config() });
        let many = removal(1..=3, []);
        let long = store([1], None, &[1; 9], []);
        let (events, report) = next(&mut decoder, [many, long, good(1), good(2), good(3)]);
        assert_eq!(events, [removed(Device, &[1])]);
        assert_eq!((found(&report), report.events, report.usable), (vec![(Finding::TooLarge, 3)], 5, 1));
        let (events, report) = next(&mut decoder, (0..20).map(good));
        assert_eq!((events.len(), report.events, found(&report)), (0, 0, vec![(Finding::TooLarge, 1)]));
    }
}
