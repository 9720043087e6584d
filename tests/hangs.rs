//! Hung actors: each is named, replaced where that is safe, and its late effects change nothing.
//!
//! A hang lasts until the test releases it, as long as a handler that blocks for 30 s or forever. No test depends on the
//! time of a detection. A loaded machine may cause detections of its own, so restarts are counted from below.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use pointsman::error::RouteError;
use pointsman::internals::Hang;
use pointsman::internals::config::{IndexConfig, QueueConfig, SupervisionConfig};
use pointsman::internals::membership::WatchedActor;
use pointsman::policy::{RankFilter, RequestFacts};
use pointsman::protocol::{WorkerConfig, WorkerId, WorkerRank};
use pointsman::test_support::rank;
use pointsman::{AddRequest, Fault, Placement, Prompt, RankTraits, RouteRequest, Router, RouterConfig};
use tokio::task::JoinHandle;

use crate::common::{WAIT_MAX, assert_at_rest, cleared, config, loads, router, stored, tokens, until};

/// Short, so that a test with a hang takes a fraction of a second.
const HANG_TIMEOUT_MS: u64 = 200;

fn watched() -> RouterConfig {
    let supervision = SupervisionConfig { hang_timeout_ms: HANG_TIMEOUT_MS, ..config().supervision };
    RouterConfig { supervision, index: IndexConfig { shards: 2, ..config().index }, ..config() }
}

/// Waits until the actor is, or no longer is, among those that hang.
async fn named(router: &Router, actor: WatchedActor, hangs: bool) {
    let what = format!("{actor} hangs: {hangs}");
    until(&what, async || router.health().hung.contains(&actor) == hangs).await;
}

/// Waits for a restart after `before` restarts.
async fn replaced(router: &Router, before: u64) {
    until("replacement", async || router.health().restarts > before).await;
}

fn calls(router: &Router, ids: std::ops::Range<u32>) -> Vec<JoinHandle<Result<Placement, RouteError>>> {
    ids.map(|n| {
        let router = router.clone();
        tokio::spawn(async move { router.route(RouteRequest::new(n.to_string(), Prompt::Tokens(&tokens(n, 6)))).await })
    })
    .collect()
}

async fn placed(calls: Vec<JoinHandle<Result<Placement, RouteError>>>) -> Vec<Placement> {
    let mut placements = Vec::new();
    for call in calls {
        let result = tokio::time::timeout(WAIT_MAX, call).await.expect("every call returns");
        placements.push(result.expect("no panic").expect("placed"));
    }
    placements
}

/// Releases the hung thread, whose late effects must change nothing, and then every placement.
async fn released(router: &Router, hang: Hang, placements: Vec<Placement>) {
    let before = (router.health().leases, loads(router).await);
    tokio::task::spawn_blocking(move || drop(hang)).await.expect("the hung thread ends");
    assert_eq!((router.health().leases, loads(router).await), before, "late effects");
    let requests: u32 = before.1.iter().map(|load| load.0).sum();
    assert_eq!(requests as usize, placements.len(), "one booking per placement");
    drop(placements);
    assert_at_rest(router).await;
    drop(router.route(RouteRequest::new("after", Prompt::Tokens(&tokens(77, 3)))).await.expect("the router serves"));
    assert_at_rest(router).await;
}

/// Blocks the first evaluation of a request with a marked prompt.
#[derive(Default)]
struct Blocks {
    blocked: AtomicBool,
    is_blocked: (Mutex<bool>, Condvar),
    release: (Mutex<bool>, Condvar),
}

fn set(flag: &(Mutex<bool>, Condvar)) {
    *flag.0.lock().expect("no panic") = true;
    flag.1.notify_all();
}

fn wait(flag: &(Mutex<bool>, Condvar)) {
    drop(flag.1.wait_while(flag.0.lock().expect("no panic"), |set| !*set).expect("no panic"));
}

impl RankFilter for Blocks {
    fn accepts(&self, _: &RequestFacts<'_>, _: WorkerRank, _: &RankTraits) -> bool {
        if !self.blocked.swap(true, Ordering::SeqCst) {
            set(&self.is_blocked);
            wait(&self.release);
        }
        true
    }
}

