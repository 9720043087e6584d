use std::collections::BTreeMap;
use std::sync::Arc;

use crate::engine::{Block, CacheEvent, EngineHash, Tier};

use super::{Dialect, Encoder, EventFormat};

/// Timestamp of the captures of real publishers, which use blocks of four tokens and one adapter.
const TS: f64 = 1_700_000_000.5;

fn encoded(format: impl Into<EventFormat>, block_size: u32, events: &[CacheEvent]) -> String {
    encoded_at(TS, format, block_size, events)
}

fn encoded_at(ts: f64, format: impl Into<EventFormat>, block_size: u32, events: &[CacheEvent]) -> String {
    let lora_ids = Arc::new(BTreeMap::from([("adapterA".to_owned(), 1)]));
    let encoder = Encoder { format: format.into(), block_size, rank: 0, lora_ids };
    encoder.batch(ts, events).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn binary(dialect: Dialect) -> EventFormat {
    EventFormat { dialect, binary_hashes: true }
}

/// An engine hash with this value in its last eight bytes.
fn name(value: u64) -> EngineHash {
    let mut bytes = [0xee; 32];
    bytes[24..].copy_from_slice(&value.to_be_bytes());
    EngineHash(bytes)
}

fn block(
    hash: EngineHash,
    parent: Option<EngineHash>,
    tokens: &[u32],
    lora: Option<&str>,
    salt: Option<&str>,
) -> Block {
    Block {
        hash,
        parent,
        depth: u32::from(parent.is_some()),
        tokens: tokens.into(),
        lora_name: lora.map(Into::into),
        cache_salt: salt.map(Into::into),
    }
}

fn stored(tier: Tier, blocks: impl IntoIterator<Item = Block>) -> CacheEvent {
    CacheEvent::Stored { tier, blocks: blocks.into_iter().map(Arc::new).collect() }
}

/// Store of two blocks without a parent: tokens 1 to 8.
fn root(first: EngineHash, second: EngineHash) -> CacheEvent {
    let blocks = [block(first, None, &[1, 2, 3, 4], None, None), block(second, Some(first), &[5, 6, 7, 8], None, None)];
    stored(Tier::Device, blocks)
}

/// Store of one block with an adapter and a parent.
fn child(hash: u64, parent: u64, salt: Option<&str>) -> CacheEvent {
    let tokens = [151_643, 9, 10, 11];
    stored(Tier::Device, [block(name(hash), Some(name(parent)), &tokens, Some("adapterA"), salt)])
}

fn removed(hash: EngineHash) -> CacheEvent {
    CacheEvent::Removed { tier: Tier::Device, hash }
}

/// Captured batches of engines with the same layout and content, as hex strings.
const VLLM_11_ROOT: &str = "93cb41d954fc402000009197ab426c6f636b53746f72656492c4200101010101010101010101010101010101010101010101010101010101010101c4200202020202020202020202020202020202020202020202020202020202020202c098010203040506070804c0a347505500";
const VLLM_11_CHILD: &str = "93cb41d954fc402000009197ab426c6f636b53746f72656491cffedcba9876543210cf0123456789abcdef94ce0002505b090a0b0401a347505500";
const VLLM_33_CHILD: &str = "93cb41d954fc4020000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cffedcba9876543210b1706172656e745f626c6f636b5f68617368cf0123456789abcdefa9746f6b656e5f69647394ce0002505b090a0baa626c6f636b5f73697a6504a76c6f72615f696401a66d656469756da3475055a96c6f72615f6e616d65a86164617074657241aa65787472615f6b6579739191a86164617074657241a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00";
const SGLANG_18_ROOT: &str =
    "93cb41d954fc402000009197ab426c6f636b53746f72656492d2f8a432ebce3ade68b1c098010203040506070804c0a347505500";
const SGLANG_18_CHILD: &str =
    "93cb41d954fc402000009197ab426c6f636b53746f7265649105d2f8a432eb94ce0002505b090a0b04c0a347505500";
const SGLANG_18_HOST: &str = "93cb41d954fc402000009397ab426c6f636b53746f7265649106c0910101c0aa4350555f50494e4e454493ac426c6f636b52656d6f7665649105a347505591b0416c6c426c6f636b73436c656172656400";
const SGLANG_23_ROOT: &str = "93cb41d954fc402000009187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392d2f8a432ebce3ade68b1b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da347505500";
const SGLANG_23_CHILD: &str = "93cb41d954fc40200000918aa474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739105b1706172656e745f626c6f636b5f68617368d2f8a432eba9746f6b656e5f69647394ce0002505b090a0baa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055aa63616368655f73616c74ab74656e616e742d73616c74aa73657373696f6e5f6964a3732d31a96c6f72615f6e616d65a8616461707465724100";
const SGLANG_23_HOST: &str = "93cb41d954fc402000009387a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739106b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739101aa626c6f636b5f73697a6501a76c6f72615f6964c0a66d656469756daa4350555f50494e4e454483a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105a66d656469756da347505581a474797065b0416c6c426c6f636b73436c656172656400";
const EMPTY: &str = "93cb41d954fc402000009000";

/// Captures from the cache manager of vLLM 0.33, blocks of four tokens: a shared prefix, a salt, and the evictions for
/// further blocks.
const VLLM_33_SHARED: &str = "93cb3ff800000000000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfc6882bb15d6bfcb9b1706172656e745f626c6f636b5f68617368cff20358aa4fbb8879a9746f6b656e5f6964739407070707aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00";
const VLLM_33_SALTED: &str = "93cb3ff800000000000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfee50e0714c8a83d5cfd7de0ebd5f006695b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473986465666768696a6baa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a774656e616e7442c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00";
const VLLM_33_REMOVED: &str = "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf4cb3b9d034695fdda66d656469756da3475055a967726f75705f69647800";
const VLLM_33_CLEARED: &str = "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400";

#[test]
fn the_newest_vllm_layout_matches_captured_bytes() {
    let format = Dialect::VllmMap;
    assert_eq!(encoded(format, 4, &[child(0xfedc_ba98_7654_3210, 0x0123_4567_89ab_cdef, None)]), VLLM_33_CHILD);
    assert_eq!(encoded(format, 4, &[]), EMPTY);
    let (shared, parent) = (name(0xc688_2bb1_5d6b_fcb9), name(0xf203_58aa_4fbb_8879));
    let shared = stored(Tier::Device, [block(shared, Some(parent), &[7; 4], None, None)]);
    assert_eq!(encoded_at(1.5, format, 4, &[shared]), VLLM_33_SHARED);
    let (first, second) = (name(0xee50_e071_4c8a_83d5), name(0xd7de_0ebd_5f00_6695));
    let salted = stored(
        Tier::Device,
        [
            block(first, None, &[100, 101, 102, 103], None, Some("tenantB")),
            block(second, Some(first), &[104, 105, 106, 107], None, Some("tenantB")),
        ],
    );
    assert_eq!(encoded_at(1.5, format, 4, &[salted]), VLLM_33_SALTED);
    let removal = encoded_at(1.5, format, 4, &[removed(name(0x4cb3_b9d0_3469_5fdd))]);
    assert_eq!(removal, format!("93cb3ff800000000000091{VLLM_33_REMOVED}00"));
    assert_eq!(encoded_at(1.5, format, 4, &[CacheEvent::Cleared]), VLLM_33_CLEARED);
}

#[test]
fn the_older_vllm_layout_matches_captured_bytes_with_appended_fields() {
    let bytes = |byte: u8| EngineHash([byte; 32]);
    // lora_name, extra_keys, group_idx, kind and window of 0.23, appended to the fields of 0.11.
    let later = |captured: &str, tail: &str| {
        let body = captured.strip_suffix("00").expect("ends with the rank");
        format!("{}{tail}00", body.replacen("9197ab42", "919cab42", 1))
    };
    let kind = "00ae66756c6c5f617474656e74696f6ec0";
    let roots = encoded(binary(Dialect::VllmArray), 4, &[root(bytes(1), bytes(2))]);
    assert_eq!(roots, later(VLLM_11_ROOT, &format!("c092c0c0{kind}")));
    let children = encoded(Dialect::VllmArray, 4, &[child(0xfedc_ba98_7654_3210, 0x0123_4567_89ab_cdef, None)]);
    assert_eq!(children, later(VLLM_11_CHILD, &format!("a861646170746572419191a86164617074657241{kind}")));
    let gone = encoded(binary(Dialect::VllmArray), 4, &[removed(bytes(2)), CacheEvent::Cleared]);
    assert_eq!(
        gone,
        format!(
            "93cb41d954fc4020000092\
             94ac426c6f636b52656d6f76656491c420{}a347505500\
             91b0416c6c426c6f636b73436c656172656400",
            "02".repeat(32)
        )
    );
}

#[test]
fn maps_support_binary_hashes() {
    let encoded = encoded(binary(Dialect::VllmMap), 4, &[removed(EngineHash([3; 32]))]);
    assert!(encoded.contains(&format!("91c420{}", "03".repeat(32))), "{encoded}");
}

#[test]
fn both_sglang_layouts_match_captured_bytes() {
    // The hashes in the engine's notation: -123456789 and 987654321.
    let roots = root(name(0xffff_ffff_f8a4_32eb), name(0x3ade_68b1));
    assert_eq!(encoded(Dialect::SglangArray, 4, std::slice::from_ref(&roots)), SGLANG_18_ROOT);
    assert_eq!(encoded(Dialect::SglangMap, 4, &[roots]), SGLANG_23_ROOT);
    let host = [stored(Tier::Host, [block(name(6), None, &[1], None, None)]), removed(name(5)), CacheEvent::Cleared];
    assert_eq!(encoded(Dialect::SglangArray, 1, &host), SGLANG_18_HOST);
    assert_eq!(encoded(Dialect::SglangMap, 1, &host), SGLANG_23_HOST);
}

#[test]
fn sglang_maps_contain_salt_and_adapter_and_arrays_do_not() {
    let child = child(5, 0xffff_ffff_f8a4_32eb, Some("tenant-salt"));
    assert_eq!(encoded(Dialect::SglangArray, 4, std::slice::from_ref(&child)), SGLANG_18_CHILD);
    // The capture contains a session id, which the mock does not have.
    let session = "aa73657373696f6e5f6964a3732d31";
    let expected = SGLANG_23_CHILD.replacen("918aa474", "9189a474", 1).replacen(session, "", 1);
    assert_eq!(encoded(Dialect::SglangMap, 4, &[child]), expected);
}

#[test]
fn extra_keys_contain_the_salt_once_and_the_adapter_per_block() {
    let keys = |parent| {
        let first = block(name(1), parent, &[1], Some("adapterA"), Some("s"));
        let second = block(name(2), Some(name(1)), &[2], Some("adapterA"), Some("s"));
        encoded(Dialect::VllmMap, 1, &[stored(Tier::Device, [first, second])])
    };
    let adapter = "a86164617074657241";
    assert!(keys(None).contains(&format!("5f6b6579739292{adapter}a17391{adapter}")), "{}", keys(None));
    assert!(keys(Some(name(9))).contains(&format!("5f6b6579739291{adapter}91{adapter}")));
}

/// Events of vLLM's connectors and hybrid models, written with the event types of 0.32 and the map headers of 0.33.
const VLLM_OFFLOADED_NAME: &str = "93cb3ff800000000000092de0009a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739102b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739102a66d656469756da3435055a967726f75705f6964780000";
const VLLM_OFFLOADED_BLOCK: &str = "93cb3ff800000000000091de000aa474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739103b1706172656e745f626c6f636b5f6861736802a9746f6b656e5f6964739405060708aa626c6f636b5f73697a6504a76c6f72615f696401a66d656469756da3435055a96c6f72615f6e616d65a86164617074657241a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00";
const VLLM_MOONCAKE: &str = "93cb3ff800000000000091de0009a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739103b1706172656e745f626c6f636b5f6861736802a9746f6b656e5f6964739405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3637075a96c6f72615f6e616d65c0a967726f75705f6964780000";
const VLLM_LMCACHE: &str = "93cb3ff800000000000091de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739103b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6508a76c6f72615f6964c0a66d656469756da3637075a96c6f72615f6e616d65c000";
const VLLM_WINDOW: &str = "93cb3ff800000000000091de000ca474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739102b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f770d00";
const VLLM_MAMBA: &str = "93cb3ff800000000000093de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739102b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64a56d616d6261de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647801b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739102a66d656469756da3475055a967726f75705f6964780100";

#[test]
fn connectors_and_hybrid_models_match_captured_bytes() {
    let copy = |lora| {
        let blocks = [block(name(3), Some(name(2)), &[5, 6, 7, 8], lora, Some("salt"))];
        [stored(Tier::Host, blocks)]
    };
    let batch = |dialect, events: &[CacheEvent]| encoded_at(1.5, dialect, 4, events);
    let of_host = [stored(Tier::Host, [block(name(2), Some(name(1)), &[5; 4], Some("adapterA"), None)])];
    let gone = [CacheEvent::Removed { tier: Tier::Host, hash: name(2) }];
    assert_eq!(batch(Dialect::VllmOffloading, &[of_host, gone].concat()), VLLM_OFFLOADED_NAME);
    assert_eq!(batch(Dialect::VllmSelfDescribing, &copy(Some("adapterA"))), VLLM_OFFLOADED_BLOCK);
    assert_eq!(batch(Dialect::VllmMooncake, &copy(Some("adapterA"))), VLLM_MOONCAKE);

    let computed = root(name(1), name(2));
    let CacheEvent::Stored { blocks, .. } = computed.clone() else { unreachable!() };
    let chunks = batch(Dialect::VllmLmcache, std::slice::from_ref(&computed));
    // The capture has the name 3 in place of LMCache's own.
    let chunk = VLLM_LMCACHE[22..].replacen("9103", "91cffffffffffffffffd", 1);
    assert!(chunks.starts_with("93cb3ff800000000000092") && chunks.ends_with(&chunk), "{chunks}");

    let beside = CacheEvent::Stored { tier: Tier::Beside, blocks };
    let both = [beside.clone(), computed, removed(name(2))];
    assert_eq!(batch(Dialect::VllmMamba, &both), VLLM_MAMBA);
    let window = VLLM_WINDOW.replacen("9102b1", "920102b1", 1).replacen("91c0a967", "92c0c0a967", 1);
    assert_eq!(batch(Dialect::VllmWindow, &[beside]), window, "a window of three blocks holds both");
}
