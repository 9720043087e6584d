//! Cost of a stored block, a removed block and a query in the prefix index under a steady load.
//!
//! The load has sixteen ranks, each with a cache of 16,384 blocks that evicts least recently used leaves.
//! `POINTSMAN_TRACE` is the path of a trace in Mooncake's format (one `{"hash_ids": [...], ...}` per line, 512 tokens
//! per id, here eight blocks of 64). Without it, the load consists of generated conversations over shared system
//! prompts. Each request is sent to a pseudo-random rank, so that prefixes spread. Before the measurement, the caches
//! are filled and evict blocks.
//!
//! Criterion measures stores, removals and queries per element. In addition, the distribution of single queries and the
//! bytes per held block are printed once on stderr.

#![expect(clippy::disallowed_types, reason = "a benchmark reads the clock")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pointsman::internals::index::{BlockDigest, Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock};
use pointsman::test_support::{mix, rank};

const RANKS: u64 = 16;
const BLOCKS_PER_RANK: usize = 16_384;
const BLOCKS_PER_ID: u64 = 8;

/// Events of one request. Evictions come first, because they make room.
struct Step {
    removed: Option<RouterEvent>,
    stored: Option<RouterEvent>,
}

/// A load: steps that fill the caches, measured steps, and the prompts of the queries.
struct Load {
    warm: Vec<Step>,
    timed: Vec<Step>,
    prompts: Vec<Vec<BlockHash>>,
}

/// Requests as lists of ids, each id `BLOCKS_PER_ID` blocks.
fn requests() -> Vec<Vec<u64>> {
    #[expect(clippy::disallowed_methods, reason = "the trace is not shipped; the caller provides its path")]
    let Ok(path) = std::env::var("POINTSMAN_TRACE") else { return generated() };
    let trace = std::fs::read_to_string(&path).expect("POINTSMAN_TRACE names a readable file");
    let ids = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).expect("each line is a JSON object");
        let ids = record["hash_ids"].as_array().expect("each record has hash_ids");
        ids.iter().map(|id| id.as_u64().expect("hash_ids are numbers")).collect()
    };
    trace.lines().map(ids).collect()
}

/// Conversations of up to eight turns, each prompt an extension of the previous one, over twelve system prompts.
fn generated() -> Vec<Vec<u64>> {
    let mut open: Vec<Vec<u64>> = Vec::new();
    let mut next_id = 1_000;
    let mut requests = Vec::new();
    for draw in (0..12_000_u64).map(|n| mix(n ^ 0x0005_eed5)) {
        let conversation = if open.len() < 256 || draw % 5 < 2 {
            let system = draw >> 8 & 0xff;
            let prompt = (0..2 + system % 7).map(|at| system % 12 * 16 + at).collect();
            if open.len() < 256 {
                open.push(prompt);
                open.len() - 1
            } else {
                let replaced = (draw >> 16) as usize % open.len();
                open[replaced] = prompt;
                replaced
            }
        } else {
            (draw >> 16) as usize % open.len()
        };
        let turn = 2 + (draw >> 40) % 24;
        open[conversation].extend(next_id..next_id + turn);
        next_id += turn;
        requests.push(open[conversation].clone());
    }
    requests
}

/// Cache of one rank: the time of last use and the depth of each held block.
#[derive(Default)]
struct Cache {
    used_at: BTreeMap<u64, (u64, u32)>,
    /// Oldest first; within a prompt, deepest first: a parent is never evicted before its child.
    oldest: BTreeSet<(u64, Reverse<u32>, u64)>,
}

impl Cache {
    /// Uses a prompt given by the engine hashes of its blocks. Returns the evicted hashes and the number of leading
    /// blocks that were held.
    fn request(&mut self, now: u64, names: &[u64]) -> (Vec<u64>, usize) {
        let held = names.iter().take_while(|name| self.used_at.contains_key(name)).count();
        for (depth, &name) in (0..).zip(names) {
            if let Some((then, depth)) = self.used_at.insert(name, (now, depth)) {
                self.oldest.remove(&(then, Reverse(depth), name));
            }
            self.oldest.insert((now, Reverse(depth), name));
        }
        let mut evicted = Vec::new();
        while self.used_at.len() > BLOCKS_PER_RANK {
            let Some((_, _, name)) = self.oldest.pop_first() else { break };
            self.used_at.remove(&name);
            evicted.push(name);
        }
        (evicted, held)
    }
}

fn load() -> Load {
    let mut caches: Vec<Cache> = (0..RANKS).map(|_| Cache::default()).collect();
    let (mut steps, mut prompts) = (Vec::new(), Vec::new());
    let requests = requests();
    for (now, ids) in (0_u64..).zip(&requests) {
        let hashes: Vec<u64> = ids.iter().flat_map(|id| (0..BLOCKS_PER_ID).map(move |n| mix(id * 8 + n))).collect();
        let hashes = &hashes[..hashes.len().min(BLOCKS_PER_RANK)];
        // An engine hash covers the whole prefix of a block.
        let names = hashes.iter().scan(7, |name, hash| {
            *name = mix(*name ^ hash);
            Some(*name)
        });
        let names: Vec<u64> = names.collect();
        let slot = mix(now) % RANKS;
        let (evicted, held) = caches[slot as usize].request(now, &names);
        let event = |data| RouterEvent { rank: rank(slot), tier: StorageTier::Device, data };
        let parent = held.checked_sub(1).map(|last| EngineHash(names[last]));
        let blocks: Vec<_> = (names[held..].iter().zip(&hashes[held..]))
            .map(|(name, hash)| StoredBlock { engine_hash: EngineHash(*name), block_hash: BlockHash(*hash) })
            .collect();
        let removed = evicted.into_iter().map(EngineHash).collect::<Vec<_>>();
        steps.push(Step {
            removed: (!removed.is_empty()).then(|| event(KvEvent::Removed { blocks: removed })),
            stored: (!blocks.is_empty()).then(|| event(KvEvent::Stored { parent, blocks })),
        });
        prompts.push(hashes.iter().copied().map(BlockHash).collect());
    }
    let timed = steps.split_off(steps.len() / 2);
    let prompts = prompts.split_off(steps.len());
    Load { warm: steps, timed, prompts }
}

