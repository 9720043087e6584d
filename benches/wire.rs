//! Throughput of KV events from their bytes to the index, by stage, in blocks per second on one core.
//!
//! The batches are those of one engine: prompts of 10 to 100 blocks, half of which share a prefix with earlier ones,
//! stored in map form as vLLM 0.33 publishes them. The same number of blocks is evicted, leaf first, with one event
//! each, before the store that needs the room. Token ids are from a vocabulary of 150,000, with small ids far more
//! frequent than large ones. A uniform distribution is measured too, the worst case for a decoder that predicts the
//! length of the next id.
//!
//! `cargo bench --bench wire -- --warm-up-time 0.5 --measurement-time 2` takes a minute, without the build.

use std::collections::VecDeque;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use pointsman::index::Index;
use pointsman::protocol::{Generation, RouterEvent, Slot, WorkerId, WorkerRank};
use pointsman::test_support::mix;
use pointsman::wire::{Decoder, DecoderLimits, WireConfig};
use pointsman_trial::engine::{Block, CacheEvent, EngineHash, Tier};
use pointsman_trial::kv_events::{Dialect, Encoder, EventFormat};

const BATCHES: u64 = 400;
const BLOCKS_HELD_MAX: usize = 4_000;
const RANK: WorkerRank = WorkerRank::new(WorkerId(1), 0);

/// Distribution of token ids over the vocabulary.
#[derive(Clone, Copy)]
enum Ids {
    Skewed,
    Even,
}

fn token(draw: u64, ids: Ids) -> u64 {
    let unit = (mix(draw) >> 11) as f64 / (1_u64 << 53) as f64;
    let at = match ids {
        Ids::Skewed => unit * unit * unit,
        Ids::Even => unit,
    };
    (at * 150_000.0) as u64
}

/// The engine's hash of 32 bytes, of which it publishes the last eight.
fn engine_hash(name: u64) -> EngineHash {
    let mut bytes = [0; 32];
    bytes[24..].copy_from_slice(&name.to_be_bytes());
    EngineHash(bytes)
}

/// Batches of one engine, and their number of stored blocks.
fn batches(block_size: u64, ids: Ids) -> (Vec<Vec<u8>>, u64) {
    let format = EventFormat::from(Dialect::VllmMap);
    let encoder = Encoder { format, block_size: block_size as u32, rank: 0, lora_ids: Arc::default() };
    let tier = Tier::Device;
    let mut held: VecDeque<u64> = VecDeque::new();
    let mut stored = 0;
    let batches = (0..BATCHES).map(|n| {
        let draw = mix(n);
        let n_blocks = 10 + draw % 91;
        // After the first blocks of one of eight prompt families, or at the start of a prompt.
        let family = (n % 2 == 0).then_some(draw % 8).filter(|_| n >= 32);
        let name = |at: u64| {
            mix(match family {
                Some(family) if at < 10 => family * 1_000 + at,
                _ => 1_000_000 + n * 1_000 + at,
            })
        };
        let first = if family.is_some() { 10 } else { 0 };
        let n_new = n_blocks.saturating_sub(first).max(1);
        let mut events = Vec::new();
        while held.len() + n_new as usize > BLOCKS_HELD_MAX {
            let victim = held.pop_front().expect("the table is full");
            events.push(CacheEvent::Removed { tier, hash: engine_hash(victim) });
        }
        let block = |at: u64| {
            let tokens = at * block_size..(at + 1) * block_size;
            Arc::new(Block {
                hash: engine_hash(name(at)),
                parent: at.checked_sub(1).map(|before| engine_hash(name(before))),
                depth: at as u32,
                tokens: tokens.map(|at| token(n << 32 | at, ids) as u32).collect(),
                lora_name: None,
                cache_salt: None,
            })
        };
        events.push(CacheEvent::Stored { tier, blocks: (first..first + n_new).map(block).collect() });
        stored += n_new;
        // The first blocks of the families are never evicted; all other blocks are evicted leaf first.
        if n >= 32 {
            held.extend((first..first + n_new).rev().map(name));
        }
        encoder.batch(1.5, &events)
    });
    (batches.collect(), stored)
}

fn decoder(block_size: u64, ranks: u32) -> Decoder {
    let block_size = NonZeroU32::new(block_size as u32).expect("not zero");
    Decoder::new(WireConfig {
        rank: RANK,
        ranks: 0..ranks,
        block_size,
        is_eagle: false,
        limits: DecoderLimits::default(),
    })
}

fn decode(decoder: &mut Decoder, batches: &[Vec<u8>], mut then: impl FnMut(&[RouterEvent])) {
    let mut events = Vec::new();
    for payload in batches {
        events.clear();
        let report = decoder.decode(payload, &mut events);
        assert!(report.findings.is_empty(), "{report:?}");
        then(&events);
    }
}

fn benches(criterion: &mut Criterion) {
    for (block_size, ids, name) in
        [(64, Ids::Skewed, "64 tokens"), (64, Ids::Even, "64 tokens, ids drawn evenly"), (16, Ids::Skewed, "16 tokens")]
    {
        let (batches, stored) = batches(block_size, ids);
        let mut group = criterion.benchmark_group(format!("blocks of {name}"));
        group.throughput(Throughput::Elements(stored));
        // With another block size no block is hashed.
        group.bench_function("read", |bencher| {
            let mut decoder = decoder(block_size + 1, 1);
            bencher.iter(|| {
                let mut events = Vec::new();
                for payload in &batches {
                    events.clear();
                    black_box(decoder.decode(payload, &mut events));
                }
            });
        });
        group.bench_function("read, hash", |bencher| {
            let mut decoder = decoder(block_size, 1);
            bencher.iter(|| decode(&mut decoder, &batches, |events| _ = black_box(events)));
        });
        group.bench_function("read, hash, one of several ranks", |bencher| {
            let mut decoder = decoder(block_size, 2);
            bencher.iter(|| decode(&mut decoder, &batches, |events| _ = black_box(events)));
        });
        group.bench_function("read, hash, apply", |bencher| {
            let index = || {
                let mut index = Index::new();
                assert!(index.register(RANK, Slot(0), Generation(1)));
                (decoder(block_size, 1), index)
            };
            bencher.iter_batched(
                index,
                |(mut decoder, mut index)| {
                    decode(&mut decoder, &batches, |events| {
                        for event in events {
                            let applied = index.apply(event);
                            debug_assert_eq!((applied.unknown_parents, applied.unknown_removals), (0, 0));
                        }
                    });
                    index
                },
                BatchSize::PerIteration,
            );
        });
        group.finish();
    }
}

criterion_group!(wire, benches);
criterion_main!(wire);
