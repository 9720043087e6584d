//! Cost of a decision without actors: the scheduler's share of one request.
//!
//! The scheduler's share is all work of [`Schedule`] for a request, from `Request` to `Book`. The fleet was filled by
//! the scheduler itself: eight requests of 190 blocks per rank, conversations whose turns share 100 blocks, and an
//! index with each conversation on two ranks and its system prompt on a quarter of them. The work of ranks is excluded:
//! their responses are prepared, and a booking ends immediately, by a board with the previous load. The remaining work
//! is a copy of a response for each queried rank, and one write to a board.
//!
//! The number of queried ranks is printed on stderr.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman::RouterConfig;
use pointsman::internals::config::LoadConfig;
use pointsman::policy::{KvConfig, PolicyConfig};

#[allow(dead_code, reason = "other benchmarks use the rest")]
#[path = "common/still.rs"]
mod still;

use still::Still;

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
    targets = decide
}
criterion_main!(benches);