fn warmed(load: &Load) -> Index {
    let mut index = Index::new();
    for slot in 0..RANKS {
        index.register(rank(slot), Slot(slot as u32), Generation(1));
    }
    for step in &load.warm {
        for event in step.removed.iter().chain(&step.stored) {
            index.apply(event);
        }
    }
    index
}

/// Time and number of blocks of one kind of event.
#[derive(Default)]
struct Spent {
    time: Duration,
    blocks: u64,
    /// Nanoseconds per block of each step. Their median is insensitive to other load on the machine.
    steps: Vec<f64>,
}

impl Spent {
    fn add(&mut self, apply: impl FnOnce() -> u64) {
        let start = Instant::now();
        let blocks = apply();
        let time = start.elapsed();
        self.steps.push(time.as_nanos() as f64 / blocks as f64);
        self.time += time;
        self.blocks += blocks;
    }

    /// Mean and median in nanoseconds per block, and the number of blocks.
    fn report(mut self) -> String {
        self.steps.sort_unstable_by(f64::total_cmp);
        let mean = self.time.as_nanos() as f64 / self.blocks as f64;
        format!("{mean:.1}, median event {:.1} ({} blocks)", self.steps[self.steps.len() / 2], self.blocks)
    }
}

/// Applies all timed steps and returns the cost of stores and of removals. A step has about a hundred blocks, so the cost
/// of reading the clock is negligible.
fn churn(index: &mut Index, load: &Load) -> [Spent; 2] {
    let [mut stores, mut removals] = [Spent::default(), Spent::default()];
    for step in &load.timed {
        if let Some(event) = &step.removed {
            removals.add(|| index.apply(event).removed);
        }
        if let Some(event) = &step.stored {
            stores.add(|| index.apply(event).stored);
        }
    }
    [stores, removals]
}

/// Repeats all timed steps until at least `blocks` blocks of a kind are processed, and scales the time to exactly
/// `blocks`.
fn repeat(load: &Load, blocks: u64, kind: usize) -> Duration {
    let (mut time, mut done) = (Duration::ZERO, 0);
    while done < blocks {
        let spent = &churn(&mut warmed(load), load)[kind];
        time += spent.time;
        done += spent.blocks;
    }
    Duration::from_secs_f64(time.as_secs_f64() * blocks as f64 / done as f64)
}

fn report(load: &Load) {
    let mut index = warmed(load);
    let (bytes, held) = (index.bytes(), index.held_blocks());
    let mut overlaps = Overlaps::default();
    let mut times: Vec<_> = (load.prompts.iter())
        .map(|prompt| {
            let start = Instant::now();
            index.overlaps(black_box(prompt), &mut overlaps);
            black_box(&overlaps);
            start.elapsed().as_nanos()
        })
        .collect();
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    let [stores, removals] = churn(&mut index, load);
    eprintln!("device tier: {:?}", index.shape(StorageTier::Device));
    eprintln!("{held} held blocks, {:.1} bytes each", bytes as f64 / held as f64);
    eprintln!("after churn {:.1} bytes each", index.bytes() as f64 / index.held_blocks() as f64);
    eprintln!("query ns: p10 {} p50 {} p90 {} p99 {}", at(10), at(50), at(90), at(99));
    eprintln!("one pass, ns a block: store {}", stores.report());
    eprintln!("one pass, ns a block: remove {}", removals.report());
}

fn bench(criterion: &mut Criterion) {
    let load = load();
    report(&load);
    let mut group = criterion.benchmark_group("index");
    group.sample_size(10).throughput(Throughput::Elements(1));
    group.bench_function("store, per block", |bencher| {
        bencher.iter_custom(|blocks| repeat(&load, blocks, 0));
    });
    group.bench_function("remove, per block", |bencher| {
        bencher.iter_custom(|blocks| repeat(&load, blocks, 1));
    });
    // Cost of the digest in a store and in a removal.
    let names: Vec<_> = (0..1 << 14).map(|n| (StorageTier::Device, EngineHash(mix(n)))).collect();
    group.throughput(Throughput::Elements(1 << 14));
    group.bench_function("digest", |bencher| {
        bencher.iter(|| black_box(&names).iter().copied().collect::<BlockDigest>());
    });
    group.throughput(Throughput::Elements(1));
    let index = warmed(&load);
    let mut overlaps = Overlaps::default();
    let mut prompts = load.prompts.iter().cycle();
    group.bench_function("query", |bencher| {
        bencher.iter(|| {
            index.overlaps(prompts.next().expect("cycles"), &mut overlaps);
            black_box(overlaps.hits().len())
        });
    });
    group.bench_function("query, detailed", |bencher| {
        bencher.iter(|| {
            index.overlaps_detailed(prompts.next().expect("cycles"), &mut overlaps);
            black_box(overlaps.last_matched().len())
        });
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
