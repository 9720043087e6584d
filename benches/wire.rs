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

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use pointsman::index::Index;
use pointsman::protocol::{Generation, RouterEvent, Slot, WorkerId, WorkerRank};
use pointsman::test_support::mix;
use pointsman::wire::{Decoder, DecoderLimits, WireConfig};

const BATCHES: u64 = 400;
const BLOCKS_HELD_MAX: usize = 4_000;
const RANK: WorkerRank = WorkerRank::new(WorkerId(1), 0);

fn text(to: &mut Vec<u8>, text: &str) {
    match text.len() {
        len @ ..32 => to.push(0xa0 | len as u8),
        len => to.extend([0xd9, len as u8]),
    }
    to.extend(text.as_bytes());
}

fn array(to: &mut Vec<u8>, len: usize) {
    match len {
        ..16 => to.push(0x90 | len as u8),
        _ => {
            to.push(0xdc);
            to.extend((len as u16).to_be_bytes());
        }
    }
}

fn number(to: &mut Vec<u8>, number: u64) {
    match number {
        ..0x80 => to.push(number as u8),
        0x80..0x100 => to.extend([0xcc, number as u8]),
        0x100..0x1_0000 => {
            to.push(0xcd);
            to.extend((number as u16).to_be_bytes());
        }
        0x1_0000..0x1_0000_0000 => {
            to.push(0xce);
            to.extend((number as u32).to_be_bytes());
        }
        _ => {
            to.push(0xcf);
            to.extend(number.to_be_bytes());
        }
    }
}

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

/// Batches of one engine, and their number of stored blocks.
fn batches(block_size: u64, ids: Ids) -> (Vec<Vec<u8>>, u64) {
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
        let mut n_events = 1;
        while held.len() + n_new as usize > BLOCKS_HELD_MAX {
            let victim = held.pop_front().expect("the table is full");
            events.push(0x84);
            text(&mut events, "type");
            text(&mut events, "BlockRemoved");
            text(&mut events, "block_hashes");
            array(&mut events, 1);
            number(&mut events, victim);
            text(&mut events, "medium");
            text(&mut events, "GPU");
            text(&mut events, "group_idx");
            number(&mut events, 0);
            n_events += 1;
        }
        events.extend([0xde, 0, 11]);
        text(&mut events, "type");
        text(&mut events, "BlockStored");
        text(&mut events, "block_hashes");
        array(&mut events, n_new as usize);
        (first..first + n_new).for_each(|at| number(&mut events, name(at)));
        text(&mut events, "parent_block_hash");
        match first {
            0 => events.push(0xc0),
            _ => number(&mut events, name(first - 1)),
        }
        text(&mut events, "token_ids");
        array(&mut events, (n_new * block_size) as usize);
        for at in first * block_size..(first + n_new) * block_size {
            number(&mut events, token(n << 32 | at, ids));
        }
        text(&mut events, "block_size");
        number(&mut events, block_size);
        text(&mut events, "lora_id");
        events.push(0xc0);
        text(&mut events, "medium");
        text(&mut events, "GPU");
        text(&mut events, "lora_name");
        events.push(0xc0);
        text(&mut events, "extra_keys");
        array(&mut events, n_new as usize);
        (0..n_new).for_each(|_| events.push(0xc0));
        text(&mut events, "group_idx");
        number(&mut events, 0);
        text(&mut events, "kv_cache_spec_kind");
        text(&mut events, "full_attention");
        stored += n_new;
        // The first blocks of the families are never evicted; all other blocks are evicted leaf first.
        if n >= 32 {
            held.extend((first..first + n_new).rev().map(name));
        }
        let mut payload = vec![0x93, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0];
        array(&mut payload, n_events);
        payload.extend(events);
        payload.push(0);
        payload
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
