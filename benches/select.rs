//! Cost of a decision without actors: one cost, one selection, and the scheduler's share of one request.
//!
//! The scheduler's share is all work of [`Schedule`] for a request, from `Request` to `Book`. The fleet was filled by
//! the scheduler itself: eight requests of 190 blocks per rank, conversations whose turns share 100 blocks, and an
//! index with each conversation on two ranks and its system prompt on a quarter of them. The work of ranks is excluded:
//! their responses are prepared, and a booking ends immediately, by a board with the previous load. The remaining work
//! is a copy of a response for each queried rank, and one write to a board.
//!
//! The number of queried ranks is printed on stderr.

use pointsman::internals::policy::CostFacts;
use pointsman::policy::{KvConfig, PolicyConfig};
use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman::RouterConfig;
use pointsman::internals::config::LoadConfig;
use pointsman::internals::select::{Draw, TierOverlap};
use pointsman::test_support::{mix, rank};

#[allow(dead_code, reason = "other benchmarks use the rest")]
#[path = "common/still.rs"]
mod still;

use still::{BLOCKS, Still};

fn cost(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("select/cost");
    let facts = CostFacts {
        prompt_tokens: 64 * BLOCKS,
        overlap: TierOverlap { device_blocks: 100, host_pinned_blocks: 8, disk_blocks: 4, external_blocks: 0 },
        prefill_tokens: 9_000,
        prefill_tokens_least: 1_000,
        potential_blocks: 1_200,
        active_requests: 9,
        shared_cache_blocks: 0,
    };
    for (name, overlap_score_credit_decay) in [("as it comes", 0.0), ("decaying credit", 0.5)] {
        let cost = RouterConfig {
            policy: PolicyConfig::Kv(KvConfig { overlap_score_credit_decay, ..KvConfig::default() }),
            ..RouterConfig::default()
        }
        .kv_cost();
        group.bench_function(name, |bencher| bencher.iter(|| black_box(&cost).cost(black_box(&facts))));
    }
    group.finish();
}

fn pick(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("select/cheapest");
    for ranks in [8, 64, 512] {
        let differing: Vec<_> = (0..ranks).map(|slot| (rank(slot as u64), (mix(slot as u64) >> 40) as f64)).collect();
        let tied: Vec<_> = (0..ranks).map(|slot| (rank(slot as u64), 128.0)).collect();
        for (name, candidates) in [("costs differ", differing), ("all tied", tied)] {
            let mut request = 0;
            group.bench_function(BenchmarkId::new(name, ranks), |bencher| {
                bencher.iter(|| {
                    request += 1;
                    Draw { seed: 7, request }
                        .cheapest(black_box(&candidates).iter().map(|&(rank, cost)| (rank, rank, cost)))
                });
            });
        }
    }
    group.finish();
}

fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("select/scheduler's share");
    let latency = RouterConfig::default();
    let kv = RouterConfig { policy: PolicyConfig::Kv(KvConfig::default()), ..RouterConfig::default() };
    let board_only = RouterConfig { load: LoadConfig { assume_kv_reuse: false, ..kv.clone().load }, ..kv.clone() };
    for (name, config) in [("latency", latency), ("kv", kv), ("kv, no reuse assumed", board_only)] {
        for ranks in [8, 64, 512, 2_048] {
            let mut still = Still::new(config.clone(), ranks);
            group.bench_function(BenchmarkId::new(name, ranks), |bencher| bencher.iter(|| still.decide()));
            if let Some(tenths) = (10 * still.queried_ranks).checked_div(still.requests) {
                eprintln!("{name}, {ranks} ranks: {}.{} queried ranks per request", tenths / 10, tenths % 10);
            }
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = cost, pick, decide
}
criterion_main!(benches);
