//! Live bytes of a router over hours of churn, in virtual time.
//!
//! Requests, sessions, tenants, workers and cached blocks come and go under names that never repeat. Anything that is
//! kept per name without a bound grows with the hours. `CHURN_HOURS` sets their number.

#![allow(clippy::print_stdout, reason = "the figures are the output")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use pointsman::internals::config::{
    HealthConfig, IndexConfig, QueueConfig, RecorderConfig, SessionConfig, SpeculativeConfig,
};
use pointsman::protocol::{EngineHash, KvEvent, RouterEvent, StorageTier, WorkerConfig, WorkerId};
use pointsman::test_support::{mix, rank};
use pointsman::{AddRequest, Outcome, Placement, Prompt, RequestOptions, RouteRequest, Router, RouterConfig};

use crate::ALLOCATOR;
use crate::common::{assert_at_rest, config, stored, tokens, until};
use crate::repetitions::repetitions;

/// Time between two requests.
const GAP: Duration = Duration::from_secs(8);

const REQUESTS_PER_HOUR: u64 = 3_600 / GAP.as_secs();

/// A worker joins and one leaves after this many requests: every two minutes.
const REQUESTS_PER_WORKER: u64 = 15;

/// Workers of the router.
const WORKERS: usize = 6;

/// Requests in flight.
const HELD: usize = 24;

/// Prompts in the cache of a worker.
const CACHED: usize = 40;

/// Hours until every table has its final size: the longest limit of an age is ten minutes.
const WARM_UP_HOURS: u64 = 1;

/// Largest permitted growth per hour: 9 bytes for each request, or 136 for each worker. Means of an hour vary by up to
/// two kilobytes.
const GROWTH_PER_HOUR_MAX: f64 = 4_096.0;

/// Settings with which names are kept: sessions, records, speculative entries, tenants in a queue.
fn churn_config() -> RouterConfig {
    let defaults = RouterConfig::default();
    let age_ms = 600_000;
    RouterConfig {
        policy: defaults.policy,
        session: SessionConfig { ttl_ms: age_ms, ..defaults.session },
        recorder: RecorderConfig { age_max_ms: age_ms, ..defaults.recorder },
        queue: QueueConfig { threshold: Some(8.0), ..defaults.queue },
        index: IndexConfig {
            speculative: SpeculativeConfig { with_events_ttl_ms: Some(2_000), ..defaults.index.speculative },
            ..defaults.index
        },
        health: HealthConfig { probe_interval_ms: 0, ..defaults.health },
        ..config()
    }
}

/// A worker with the names that it has cached, by prompt.
struct Worker {
    id: WorkerId,
    cached: VecDeque<Vec<EngineHash>>,
}

struct Churn {
    router: Router,
    workers: VecDeque<Worker>,
    held: VecDeque<Placement>,
    requests: u64,
    joined: u64,
}

impl Churn {
    async fn join(&mut self) {
        let id = WorkerId(self.joined);
        self.joined += 1;
        let config = WorkerConfig {
            max_num_batched_tokens: Some(2_048),
            total_kv_blocks: Some(4_096),
            ..WorkerConfig::at(format!("http://engine-{}", id.0))
        };
        self.router.upsert_worker(id, config).await.expect("joins");
        self.workers.push_back(Worker { id, cached: VecDeque::new() });
    }

    /// The oldest worker leaves, in turn by a removal and by a drain that ends at its deadline.
    async fn leave(&mut self) {
        let worker = self.workers.pop_front().expect("a worker");
        if worker.id.0.is_multiple_of(2) {
            self.router.remove_worker(worker.id).await.expect("removed");
        } else {
            self.router.drain_worker(worker.id, GAP).await.expect("drained");
        }
    }

    /// Events of the chosen worker: the prompt is stored, and the oldest one removed from a full cache.
    async fn serve(&mut self, placement: &Placement, tokens: &[u32]) {
        let rank = placement.rank();
        let worker = self.workers.iter_mut().find(|worker| worker.id == rank.worker).expect("a worker of the router");
        let event = stored(rank, tokens);
        let KvEvent::Stored { blocks, .. } = &event.data else { unreachable!("a stored event") };
        worker.cached.push_back(blocks.iter().rev().map(|block| block.engine_hash).collect());
        let mut events = vec![event];
        if worker.cached.len() > CACHED
            && let Some(blocks) = worker.cached.pop_front()
        {
            events.push(RouterEvent { rank, tier: StorageTier::Device, data: KvEvent::Removed { blocks } });
        }
        self.router.apply_events(events).await.expect("the router is up");
    }

