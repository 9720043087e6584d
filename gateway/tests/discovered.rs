//! Engines known by address only: the gateway probes them for their configuration.

use pointsman::internals::config::{EngineLoadConfig, HealthConfig};
use std::time::Duration;

use pointsman::protocol::{LoadSource, WorkerConfig, WorkerId, WorkerRank};
use pointsman::{KvSourceStatus, ProbeOptions, ProbedUrls, Prompt, RouteRequest, Router, RouterConfig, StreamState};
use pointsman_trial::mock::{Dialect, MockConfig, MockEngine};
use serde_json::json;

use crate::common::proxy::{request, until};

const BLOCK_SIZE: u32 = 16;

async fn engine(model: &str) -> MockEngine {
    let config = MockConfig {
        dialect: Dialect::SglangMap,
        data_parallel_size: 2,
        block_size: BLOCK_SIZE,
        model: model.to_owned(),
        kv_blocks: 300,
        time_scale: 0.0,
        ..MockConfig::default()
    };
    MockEngine::start(config).await.expect("start succeeds")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probed_engines_report_configuration_events_and_load() {
    let (good, other) = (engine("mock").await, engine("other").await);
    let config = RouterConfig {
        block_size: Some(BLOCK_SIZE),
        health: HealthConfig { probe_interval_ms: 20, ..HealthConfig::default() },
        engine_load: EngineLoadConfig { interval_ms: 20, ..EngineLoadConfig::default() },
        ..RouterConfig::default()
    };
    let options = ProbeOptions::of(&config).model("mock");
    let given =
        WorkerConfig { load: Some(LoadSource::Metrics(format!("{}/metrics", good.url()))), ..WorkerConfig::at("") };
    let source = ProbedUrls::new([good.url(), other.url()], options).expect("two addresses").given(&given);
    let router = Router::builder(config).discovery(source).start().await.expect("start succeeds");

    let worker = WorkerId::derived(&good.url());
    let live = || router.kv_sources().iter().filter(|source| source.state == StreamState::Live).count();
    until("both ranks are connected", || live() == 2).await;
    let workers = router.workers();
    assert_eq!(workers.len(), 1, "the engine with another model is rejected");
    assert_eq!((workers[0].worker, workers[0].config.data_parallel_size), (worker, 2));
    // A slow probe of the other engine ends later.
    until("the reason is reported", || router.discovery()[0].last_error.is_some()).await;
    let complaint = router.discovery()[0].last_error.clone().expect("reported");
    assert!(complaint.contains(&other.url()) && complaint.contains("it serves {\"other\"}"), "{complaint}");

    let tokens: Vec<u32> = (0..100).collect();
    let placement = router.route(RouteRequest::new("first", Prompt::Tokens(&tokens))).await.expect("placed");
    let rank = placement.rank();
    let body = json!({ "prompt": tokens, "max_tokens": 1 }).to_string();
    let header = format!("x-data-parallel-rank: {}\r\n", rank.rank);
    assert_eq!(request(good.address(), "POST", "/v1/completions", &header, body.as_bytes()).await.status, 200);
    drop(placement);
    good.quiet().await;
    until("events are applied", || {
        let next = good.sequence_next(u16::try_from(rank.rank).expect("two ranks"));
        let applied = |source: &KvSourceStatus| source.applied.map_or(0, |sequence| sequence + 1);
        router.kv_sources().iter().any(|source| source.rank == rank && applied(source) == next)
    })
    .await;
    router.flush().await.expect("router is running");
    let again = router.route(RouteRequest::new("again", Prompt::Tokens(&tokens))).await.expect("placed");
    assert_eq!((again.rank(), again.cached_tokens()), (rank, 96));

    until("engine load is reported", || {
        let loads = router.engine_loads();
        let ranks: Vec<WorkerRank> = loads.iter().filter_map(|(rank, fact)| fact.map(|_| *rank)).collect();
        ranks == [WorkerRank::new(worker, 0), WorkerRank::new(worker, 1)]
    })
    .await;

    // When an engine stops, the loss of its events is reported. The worker stays registered because its address is
    // still configured.
    good.shutdown().await;
    until("event streams are closed", || router.kv_sources().iter().all(|source| !source.connected)).await;
    assert_eq!(router.workers().len(), 1);
    other.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn event_ports_that_the_system_assigns_are_followed() {
    let config = MockConfig {
        data_parallel_size: 2,
        event_port: Some(0),
        block_size: BLOCK_SIZE,
        no_server_info: true,
        time_scale: 0.0,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config).await.expect("start succeeds");
    let config = RouterConfig { block_size: Some(BLOCK_SIZE), ..RouterConfig::default() };
    let options = ProbeOptions { interval: Duration::from_millis(20), ..ProbeOptions::of(&config).model("mock") };
    let source = ProbedUrls::new([engine.url()], options).expect("an address");
    let router = Router::builder(config).discovery(source).start().await.expect("start succeeds");
    let endpoints = || {
        let live = router.kv_sources().into_iter().filter(|source| source.state == StreamState::Live);
        live.map(|source| source.endpoint).collect::<Vec<_>>()
    };
    let reported = || vec![engine.event_endpoint(0), engine.event_endpoint(1)];
    until("both ranks are live", || endpoints() == reported()).await;
    let before = reported();
    engine.restart(Dialect::VllmMap).await.expect("restarted");
    assert_ne!(reported(), before, "other ports");
    until("the new ports are followed", || endpoints() == reported()).await;
    engine.restart(Dialect::VllmArray).await.expect("restarted");
    until("this version does not report them", || router.kv_sources().is_empty()).await;
    assert_eq!(router.workers()[0].ranks.len(), 2, "the ranks stay");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_openai_server_without_other_pages_joins() {
    let pages = ["/metrics", "/health", "/tokenize", "/detokenize", "/kv_event_sources", "/server_info"];
    let config = MockConfig {
        no_server_info: true,
        no_pages: pages.map(str::to_owned).into(),
        time_scale: 0.0,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config).await.expect("start succeeds");
    let config = RouterConfig::default();
    let source = ProbedUrls::new([engine.url()], ProbeOptions::of(&config).model("mock")).expect("an address");
    let router = Router::builder(config).discovery(source).start().await.expect("start succeeds");
    until("the worker joins", || !router.workers().is_empty()).await;
    let unreported = router.workers()[0].config.unreported.keys().cloned().collect::<Vec<_>>();
    assert_eq!(unreported, ["KV cache size", "block size", "load"]);
    let placement = router.route(RouteRequest::new("first", Prompt::Tokens(&[1; 100]))).await.expect("placed");
    assert_eq!(placement.endpoint(), engine.url());
    drop(placement);
    engine.shutdown().await;
}
