//! Mock engines behind a router, and traffic through it.
//!
//! The fleet owns the engines, the router and the request counter. Every request is completed by some running engine,
//! and every wait has a generous limit. Faults belong to the tests.

use pointsman::internals::config::{EngineLoadConfig, HealthConfig, IndexConfig, SlowStartConfig};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pointsman::protocol::{KvEventsConfig, LoadSource, WorkerConfig, WorkerId, WorkerRank};
use pointsman::{KvSourceStatus, Outcome, Router, RouterConfig, StreamState};
use pointsman_trial::mock::{Dialect, EventFormat, MockConfig, MockEngine};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, timeout};

use super::holdings::Holdings;
use super::http::Client;
use super::proxy::{PATIENCE, until};
use super::workload::{BLOCK_SIZE, LORAS, NAMES, WorkloadRequest};

const SEED: u64 = 20_261_121;

/// Concurrent clients.
const CLIENTS: u64 = 32;

/// Engines and their router. Worker n is the n-th engine, from 0.
pub(crate) struct Fleet {
    pub(crate) router: Router,
    engines: Vec<Option<MockEngine>>,
    formats: Vec<EventFormat>,
    sent: u64,
    unshared: AtomicU64,
    direct: Client,
}

impl Fleet {
    /// Starts one engine of two ranks per format. Engines with odd numbers also have host memory.
    pub(crate) async fn start(formats: &[EventFormat]) -> Self {
        Self::start_with(formats, BLOCK_SIZE).await
    }

    /// The same with engines of this block size, which divides the router's.
    pub(crate) async fn start_with(formats: &[EventFormat], page_size: u32) -> Self {
        let pages = BLOCK_SIZE / page_size;
        let config = RouterConfig {
            block_size: Some(BLOCK_SIZE),
            index: IndexConfig { shards: 2, ..IndexConfig::default() },
            health: HealthConfig {
                // A dead engine is ejected quickly and readmitted quickly.
                probe_interval_ms: 100,
                probe_successes_min: 1,
                ejection_ms: 200,
                ..HealthConfig::default()
            },
            engine_load: EngineLoadConfig { interval_ms: 20, ..EngineLoadConfig::default() },
            slow_start: SlowStartConfig { return_ms: 0, ..SlowStartConfig::default() },
            ..RouterConfig::default()
        };
        let router = Router::builder(config).start().await.expect("the router starts");
        let mut fleet = Self {
            router,
            engines: Vec::new(),
            formats: formats.to_vec(),
            sent: 0,
            unshared: AtomicU64::new(0),
            direct: Client::default(),
        };
        for (n, format) in formats.iter().enumerate() {
            let engine = MockConfig {
                data_parallel_size: 2,
                dialect: format.dialect,
                binary_hashes: format.binary_hashes,
                loras: LORAS.map(str::to_owned).to_vec(),
                block_size: page_size,
                kv_blocks: 500 * pages,
                host_kv_blocks: if pages == 1 && (n % 2 == 1 || format.dialect.has_connector()) { 300 } else { 0 },
                // Groups with a window keep the last blocks of each computation: short ones give more hits.
                step_tokens_max: if format.dialect.beside_window_blocks() > 0 { 256 } else { 2_048 },
                time_scale: 0.0,
                seed: SEED ^ n as u64,
                ..MockConfig::default()
            };
            fleet.engines.push(Some(MockEngine::start(engine).await.expect("the engine starts")));
            fleet.register(n).await;
        }
        fleet
    }

