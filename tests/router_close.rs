//! A router that fails or shuts down under load: every pending call returns, whatever it waits for.

use pointsman::internals::config::IndexConfig;
use pointsman::internals::config::{EventsConfig, SupervisionConfig};
use std::time::Duration;

use pointsman::error::{Down, FlushError, RouteError};
use pointsman::test_support::rank;
use pointsman::{Fault, Prompt, RouteRequest, Router, RouterConfig};

use crate::common::{config, router, stored, suppress_fault_reports, tokens};
use crate::repetitions::repetitions;

/// Longer than any response on a loaded machine. Only a call that never returns reaches it.
const HANG: Duration = Duration::from_secs(20);

/// Eight callers route continuously while the router stops. Returns the number of calls without a result.
async fn hung_callers(round: u64) -> usize {
    let router = router(
        RouterConfig { supervision: SupervisionConfig { restarts_max: 0, ..config().supervision }, ..config() },
        2,
    )
    .await;
    let call = |router: Router, caller: u32| async move {
        for n in 0.. {
            let (id, prompt) = (format!("{caller}-{n}"), tokens(n % 7, 3));
            let request = RouteRequest::new(&id, Prompt::Tokens(&prompt));
            match tokio::time::timeout(HANG, router.route(request)).await {
                Err(_elapsed) => return true,
                Ok(Err(_down)) => return false,
                Ok(Ok(_placed)) => {}
            }
        }
        false
    };
    let callers: Vec<_> = (0..8).map(|caller| tokio::spawn(call(router.clone(), caller))).collect();
    // The delay varies per round, so the router stops at different points of its work.
    tokio::time::sleep(Duration::from_micros(300 + round % 50 * 20)).await;
    if round.is_multiple_of(2) {
        router.inject(Fault::Supervisor);
    } else {
        router.shutdown(Duration::ZERO).await;
    }
    let mut hung = 0;
    for caller in callers {
        hung += usize::from(caller.await.expect("no panic"));
    }
    hung
}

/// `POINTSMAN_ROUTER_FAILURES` sets the number of rounds.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_call_ends_when_the_router_stops_under_load() {
    suppress_fault_reports();
    let rounds = repetitions("POINTSMAN_ROUTER_FAILURES", 100);
    let mut hung = 0;
    for round in 0..rounds {
        hung += hung_callers(round).await;
    }
    assert_eq!(hung, 0, "calls hung in {rounds} rounds");
}

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
        RouterConfig {
            events: EventsConfig { blocks_max: 4, ..config().events },
            index: IndexConfig { shards: 1, ..config().index },
            ..config()
        },
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
            router.overlap_scores(query.clone(), false),
            router.cache_hit_estimate(query),
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
    let (placed, scores, hits, flushed, dumped, applied) = answers;
    let failed = RouteError::from(Down::Failed);
    assert_eq!(placed.expect_err("the router is down"), failed);
    assert_eq!(scores.expect_err("the router is down"), failed);
    assert_eq!(hits.expect_err("the router is down"), failed);
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
