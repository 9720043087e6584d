//! Gateways that restart with an index snapshot, from their file or from another replica.
//!
//! The engines keep too few messages for a complete replay, so only a snapshot makes the index complete.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use pointsman::protocol::{KvEvent, RouterEvent, WorkerId};
use pointsman::test_support::{MemoryBus, MemoryNetwork};
use pointsman::{BoxFuture, ReplicaBus as _, ReplicaId, ReplicaLife, RestoreState, Router, Snapshot, SnapshotSource};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{ModelSettings, Settings, TokenSourceChoice};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::Value;
use tokio::time::timeout;

use crate::common::directory::Directory;
use crate::common::process::{Process, serve};
use crate::common::proxy::{PATIENCE, eventually, published, ready, request, until};

const BLOCK_SIZE: u32 = 16;

/// Messages that an engine keeps for replay.
const REPLAY_MESSAGES: usize = 8;

/// Prompts, each of four blocks and a part of one.
const PROMPTS: u32 = 40;

async fn engines() -> Vec<MockEngine> {
    let mut engines = Vec::new();
    for seed in 0..2 {
        let replay_messages_max = REPLAY_MESSAGES;
        let config =
            MockConfig { block_size: BLOCK_SIZE, replay_messages_max, time_scale: 0.0, seed, ..MockConfig::default() };
        engines.push(MockEngine::start(config).await.expect("the engine starts"));
    }
    engines
}

