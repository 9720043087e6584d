//! Event sources on real sockets that die, hang, move and end: afterwards each rank is either exact again or marked as
//! degraded.
//!
//! The tests wait for conditions, never for a time. The clock only bounds the duration of a failure.

use std::time::Duration;

use pointsman::internals::Hang;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::test_support::rank;
use pointsman::{Fault, Prompt, RouteRequest, Router, RouterConfig, StreamState};
use tokio::time::Instant;

use crate::common::{BLOCK_SIZE, config, config_with, suppress_fault_reports, tokens};
use crate::engines::{Engine, Held, held, held_in, source};

/// Longer than any step, including the back-off on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Polls until `condition` holds.
pub(crate) async fn until(what: &str, router: &Router, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{what}: {:#?}", router.kv_sources());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Polls until the content of the index satisfies a condition.
pub(crate) async fn until_held(router: &Router, is_well: impl Fn(&Held) -> bool) {
    let begun = Instant::now();
    loop {
        let held = held(router).await;
        if is_well(&held) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{held:?} {:#?}", router.kv_sources());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) fn is(router: &Router, of: WorkerRank, state: StreamState) -> bool {
    source(router, of).is_some_and(|source| source.connected && source.state == state)
}

/// Engines with cached prompts, and a router whose index matches them.
pub(crate) async fn fleet(config: RouterConfig, engines: u64, ring_max: usize) -> (Router, Vec<Engine>) {
    suppress_fault_reports();
    let mut builder = Router::builder(config);
    let mut fleet = Vec::new();
    for worker in 0..engines {
        let engine = Engine::start(worker, ring_max).await;
        builder = builder.worker(WorkerId(worker), engine.config());
        fleet.push(engine);
    }
    let router = builder.start().await.expect("valid");
    until("connected", &router, || fleet.iter().all(|engine| is(&router, engine.rank, StreamState::Live))).await;
    for engine in &mut fleet {
        engine.work();
    }
    assert_exact(&router, &fleet).await;
    (router, fleet)
}

/// Waits until the index matches the engines and every rank is live.
pub(crate) async fn assert_exact(router: &Router, fleet: &[Engine]) {
    let expected: Held = fleet.iter().flat_map(Engine::holds).collect();
    let begun = Instant::now();
    loop {
        let all_live = fleet.iter().all(|engine| is(router, engine.rank, StreamState::Live));
        let held = held_or_empty(router).await;
        if all_live && held == expected {
            break;
        }
        let (extra, missing) = (held.difference(&expected).count(), expected.difference(&held).count());
        assert!(begun.elapsed() < PATIENCE, "{extra} too many, {missing} missing: {:#?}", router.kv_sources());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A shard that dies during the query returns nothing.
async fn held_or_empty(router: &Router) -> Held {
    if router.flush().await.is_err() { Held::new() } else { held_in(router.dump_events().await.unwrap_or_default()) }
}

pub(crate) async fn assert_routed_to(router: &Router, engine: &Engine) {
    let prompt = engine.prompts.last().expect("one block held");
    let placement = router.route(RouteRequest::new("asks", Prompt::Tokens(prompt))).await.expect("placed");
    assert_eq!((placement.rank(), placement.cached_tokens()), (engine.rank, prompt.len() as u32 - BLOCK_SIZE));
}

/// Makes the reader of an engine's events panic and waits until a new one has connected.
async fn kill_reader(router: &Router, engine: &Engine) {
    let accepted = engine.publisher.accepted();
    assert!(router.inject(Fault::Ingest(engine.rank)));
    until("read again", router, || engine.publisher.accepted() > accepted).await;
}

async fn hang(router: &Router, fault: Fault) -> Hang {
    let router = router.clone();
    let hang = tokio::task::spawn_blocking(move || router.hang(fault)).await.expect("no panic");
    hang.expect("not empty")
}

async fn release(hang: Hang) {
    tokio::task::spawn_blocking(move || drop(hang)).await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_dies_six_times_is_given_up_and_reported() {
    let (router, mut fleet) = fleet(config_with(|c| c.supervision.restarts_max = 0), 3, 100).await;
    for _ in 0..5 {
        kill_reader(&router, &fleet[1]).await;
        until("recovered", &router, || is(&router, rank(1), StreamState::Live)).await;
    }
    assert!(router.inject(Fault::Ingest(rank(1))));
    until("given up", &router, || source(&router, rank(1)).is_some_and(|s| s.state == StreamState::Mismatched)).await;
    let left = source(&router, rank(1)).expect("the source is still listed");
    assert!(!left.connected);
    assert!(left.reason.expect("a reason").contains("died 6 times"));
    let problems = router.health().problems;
    assert!(problems.len() == 1 && problems[0].contains("died 6 times"), "{problems:?}");
    until("its connections close", &router, || fleet[1].publisher.connections() == 0).await;

    // Its earlier blocks no longer count, and the other ranks continue.
    let lost = fleet[1].prompts.last().expect("one block held").clone();
    let best = router.find_best_match(RouteRequest::query(Prompt::Tokens(&lost))).await.expect("a match");
    assert_eq!(best.overlap_blocks(), 0);
    fleet[0].work();
    fleet[2].work();
    for well in [&fleet[0], &fleet[2]] {
        until("live", &router, || is(&router, well.rank, StreamState::Live)).await;
        until_held(&router, |held| held.is_superset(&well.holds())).await;
        assert_routed_to(&router, well).await;
    }
    assert_eq!((router.health().restarts, router.health().state), (0, Ok(())));

    // The documented recovery: remove the worker and add it again.
    router.remove_worker(WorkerId(1)).await.expect("known");
    router.upsert_worker(WorkerId(1), fleet[1].config()).await.expect("valid");
    assert_exact(&router, &fleet).await;
}

/// Hangs a reader while its publisher continues: `unheard` messages never reach it.
async fn stands_still(ring_max: usize, unheard: u32) -> (Router, Vec<Engine>) {
    let (router, mut fleet) = fleet(config(), 2, ring_max).await;
    let stuck = hang(&router, Fault::Ingest(rank(0))).await;
    fleet[0].store();
    for _ in 0..unheard {
        let payload = fleet[0].stores(2);
        fleet[0].publisher.publish_unheard(&payload);
    }
    fleet[0].store();
    // Other ranks and decisions do not wait for it.
    fleet[1].work();
    until_held(&router, |held| held.is_superset(&fleet[1].holds())).await;
    assert_routed_to(&router, &fleet[1]).await;
    release(stuck).await;
    (router, fleet)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_missed_by_a_hanging_reader_are_requested() {
    let (router, fleet) = stands_still(100, 20).await;
    assert_exact(&router, &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removing_a_rank_with_a_waiting_reader_blocks_nothing() {
    let config = config_with(|c| {
        c.events.blocks_max = 8;
        c.index.shards = 2;
    });
    let (router, mut fleet) = fleet(config, 3, 100).await;
    let stuck = hang(&router, Fault::Radix(rank(1))).await;
    let received = |router: &Router| source(router, rank(1)).map(|source| source.messages);
    let before = received(&router);
    for _ in 0..10 {
        fleet[1].store();
    }
    until("connected", &router, || received(&router) >= before.map(|messages| messages + 3)).await;
    // Its reader waits because three prompts of three blocks exceed the limit. The other shard is unaffected.
    fleet[0].work();
    until("the other shard continues", &router, || {
        source(&router, rank(0)).and_then(|source| source.applied) == Some(7)
    })
    .await;
    let removal = tokio::spawn({
        let router = router.clone();
        async move { router.remove_worker(WorkerId(1)).await }
    });
    until("its connections close", &router, || fleet[1].publisher.connections() == 0).await;
    release(stuck).await;
    removal.await.expect("no panic").expect("known");
    let gone = fleet.remove(1);
    assert_exact(&router, &fleet).await;

    // A worker added again starts without earlier state.
    let mut again = Engine::start(1, 100).await;
    again.batches = 100;
    router.upsert_worker(WorkerId(1), again.config()).await.expect("valid");
    again.work();
    fleet.push(again);
    assert_exact(&router, &fleet).await;
    drop(gone);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_moved_source_is_followed_and_old_blocks_are_dropped() {
    let (router, mut fleet) = fleet(config(), 2, 100).await;
    for round in 0..10 {
        let mut moved = Engine::start(0, 100).await;
        moved.batches = 1_000 + 10 * round;
        moved.work();
        let old = std::mem::replace(&mut fleet[0], moved);
        // Messages of the old source still in progress must not be applied after those of the new one.
        let mut in_hand = old;
        in_hand.work();
        router.upsert_worker(WorkerId(0), fleet[0].config()).await.expect("valid");
        assert_eq!(router.kv_sources().len(), 2, "round {round}: connected");
        until("the old connections close", &router, || in_hand.publisher.connections() == 0).await;
        assert_exact(&router, &fleet).await;
        let endpoint = fleet[0].publisher.kv_events().endpoint;
        assert_eq!(source(&router, rank(0)).expect("the source is connected").endpoint, endpoint);
    }
    // Removed and immediately added with another endpoint: no state of the old source remains.
    let mut again = Engine::start(0, 100).await;
    again.batches = 5_000;
    router.remove_worker(WorkerId(0)).await.expect("known");
    router.upsert_worker(WorkerId(0), again.config()).await.expect("valid");
    again.work();
    fleet[0] = again;
    assert_exact(&router, &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconnections_and_engine_restarts_are_followed() {
    let (router, mut fleet) = fleet(config(), 2, 100).await;
    for _ in 0..3 {
        fleet[0].publisher.disconnect();
        fleet[0].work();
        assert_exact(&router, &fleet).await;
    }
    fleet[0].publisher.disconnect();
    fleet[0].publisher.forget();
    fleet[0].prompts.clear();
    fleet[0].work();
    assert_exact(&router, &fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_router_closes_all_connections() {
    let (router, fleet) = fleet(config(), 3, 100).await;
    let open = || fleet.iter().map(|engine| engine.publisher.connections()).sum::<usize>();
    assert!(open() >= 3);
    drop(router);
    let begun = Instant::now();
    while open() > 0 {
        assert!(begun.elapsed() < PATIENCE, "{} connections are left", open());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_event_limit_blocks_neither_events_nor_decisions() {
    let (router, mut fleet) = fleet(config_with(|c| c.events.blocks_max = 8), 3, 1_000).await;
    for round in 0..50 {
        for engine in &mut fleet {
            engine.work();
        }
        let large = fleet[round % 3].stores(40); // more than the gate's limit
        fleet[round % 3].publisher.publish(&large);
        let id = round.to_string();
        let prompt = tokens(round as u32, 5);
        drop(router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.expect("placed"));
    }
    assert_exact(&router, &fleet).await;
    for engine in &fleet {
        assert_routed_to(&router, engine).await;
    }
}