/// The embedder's filter blocks in the middle of a decision, on the thread of a caller.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn decision_that_returns_after_the_replacement_books_nothing() {
    let filter = Arc::new(Blocks::default());
    let filters: Arc<dyn RankFilter> = Arc::<Blocks>::clone(&filter);
    let builder = Router::builder(watched()).filter(filters);
    let router = crate::common::started(builder, 3).await;
    let before = router.health().restarts;
    let first = calls(&router, 0..1);
    let is_blocked = Arc::clone(&filter);
    tokio::task::spawn_blocking(move || wait(&is_blocked.is_blocked)).await.expect("no panic");
    replaced(&router, before).await;
    let others = placed(calls(&router, 1..20)).await;
    set(&filter.release);
    let first = placed(first).await; // retried at the successor
    assert_eq!(router.health().leases, 20, "one lease per placement");
    let requests: u32 = loads(&router).await.iter().map(|load| load.0).sum();
    assert_eq!(requests, 20, "the late decision booked nothing");
    drop((first, others));
    assert_at_rest(&router).await;
}

/// A Book in the inbox of a hung sequence actor belongs to a scheduler that hangs and is replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn book_of_a_replaced_scheduler_is_dropped() {
    let router = router(RouterConfig { index: IndexConfig { enabled: false, ..config().index }, ..watched() }, 1).await;
    let sequence = router.hang(Fault::Sequence(rank(0))).expect("a rank");
    let call = calls(&router, 0..1);
    until("request at the rank", async || router.health().leases == 1).await;
    let before = router.health().restarts;
    let hang = router.hang(Fault::Scheduler).expect("a scheduler");
    replaced(&router, before).await;
    drop(tokio::task::spawn_blocking(move || drop(sequence)).await);
    let placements = placed(call).await;
    released(&router, hang, placements).await;
}

/// The permits of requests in the hung state do not count against its successor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_scheduler_with_a_full_queue_loses_no_request() {
    let queue = QueueConfig { threshold: Some(0.5), requests_max: 5, overlap_refresh_after_ms: 0, ..config().queue };
    let engine = WorkerConfig { max_num_batched_tokens: Some(100), ..WorkerConfig::at("http://engine") };
    let router = Router::builder(RouterConfig { queue, ..watched() }).worker(WorkerId(0), engine).start().await;
    let router = router.expect("valid");
    let prompt = tokens(1, 25);
    let busy = router.route(RouteRequest::new("busy", Prompt::Tokens(&prompt))).await.expect("idle");
    let waiting: Vec<_> = (0..5)
        .map(|n| {
            let (router, prompt) = (router.clone(), prompt.clone());
            tokio::spawn(async move {
                let id = format!("waiting-{n}");
                router.route(RouteRequest::new(&id, Prompt::Tokens(&prompt))).await.map(drop)
            })
        })
        .collect();
    let all_wait = async || router.pending().await.is_ok_and(|pending| pending[0].depth.requests == 5);
    until("full queue", all_wait).await;
    let before = router.health().restarts;
    let hang = router.hang(Fault::Scheduler).expect("a scheduler");
    replaced(&router, before).await;
    until("full queue at the successor", all_wait).await;
    drop(busy);
    for call in waiting {
        assert_eq!(tokio::time::timeout(WAIT_MAX, call).await.expect("no hang").expect("no panic"), Ok(()));
    }
    released(&router, hang, Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_shard_is_replaced_and_its_ranks_are_cold() {
    let router = router(watched(), 4).await;
    let prompt = tokens(1, 10);
    for worker in 0..4 {
        router.apply_events(vec![stored(rank(worker), &prompt)]).await.expect("up");
    }
    let before = router.health().restarts;
    let hang = router.hang(Fault::Radix(rank(1))).expect("a shard");
    let placements = placed(calls(&router, 0..20)).await; // each queries both shards
    replaced(&router, before).await;
    until("cold ranks", async || router.health().cold.contains(&rank(1))).await;
    assert!(!router.health().cold.contains(&rank(0)), "the other shard keeps its index");
    for worker in [1, 3] {
        router.apply_events(vec![cleared(rank(worker)), stored(rank(worker), &prompt)]).await.expect("up");
    }
    until("warm ranks", async || router.health().cold.is_empty()).await;
    released(&router, hang, placements).await;
    assert_eq!(router.dump_events().await.expect("up").len(), 4, "the contents of the successor");
}

/// The supervisor is not replaced: requests are served without it, and it continues where it hung.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn hung_supervisor_is_named_and_requests_are_served() {
    let router = router(watched(), 2).await;
    let hang = {
        let router = router.clone();
        tokio::task::spawn_blocking(move || router.hang(Fault::Supervisor)).await.expect("no panic")
    };
    named(&router, WatchedActor::Supervisor, true).await;
    assert_eq!(router.health().state, Ok(()), "requests are accepted");
    assert!(router.health().problems.contains(&"supervisor hangs".to_owned()));
    let placements = placed(calls(&router, 0..10)).await;
    let upsert = tokio::spawn({
        let router = router.clone();
        async move { router.upsert_worker(WorkerId(9), WorkerConfig::at("http://late")).await }
    });
    drop(hang);
    upsert.await.expect("no panic").expect("performed after the hang");
    named(&router, WatchedActor::Supervisor, false).await;
    drop(placements);
    assert_at_rest(&router).await;
}

