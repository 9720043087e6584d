//! Engines with their default block sizes behind a gateway that configures none.

use std::time::Duration;

use pointsman::internals::protocol::BlockSizeOrigin;
use pointsman::protocol::WorkerConfig;
use pointsman::{KvSourceStatus, NamedWorker, Prompt, RouteRequest, Router, StreamState};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{ModelSettings, Settings};
use pointsman_trial::mock::{Dialect, MockConfig, MockEngine};
use serde_json::{Value as Json, json};

use crate::common::proxy::{get, post, published, settings, until};

/// vLLM: no `/server_info`.
async fn vllm(block_size: u32) -> MockEngine {
    let config = MockConfig { no_server_info: true, block_size, time_scale: 0.0, ..MockConfig::default() };
    MockEngine::start(config).await.expect("the engine starts")
}

/// SGLang with its default page size.
async fn sglang() -> MockEngine {
    let (dialect, kv_blocks) = (Dialect::SglangMap, 65_536);
    let config = MockConfig { dialect, kv_blocks, block_size: 1, time_scale: 0.0, ..MockConfig::default() };
    MockEngine::start(config).await.expect("the engine starts")
}

/// Settings of the model `mock` on probed engines, with the event endpoints of those that do not report them.
fn on(engines: &[&MockEngine]) -> Settings {
    let worker = |engine: &&MockEngine| {
        let is_silent = engine.config().no_server_info;
        let config = if is_silent { published(engine) } else { WorkerConfig::at(engine.url()) };
        NamedWorker { id: None, config, probe: true }
    };
    let defaults = settings(Vec::new());
    let model = ModelSettings {
        router: pointsman::RouterConfig::default(),
        workers: engines.iter().map(worker).collect(),
        ..defaults.models[0].clone()
    };
    Settings { models: vec![model], ..defaults }
}

fn router(gateway: &Gateway) -> Router {
    gateway.router("mock").expect("the model is served").clone()
}

async fn completion(gateway: &Gateway, prompt: &[u32]) -> Json {
    let body = json!({ "model": "mock", "prompt": prompt, "max_tokens": 2 });
    let answer = post(gateway, "/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

async fn cached_tokens(router: &Router, prompt: &[u32]) -> u32 {
    let scores = router.overlap_scores(RouteRequest::query(Prompt::Tokens(prompt)), false).await.expect("up");
    scores.ranks.iter().map(|known| known.device_blocks * router.block_size()).max().unwrap_or_default()
}

/// The first request is served, and the second turn of its conversation is a predicted hit.
async fn serves_without_settings(engine: MockEngine, block_size: u32) {
    let gateway = Gateway::start(on(&[&engine])).await.expect("the gateway starts");
    let router = router(&gateway);
    until("the engine has joined", || router.workers().len() == 1).await;
    assert_eq!((router.block_size(), router.block_size_origin()), (block_size, BlockSizeOrigin::Reported));
    assert_eq!(router.config().block_size, None, "as configured");
    let prompt: Vec<u32> = (0..1_003).collect();
    completion(&gateway, &prompt).await;
    until("events are live", || router.kv_sources().iter().any(|source| source.state == StreamState::Live)).await;
    engine.quiet().await;
    let whole = 1_003 / block_size * block_size;
    let mut found = 0;
    while found < whole {
        tokio::time::sleep(Duration::from_millis(2)).await;
        found = cached_tokens(&router, &prompt).await;
    }
    assert_eq!(found, whole);
    let second: Vec<u32> = (0..1_003).chain(5_000..5_100).collect();
    let usage = completion(&gateway, &second).await["usage"].clone();
    assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("reported") >= u64::from(whole), "{usage}");
    let ready = get(&gateway, "/ready").await;
    assert!(!ready.text().contains("assumed"), "{}", ready.text());
    gateway.shutdown(Duration::ZERO).await;
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stock_vllm_serves_without_settings() {
    serves_without_settings(vllm(16).await, 16).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stock_sglang_serves_without_settings() {
    // Pages of one token fold into blocks of 16.
    serves_without_settings(sglang().await, 16).await;
}

/// The engine has joined and serves, and its events do not count, for a reason that names both sizes.
async fn serves_as_a_misfit(gateway: &Gateway, (engine, pool): (u32, u32)) {
    let router = router(gateway);
    let reason = format!("the engine's block size is {engine}, the pool's is {pool}");
    let is_misfit = |source: &KvSourceStatus| {
        source.state == StreamState::Mismatched && source.reason.as_ref().is_some_and(|known| known.contains(&reason))
    };
    let mut seed = 0;
    while !router.kv_sources().iter().any(is_misfit) {
        seed += 1;
        completion(gateway, &vec![seed; 200]).await;
    }
    let ready = get(gateway, "/ready").await;
    assert!(ready.text().contains(&reason), "{}", ready.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_with_another_size_serves_and_is_reported() {
    // Neither size divides the other.
    let (first, other) = (vllm(32).await, vllm(48).await);
    let gateway = Gateway::start(on(&[&first, &other])).await.expect("the gateway starts");
    let router = router(&gateway);
    until("both have joined", || router.workers().len() == 2).await;
    let mut seed = 0;
    while !router.kv_sources().iter().any(|source| source.state == StreamState::Mismatched) {
        seed += 1;
        completion(&gateway, &vec![seed; 200]).await;
    }
    let size = router.block_size();
    serves_as_a_misfit(&gateway, (80 - size, size)).await;
    gateway.shutdown(Duration::ZERO).await;
    first.shutdown().await;
    other.shutdown().await;
}

/// The pages report half the block size of the events.
async fn context_parallel_engine(configured: Option<u32>) {
    let config = MockConfig {
        no_server_info: true,
        block_size: 32,
        context_parallel_size: 2,
        time_scale: 0.0,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config).await.expect("the engine starts");
    let mut settings = on(&[&engine]);
    settings.models[0].router.block_size = configured;
    let gateway = Gateway::start(settings).await.expect("the gateway starts");
    let router = router(&gateway);
    until("the engine has joined", || router.workers().len() == 1).await;
    assert_eq!(router.block_size(), configured.unwrap_or(16));
    let prompt: Vec<u32> = (0..1_003).collect();
    completion(&gateway, &prompt).await;
    let mut found = 0;
    while found < 992 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        found = cached_tokens(&router, &prompt).await;
        assert!(found <= 992, "{found}");
    }
    assert_eq!(router.block_size(), 32);
    gateway.shutdown(Duration::ZERO).await;
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_context_parallel_engines_determine_the_block_size() {
    context_parallel_engine(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_size_is_that_of_the_events() {
    context_parallel_engine(Some(32)).await;
}