    /// Registers an engine, or updates its registration.
    async fn register(&self, n: usize) {
        let engine = self.engine(n);
        let names = self.formats[n].dialect != Dialect::SglangArray;
        let config = WorkerConfig {
            data_parallel_size: 2,
            max_num_batched_tokens: Some(engine.config().step_tokens_max),
            total_kv_blocks: Some(engine.config().kv_blocks),
            taints: names.then(|| NAMES.to_owned()).into_iter().collect(),
            lora_adapters: LORAS.into_iter().filter(|_| names).map(str::to_owned).collect(),
            kv_events: Some(KvEventsConfig {
                endpoint: engine.event_endpoint(0),
                replay_endpoint: Some(engine.replay_endpoint(0)),
                topic: "kv-events".to_owned(),
            }),
            // Sleep is on the page.
            load: self.formats[n].dialect.has_connector().then(|| LoadSource::Metrics(engine.url() + "/metrics")),
            ..WorkerConfig::at(engine.url())
        };
        self.router.upsert_worker(WorkerId(n as u64), config).await.expect("worker registered");
    }

    pub(crate) fn engine(&self, n: usize) -> &MockEngine {
        self.engines[n].as_ref().expect("the engine runs")
    }

    pub(crate) fn engines(&self) -> impl Iterator<Item = (WorkerId, &MockEngine)> {
        let all = self.engines.iter().enumerate();
        all.filter_map(|(n, engine)| Some((WorkerId(n as u64), engine.as_ref()?)))
    }

    /// Stops an engine. Starting the returned configuration later brings it back at the same address.
    pub(crate) async fn kill(&mut self, n: usize) -> MockConfig {
        let engine = self.engines[n].take().expect("the engine runs");
        let config = engine.config().clone();
        engine.shutdown().await;
        config
    }

    pub(crate) async fn revive(&mut self, n: usize, config: MockConfig) {
        self.engines[n] = Some(MockEngine::start(config).await.expect("the engine starts again"));
    }

    pub(crate) fn format(&self, n: usize) -> EventFormat {
        self.formats[n]
    }

    /// Restarts an idle engine in another format.
    pub(crate) async fn redialect(&mut self, n: usize, format: EventFormat) {
        self.formats[n] = format;
        self.register(n).await; // without salts in its events the worker receives no more salted requests
        self.engine(n).restart(format).await.expect("the engine restarts");
    }

    /// Starts the next `count` requests, shared by all clients.
    pub(crate) fn traffic(&mut self, count: u64) -> Traffic {
        let numbers = self.sent..self.sent + count;
        self.sent = numbers.end;
        Traffic::start(&self.router, numbers)
    }

    /// Sends a unique prompt to each rank directly, without the router, so every rank publishes at least one event.
    pub(crate) async fn nudge_all(&self) {
        let mut client = Client::default();
        for n in 0..self.engines.len() {
            for rank in 0..2 {
                let unshared = 1 + self.unshared.fetch_add(1, Ordering::Relaxed);
                let address = self.engine(n).address();
                let answer = client.complete(address, rank, &WorkloadRequest::unshared(unshared)).await;
                answer.expect("the engine answers");
            }
        }
    }

    pub(crate) fn numbers(&mut self, count: u64) -> Range<u64> {
        self.sent += count;
        self.sent - count..self.sent
    }

    pub(crate) fn request(n: u64) -> WorkloadRequest {
        WorkloadRequest::nth(SEED, n)
    }

    /// Resets the cache of every engine.
    pub(crate) async fn reset_caches(&mut self) {
        self.engines_quiet().await;
        for n in 0..self.engines.len() {
            let address = self.engine(n).address();
            self.direct.command(address, "/reset_prefix_cache").await.expect("the engine answers");
        }
    }

    /// An idle engine sleeps at this level and wakes up. Requests go to the others meanwhile.
    pub(crate) async fn sleep(&mut self, n: usize, level: u8) {
        self.engines_quiet().await;
        let (address, awake) = (self.engine(n).address(), self.router.eligible_ranks());
        self.direct.command(address, &format!("/sleep?level={level}")).await.expect("the engine answers");
        until("the engine sleeps", || self.router.eligible_ranks() == awake - 2).await;
        self.traffic(50).end().await;
        self.direct.command(address, "/wake_up").await.expect("the engine answers");
        until("the engine is awake", || self.router.eligible_ranks() == awake).await;
    }

