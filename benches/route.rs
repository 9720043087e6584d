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

use pointsman::config::HealthConfig;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman::hashing::{BlockHasher, HashScheme, HashedPrompt, MmBlocks};
use pointsman::protocol::{
    EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerConfig, WorkerId, WorkerRank,
};
use pointsman::{Placement, Prompt, RouteRequest, Router, RouterConfig};
use tokio::runtime::{Builder, Runtime};

const BLOCK_SIZE: u32 = 64;
const BLOCKS: u32 = 190;
/// Blocks of a prompt that the turns of its conversation share, including the system prompt.
const CONVERSATION_BLOCKS: u32 = 100;
const SYSTEM_BLOCKS: u32 = 16;
const CONVERSATIONS: u32 = 16;
const SYSTEMS: u32 = 4;
const ACTIVE: u32 = 64;

/// Tokens of one turn of a conversation.
fn tokens(conversation: u32, turn: u32) -> Vec<u32> {
    let token = |at: u32| {
        let of = match at / BLOCK_SIZE {
            0..SYSTEM_BLOCKS => conversation % SYSTEMS,
            SYSTEM_BLOCKS..CONVERSATION_BLOCKS => 1_000 + conversation,
            _ => 1_000_000 + turn,
        };
        (of.wrapping_mul(0x9e37_79b9) ^ at.wrapping_mul(0x85eb_ca6b)) % 150_000
    };
    (0..BLOCKS * BLOCK_SIZE).map(token).collect()
}

fn hashed(tokens: &[u32]) -> HashedPrompt {
    let scheme = HashScheme::new(BLOCK_SIZE.try_into().expect("not zero"));
    HashedPrompt::from_tokens(&BlockHasher::new(scheme), tokens, &MmBlocks::NONE)
}

/// Event: `rank` has stored the first `blocks` blocks of a prompt.
fn stored(rank: u32, prompt: &HashedPrompt, blocks: u32) -> RouterEvent {
    let names = prompt.sequence_hashes().iter().map(|hash| EngineHash(!hash.0));
    let named = names.zip(prompt.block_hashes().iter()).take(blocks as usize);
    let blocks = named.map(|(engine_hash, &block_hash)| StoredBlock { engine_hash, block_hash }).collect();
    let rank = WorkerRank::new(WorkerId(u64::from(rank)), 0);
    RouterEvent { rank, tier: StorageTier::Device, data: KvEvent::Stored { parent: None, blocks } }
}

/// A router with cache contents, and the active requests on its ranks.
async fn busy(ranks: u32) -> (Router, Vec<Placement>) {
    let defaults = RouterConfig::default();
    // The engines do not exist, so they cannot be probed.
    let config = RouterConfig {
        block_size: BLOCK_SIZE,
        health: HealthConfig { probe_interval_ms: 0, ..defaults.health },
        ..defaults
    };
    let mut builder = Router::builder(config);
    for worker in 0..u64::from(ranks) {
        builder = builder.worker(WorkerId(worker), WorkerConfig::at(format!("http://engine-{worker}")));
    }
    let router = builder.start().await.expect("a valid configuration starts");
    for conversation in 0..CONVERSATIONS {
        let prompt = hashed(&tokens(conversation, 0));
        let systems = (0..ranks).filter(|rank| rank % SYSTEMS == conversation % SYSTEMS);
        let mut events: Vec<_> = systems.map(|rank| stored(rank, &prompt, SYSTEM_BLOCKS)).collect();
        let homes = [conversation, conversation * 7 + 3].map(|home| home % ranks);
        events.extend(homes.map(|rank| stored(rank, &prompt, CONVERSATION_BLOCKS)));
        router.apply_events(events).await.expect("the router is up");
    }
    router.flush().await.expect("the router is up");
    let mut active = Vec::new();
    for request in 0..ACTIVE {
        let (id, tokens) = (format!("active-{request}"), tokens(request % CONVERSATIONS, 1 + request));
        let placement = router.route(RouteRequest::new(&id, Prompt::Tokens(&tokens))).await.expect("a rank");
        if request % 2 == 0 {
            placement.prefill_completed();
        }
        active.push(placement);
    }
    (router, active)
}

/// Prompts of the measured requests: a new turn of each conversation.
struct Prompts {
    tokens: Vec<Vec<u32>>,
    hashed: Vec<HashedPrompt>,
}

impl Prompts {
    fn new() -> Self {
        let tokens: Vec<_> = (0..CONVERSATIONS).map(|conversation| tokens(conversation, 1_000)).collect();
        Self { hashed: tokens.iter().map(|tokens| hashed(tokens)).collect(), tokens }
    }

    fn tokens(&self, request: usize) -> Prompt<'_> {
        Prompt::Tokens(&self.tokens[request % self.tokens.len()])
    }

    fn hashed(&self, request: usize) -> Prompt<'_> {
        Prompt::Hashed(self.hashed[request % self.hashed.len()].clone())
    }
}

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
        let (router, active) = runtime.block_on(busy(ranks));
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
