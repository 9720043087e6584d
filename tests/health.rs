//! Ejection by failed requests and failed probes, its limit, conditions set by the embedder, and readmission.
//!
//! Time is paused except for engines on loopback, where no assertion depends on duration.

#![allow(clippy::print_stdout, reason = "the shares are the output")]

use pointsman::internals::config::{HealthConfig, SlowStartConfig};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use pointsman::policy::Policy;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{Filter, RankConditions};
use pointsman::{HealthState, Outcome, Placement, Prompt, RouteRequest, Router, RouterConfig};

use crate::common::{config, router, tokens};

fn unavailable(workers: &[u64]) -> RankConditions {
    RankConditions { unavailable: workers.iter().copied().map(rank).collect(), ..RankConditions::default() }
}

fn fail(router: &Router, worker: u64) {
    (0..5).for_each(|_| router.report_outcome(rank(worker), Outcome::Timeout));
}

/// The worker of each rank with its cost multiplier, or the filter that excludes it.
async fn standings(router: &Router) -> Vec<(u64, Result<f64, Filter>)> {
    let explanation = router.explain(RouteRequest::query(Prompt::Tokens(&[1]))).await.expect("explained");
    let rows = explanation.ranks.into_iter();
    rows.map(|row| (row.facts.rank.worker.0, row.excluded_by.map_or(Ok(row.facts.preference), Err))).collect()
}

/// Eligible workers.
async fn open(router: &Router) -> Vec<u64> {
    let standings = standings(router).await;
    standings.into_iter().filter(|(_, standing)| standing.is_ok()).map(|(worker, _)| worker).collect()
}

async fn states(router: &Router) -> Vec<HealthState> {
    router.rank_health().await.expect("serving").into_iter().map(|row| row.state).collect()
}