    /// Whether the contents of host memory are known to the index.
    pub(crate) fn has_host(&self) -> bool {
        let is_hybrid = |dialect: Dialect| dialect.beside_window_blocks() > 0;
        let hosts = |format: &EventFormat| format.dialect != Dialect::VllmLmcache && !is_hybrid(format.dialect);
        self.engine(0).config().block_size == BLOCK_SIZE && self.formats.iter().any(hosts)
    }

    /// Number of published events.
    pub(crate) fn events(&self) -> u64 {
        self.engines().flat_map(|(_, engine)| [0, 1].map(|rank| engine.events_published(rank))).sum()
    }

    /// Ranks with published events that are not applied yet, or whose stream state is not live.
    fn behind(&self) -> Vec<(WorkerRank, KvSourceStatus)> {
        let sources = self.router.kv_sources().into_iter().map(|source| (source.rank, source));
        sources.filter(|(_, source)| !self.has_caught_up(source)).collect()
    }

    fn has_caught_up(&self, source: &KvSourceStatus) -> bool {
        let n = usize::try_from(source.rank.worker.0).expect("a number");
        let Some(engine) = self.engines[n].as_ref() else { return true };
        let next = engine.sequence_next(u16::try_from(source.rank.rank).expect("a rank"));
        // If the engine has published nothing yet, the last message of its earlier life may still be recorded.
        let has_applied = next == 0 || source.applied.is_some_and(|applied| applied + 1 == next);
        source.connected && source.state == StreamState::Live && has_applied
    }

    async fn engines_quiet(&self) {
        for (_, engine) in self.engines() {
            timeout(PATIENCE, engine.quiet()).await.expect("the engine is idle before the timeout");
        }
    }

    pub(crate) fn truth(&self) -> Holdings {
        let mut truth = Holdings::default();
        self.engines().for_each(|(worker, engine)| truth.add_engine(worker, engine));
        truth
    }

    async fn differences(&self) -> (Holdings, Vec<String>) {
        self.router.flush().await.expect("the router is up");
        let index = Holdings::from_dump(&self.router.dump_events().await.expect("the router is up"));
        let truth = self.truth();
        let differences = truth.differences(&index);
        (truth, differences)
    }

