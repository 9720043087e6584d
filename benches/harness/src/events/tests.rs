use std::num::NonZeroU32;
use std::sync::Arc;

use clap::Parser;
use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::internals::wire::{Decoder, DecoderLimits, WireConfig};
use pointsman::protocol::{EngineHash, KvEvent, RouterEvent, StoredBlock, WorkerId, WorkerRank};
use pointsman_trial::engine::{EngineConfig, Rank, RequestSpec};
use pointsman_trial::kv_events::Encoder;
use serde_json::Value;

use super::*;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    events: Events,
}

/// Arguments for a fast test, with caches small enough for evictions.
fn small() -> Events {
    let line = "test --ranks 2 --limit 40 --kv-blocks 256 --output-tokens 70 --repeat 2";
    Arguments::parse_from(line.split_whitespace()).events
}

#[test]
fn both_layouts_contain_the_same_blocks() {
    let map = small().run().expect("maps are read and applied");
    let array = Events { dialect: Dialect::VllmArray, ..small() }.run().expect("arrays are read and applied");
    assert!(map.removed_blocks > 100 && map.stored_blocks > map.removed_blocks, "{map:?}");
    assert_eq!((map.stored_blocks, map.removed_blocks), (array.stored_blocks, array.removed_blocks));
    assert_eq!((map.requests, map.messages), (40, array.messages));
    assert!(map.bytes > array.bytes && array.bytes > 64 * array.stored_blocks);
}

#[test]
fn equal_arguments_give_equal_recordings() {
    let options = Events { limit: Some(12), ..small() };
    let record = |options: &Events| {
        recording::record(options, &options.prompts().expect("generated")).expect("an engine serves the request")
    };
    let recording = record(&options);
    assert_eq!(recording, record(&options));
    assert_ne!(recording, record(&Events { seed: 2, ..options }));
    assert_eq!(recording.tokens.len() as u64, 64 * recording.stored_blocks);
    assert!((0..2).all(|engine| recording.messages.iter().any(|message| message.engine == engine)));
}

#[test]
fn decoded_batches_match_the_engine() {
    let block_size = NonZeroU32::new(4).expect("not zero");
    let config = EngineConfig { block_size: 4, kv_blocks: 6, max_model_len: 20, ..EngineConfig::default() };
    let mut engine = Rank::new(config).expect("valid engine settings");
    // The second prompt only fits after the eviction of the first one's last block.
    let prompts = [(0..16).collect::<Vec<_>>(), [0, 1, 2, 3].into_iter().chain(70_000..70_014).collect()];
    let id = WorkerRank::new(WorkerId(3), 0);
    for dialect in [Dialect::VllmMap, Dialect::VllmArray] {
        let config =
            WireConfig { rank: id, ranks: 0..1, block_size, is_eagle: false, limits: DecoderLimits::default() };
        let mut decoder = Decoder::new(config);
        let encoder = Encoder { format: dialect.into(), block_size: 4, rank: 0, lora_ids: Arc::default() };
        engine.reset_cache(false).expect("no request holds blocks");
        let mut decoded: Vec<RouterEvent> = Vec::new();
        for (request, prompt) in (0..).zip(&prompts) {
            engine.submit(RequestSpec::new(request, &prompt[..], 1)).expect("accepted");
            let step = engine.step().expect("a request waits");
            let report = decoder.decode(&encoder.batch(1e-6, &step.events), &mut decoded);
            assert!(report.findings.is_empty(), "{report:?}");
        }
        let names = |event: &RouterEvent| match &event.data {
            KvEvent::Stored { blocks, .. } => blocks.clone(),
            KvEvent::Removed { .. }
            | KvEvent::Offloaded { .. }
            | KvEvent::Cleared
            | KvEvent::TierCleared
            | KvEvent::GroupStored { .. }
            | KvEvent::GroupRemoved { .. } => {
                panic!("{event:?} is no store")
            }
        };
        let first = names(&decoded[0]);
        let hashes = BlockHasher::new(HashScheme::new(block_size)).block_hashes(&prompts[0], &MmBlocks::NONE);
        assert!(first.iter().map(|block| block.block_hash).eq(hashes.iter().copied()), "{first:?}");
        let removed: Vec<EngineHash> = first[1..].iter().rev().map(|block| block.engine_hash).collect();
        let [gone @ .., last] = &decoded[1..] else { panic!("{decoded:?}") };
        let gone: Vec<EngineHash> = gone
            .iter()
            .flat_map(|event| match &event.data {
                KvEvent::Removed { blocks } => blocks.clone(),
                KvEvent::Stored { .. }
                | KvEvent::Offloaded { .. }
                | KvEvent::Cleared
                | KvEvent::TierCleared
                | KvEvent::GroupStored { .. }
                | KvEvent::GroupRemoved { .. } => {
                    panic!("{event:?} is no removal")
                }
            })
            .collect();
        assert_eq!(gone, removed, "leaf first");
        let KvEvent::Stored { parent, blocks } = &last.data else { panic!("{last:?}") };
        let hashes = BlockHasher::new(HashScheme::new(block_size)).block_hashes(&prompts[1], &MmBlocks::NONE);
        let stored: Vec<StoredBlock> = blocks.clone();
        assert_eq!(*parent, Some(first[0].engine_hash));
        assert!(stored.iter().map(|block| block.block_hash).eq(hashes[1..].iter().copied()), "{stored:?}");
    }
}

#[test]
fn json_is_one_line_and_round_trips() {
    let report = Events { limit: Some(6), repeat: 1, ..small() }.run().expect("it runs");
    let mut line = Vec::new();
    report.write(&mut line, true).expect("written");
    let line = String::from_utf8(line).expect("text");
    assert_eq!(line.matches('\n').count(), 1);
    let json: Value = serde_json::from_str(&line).expect("json");
    for key in ["stored_blocks", "removed_blocks", "bytes", "messages", "ranks", "repeat", "seed"] {
        assert!(json[key].is_u64(), "{key}: {line}");
    }
    for stage in ["hash", "decode_hash", "decode_hash_apply"] {
        assert!(json[stage]["median"]["cpu_ms"].is_number(), "{stage}: {line}");
        assert!(json[stage]["best"]["million_named_per_second"].is_number(), "{stage}: {line}");
    }
    let mut text = Vec::new();
    report.write(&mut text, false).expect("written");
    assert!(String::from_utf8(text).expect("text").contains("decode_hash_apply.best.cpu_ms"));
}

#[test]
fn invalid_fleets_are_rejected_by_name() {
    for (flag, value) in [("--ranks", "0"), ("--repeat", "0"), ("--block-size", "0"), ("--dialect", "xml")] {
        let error = Arguments::try_parse_from(["test", flag, value]).err().expect("refused").to_string();
        assert!(error.contains(flag) && error.contains(value), "{error}");
    }
    let error = Events { kv_blocks: 9, ..small() }.run().expect_err("no prompt fits").to_string();
    assert!(error.contains("kv_blocks 9"), "{error}");
}
