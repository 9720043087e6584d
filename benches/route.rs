//! Cost of a whole request for its caller: [`Router::route`], and the drop that frees its booking.
//!
//! The caller is one task on a runtime of two threads, with fleets of 8, 64 and 512 ranks. 64 requests are active in
//! addition to the measured one, half of them past their prefill. Prompts are 190 blocks (12k tokens in blocks of 64):
//! sixteen conversations, whose requests share 100 blocks, each held by two ranks, and four system prompts of 16
//! blocks, each held by a quarter of the ranks. The same prompts are passed as tokens, which the caller hashes, and as
//! hashes. The difference between the two is the cost of hashing; the rest is the cost of the actors.
//!
//! The measured time includes the messages to the chosen rank for both ends of the booking. There are no other callers,
//! so no actor is contended. `pointsman-bench replay --clients` measures contention between callers.

#![expect(clippy::disallowed_types, reason = "a benchmark reads the clock")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman::{Prompt, RouteRequest, Router, RouterConfig};
use tokio::runtime::{Builder, Runtime};

#[allow(dead_code, reason = "other benchmarks use the rest")]
#[path = "common/routed.rs"]
mod routed;

use routed::{Prompts, busy};

/// Routes and frees `times` requests on a task of the runtime.
fn time(
    runtime: &Runtime,
    router: &Router,
    prompts: &Arc<Prompts>,
    prompt: for<'a> fn(&'a Prompts, usize) -> Prompt<'a>,
    times: u64,
) -> Duration {
    let (router, prompts) = (router.clone(), Arc::clone(prompts));
    let timed = runtime.spawn(async move {
        let started = Instant::now();
        for request in 0..times as usize {
            let request = RouteRequest::new("timed", prompt(&prompts, request));
            drop(router.route(request).await.expect("a rank"));
        }
        started.elapsed()
    });
    runtime.block_on(timed).expect("nothing in it panics")
}

fn route(criterion: &mut Criterion) {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_time().build().expect("a runtime");
    let prompts = Arc::new(Prompts::new());
    let mut group = criterion.benchmark_group("route+free");
    for ranks in [8, 64, 512] {
        let (router, active) = runtime.block_on(busy(ranks, RouterConfig::default()));
        group.bench_function(BenchmarkId::new("hashed", ranks), |bencher| {
            bencher.iter_custom(|times| time(&runtime, &router, &prompts, Prompts::hashed, times));
        });
        group.bench_function(BenchmarkId::new("tokens", ranks), |bencher| {
            bencher.iter_custom(|times| time(&runtime, &router, &prompts, Prompts::tokens, times));
        });
        drop(active);
        runtime.block_on(router.shutdown(Duration::from_secs(1)));
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = route
}
criterion_main!(benches);
