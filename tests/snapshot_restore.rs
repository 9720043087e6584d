//! Routers that restart with a snapshot, against event publishers on real sockets.

use pointsman::protocol::{EngineHash, KvEvent, RouterEvent, StoredBlock, WorkerId};
use pointsman::test_support::rank;
use pointsman::{KvSourceStatus, RestoreState, Router, RouterConfig, Snapshot, StreamState};

use crate::common::{BLOCK_SIZE, config, stored, tokens};
use crate::engines::{Engine, Held, source};
use crate::ingest_faults::{assert_exact, assert_routed_to, fleet, is, until, until_held};

/// Messages that a publisher keeps: fewer than its engine has published, so no replay rebuilds the complete index.
const RING: usize = 6;

/// Engines that have published more messages than they keep, and a router that has read all of them.
async fn warm_fleet(engines: u64) -> (Router, Vec<Engine>) {
    let (router, mut fleet) = fleet(config(), engines, RING).await;
    for _ in 0..3 {
        work(&router, &mut fleet).await;
    }
    (router, fleet)
}

async fn work(router: &Router, fleet: &mut [Engine]) {
    fleet.iter_mut().for_each(Engine::work);
    assert_exact(router, fleet).await;
}

/// The snapshot as another process reads it.
async fn snapshot(router: &Router) -> Snapshot {
    let snapshot = router.snapshot().await.expect("up");
    Snapshot::decode(&snapshot.encode()).expect("valid")
}

async fn restarted(config: RouterConfig, snapshot: Snapshot, fleet: &[Engine]) -> Router {
    let mut builder = Router::builder(config).snapshot(snapshot);
    for engine in fleet {
        builder = builder.worker(engine.rank.worker, engine.config());
    }
    builder.start().await.expect("valid")
}

fn restore(router: &Router, engine: &Engine) -> Option<RestoreState> {
    source(router, engine.rank).and_then(|source| source.restore)
}

