//! Pools that take their block size from the engines: adoption, a change under load, snapshots and replicas.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pointsman::internals::config::SupervisionConfig;
use pointsman::internals::protocol::BlockSizeOrigin;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::{Placement, Prompt, RouteRequest, Router, RouterConfig, Snapshot, internals::snapshot::SnapshotLayout};

use crate::common::{assert_at_rest, config, config_with, tokens};
use crate::engines::{Engine, Held};
use crate::ingest_faults::{until, until_held};

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
    let sixteen = config_with(|c| c.block_size = Some(REPORTED));
    let warm = Router::builder(sixteen).start().await.expect("valid");
    warm.upsert_worker(engine.rank.worker, engine.config()).await.expect("valid");
    let expected = engine.holds();
    until_held(&warm, |found| *found == expected).await;
    let mut snapshot = warm.snapshot().await.expect("up");
    while snapshot.ranks.is_empty() {
        snapshot = warm.snapshot().await.expect("up"); // a reader that is busy is left out
    }

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
