//! Mock engines behind a router, and the traffic that goes through it.
//!
//! Owns engines, router and the count of requests. Promises that every request is completed, by whichever engine is
//! there for it, and that every wait has a generous end. Leaves faults to the test.

use pointsman::config::{HealthConfig, IndexConfig, SlowStartConfig};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pointsman::health::Outcome;
use pointsman::ingest::StreamState;
use pointsman::protocol::{KvEventsConfig, WorkerConfig, WorkerId, WorkerRank};
use pointsman::{KvSourceStatus, Router, RouterConfig};
use pointsman_trial::mock::{Dialect, EventFormat, MockConfig, MockEngine};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, timeout};

use super::holdings::Holdings;
use super::http::{Client, PATIENCE};
use super::workload::{Ask, BLOCK_SIZE, LORAS, NAMES};

const SEED: u64 = 20_261_121;

/// Clients that ask at the same time.
const CLIENTS: u64 = 32;

/// Engines and their router. Worker n is the n-th engine, from 0.
pub(crate) struct Fleet {
    pub(crate) router: Router,
    engines: Vec<Option<MockEngine>>,
    formats: Vec<EventFormat>,
    asked: u64,
    lone: AtomicU64,
    /// Attempts that an engine did not answer.
    pub(crate) failures: Arc<AtomicU64>,
    direct: Client,
}

impl Fleet {
    /// One engine of two ranks for each format; those of odd number have host memory, too.
    pub(crate) async fn start(formats: &[EventFormat]) -> Self {
        let config = RouterConfig {
            block_size: BLOCK_SIZE,
            index: IndexConfig { shards: 2, ..IndexConfig::default() },
            health: HealthConfig {
                // A dead engine is left alone soon, and taken back soon.
                probe_interval_ms: 100,
                probe_successes_min: 1,
                ejection_ms: 200,
                ..HealthConfig::default()
            },
            slow_start: SlowStartConfig { return_ms: 0, ..SlowStartConfig::default() },
            ..RouterConfig::default()
        };
        let router = Router::builder(config).start().await.expect("the router starts");
        let mut fleet = Self {
            router,
            engines: Vec::new(),
            formats: formats.to_vec(),
            asked: 0,
            lone: AtomicU64::new(0),
            failures: Arc::default(),
            direct: Client::default(),
        };
        for (n, format) in formats.iter().enumerate() {
            let engine = MockConfig {
                data_parallel_size: 2,
                dialect: format.dialect,
                binary_hashes: format.binary_hashes,
                loras: LORAS.map(str::to_owned).to_vec(),
                block_size: BLOCK_SIZE,
                kv_blocks: 500,
                host_kv_blocks: if n % 2 == 1 { 300 } else { 0 },
                step_tokens_max: 2_048,
                time_scale: 0.0,
                seed: SEED ^ n as u64,
                ..MockConfig::default()
            };
            fleet.engines.push(Some(MockEngine::start(engine).await.expect("the engine starts")));
            fleet.register(n).await;
        }
        fleet
    }

