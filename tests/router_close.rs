//! A router that fails while an actor hangs: every pending call returns, whatever it waits for.

use std::time::Duration;

use pointsman::error::{Down, FlushError, RouteError};
use pointsman::test_support::rank;
use pointsman::{Fault, Prompt, RouteRequest};

use crate::common::{config, config_with, router, stored, suppress_fault_reports, tokens};

/// Longer than any response on a loaded machine. Only a call that never returns reaches it.
const HANG: Duration = Duration::from_secs(20);

/// The hung scheduler never responds and stays hung while the router fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_call_ends_when_the_router_fails_with_a_hanging_scheduler() {
    suppress_fault_reports();
    let router = router(config(), 2).await;
    let hang = router.hang(Fault::Scheduler).expect("a scheduler");
    let prompt = tokens(1, 3);
    let query = RouteRequest::query(Prompt::Tokens(&prompt));
    let calls = async {
        tokio::join!(
            router.route(RouteRequest::new("stuck", Prompt::Tokens(&prompt))),
            router.find_best_match(query.clone()),
            router.potential_loads(query.clone()),
            router.explain(query),
            router.pending(),
            router.set_conditions(pointsman::RankConditions::default()),
        )
    };
    let fail = async { router.inject(Fault::Supervisor) };
    let (answers, _) = tokio::time::timeout(HANG, async { tokio::join!(calls, fail) }).await.expect("no hang");
    let (placed, best, loads, explanation, pending, conditions) = answers;
    let failed = RouteError::from(Down::Failed);
    assert_eq!(placed.expect_err("the router is down"), failed);
    assert_eq!(best.expect_err("the router is down"), failed);
    assert_eq!(loads.expect_err("the router is down"), failed);
    assert_eq!(explanation.expect_err("the router is down"), failed);
    assert_eq!(pending.expect_err("the router is down"), failed);
    assert_eq!(conditions.expect_err("the router is down"), Down::Failed);
    assert_eq!(router.health().leases, 0, "the request's lease has ended");
    drop(hang);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_call_ends_when_the_router_fails_with_a_hanging_shard() {
    suppress_fault_reports();
    let router = router(
        config_with(|c| {
            c.events.blocks_max = 4;
            c.index.shards = 1;
        }),
        2,
    )
    .await;
    let hang = router.hang(Fault::Radix(rank(0))).expect("a shard");
    let prompt = tokens(1, 3);
    let query = RouteRequest::query(Prompt::Tokens(&prompt));
    let fill = || async { router.apply_events(vec![stored(rank(0), &prompt)]).await };
    let calls = async {
        tokio::join!(
            router.route(RouteRequest::new("stuck", Prompt::Tokens(&prompt))),
            router.overlap_scores(query, false),
            router.flush(),
            router.dump_events(),
            async {
                fill().await.expect("the first event fits");
                fill().await
            },
        )
    };
    let fail = async { router.inject(Fault::Supervisor) };
    let (answers, _) = tokio::time::timeout(HANG, async { tokio::join!(calls, fail) }).await.expect("no hang");
    let (placed, scores, flushed, dumped, applied) = answers;
    let failed = RouteError::from(Down::Failed);
    assert_eq!(placed.expect_err("the router is down"), failed);
    assert_eq!(scores.expect_err("the router is down"), failed);
    assert_eq!(flushed.expect_err("the router is down"), FlushError::Down(Down::Failed));
    assert_eq!(dumped.expect_err("the router is down"), FlushError::Down(Down::Failed));
    assert_eq!(applied.expect_err("the event limit is reached"), Down::Failed);
    drop(hang);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rank_health_ends_when_the_router_fails_with_a_hanging_health_actor() {
    suppress_fault_reports();
    let router = router(config(), 2).await;
    let hang = router.hang(Fault::Health).expect("a health actor");
    let both = async { tokio::join!(router.rank_health(), async { router.inject(Fault::Supervisor) }) };
    let (answer, _) = tokio::time::timeout(HANG, both).await.expect("no hang");
    assert_eq!(answer.expect_err("the router is down"), Down::Failed);
    drop(hang);
}
