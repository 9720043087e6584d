//! Ejection by failed requests and failed probes, its limit, conditions set by the embedder, and readmission.
//!
//! Time is paused except for engines on loopback, where no assertion depends on duration.

#![allow(clippy::print_stdout, reason = "the shares are the output")]

use pointsman::internals::config::{HealthConfig, SlowStartConfig};
use std::time::Duration;

use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{Filter, HealthState, Outcome, Placement, Prompt, RankConditions, RouteRequest, Router, RouterConfig};

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

/// 20 requests per second over four ranks. The prefills of rank 1 take ten times as long as the others'.
#[tokio::test(start_paused = true)]
async fn stalled_rank_gets_the_requests_of_three_seconds() {
    let router = router(config(), 4).await;
    let prompt = tokens(1, 8);
    let (mut running, mut stuck, mut reached) = (Vec::<(u32, Placement)>::new(), Vec::new(), 0);
    for step in 0..1_600 {
        let hangs = (400..1_200).contains(&step);
        pass(Duration::from_millis(50)).await;
        if step == 1_200 {
            assert_eq!(router.stalled().into_iter().collect::<Vec<_>>(), [rank(0)]);
            running.extend(stuck.drain(..).map(|placement| (step, placement)));
        }
        for (_, placement) in running.extract_if(.., |(until, _)| *until <= step) {
            placement.prefill_completed();
            placement.outcome(Outcome::Ok);
        }
        if step < 400 {
            assert_eq!(states(&router).await, [HealthState::Healthy; 4], "step {step}");
        }
        let request = format!("r{step}");
        let placement = router.route(RouteRequest::new(&request, Prompt::Tokens(&prompt))).await.expect("placed");
        match placement.rank().worker.0 {
            0 if hangs => {
                reached += 1;
                stuck.push(placement);
            }
            1 => running.push((step + 60, placement)),
            _ => running.push((step + 6, placement)),
        }
    }
    println!("{reached} requests reached the stalled rank");
    assert!((2..=25).contains(&reached), "{reached} of 800");
    assert_eq!((states(&router).await, router.stalled().len()), (vec![HealthState::Healthy; 4], 0));
}
