//! Load reports of engines: their display, their effect on placement, and missing or stale reports, which do not count
//! as idle.
//!
//! Time is paused except for metrics pages read over loopback.

use pointsman::internals::config::OverloadConfig;
use std::time::Duration;

use pointsman::error::RouteError;
use pointsman::internals::engine_load::EngineSleep;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{
    EngineLoadFact, EngineReading, Filter, HealthState, Prompt, Rejection, RouteRequest, Router, RouterConfig,
};

use crate::common::{config, config_with, router};

fn waiting(requests: u32) -> EngineReading {
    EngineReading { running: Some(8), waiting: Some(requests), kv_usage: Some(0.5), sleep: None }
}

fn facts(router: &Router) -> Vec<Option<EngineLoadFact>> {
    router.engine_loads().into_iter().map(|(_, fact)| fact).collect()
}

async fn refusals(router: &Router) -> Vec<Option<Filter>> {
    let explanation = router.explain(RouteRequest::query(Prompt::Tokens(&[1]))).await.expect("explained");
    explanation.ranks.iter().map(|row| row.excluded_by).collect()
}

#[tokio::test(start_paused = true)]
async fn reports_have_an_age_and_become_stale() {
    let router = router(config(), 2).await;
    router.report_engine_load(rank(1), waiting(3));
    router.report_engine_load(rank(1), EngineReading::default()); // an empty report
    router.report_engine_load(rank(9), waiting(3)); // an unknown rank
    let fact = |age_ms, is_stale| {
        let age = Duration::from_millis(age_ms);
        Some(EngineLoadFact { running: Some(8), waiting: Some(3), kv_usage: Some(0.5), age, is_stale })
    };
    assert_eq!(facts(&router), [None, fact(0, false)]);
    tokio::time::advance(Duration::from_millis(4_999)).await;
    assert_eq!(facts(&router), [None, fact(4_999, false)]);
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(facts(&router), [None, fact(5_000, true)]);
    let explanation = router.explain(RouteRequest::query(Prompt::Tokens(&[1]))).await.expect("explained");
    assert_eq!(explanation.ranks[1].facts.engine_load, fact(5_000, true));
}

#[tokio::test(start_paused = true)]
async fn full_engines_are_overloaded_and_silent_ones_unknown() {
    let limits = RouterConfig {
        overload: OverloadConfig { engine_waiting: Some(4), engine_kv_usage: Some(0.9), ..config().overload },
        ..config()
    };
    let router = router(limits, 4).await;
    router.report_engine_load(rank(0), waiting(5));
    router.report_engine_load(rank(1), waiting(4));
    router.report_engine_load(rank(2), EngineReading { kv_usage: Some(0.95), ..EngineReading::default() });
    let overloaded = Some(Filter::Overloaded);
    assert_eq!(refusals(&router).await, [overloaded, None, overloaded, None], "rank 3 has not reported");
    tokio::time::advance(Duration::from_millis(2_500)).await;
    router.report_engine_load(rank(2), waiting(9));
    tokio::time::advance(Duration::from_millis(2_500)).await;
    assert_eq!(refusals(&router).await, [None, None, overloaded, None], "the report of rank 0 is stale");
    for worker in 0..4 {
        router.report_engine_load(rank(worker), waiting(9));
    }
    let refused = router.route(RouteRequest::new("r", Prompt::Tokens(&[1]))).await.expect_err("all are full");
    assert!(matches!(refused, RouteError::Rejected(Rejection::AllOverloaded { .. })), "{refused}");
    router.report_engine_load(rank(3), waiting(0));
    let placement = router.route(RouteRequest::new("r", Prompt::Tokens(&[1]))).await.expect("one rank has capacity");
    assert_eq!(placement.rank(), rank(3));
}

#[tokio::test(start_paused = true)]
async fn queued_requests_leave_when_an_engine_becomes_unknown_or_idle() {
    let limits = config_with(|c| {
        c.queue.threshold = Some(0.0);
        c.overload.engine_waiting = Some(4);
    });
    let router = router(limits, 1).await;
    let first = router.route(RouteRequest::new("first", Prompt::Tokens(&[1]))).await.expect("placed");
    let handle = router.clone();
    let second = tokio::spawn(async move { handle.route(RouteRequest::new("second", Prompt::Tokens(&[2]))).await });
    crate::common::until("request in the queue", async || {
        router.pending().await.expect("serving")[0].depth.requests == 1
    })
    .await;
    router.report_engine_load(rank(0), waiting(5));
    first.prefill_completed(); // no longer busy, but overloaded according to its engine
    let placed = second.await.expect("answered").expect("placed once the report is stale");
    assert!(facts(&router)[0].is_some_and(|fact| fact.is_stale));
    assert_eq!(placed.rank(), rank(0));
}