/// The contents of the index. The order of unrelated prompts depends on the order of their arrival.
async fn dump(router: &Router) -> Vec<RouterEvent> {
    router.flush().await.expect("up");
    let mut events = router.dump_events().await.expect("up");
    events.sort_by_key(|event| format!("{event:?}"));
    events
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_applies_only_the_missing_messages() {
    let (undisturbed, mut fleet) = warm_fleet(3).await;
    let snapshot = snapshot(&undisturbed).await;
    assert_eq!(snapshot.ranks.len(), 3);
    let applied: Vec<_> = undisturbed.kv_sources().iter().map(|source| source.applied).collect();
    assert_eq!(snapshot.ranks.iter().map(|rank| Some(rank.position.next - 1)).collect::<Vec<_>>(), applied);

    fleet[..2].iter_mut().for_each(Engine::work); // four messages each, one of them a removal
    assert_exact(&undisturbed, &fleet).await;
    let router = restarted(config(), snapshot, &fleet).await;
    assert_exact(&router, &fleet).await;
    until("resumed", &router, || fleet.iter().all(|e| restore(&router, e) == Some(RestoreState::Resumed))).await;
    for (engine, missing) in fleet.iter().zip([4, 4, 0]) {
        // The last message before the snapshot verifies the publisher.
        assert_eq!(source(&router, engine.rank).map(|source| source.messages), Some(missing + 1));
    }
    assert_eq!(dump(&router).await, dump(&undisturbed).await);

    // Later parents and removals name blocks by engine hashes from before the restart.
    work(&undisturbed, &mut fleet).await;
    assert_exact(&router, &fleet).await;
    assert_eq!(dump(&router).await, dump(&undisturbed).await);
    for engine in &fleet {
        assert_routed_to(&router, engine).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_under_traffic_is_consistent_with_its_position() {
    let (undisturbed, mut fleet) = fleet(config(), 2, 10_000).await;
    // A block with a copy per repetition. Each copy needs a removal, so a repeated or lost message changes the index.
    let prompt = tokens(77, 3);
    let root = stored(rank(0), &prompt);
    let root = fleet[0].payload(&[(root, &prompt)]);
    fleet[0].publisher.publish(&root);
    let KvEvent::Stored { blocks, .. } = stored(rank(0), &prompt).data else { unreachable!("a store") };
    let copied: StoredBlock = blocks[2];
    let parent: Option<EngineHash> = Some(blocks[1].engine_hash);
    let last = prompt[2 * BLOCK_SIZE as usize..].to_vec();
    let copy = RouterEvent { data: KvEvent::Stored { parent, blocks: vec![copied] }, ..stored(rank(0), &prompt) };
    let mut snapshots = Vec::new();
    for _ in 0..8 {
        for _ in 0..20 {
            let payload = fleet[0].payload(&[(copy.clone(), &last)]);
            fleet[0].publisher.publish(&payload);
        }
        snapshots.push(snapshot(&undisturbed).await);
    }
    let removal = RouterEvent { data: KvEvent::Removed { blocks: vec![copied.engine_hash] }, ..copy };
    for _ in 0..150 {
        let payload = fleet[0].payload(&[(removal.clone(), &[])]);
        fleet[0].publisher.publish(&payload);
    }
    let end = fleet[0].payload(&[]);
    let published = fleet[0].publisher.publish(&end);
    let has_all = |router: &Router| source(router, rank(0)).and_then(|source| source.applied) == Some(published);
    until("all applied", &undisturbed, || has_all(&undisturbed)).await;
    let expected = dump(&undisturbed).await;
    let copies = expected.iter().filter(|event| matches!(&event.data, KvEvent::Offloaded { .. })).count();
    assert!(copies > 0, "copies are left: {expected:?}");
    for snapshot in snapshots {
        let router = restarted(config(), snapshot, &fleet).await;
        until("all applied", &router, || has_all(&router) && is(&router, rank(0), StreamState::Live)).await;
        assert_eq!(dump(&router).await, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_that_no_longer_reaches_the_snapshot_makes_the_rank_cold() {
    let (router, mut fleet) = warm_fleet(2).await;
    let snapshot = snapshot(&router).await;
    drop(router);
    for _ in 0..RING {
        fleet[0].store();
    }
    let router = restarted(config(), snapshot, &fleet).await;
    until("cold", &router, || is(&router, rank(0), StreamState::Cold)).await;
    assert_eq!(restore(&router, &fleet[0]), Some(RestoreState::Dropped));
    let known = fleet[0].prompts.len() - RING;
    fleet[0].prompts.drain(..known);
    let expected: Held = fleet.iter().flat_map(Engine::holds).collect();
    until_held(&router, |held| *held == expected).await;
    let reason = source(&router, rank(0)).and_then(|source| source.reason).expect("a reason");
    assert!(reason.contains("replay buffer"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contents_wait_for_a_rank_that_registers_later() {
    let (router, mut fleet) = warm_fleet(3).await;
    let snapshot = snapshot(&router).await;
    drop(router);
    let (late, gone) = (fleet.remove(1), fleet.pop());
    let router = restarted(config(), snapshot, &fleet).await;
    assert_exact(&router, &fleet).await;
    router.upsert_worker(late.rank.worker, late.config()).await.expect("valid");
    fleet.push(late);
    assert_exact(&router, &fleet).await;
    assert!(fleet.iter().all(|engine| restore(&router, engine) == Some(RestoreState::Resumed)));
    // A worker with the id of the third one and another publisher gets none of its contents.
    let other = Engine::start(2, RING).await;
    router.upsert_worker(WorkerId(2), other.config()).await.expect("valid");
    fleet.push(other);
    assert_exact(&router, &fleet).await;
    assert_eq!(restore(&router, &fleet[2]), None);
    drop(gone);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_router_restores_incomplete_ranks_only() {
    let (warm, mut fleet) = warm_fleet(2).await;
    // Rank 0 cannot be read from its first message on and is cold; the publisher of rank 1 has kept everything.
    let complete = Engine::start(9, 100).await;
    warm.upsert_worker(WorkerId(9), complete.config()).await.expect("valid");
    fleet.push(complete);
    work(&warm, &mut fleet).await;
    let router = restarted(config(), Snapshot { ranks: Vec::new(), ..snapshot(&warm).await }, &fleet).await;
    until("cold", &router, || is(&router, rank(0), StreamState::Cold) && is(&router, rank(1), StreamState::Cold)).await;
    until("read", &router, || is(&router, rank(9), StreamState::Live)).await;
    router.restore(snapshot(&warm).await).expect("the same layout");
    assert_exact(&router, &fleet).await;
    let restored: Vec<_> = fleet.iter().map(|engine| restore(&router, engine)).collect();
    assert_eq!(restored, [Some(RestoreState::Resumed), Some(RestoreState::Resumed), None]);

    // An older snapshot changes nothing.
    let old = snapshot(&warm).await;
    work(&router, &mut fleet).await;
    let before: Vec<KvSourceStatus> = router.kv_sources();
    router.restore(old).expect("the same layout");
    work(&router, &mut fleet).await;
    let connected = |sources: &[KvSourceStatus]| sources.iter().map(|s| (s.rank, s.restore)).collect::<Vec<_>>();
    assert_eq!(connected(&router.kv_sources()), connected(&before));
}
