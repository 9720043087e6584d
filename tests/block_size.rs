//! Pools that take their block size from the engines: adoption, a change under load, snapshots and replicas.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pointsman::hashing::HashScheme;
use pointsman::internals::config::{EventsConfig, SupervisionConfig};
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::internals::protocol::BlockSizeOrigin;
use pointsman::protocol::{EngineHash, WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{
    Placement, Prompt, RouteRequest, Router, RouterConfig, StreamState,
    internals::{MemoryFaults, MemoryNetwork},
};
use pointsman::{ReplicaId, ReplicaLife};
use pointsman::{Snapshot, internals::snapshot::SnapshotLayout};

use crate::common::{assert_at_rest, config, loads, tokens};
use crate::engines::{Engine, Held, source};
use crate::ingest_faults::{until, until_held};
use crate::msgpack::{Msg, batch};

/// Size of the engines' blocks. A pool takes no smaller one.
const REPORTED: u32 = 16;

/// Fails at the first restart.
fn unsized_config() -> RouterConfig {
    let supervision = SupervisionConfig { restarts_max: 0, ..config().supervision };
    RouterConfig { block_size: None, supervision, ..config() }
}

fn sized(worker: u64, tokens: u32) -> WorkerConfig {
    WorkerConfig { block_size: Some(tokens), ..WorkerConfig::at(format!("http://engine-{worker}")) }
}

fn size(router: &Router) -> (u32, BlockSizeOrigin) {
    (router.block_size(), router.block_size_origin())
}

async fn route(router: &Router, id: &str, prompt: &[u32]) -> Placement {
    router.route(RouteRequest::new(id, Prompt::Tokens(prompt))).await.expect("placed")
}

/// Routes prompts of a few families until the flag is set; returns the number of placements.
async fn traffic(router: Router, client: u32, ends: Arc<AtomicBool>, placed: Arc<AtomicU64>) {
    for n in 0.. {
        if ends.load(Ordering::Relaxed) {
            break;
        }
        let placement = route(&router, &format!("{client}-{n}"), &tokens(n % 7, 8)).await;
        placement.prefill_completed();
        placement.output_block(None).expect("no decay");
        placed.fetch_add(1, Ordering::Relaxed);
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_another_size_change_an_assumed_size_under_load() {
    let mut engines = [Engine::start(0, 100).await, Engine::start(1, 100).await];
    engines.iter_mut().for_each(|engine| engine.block_size = REPORTED);
    // Stored before anything is read: only the replay has them.
    engines.iter_mut().for_each(Engine::store);
    let router = Router::builder(unsized_config()).start().await.expect("valid");
    router.upsert_worker(WorkerId(9), WorkerConfig::at("http://silent")).await.expect("valid");
    assert_eq!(size(&router), (64, BlockSizeOrigin::Assumed));
    let held = [route(&router, "held", &tokens(3, 40)).await, route(&router, "also held", &tokens(4, 40)).await];
    let (ends, placed) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
    let clients = [0, 1].map(|n| tokio::spawn(traffic(router.clone(), n, Arc::clone(&ends), Arc::clone(&placed))));

    for engine in &engines {
        router.upsert_worker(engine.rank.worker, engine.config()).await.expect("valid");
    }
    until("taken", &router, || size(&router) == (REPORTED, BlockSizeOrigin::Reported)).await;
    let all = |engines: &[Engine]| engines.iter().flat_map(|engine| engine.holds()).collect::<Held>();
    let expected = all(&engines);
    until_held(&router, |found| *found == expected).await;
    engines.iter_mut().for_each(Engine::work);
    let expected = all(&engines);
    until_held(&router, |found| *found == expected).await;
    let before = placed.load(Ordering::Relaxed);
    until("traffic goes on", &router, || placed.load(Ordering::Relaxed) > before + 100).await;
    ends.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("no request was lost");
    }

    for engine in &engines {
        let prompt = engine.prompts.last().expect("stored");
        let placement = route(&router, "again", prompt).await;
        assert_eq!((placement.rank(), placement.cached_tokens()), (engine.rank, prompt.len() as u32 - REPORTED));
    }
    assert_eq!(router.health().leases, 2, "the held bookings have survived");
    assert_eq!((router.health().restarts, router.health().state), (0, Ok(())));
    drop(held);
    assert_at_rest(&router).await;
}

fn snapshot_in_blocks_of(block_size: u32) -> Snapshot {
    let layout = SnapshotLayout::of(&config(), block_size);
    Snapshot { layout, created_ms: 1, ranks: Vec::new() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_waits_for_the_size_and_is_loaded_in_its_own_size_only() {
    let mut engine = Engine::start(0, 100).await;
    engine.block_size = REPORTED;
    engine.store();
    let sixteen = RouterConfig { block_size: Some(REPORTED), ..config() };
    let warm = Router::builder(sixteen).start().await.expect("valid");
    warm.upsert_worker(engine.rank.worker, engine.config()).await.expect("valid");
    let expected = engine.holds();
    until_held(&warm, |found| *found == expected).await;
    let snapshot = warm.snapshot().await.expect("up");
    assert_eq!(snapshot.ranks.len(), 1);

    let restarted = Router::builder(unsized_config()).snapshot(snapshot.clone()).start().await.expect("kept");
    assert_eq!(restarted.snapshot().await.expect("up").ranks.len(), 0, "of an unknown size");
    let reporting = WorkerConfig { block_size: Some(REPORTED), ..engine.config() };
    restarted.upsert_worker(engine.rank.worker, reporting).await.expect("valid");
    until_held(&restarted, |found| *found == expected).await;
    assert!(restarted.kv_sources()[0].restore.is_some(), "loaded");
    restarted.restore(snapshot_in_blocks_of(32)).expect_err("another size than the reported one");

    let other = Router::builder(unsized_config()).snapshot(snapshot).start().await.expect("kept");
    other.upsert_worker(WorkerId(7), sized(7, 32)).await.expect("valid");
    let layout = SnapshotLayout::of(other.config(), 32);
    let dropped = other.snapshot().await.expect("up");
    assert_eq!((dropped.layout, dropped.ranks), (layout, Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn replicas_share_load_once_they_have_taken_the_same_size() {
    let network = MemoryNetwork::new(MemoryFaults { delay: Duration::from_millis(1), ..MemoryFaults::default() });
    let mut routers = Vec::new();
    for id in [1, 2] {
        let bus = network.join(ReplicaLife { replica: ReplicaId(id), incarnation: 1 });
        routers.push(Router::builder(unsized_config()).replicas(bus).start().await.expect("valid"));
    }
    let settle = || tokio::time::sleep(Duration::from_millis(100));
    settle().await;
    // Both assume a size, then take that of a worker which joins later.
    for router in &routers {
        router.upsert_worker(WorkerId(0), WorkerConfig::at("http://engine-0")).await.expect("valid");
    }
    let held = route(&routers[0], "a", &tokens(1, 32)).await;
    settle().await;
    assert_eq!(loads(&routers[1]).await, [(1, 2, 128)]);
    for router in &routers {
        router.upsert_worker(WorkerId(1), sized(1, 16)).await.expect("valid");
    }
    let other = route(&routers[0], "b", &tokens(2, 32)).await;
    settle().await;
    settle().await;
    assert_eq!(loads(&routers[0]).await, loads(&routers[1]).await);
    assert_eq!(BTreeSet::from([held.rank(), other.rank()]), BTreeSet::from([rank(0), rank(1)]));
    drop((held, other));
    settle().await;
    assert_at_rest(&routers[1]).await;
}

/// A store of pages of one token, whose names are the positions behind them.
fn pages(prompt: &[u32], from: u64) -> Msg {
    let (start, end) = (from as usize, prompt.len() as u64);
    Msg::named([
        ("type", "BlockStored".into()),
        ("block_hashes", (from + 1..=end).collect()),
        ("parent_block_hash", if from > 0 { from.into() } else { Msg::Nil }),
        ("token_ids", prompt[start..].iter().map(|token| u64::from(*token)).collect()),
        ("block_size", 1.into()),
        ("medium", "GPU".into()),
    ])
}

/// SGLang at its defaults: pages of one token are folded into blocks of 16, restored and audited by replays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_one_token_are_folded() {
    let events = EventsConfig { audit_interval_ms: 20, ..config().events };
    let router = Router::builder(RouterConfig { events, ..unsized_config() }).start().await.expect("valid");
    let engine = Engine::start(0, 100).await;
    let prompt: Vec<u32> = (1..=50).collect();
    let reporting = || WorkerConfig { block_size: Some(1), ..engine.config() };
    router.upsert_worker(engine.rank.worker, reporting()).await.expect("valid");
    assert_eq!(size(&router), (16, BlockSizeOrigin::Reported));
    let removal = Msg::named([("type", "BlockRemoved".into()), ("block_hashes", (41..=50).collect())]);
    engine.publisher.publish(&batch([pages(&prompt[..20], 0), pages(&prompt, 20)]));
    engine.publisher.publish(&batch([removal]));
    let scheme = HashScheme::new(NonZeroU32::new(16).expect("not zero"));
    let blocks = BlockHasher::new(scheme).block_hashes(&prompt[..32], &MmBlocks::NONE);
    let expected: Held =
        [16, 32].into_iter().zip(&*blocks).map(|(n, hash)| (engine.rank, EngineHash(n), *hash)).collect();
    until_held(&router, |found| *found == expected).await;
    let audited = || source(&router, engine.rank).and_then(|source| source.audit).map(|audit| audit.result);
    until("audited", &router, || audited() == Some("equal")).await;
    let placement = route(&router, "again", &prompt).await;
    assert_eq!((placement.rank(), placement.cached_tokens()), (engine.rank, 32));
    assert_eq!(router.snapshot().await.expect("up").ranks.len(), 0, "tokens stay in memory");
    drop(placement);
    // A larger pool folds more of them.
    let pool = Router::builder(RouterConfig { block_size: Some(32), ..config() }).start().await.expect("valid");
    pool.upsert_worker(engine.rank.worker, reporting()).await.expect("valid");
    until("folded", &pool, || pool.kv_sources()[0].state == StreamState::Live).await;
    assert_eq!(route(&pool, "again", &prompt).await.cached_tokens(), 32);
}