async fn pass(by: Duration) {
    tokio::time::advance(by).await;
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn failed_requests_eject_a_rank_until_a_slow_start() {
    let router = router(config(), 3).await;
    let prompt = tokens(1, 2);
    let mut failed = 0;
    for _ in 0..100 {
        if failed == 5 {
            break;
        }
        let request = format!("r{failed}");
        let placement = router.route(RouteRequest::new(&request, Prompt::Tokens(&prompt))).await.expect("placed");
        if placement.rank() == rank(0) {
            placement.outcome(Outcome::ServerError);
            placement.outcome(Outcome::Ok); // only the first outcome counts
            failed += 1;
        } else {
            placement.outcome(Outcome::Ok);
        }
    }
    assert_eq!(standings(&router).await[0], (0, Err(Filter::Unavailable)));
    let report = router.rank_health().await.expect("serving");
    assert!(matches!(report[0].state, HealthState::Ejected { until: Some(_) }), "{}", report[0]);
    assert_eq!(report[0].reason, "5 requests in a row failed, the last: server error");
    assert_eq!(report[1].to_string(), "1/0 is healthy");

    pass(Duration::from_secs(30)).await;
    assert_eq!(states(&router).await, [HealthState::Healthy; 3]);
    assert_eq!(standings(&router).await[0], (0, Ok(10.0)));
    pass(Duration::from_millis(2_500)).await;
    let (_, Ok(factor)) = standings(&router).await[0] else { panic!("the rank returned") };
    assert!((3.9..4.1).contains(&factor), "a quarter of the way: {factor}");
    pass(Duration::from_millis(7_500)).await;
    assert_eq!(standings(&router).await, [(0, Ok(1.0)), (1, Ok(1.0)), (2, Ok(1.0))]);
}

#[tokio::test(start_paused = true)]
async fn slow_start_can_be_disabled() {
    let router =
        router(RouterConfig { slow_start: SlowStartConfig { return_ms: 0, ..config().slow_start }, ..config() }, 2)
            .await;
    fail(&router, 0);
    assert_eq!(open(&router).await, [1]);
    pass(Duration::from_secs(30)).await;
    assert_eq!(standings(&router).await, [(0, Ok(1.0)), (1, Ok(1.0))]);
}

#[tokio::test(start_paused = true)]
async fn ejections_and_embedder_conditions_are_independent() {
    let router = router(config(), 4).await;
    router.set_conditions(unavailable(&[0])).await.expect("serving");
    fail(&router, 1);
    fail(&router, 0);
    assert_eq!(open(&router).await, [2, 3]);
    router.set_conditions(unavailable(&[3])).await.expect("serving");
    assert_eq!(open(&router).await, [2], "0 and 1 are still ejected");
    pass(Duration::from_secs(30)).await;
    assert_eq!(open(&router).await, [0, 1, 2], "3 is still unavailable");
    fail(&router, 0);
    router.set_conditions(RankConditions::default()).await.expect("serving");
    assert_eq!(open(&router).await, [1, 2, 3], "and 0 ejected again");
}

#[tokio::test(start_paused = true)]
async fn the_last_eligible_rank_is_never_ejected() {
    let router = router(config(), 2).await;
    fail(&router, 0);
    fail(&router, 1);
    assert_eq!(open(&router).await, [1]);
    assert_eq!(states(&router).await[1], HealthState::Suspected);
    router.set_conditions(unavailable(&[1])).await.expect("serving");
    assert_eq!(open(&router).await, [0], "a failing rank is better than none");
    let health = router.rank_health().await.expect("serving");
    assert!(health[0].to_string().starts_with("0/0 is suspected and kept as the last eligible rank"), "{}", health[0]);
    router.set_conditions(RankConditions::default()).await.expect("serving");
    router.remove_worker(WorkerId(1)).await.expect("removed");
    assert_eq!(open(&router).await, [0]);
}

#[tokio::test(start_paused = true)]
async fn draining_ranks_do_not_count_as_eligible() {
    let router = router(config(), 2).await;
    let exactly = RouteRequest::new("held", Prompt::Tokens(&[1]));
    let held = router.route(exactly).await.expect("placed");
    let (draining, other) = (held.rank().worker, 1 - held.rank().worker.0);
    let handle = router.clone();
    let drain = tokio::spawn(async move { handle.drain_worker(draining, Duration::from_secs(600)).await });
    pass(Duration::ZERO).await;
    fail(&router, other);
    assert_eq!(open(&router).await, [other]);
    drop(held);
    assert_eq!(drain.await.expect("drained"), Ok(0));
}

/// Duration of an accepted request, in steps of 50 ms.
const STEPS: usize = 64;

/// Sends a request every 50 ms to four ranks of which `refusers` refuse immediately. Returns the number of requests per
/// rank, and that number at its first ejection.
async fn draws(policy: Policy, refusers: &[u64], requests: usize) -> ([usize; 4], [Option<usize>; 4]) {
    let router = router(RouterConfig { policy: policy.into(), ..config() }, 4).await;
    let (mut running, mut drawn, mut ejected) = (VecDeque::new(), [0; 4], [None; 4]);
    for n in 0..requests {
        pass(Duration::from_millis(50)).await;
        if running.len() > STEPS {
            let over: Option<Placement> = running.pop_front().flatten();
            over.iter().for_each(|placement| placement.outcome(Outcome::Ok));
        }
        let (request, prompt) = (format!("r{n}"), tokens(1_000 + n as u32, 8));
        let placement = router.route(RouteRequest::new(&request, Prompt::Tokens(&prompt))).await.expect("placed");
        let worker = placement.rank().worker.0;
        drawn[worker as usize] += 1;
        if refusers.contains(&worker) {
            placement.outcome(Outcome::Refused { retry_after: None });
            running.push_back(None);
        } else {
            placement.prefill_completed();
            running.push_back(Some(placement));
        }
        for (rank, state) in states(&router).await.into_iter().enumerate() {
            if matches!(state, HealthState::Ejected { .. }) {
                ejected[rank].get_or_insert(drawn[rank]);
            }
        }
    }
    (drawn, ejected)
}

#[tokio::test(start_paused = true)]
async fn refusing_ranks_receive_less_than_their_share_under_every_policy() {
    println!("| policy | requests | drawn by each of four, the last refuses | ejected after |");
    for policy in Policy::ALL {
        let (drawn, ejected) = draws(policy, &[3], 600).await;
        println!("| {} | 600 | {drawn:?} | {:?} |", policy.name(), ejected[3]);
        assert!(drawn[3] <= 10, "{policy:?}: a fair share is 150: {drawn:?}");
        assert_eq!(ejected, [None, None, None, Some(5)], "{policy:?}: {drawn:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_entirely_refusing_fleet_stays_in_service_with_spread_load() {
    for policy in Policy::ALL {
        let (drawn, ejected) = draws(policy, &[0, 1, 2, 3], 400).await;
        println!("| {} | 400 | {drawn:?} | {ejected:?} |", policy.name());
        assert!(drawn.iter().all(|&share| share >= 50), "{policy:?}: every rank receives requests: {drawn:?}");
        assert_eq!(ejected, [None; 4], "{policy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn unreachable_ranks_are_skipped_until_they_respond() {
    let router =
        router(RouterConfig { slow_start: SlowStartConfig { return_ms: 0, ..config().slow_start }, ..config() }, 4)
            .await;
    let refuse = |worker| (0..5).for_each(|_| router.report_outcome(rank(worker), Outcome::ConnectFailed));
    let long = router.route(RouteRequest::new("long", Prompt::Tokens(&[1]))).await.expect("placed");
    pass(Duration::from_millis(1)).await;
    let others: Vec<u64> = (0..4).filter(|worker| *worker != long.rank().worker.0).collect();
    others.iter().copied().for_each(refuse);
    assert_eq!((open(&router).await, router.eligible_ranks()), (vec![long.rank().worker.0], 1));
    refuse(long.rank().worker.0);
    assert_eq!(
        (open(&router).await, router.eligible_ranks()),
        (vec![0, 1, 2, 3], 0),
        "without healthy ranks all are tried"
    );
    long.outcome(Outcome::Ok);
    assert_eq!(router.eligible_ranks(), 0, "the request was sent before the ejection");
    pass(Duration::from_millis(1)).await;
    let tried = router.route(RouteRequest::new("tried", Prompt::Tokens(&[1]))).await.expect("placed");
    tried.outcome(Outcome::Ok);
    assert_eq!((open(&router).await, router.eligible_ranks()), (vec![tried.rank().worker.0], 1));
}

#[tokio::test(start_paused = true)]
async fn a_replaced_engine_starts_without_failures() {
    let router = router(config(), 2).await;
    fail(&router, 0);
    assert_eq!(open(&router).await, [1]);
    router.upsert_worker(WorkerId(0), WorkerConfig::at("http://elsewhere")).await.expect("changed");
    assert_eq!(open(&router).await, [0, 1]);
}

#[tokio::test(start_paused = true)]
async fn failures_are_not_counted_if_disabled() {
    let router =
        router(RouterConfig { health: HealthConfig { outcome_failures_max: 0, ..config().health }, ..config() }, 2)
            .await;
    (0..100).for_each(|_| fail(&router, 0));
    assert_eq!(states(&router).await, [HealthState::Healthy; 2]);
    let ranks: BTreeSet<_> = router.rank_health().await.expect("serving").iter().map(|row| row.rank).collect();
    assert_eq!(ranks, [rank(0), rank(1)].into());
}

#[cfg(feature = "faults")]
#[tokio::test]
async fn a_restarted_health_actor_starts_without_state() {
    use pointsman::Fault;

    crate::common::suppress_fault_reports();
    let router = router(config(), 3).await;
    fail(&router, 0);
    assert_eq!(open(&router).await, [1, 2]);
    assert!(router.inject(Fault::Health));
    assert_eq!(states(&router).await, [HealthState::Healthy; 3]);
    assert_eq!(open(&router).await, [0, 1, 2]);
    fail(&router, 1);
    assert_eq!(open(&router).await, [0, 2]);
    assert!(router.inject(Fault::Scheduler));
    assert_eq!(open(&router).await, [0, 2], "the restarted scheduler keeps the state");
}

#[cfg(feature = "discovery")]
mod probes {
    //! Engines on loopback that respond or fail.

    use super::*;
    use crate::common::pages::Pages;

    fn probing() -> RouterConfig {
        // The timeout is far above loopback latency, so no result depends on timing.
        RouterConfig {
            health: HealthConfig { probe_interval_ms: 1, probe_timeout_ms: 60_000, ..config().health },
            ..config()
        }
    }

    async fn until(router: &Router, holds: impl Fn(&[HealthState]) -> bool) {
        crate::common::until("health states", async || holds(&states(router).await)).await;
    }

    #[tokio::test]
    async fn unhealthy_engines_are_skipped_until_they_recover() {
        let engines = [Pages::default(), Pages::default(), Pages::default()];
        engines.iter().for_each(|engine| engine.set("/healthz", ""));
        let mut builder = Router::builder(RouterConfig {
            slow_start: SlowStartConfig { return_ms: 0, ..probing().slow_start },
            ..probing()
        });
        for (worker, engine) in (0..).zip(&engines) {
            let at = WorkerConfig::at(engine.serve().await);
            builder = builder.worker(WorkerId(worker), WorkerConfig { health_path: "/healthz".to_owned(), ..at });
        }
        // A worker without a valid address is never probed.
        let router = builder.worker(WorkerId(3), WorkerConfig::at("engine-3")).start().await.expect("starts");
        engines[1].remove("/healthz");
        until(&router, |states| matches!(states[1], HealthState::Ejected { until: None })).await;
        let health = router.rank_health().await.expect("serving");
        assert!(health[1].reason.contains("probes in a row failed, the last: response status is 404"), "{}", health[1]);
        assert_eq!(open(&router).await, [0, 2, 3]);
        engines[1].set("/healthz", "");
        until(&router, |states| states[1] == HealthState::Healthy).await;
        assert_eq!(open(&router).await, [0, 1, 2, 3]);
    }
}