    /// Tells the router of an engine, or of what has changed about it.
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
            ..WorkerConfig::at(engine.url())
        };
        self.router.upsert_worker(WorkerId(n as u64), config).await.expect("the worker is taken");
    }

    pub(crate) fn engine(&self, n: usize) -> &MockEngine {
        self.engines[n].as_ref().expect("the engine runs")
    }

    pub(crate) fn engines(&self) -> impl Iterator<Item = (WorkerId, &MockEngine)> {
        let all = self.engines.iter().enumerate();
        all.filter_map(|(n, engine)| Some((WorkerId(n as u64), engine.as_ref()?)))
    }

    /// Ends an engine; its start later with the answer brings it back where it was.
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
        self.register(n).await; // whoever no longer names salts gets no more of them
        self.engine(n).restart(format).await.expect("the engine restarts");
    }

    /// The next `count` requests, of all clients together.
    pub(crate) fn traffic(&mut self, count: u64) -> Traffic {
        let numbers = self.asked..self.asked + count;
        self.asked = numbers.end;
        Traffic::start(&self.router, numbers, &self.failures)
    }

    /// A prompt of its own for each rank, past the router: whoever has published nothing since it began does so now.
    pub(crate) async fn nudge_all(&self) {
        let mut client = Client::default();
        for n in 0..self.engines.len() {
            for rank in 0..2 {
                let lone = 1 + self.lone.fetch_add(1, Ordering::Relaxed);
                let address = self.engine(n).address();
                let answer = client.complete(address, rank, &Ask::lone(lone)).await;
                answer.expect("the engine answers");
            }
        }
    }

    pub(crate) fn numbers(&mut self, count: u64) -> Range<u64> {
        self.asked += count;
        self.asked - count..self.asked
    }

    pub(crate) fn ask(n: u64) -> Ask {
        Ask::nth(SEED, n)
    }

    /// How many requests there have been.
    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }

    /// Makes every engine forget what it has cached.
    pub(crate) async fn reset_caches(&mut self) {
        self.engines_quiet().await;
        for n in 0..self.engines.len() {
            let address = self.engine(n).address();
            self.direct.reset_cache(address).await.expect("the engine answers");
        }
    }

    /// Ranks of which not all that their engines have published has been applied, or that are not trusted.
    fn behind(&self) -> Vec<(WorkerRank, KvSourceStatus)> {
        let sources = self.router.kv_sources().into_iter().map(|source| (source.rank, source));
        sources.filter(|(_, source)| !self.has_caught_up(source)).collect()
    }

    fn has_caught_up(&self, source: &KvSourceStatus) -> bool {
        let n = usize::try_from(source.rank.worker.0).expect("a number");
        let Some(engine) = self.engines[n].as_ref() else { return true };
        let next = engine.sequence_next(u16::try_from(source.rank.rank).expect("a rank"));
        // Who has said nothing yet may still be remembered by an earlier life's last word.
        let has_applied = next == 0 || source.applied.is_some_and(|applied| applied + 1 == next);
        source.connected && source.trust == StreamState::Live && has_applied
    }

    async fn engines_quiet(&self) {
        for (_, engine) in self.engines() {
            timeout(PATIENCE, engine.quiet()).await.expect("the engine falls quiet in time");
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

    /// Waits until everything is quiet and applied; the index must then hold what the caches hold.
    pub(crate) async fn assert_exact(&mut self, when: &str) -> Holdings {
        self.engines_quiet().await;
        let (begun, mut pace) = (Instant::now(), pace());
        loop {
            pace.tick().await;
            let behind = self.behind();
            if behind.is_empty() {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{when}: still behind: {behind:#?}");
        }
        let (truth, differences) = self.differences().await;
        let few = &differences[..differences.len().min(20)];
        assert!(differences.is_empty(), "{when}: {} differences: {few:#?}", differences.len());
        truth
    }

    /// Waits until the index holds what the caches hold and every rank is trusted: how long after a fault's end that is.
    /// Nobody says anything meanwhile.
    pub(crate) async fn healed(&self, what: &str, since: Instant) -> Duration {
        let mut pace = pace();
        loop {
            self.engines_quiet().await;
            let behind = self.behind();
            let differences = if behind.is_empty() { self.differences().await.1 } else { Vec::new() };
            if behind.is_empty() && differences.is_empty() {
                return since.elapsed();
            }
            let few = &differences[..differences.len().min(20)];
            let count = differences.len();
            assert!(since.elapsed() < PATIENCE, "{what}: {count} differences: {few:#?}; behind: {behind:#?}");
            pace.tick().await;
        }
    }

    /// How long after `since`, when an engine was back, all its ranks are heard and trusted.
    pub(crate) async fn trusted_again(&self, n: usize, since: Instant) -> Duration {
        let of_engine = || {
            let sources = self.router.kv_sources().into_iter();
            sources.filter(|source| source.rank.worker.0 == n as u64).collect::<Vec<_>>()
        };
        // What was heard of its earlier life is not heard again.
        let before: Vec<u64> = of_engine().iter().map(|source| source.messages).collect();
        let mut pace = pace();
        loop {
            let sources = of_engine();
            let is_heard = |(source, before): (&KvSourceStatus, &u64)| {
                source.connected && source.trust == StreamState::Live && source.messages > *before
            };
            if sources.iter().zip(&before).all(is_heard) {
                return since.elapsed();
            }
            assert!(since.elapsed() < PATIENCE, "engine {n} is not trusted again: {sources:#?}");
            pace.tick().await;
        }
    }

    /// Asks one request, with nothing else under way, and lets its events arrive. Predicted and delivered tokens.
    pub(crate) async fn probe(&mut self, n: u64) -> (Ask, u32, u32) {
        let (ask, id) = (Self::ask(n), format!("probe-{n}"));
        let placement = self.router.route(ask.request(&id)).await.expect("the request is placed");
        let (rank, predicted) = (placement.rank(), placement.overlap().total_blocks() * BLOCK_SIZE);
        let address = self.engine(usize::try_from(rank.worker.0).expect("a number")).address();
        let delivered = self.direct.complete(address, rank.rank, &ask).await.expect("the engine answers");
        placement.prefill_completed();
        placement.delivered_cached_tokens(delivered);
        drop(placement);
        let (begun, mut pace) = (Instant::now(), pace());
        self.engines_quiet().await;
        while !self.behind().is_empty() {
            assert!(begun.elapsed() < PATIENCE, "{:#?}", self.behind());
            pace.tick().await;
        }
        (ask, predicted, delivered)
    }
}

/// Requests under way.
pub(crate) struct Traffic {
    clients: JoinSet<()>,
    sent: watch::Receiver<u64>,
}

impl Traffic {
    fn start(router: &Router, numbers: Range<u64>, failures: &Arc<AtomicU64>) -> Self {
        let next = Arc::new(AtomicU64::new(numbers.start));
        let (sender, sent) = watch::channel(0);
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let (router, next, failures) = (router.clone(), Arc::clone(&next), Arc::clone(failures));
            let (sender, numbers) = (sender.clone(), numbers.clone());
            clients.spawn(async move {
                let mut client = Client::default();
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= numbers.end {
                        break;
                    }
                    sender.send_modify(|sent| *sent = (*sent).max(n - numbers.start));
                    serve(&router, &mut client, n, &failures).await;
                }
            });
        }
        Self { clients, sent }
    }

    /// Comes back when so many requests have been taken up.
    pub(crate) async fn until(&mut self, count: u64) {
        let waited = timeout(PATIENCE, self.sent.wait_for(|sent| *sent >= count)).await;
        let _ = waited.expect("the traffic gets on").expect("there is traffic");
    }

    /// Comes back when all are answered.
    pub(crate) async fn end(mut self) {
        while let Some(client) = timeout(PATIENCE, self.clients.join_next()).await.expect("the traffic ends") {
            client.expect("no client fails");
        }
    }
}

/// Places a request and completes it, again and again until an engine has answered.
async fn serve(router: &Router, client: &mut Client, n: u64, failures: &AtomicU64) {
    let ask = Fleet::ask(n);
    let (begun, mut pace) = (Instant::now(), pace());
    for attempt in 0.. {
        let id = format!("{n}-{attempt}");
        assert!(begun.elapsed() < PATIENCE, "request {id} finds no engine");
        // Refused while its engines are known to be gone.
        let Ok(placement) = router.route(ask.request(&id)).await else {
            pace.tick().await;
            continue;
        };
        let address = placement.endpoint().strip_prefix("http://").expect("a URL");
        let address: SocketAddr = address.parse().expect("an address");
        match client.complete(address, placement.rank().rank, &ask).await {
            Ok(cached_tokens) => {
                placement.prefill_completed();
                placement.delivered_cached_tokens(cached_tokens);
                placement.outcome(Outcome::Ok);
                return;
            }
            Err(outcome) => {
                failures.fetch_add(1, Ordering::Relaxed);
                placement.outcome(outcome);
                drop(placement);
                pace.tick().await;
            }
        }
    }
}

/// How often something is looked at that nobody announces.
fn pace() -> Interval {
    let mut pace = interval(Duration::from_millis(2));
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pace
}