/// Sends a prompt of tokens, to a gateway or to an engine.
async fn send(address: SocketAddr, prompt: u32) {
    let tokens: Vec<u32> = (0..4 * BLOCK_SIZE + 3).map(|n| 1_000 * (prompt + 1) + n).collect();
    let body = serde_json::json!({ "model": "mock", "max_tokens": 1, "prompt": tokens }).to_string();
    let answer = request(address, "POST", "/v1/completions", "", body.as_bytes()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
}

/// A process of the gateway and its files.
struct Deployment {
    directory: Directory,
    engines: Vec<MockEngine>,
}

impl Deployment {
    async fn start(&self, settings: &[&str]) -> Process {
        let mut command = serve();
        command.args(["--listen", "127.0.0.1:0", "--model", "mock"]);
        for engine in &self.engines {
            command.args(["--worker", &engine.url()]);
        }
        let access_log = format!("gateway.access_log={}", self.access_log().display());
        let path = format!("gateway.snapshot_path={}", self.directory.path().display());
        let block_size = format!("router.block_size={BLOCK_SIZE}");
        for setting in [&access_log, &path, &block_size].map(String::as_str).iter().chain(settings) {
            command.args(["--set", setting]);
        }
        Process::start(command).await
    }

    fn access_log(&self) -> PathBuf {
        self.directory.path().join("access.log")
    }

    fn snapshot(&self) -> PathBuf {
        self.directory.path().join("mock.snapshot")
    }

    /// Whether the snapshot has every message that the engines have published.
    fn has_all(&self) -> bool {
        let Ok(bytes) = std::fs::read(self.snapshot()) else { return false };
        let snapshot = Snapshot::decode(&bytes).expect("complete");
        let next = |engine: &MockEngine| {
            let rank = snapshot.ranks.iter().find(|rank| rank.endpoint == engine.event_endpoint(0));
            rank.map(|rank| rank.position.next)
        };
        self.engines.iter().all(|engine| next(engine) == Some(engine.sequence_next(0)))
    }

    /// Predicted and delivered cached tokens of the last `count` requests, once all are logged.
    async fn predictions(&self, count: usize, total: usize) -> Vec<(u64, u64)> {
        let mut lines = Vec::new();
        until("requests logged", || {
            let log = std::fs::read_to_string(self.access_log()).unwrap_or_default();
            lines = log.lines().map(str::to_owned).collect();
            lines.len() >= total && log.ends_with('\n')
        })
        .await;
        let line = |line: &String| {
            let line: Value = serde_json::from_str(line).expect("JSON");
            let tokens = |field: &str| line[field].as_u64().unwrap_or_else(|| panic!("{field}: {line}"));
            (tokens("predicted_cached_tokens"), tokens("cached_tokens"))
        };
        lines[total - count..].iter().map(line).collect()
    }
}

/// Requests whose cached prefix was on some rank and was not predicted.
fn blind(predictions: &[(u64, u64)]) -> usize {
    predictions.iter().filter(|(predicted, _)| *predicted < u64::from(4 * BLOCK_SIZE)).count()
}

/// Ends the first process by `signal`, publishes further messages meanwhile, and restarts.
async fn restarted(signal: &str, interval_ms: u64) {
    let deployment = Deployment { directory: Directory::new(), engines: engines().await };
    let interval = format!("gateway.snapshot_interval_ms={interval_ms}");
    let process = deployment.start(&[&interval]).await;
    ready(process.address).await;
    for prompt in 0..PROMPTS {
        send(process.address, prompt).await;
    }
    if signal == "KILL" {
        until("a complete snapshot", || deployment.has_all()).await;
    }
    process.signal(signal);
    assert_eq!(process.exit().await.success(), signal == "TERM");
    assert!(deployment.has_all(), "the file has every message");

    // Published while no gateway runs, fewer than the engines keep.
    for prompt in PROMPTS..PROMPTS + 2 {
        send(deployment.engines[0].address(), prompt).await;
    }
    let process = deployment.start(&[&interval]).await;
    ready(process.address).await;
    for prompt in 0..PROMPTS + 2 {
        send(process.address, prompt).await;
    }
    let count = (PROMPTS + 2) as usize;
    let predictions = deployment.predictions(count, count + PROMPTS as usize).await;
    assert_eq!(blind(&predictions), 0, "{predictions:?}");
    assert!(predictions.iter().all(|(predicted, delivered)| predicted == delivered), "{predictions:?}");
    let startup = process.startup.join("\n");
    assert!(startup.contains("index snapshot loaded"), "{startup}");
    drop(process);

    // Control: without the file, the engines no longer have most messages.
    std::fs::remove_file(deployment.snapshot()).expect("the file exists");
    let process = deployment.start(&[&interval, "gateway.warm_up_ms=500"]).await;
    ready(process.address).await;
    for prompt in 0..PROMPTS {
        send(process.address, prompt).await;
    }
    let total = count + 2 * PROMPTS as usize;
    let predictions = deployment.predictions(PROMPTS as usize, total).await;
    assert!(blind(&predictions) > PROMPTS as usize / 2, "{predictions:?}");
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_gateway_restarts_with_its_periodic_snapshot() {
    restarted("KILL", 1_000).await;
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminated_gateway_restarts_with_its_last_snapshot() {
    restarted("TERM", 86_400_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_writes_are_counted_and_end_nothing() {
    let deployment = Deployment { directory: Directory::new(), engines: engines().await };
    let file = deployment.directory.write("file", "");
    let path = format!("gateway.snapshot_path={}", file.join("below").display());
    let mut process = deployment.start(&[&path, "gateway.snapshot_interval_ms=1000"]).await;
    ready(process.address).await;
    send(process.address, 0).await;
    process.logged("index snapshot could not be written").await;
    send(process.address, 1).await;
    let page = request(process.address, "GET", "/metrics", "", b"").await;
    assert!(
        page.text().contains(r#"pointsman_gateway_snapshot_writes_total{model="mock",result="failed"}"#),
        "{page:?}"
    );
}

// ---- replicas ----

/// Replica `n` of a network, which began `n`-th.
fn life(n: u64) -> ReplicaLife {
    ReplicaLife { replica: ReplicaId(n), incarnation: n }
}

/// Waits until a replica is serving, as another one sees it.
async fn until_serving(seen_by: &MemoryBus, replica: u64, expected: bool) {
    let mut members = seen_by.members();
    let serving = members.wait_for(|members| {
        members.iter().any(|member| member.life.replica == ReplicaId(replica) && member.is_serving == expected)
    });
    drop(timeout(PATIENCE, serving).await.expect("before the timeout").expect("the network exists"));
}

/// A source of damaged bytes, and whether they were requested.
#[derive(Default)]
struct Damaged(AtomicBool);

impl SnapshotSource for Damaged {
    fn snapshot(&self, _: &str) -> BoxFuture<'_, Option<Bytes>> {
        self.0.store(true, Ordering::Relaxed);
        Box::pin(async { Some(Bytes::from_static(b"damaged")) })
    }
}

/// A replica without a gateway, with its source of snapshots.
fn other(network: &MemoryNetwork, n: u64, is_serving: bool) -> (Arc<MemoryBus>, Arc<Damaged>) {
    let (bus, source) = (network.join(life(n)), Arc::<Damaged>::default());
    bus.serve_snapshots(source.clone());
    bus.set_serving(is_serving);
    (bus, source)
}

/// A gateway of this process, with the engines as workers.
async fn gateway(engines: &[MockEngine], warm_up_ms: u64) -> (Gateway, Router) {
    let mut model = ModelSettings::named("mock");
    model.router.block_size = Some(BLOCK_SIZE);
    model.tokens.source = TokenSourceChoice::None;
    let mut settings = Settings { models: vec![model], ..Settings::default() };
    settings.gateway.listen = SocketAddr::from(([127, 0, 0, 1], 0));
    settings.gateway.warm_up_ms = warm_up_ms;
    settings.gateway.snapshot_interval_ms = 20; // of the store of a bus
    let gateway = Gateway::start(settings).await.expect("start succeeds");
    let router = gateway.router("mock").expect("model is served");
    for (n, engine) in (0..).zip(engines) {
        router.upsert_worker(WorkerId(n), published(engine)).await.expect("valid");
    }
    (gateway, router)
}

/// Stored blocks of the index, sorted.
async fn held(router: &Router) -> Vec<String> {
    router.flush().await.expect("up");
    let events = router.dump_events().await.expect("up");
    let mut held: Vec<String> = events
        .iter()
        .flat_map(|RouterEvent { rank, data, .. }| {
            let KvEvent::Stored { blocks, .. } = data else { return Vec::new() };
            blocks.iter().map(|block| format!("{rank} {block:?}")).collect()
        })
        .collect();
    held.sort();
    held
}

/// Sends all prompts, and waits until the index has their events.
async fn fill(gateway: &Gateway, router: &Router, engines: &[MockEngine]) {
    for prompt in 0..PROMPTS {
        send(gateway.address(), prompt).await;
    }
    until("all applied", || {
        let applied = |n: usize| router.kv_sources()[n].applied.map(|applied| applied + 1).unwrap_or(0);
        (0..2).all(|n| applied(n) == engines[n].sequence_next(0))
    })
    .await;
}

const NEVER_MS: u64 = 86_400_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joining_replica_restores_the_snapshot_of_a_serving_one() {
    let (engines, network) = (engines().await, MemoryNetwork::default());
    let (mut first, router) = gateway(&engines, NEVER_MS).await;
    first.join_replicas(network.join(life(9)));
    ready(first.address()).await;
    let (idle, unasked) = other(&network, 6, false);
    until_serving(&idle, 9, true).await;
    fill(&first, &router, &engines).await;

    // Of the serving replicas, the one that began first sends damaged bytes, and the next one is without a source.
    let (_damaged, asked) = other(&network, 7, true);
    let without = network.join(life(8));
    without.set_serving(true);
    let (mut second, joined) = gateway(&engines, NEVER_MS).await;
    second.join_replicas(network.join(life(10)));
    until_serving(&idle, 10, true).await;
    assert_eq!([&asked, &unasked].map(|source| source.0.load(Ordering::Relaxed)), [true, false]);
    assert_eq!(held(&joined).await, held(&router).await);
    let restored = joined.kv_sources().iter().map(|source| source.restore).collect::<Vec<_>>();
    assert_eq!(restored, [Some(RestoreState::Resumed); 2]);

    // A drain ends the service for other replicas.
    second.begin_drain();
    until_serving(&idle, 10, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_serving_replica_the_stored_snapshot_is_restored() {
    let (engines, network) = (engines().await, MemoryNetwork::default());
    let (mut first, router) = gateway(&engines, NEVER_MS).await;
    let bus = network.join(life(1));
    first.join_replicas(bus.clone());
    fill(&first, &router, &engines).await;
    let (expected, blocks) = (held(&router).await, router.snapshot().await.expect("up").block_count());
    let store = bus.store().expect("the memory bus has a store");
    let pool: Arc<str> = Arc::from(&*router.config().pool);
    let is_stored = async || {
        let stored = store.get(Arc::clone(&pool)).await.expect("readable");
        stored.is_some_and(|bytes| Snapshot::decode(&bytes).expect("a snapshot").block_count() == blocks)
    };
    eventually("all blocks are stored", is_stored).await;
    first.shutdown(Duration::ZERO).await;
    drop(bus);

    let (mut second, joined) = gateway(&engines, NEVER_MS).await;
    let alone = network.join(life(2));
    second.join_replicas(alone.clone());
    until("both ranks continue from the snapshot", || {
        joined.kv_sources().iter().all(|source| source.restore == Some(RestoreState::Resumed))
    })
    .await;
    assert_eq!(held(&joined).await, expected);

    // A damaged one is refused, and the gateway serves without it.
    second.shutdown(Duration::ZERO).await;
    alone.store().expect("the same store").put(pool, Bytes::from_static(b"damaged")).await.expect("stored");
    let (mut third, cold) = gateway(&engines, 0).await;
    third.join_replicas(network.join(life(3)));
    until_serving(&alone, 3, true).await;
    assert!(cold.kv_sources().iter().all(|source| source.restore.is_none()));
}