    /// Waits until all engines are idle and all events are applied. Then the index must match the caches.
    pub(crate) async fn assert_exact(&mut self, when: &str) -> Holdings {
        self.engines_quiet().await;
        let (begun, mut pace) = (Instant::now(), pace());
        loop {
            pace.tick().await;
            let behind = self.behind();
            if behind.is_empty() {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{when}: index behind: {behind:#?}");
        }
        let (truth, differences) = self.differences().await;
        let few = &differences[..differences.len().min(20)];
        assert!(differences.is_empty(), "{when}: {} differences: {few:#?}", differences.len());
        truth
    }

    /// Waits until the index matches the caches and every rank is live. No engine publishes during the wait.
    pub(crate) async fn healed(&self, what: &str) {
        let (begun, mut pace) = (Instant::now(), pace());
        loop {
            self.engines_quiet().await;
            let behind = self.behind();
            let differences = if behind.is_empty() { self.differences().await.1 } else { Vec::new() };
            if behind.is_empty() && differences.is_empty() {
                return;
            }
            let few = &differences[..differences.len().min(20)];
            let count = differences.len();
            assert!(begun.elapsed() < PATIENCE, "{what}: {count} differences: {few:#?}; behind: {behind:#?}");
            pace.tick().await;
        }
    }

    /// Waits until all ranks of a restarted engine have sent messages and are live.
    pub(crate) async fn trusted_again(&self, n: usize) {
        let of_engine = || {
            let sources = self.router.kv_sources().into_iter();
            sources.filter(|source| source.rank.worker.0 == n as u64).collect::<Vec<_>>()
        };
        // Messages of its earlier life are not counted again.
        let before: Vec<u64> = of_engine().iter().map(|source| source.messages).collect();
        let is_trusted = || {
            of_engine().iter().zip(&before).all(|(source, before)| {
                source.connected && source.state == StreamState::Live && source.messages > *before
            })
        };
        until("the index of the engine has recovered", is_trusted).await;
    }

    /// Sends one request with nothing else in flight and waits for its events. Returns predicted and delivered tokens.
    pub(crate) async fn probe(&mut self, n: u64) -> (u32, u32) {
        let (request, id) = (Self::request(n), format!("probe-{n}"));
        let placement = self.router.route(request.route_request(&id)).await.expect("the request is placed");
        let (rank, predicted) = (placement.rank(), placement.predicted_cached_tokens());
        let address = self.engine(usize::try_from(rank.worker.0).expect("a number")).address();
        let delivered = self.direct.complete(address, rank.rank, &request).await.expect("the engine answers");
        placement.prefill_completed();
        placement.delivered_cached_tokens(delivered);
        drop(placement);
        let (begun, mut pace) = (Instant::now(), pace());
        self.engines_quiet().await;
        while !self.behind().is_empty() {
            assert!(begun.elapsed() < PATIENCE, "{:#?}", self.behind());
            pace.tick().await;
        }
        (predicted, delivered)
    }
}

/// Requests in flight.
pub(crate) struct Traffic {
    clients: JoinSet<()>,
    sent: watch::Receiver<u64>,
}

impl Traffic {
    fn start(router: &Router, numbers: Range<u64>) -> Self {
        let next = Arc::new(AtomicU64::new(numbers.start));
        let (sender, sent) = watch::channel(0);
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let (router, next) = (router.clone(), Arc::clone(&next));
            let (sender, numbers) = (sender.clone(), numbers.clone());
            clients.spawn(async move {
                let mut client = Client::default();
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= numbers.end {
                        break;
                    }
                    sender.send_modify(|sent| *sent = (*sent).max(n - numbers.start));
                    serve(&router, &mut client, n).await;
                }
            });
        }
        Self { clients, sent }
    }

    /// Waits until this many requests have been started.
    pub(crate) async fn until(&mut self, count: u64) {
        let waited = timeout(PATIENCE, self.sent.wait_for(|sent| *sent >= count)).await;
        let _ = waited.expect("traffic makes progress").expect("traffic is running");
    }

    /// Waits until all requests are completed.
    pub(crate) async fn end(mut self) {
        while let Some(client) =
            timeout(PATIENCE, self.clients.join_next()).await.expect("traffic ends before the timeout")
        {
            client.expect("no panic");
        }
    }
}

/// Places a request and completes it; retries until an engine responds.
async fn serve(router: &Router, client: &mut Client, n: u64) {
    let request = Fleet::request(n);
    let (begun, mut pace) = (Instant::now(), pace());
    for attempt in 0.. {
        let id = format!("{n}-{attempt}");
        assert!(begun.elapsed() < PATIENCE, "request {id} was not placed");
        // Rejected while all its engines are known to be down.
        let Ok(placement) = router.route(request.route_request(&id)).await else {
            pace.tick().await;
            continue;
        };
        let address = placement.endpoint().strip_prefix("http://").expect("a URL");
        let address: SocketAddr = address.parse().expect("an address");
        match client.complete(address, placement.rank().rank, &request).await {
            Ok(cached_tokens) => {
                placement.prefill_completed();
                placement.delivered_cached_tokens(cached_tokens);
                placement.outcome(Outcome::Ok);
                return;
            }
            Err(outcome) => {
                placement.outcome(outcome);
                drop(placement);
                pace.tick().await;
            }
        }
    }
}

/// Polling interval for state without notifications.
fn pace() -> Interval {
    let mut pace = interval(Duration::from_millis(2));
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pace
}
