//! Cost of a stored block, a removed block and a query in the prefix index under a steady load.
//!
//! The load has sixteen ranks, each with a cache of 16,384 blocks that evicts least recently used leaves.
//! `POINTSMAN_TRACE` is the path of a trace, such as Mooncake's. Without it, the load consists of generated conversations
//! over shared system prompts. Blocks have 64 tokens. Each request is sent to a pseudo-random rank, so that prefixes spread. Before the measurement, the caches
//! are filled and evict blocks.
//!
//! Criterion measures stores, removals and queries per element. In addition, the distribution of single queries, the
//! bytes per held block, and the share of blocks that queries find within a memory budget are printed once on stderr.

#![expect(clippy::disallowed_types, reason = "a benchmark reads the clock")]

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use ahash::RandomState;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lru::LruCache;
use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock};
use pointsman::test_support::{mix, rank};
use pointsman_trial::workload::generate::Conversations;
use pointsman_trial::workload::trace::read;
use pointsman_trial::workload::{Request, Segment};

const RANKS: u64 = 16;
const BLOCKS_PER_RANK: usize = 16_384;
const BLOCK_SIZE: u32 = 64;

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

/// Block hashes of the prompts, of equal blocks for equal segments.
fn prompts() -> Vec<Vec<u64>> {
    #[expect(clippy::disallowed_methods, reason = "the trace is not shipped; the caller provides its path")]
    let workload = match std::env::var("POINTSMAN_TRACE") {
        Ok(path) => read(Path::new(&path), None).expect("POINTSMAN_TRACE names a trace"),
        Err(_) => Conversations { requests: 12_000, ..Conversations::default() }.generate(1),
    };
    let blocks = |segment: &Segment| {
        let id = mix(segment.id);
        (0..segment.tokens / BLOCK_SIZE).map(move |block| mix(id ^ u64::from(block)))
    };
    let hashes = |request: &Request| request.prompt.iter().flat_map(blocks).take(BLOCKS_PER_RANK).collect();
    workload.requests.iter().map(hashes).collect()
}

/// Cache of one rank: its blocks by their last use, the children of a prompt before their parents.
type Cache = LruCache<u64, (), RandomState>;

/// Uses a prompt given by the engine hashes of its blocks. Returns the evicted hashes and the number of leading blocks
/// that were held.
fn request(cache: &mut Cache, names: &[u64]) -> (Vec<u64>, usize) {
    let held = names.iter().take_while(|name| cache.contains(*name)).count();
    names.iter().rev().for_each(|name| _ = cache.put(*name, ()));
    let surplus = cache.len().saturating_sub(BLOCKS_PER_RANK);
    ((0..surplus).filter_map(|_| cache.pop_lru()).map(|(name, ())| name).collect(), held)
}

fn load() -> Load {
    let mut caches: Vec<Cache> = (0..RANKS).map(|_| LruCache::unbounded_with_hasher(RandomState::new())).collect();
    let (mut steps, mut prompts) = (Vec::new(), Vec::new());
    for (now, hashes) in (0_u64..).zip(self::prompts()) {
        // An engine hash covers the whole prefix of a block.
        let names = hashes.iter().scan(7, |name, hash| {
            *name = mix(*name ^ hash);
            Some(*name)
        });
        let names: Vec<u64> = names.collect();
        let slot = mix(now) % RANKS;
        let (evicted, held) = request(&mut caches[slot as usize], &names);
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
        prompts.push(hashes.into_iter().map(BlockHash).collect());
    }
    let timed = steps.split_off(steps.len() / 2);
    let prompts = prompts.split_off(steps.len());
    Load { warm: steps, timed, prompts }
}

fn warmed(load: &Load, budget_bytes: Option<u64>) -> Index {
    let mut index = Index::new();
    index.set_budget(budget_bytes);
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
}

impl Spent {
    fn add(&mut self, apply: impl FnOnce() -> u64) {
        let start = Instant::now();
        self.blocks += apply();
        self.time += start.elapsed();
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
        let spent = &churn(&mut warmed(load, None), load)[kind];
        time += spent.time;
        done += spent.blocks;
    }
    Duration::from_secs_f64(time.as_secs_f64() * blocks as f64 / done as f64)
}

/// Blocks that the queries find on all ranks.
fn found_blocks(index: &Index, load: &Load) -> u64 {
    let mut overlaps = Overlaps::default();
    let found = load.prompts.iter().map(|prompt| {
        index.overlaps(prompt, &mut overlaps);
        overlaps.hits().iter().map(|hit| u64::from(hit.device_blocks)).sum::<u64>()
    });
    found.sum()
}

fn report(load: &Load) {
    let mut index = warmed(load, None);
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
    let found = found_blocks(&index, load) as f64;
    for divisor in [2, 4, 8] {
        let share = found_blocks(&warmed(load, Some(index.bytes_used() as u64 / divisor)), load) as f64 / found;
        eprintln!("within 1/{divisor} of {} bytes: finds {share:.3} of the blocks", index.bytes_used());
    }
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    churn(&mut index, load);
    eprintln!("device tier: {:?}", index.shape(StorageTier::Device));
    eprintln!("{held} held blocks, {:.1} bytes each", bytes as f64 / held as f64);
    eprintln!("after churn {:.1} bytes each", index.bytes() as f64 / index.held_blocks() as f64);
    eprintln!("query ns: p10 {} p50 {} p90 {} p99 {}", at(10), at(50), at(90), at(99));
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
    let index = warmed(&load, None);
    let mut overlaps = Overlaps::default();
    let mut prompts = load.prompts.iter().cycle();
    group.bench_function("query", |bencher| {
        bencher.iter(|| {
            index.overlaps(prompts.next().expect("cycles"), &mut overlaps);
            black_box(overlaps.hits().len())
        });
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