    async fn request(&mut self) {
        let n = self.requests;
        self.requests += 1;
        let draw = mix(n);
        let prompt = tokens(u32::try_from(n).expect("fits"), 6 + u32::try_from(draw % 8).expect("fits"));
        let options = RequestOptions {
            session_id: Some(format!("session-{}", n / 3).into()),
            tenant: Some(format!("tenant-{}", n / 20).into()),
            lora_name: draw.is_multiple_of(5).then(|| Arc::from(format!("adapter-{}", n / 50))),
            expected_output_tokens: draw.is_multiple_of(2).then_some(100),
            ..RequestOptions::default()
        };
        let id = format!("request-{n}");
        if draw.is_multiple_of(9) {
            // Dropped after its first step: a caller that vanishes.
            let request = RouteRequest { options, ..RouteRequest::new(id, Prompt::Tokens(&prompt)) };
            let mut route = std::pin::pin!(self.router.route(request));
            std::future::poll_fn(|context| {
                drop(route.as_mut().poll(context));
                std::task::Poll::Ready(())
            })
            .await;
            return;
        }
        if draw.is_multiple_of(11) {
            // A booking by id without a report of its end: its liveness ends it.
            let on = rank(self.workers.back().expect("a worker").id.0);
            self.router.add_request(AddRequest::new(&id, on, Prompt::Tokens(&prompt))).await.expect("booked");
            return;
        }
        let request = RouteRequest { options, ..RouteRequest::new(id, Prompt::Tokens(&prompt)) };
        let placement = self.router.route(request).await.expect("placed");
        self.serve(&placement, &prompt).await;
        placement.prefill_completed();
        placement.output_block(None).expect("booked");
        if draw.is_multiple_of(13) {
            placement.outcome(Outcome::ServerError);
        }
        self.held.push_back(placement);
        if self.held.len() > HELD {
            self.held.pop_front();
        }
    }

    /// An hour of churn. Returns the live bytes, averaged over its requests.
    async fn hour(&mut self) -> i64 {
        let mut sum = 0;
        for _ in 0..REQUESTS_PER_HOUR {
            if self.requests.is_multiple_of(REQUESTS_PER_WORKER) {
                self.join().await;
                self.leave().await;
            }
            self.request().await;
            tokio::time::sleep(GAP).await;
            sum += live_bytes();
        }
        sum / i64::try_from(REQUESTS_PER_HOUR).expect("fits")
    }
}

/// Growth per step by least squares.
fn slope(samples: &[i64]) -> f64 {
    let mean_x = (samples.len() as f64 - 1.0) / 2.0;
    let mean_y = samples.iter().sum::<i64>() as f64 / samples.len() as f64;
    let (mut covariance, mut variance) = (0.0, 0.0);
    for (x, y) in samples.iter().enumerate() {
        let x = x as f64 - mean_x;
        covariance += x * (*y as f64 - mean_y);
        variance += x * x;
    }
    covariance / variance
}

fn live_bytes() -> i64 {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as i64 - stats.bytes_deallocated as i64
}

#[test]
fn live_bytes_are_flat_over_hours_of_churn() {
    alone!();
    let hours = repetitions("CHURN_HOURS", 4).max(WARM_UP_HOURS + 2);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let router = Router::builder(churn_config()).start().await.expect("starts");
        let mut churn = Churn { router, workers: VecDeque::new(), held: VecDeque::new(), requests: 0, joined: 0 };
        for _ in 0..WORKERS {
            churn.join().await;
        }
        let mut samples = Vec::new();
        for hour in 1..=hours {
            let bytes = churn.hour().await;
            println!("hour {hour}: {bytes} live bytes");
            if hour > WARM_UP_HOURS {
                samples.push(bytes);
            }
        }
        let growth = slope(&samples);
        println!("{hours} hours, {} requests, {} workers: {growth:+.1} bytes per hour", churn.requests, churn.joined);
        assert!(growth < GROWTH_PER_HOUR_MAX, "{growth:+.1} bytes per hour: {samples:?}");
        churn.held.clear();
        until("end of all bookings", async || {
            tokio::time::sleep(GAP).await;
            churn.router.health().leases == 0
        })
        .await;
        assert_at_rest(&churn.router).await;
    });
}
