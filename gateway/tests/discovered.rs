//! Engines known by address only: the gateway probes them for their configuration.

use std::time::Duration;

use pointsman::{ProbeOptions, ProbedUrls, Prompt, RouteRequest, Router, RouterConfig, StreamState};
use pointsman_trial::mock::{Dialect, MockConfig, MockEngine};

use crate::common::proxy::until;

const BLOCK_SIZE: u32 = 16;

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