fn asleep(sleep: EngineSleep) -> EngineReading {
    EngineReading { sleep: Some(sleep), ..EngineReading::default() }
}

#[tokio::test(start_paused = true)]
async fn sleeping_ranks_get_no_requests_until_they_are_awake() {
    let router = router(config(), 2).await;
    router.report_engine_load(rank(0), asleep(EngineSleep::Paused));
    assert_eq!(refusals(&router).await, [Some(Filter::Asleep), None]);
    router.report_engine_load(rank(1), asleep(EngineSleep::Emptied));
    let refused = router.route(RouteRequest::new("r", Prompt::Tokens(&[1]))).await.expect_err("all sleep");
    let RouteError::Rejected(Rejection::NoneEligible { removed }) = &refused else { panic!("{refused}") };
    assert_eq!((removed.by(Filter::Asleep), router.eligible_ranks()), (2, 0));
    tokio::time::advance(Duration::from_secs(3_600)).await;
    assert_eq!(refusals(&router).await, [Some(Filter::Asleep); 2], "silence does not wake an engine");
    let states: Vec<_> = router.rank_health().await.expect("up").into_iter().map(|known| known.state).collect();
    assert_eq!(states, [HealthState::Asleep; 2]);
    router.report_engine_load(rank(0), asleep(EngineSleep::Awake));
    let placement = router.route(RouteRequest::new("r", Prompt::Tokens(&[1]))).await.expect("one is awake");
    assert_eq!((placement.rank(), router.eligible_ranks()), (rank(0), 1));
    // A pool with a queue holds the request.
    let queueing = crate::common::router(config_with(|c| c.queue.threshold = Some(16.0)), 1).await;
    queueing.report_engine_load(rank(0), asleep(EngineSleep::Emptied));
    let waits = async || queueing.pending().await.expect("serving")[0].depth.requests == 1;
    let wake = async {
        crate::common::until("request in the queue", waits).await;
        queueing.report_engine_load(rank(0), asleep(EngineSleep::Awake));
    };
    let (placed, ()) = tokio::join!(queueing.route(RouteRequest::new("r", Prompt::Tokens(&[1]))), wake);
    assert_eq!(placed.expect("awake").rank(), rank(0));
}

#[cfg(feature = "discovery")]
mod pages {
    //! Metrics pages read over loopback.

    use pointsman::protocol::LoadSource;

    use super::*;
    use crate::common::pages::Pages;

    /// A server of this metrics page, and its URL.
    async fn serving(page: &str) -> (Pages, Option<LoadSource>) {
        let pages = Pages::default();
        pages.set("/metrics", page);
        let url = format!("{}/metrics", pages.serve().await);
        (pages, Some(LoadSource::Metrics(url)))
    }

    async fn until(router: &Router, holds: impl Fn(&[Option<EngineLoadFact>]) -> bool) {
        crate::common::until("engine loads", async || holds(&facts(router))).await;
    }

    #[tokio::test]
    async fn pages_are_polled_and_foreign_pages_ignored() {
        let pages = [
            "vllm:num_requests_waiting{engine=\"0\"} 1\nvllm:num_requests_waiting{engine=\"1\"} 2\n",
            "vllm:num_requests_waiting{engine=\"7\"} 1\nvllm:num_requests_waiting{engine=\"8\"} NaN\n",
        ];
        let mut servers = Vec::new();
        let mut builder = Router::builder(config_with(|c| c.engine_load.interval_ms = 1));
        for (worker, page) in (0..).zip(pages) {
            let (server, load) = serving(page).await;
            servers.push(server);
            let config = WorkerConfig { data_parallel_size: 2, load, ..WorkerConfig::at("") };
            builder = builder.worker(WorkerId(worker), config);
        }
        let router = builder.start().await.expect("starts");
        let waiting = |fact: &Option<EngineLoadFact>| fact.and_then(|fact| fact.waiting);
        until(&router, |facts| facts.iter().map(waiting).eq([Some(1), Some(2), None, None])).await;
        servers[0].set("/metrics", "sglang:num_queue_reqs{dp_rank=\"1\"} 5\n");
        until(&router, |facts| facts.iter().map(waiting).eq([Some(1), Some(5), None, None])).await;
        router.upsert_worker(WorkerId(0), WorkerConfig::at("")).await.expect("changed");
        assert_eq!(router.engine_loads().len(), 3, "one rank fewer");
    }
}