/// The only thread of the runtime is blocked, so only a thread outside the runtime can detect it.
#[tokio::test]
#[expect(clippy::disallowed_types, reason = "bounds the wait without the blocked runtime")]
async fn blocked_runtime_is_detected() {
    let router = router(watched(), 1).await;
    let started = std::time::Instant::now();
    while !router.health().hung.contains(&WatchedActor::Supervisor) {
        assert!(started.elapsed() < WAIT_MAX, "not detected");
        std::thread::yield_now();
    }
    named(&router, WatchedActor::Supervisor, false).await;
}

/// A sequence actor has the only right to write the load board of its rank, so it is named and not replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_sequence_actor_is_named_and_avoided() {
    let router = router(watched(), 3).await;
    let hang = router.hang(Fault::Sequence(rank(1))).expect("a rank");
    let booking = tokio::spawn({
        let router = router.clone();
        async move { router.add_request(AddRequest::new("late", rank(1), Prompt::Tokens(&[1]))).await }
    });
    named(&router, WatchedActor::Sequence(rank(1)), true).await;
    drop(tokio::task::spawn_blocking(move || drop(hang)).await);
    booking.await.expect("no panic").expect("booked after the hang");
    named(&router, WatchedActor::Sequence(rank(1)), false).await;
    router.free("late").expect("booked");
    assert_at_rest(&router).await;
}

/// Hung steps may occupy all but one cell. A further hang lasts until one of them returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scheduler_without_a_free_cell_stays_hung_until_one_is_free() {
    let router = router(watched(), 2).await;
    let mut hangs = Vec::new();
    for _ in 0..3 {
        let before = router.health().restarts;
        hangs.push(router.hang(Fault::Scheduler).expect("a scheduler"));
        replaced(&router, before).await;
        named(&router, WatchedActor::Scheduler, false).await;
    }
    let last = router.hang(Fault::Scheduler).expect("a scheduler");
    named(&router, WatchedActor::Scheduler, true).await;
    let call = calls(&router, 0..1);
    tokio::task::spawn_blocking(move || drop(hangs.pop().map(|first| (first, hangs.clear())))).await.expect("no panic");
    let placements = placed(call).await;
    named(&router, WatchedActor::Scheduler, false).await;
    released(&router, last, placements).await;
}

/// The acknowledgement of a removal is lost with the hung scheduler.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_and_drain_during_a_hang_complete() {
    let router = router(watched(), 3).await;
    let held = placed(calls(&router, 0..9)).await;
    let hang = router.hang(Fault::Scheduler).expect("a scheduler");
    let removal = router.remove_worker(WorkerId(0));
    let drain = router.drain_worker(WorkerId(1), Duration::ZERO);
    let both = async { tokio::join!(removal, drain) };
    let (removed, drained) = tokio::time::timeout(WAIT_MAX, both).await.expect("both return");
    removed.expect("registered");
    drained.expect("registered");
    assert!(router.health().restarts > 0);
    drop(tokio::task::spawn_blocking(move || drop(hang)).await);
    drop(held);
    assert_at_rest(&router).await;
    assert_eq!(router.health().ranks, 1);
}
