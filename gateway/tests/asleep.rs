//! Engines that sleep behind a gateway.

use std::net::SocketAddr;
use std::time::Duration;

use pointsman::policy::Policy;
use pointsman::protocol::{LoadSource, WorkerId};
use pointsman::{NamedWorker, Prompt, RouteRequest, Router, RouterConfig};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::Settings;
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;

use crate::common::proxy::{eventually, gateway, get, post, published, request, settings, until};

const COMPLETIONS: &str = "/v1/completions";

async fn engine() -> MockEngine {
    let config = MockConfig { block_size: 4, time_scale: 0.0, ..MockConfig::default() };
    MockEngine::start(config).await.expect("the engine starts")
}

/// `kv` over these engines, whose pages are polled often.
fn on(engines: [&MockEngine; 2]) -> Settings {
    let worker = |(n, engine): (u64, &MockEngine)| {
        let mut config = published(engine);
        config.load = Some(LoadSource::Metrics(format!("{}/metrics", engine.url())));
        NamedWorker { id: Some(WorkerId(n)), config, probe: false }
    };
    let mut settings = settings((0..).zip(engines).map(worker).collect());
    let defaults = RouterConfig { block_size: Some(4), policy: Policy::Kv.into(), ..RouterConfig::default() };
    settings.models[0].router = defaults;
    settings.models[0].router.engine_load.interval_ms = 5;
    settings
}

async fn command(engine: &MockEngine, path: &str) {
    let address: SocketAddr = engine.url().trim_start_matches("http://").parse().expect("an address");
    assert_eq!(request(address, "POST", path, "", b"").await.status, 200, "{path}");
}

async fn completion(gateway: &Gateway, prompt: &[u32]) -> u16 {
    post(gateway, COMPLETIONS, &json!({ "model": "mock", "prompt": prompt, "max_tokens": 1 })).await.status
}

/// Blocks of the prompt that the index has on each rank with any.
async fn cached_tokens(router: &Router, prompt: &[u32]) -> Vec<(u64, u32)> {
    let scores = router.overlap_scores(RouteRequest::query(Prompt::Tokens(prompt)), false).await.expect("up");
    let held = scores.ranks.into_iter().filter(|known| known.device_blocks > 0);
    held.map(|known| (known.rank.worker.0, known.device_blocks * router.block_size())).collect()
}

fn placements(router: &Router) -> [u64; 2] {
    [0, 1].map(|worker| {
        router.rank_reports().iter().filter(|rank| rank.rank.worker.0 == worker).map(|rank| rank.placements).sum()
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sleeping_engines_get_no_requests_and_lose_their_index() {
    let engines = [engine().await, engine().await];
    let gateway = gateway(on([&engines[0], &engines[1]])).await;
    let router = gateway.router("mock").expect("the model is served").clone();
    let prompt: Vec<u32> = (0..65).collect();
    assert_eq!(completion(&gateway, &prompt).await, 200);
    eventually("the prompt is known", async || cached_tokens(&router, &prompt).await.len() == 1).await;
    let home = cached_tokens(&router, &prompt).await[0].0 as usize;

    command(&engines[home], "/sleep?level=1").await;
    until("one rank sleeps", || router.eligible_ranks() == 1).await;
    eventually("its blocks are dropped", async || cached_tokens(&router, &prompt).await.is_empty()).await;
    let before = placements(&router);
    for n in 0..10 {
        assert_eq!(completion(&gateway, &[&prompt[..], &[n]].concat()).await, 200);
    }
    let after = placements(&router);
    assert_eq!((after[home] - before[home], after[1 - home] - before[1 - home]), (0, 10));
    let is_shown = |line: &str| line.starts_with("pointsman_asleep_ranks") && line.ends_with(" 1");
    eventually("the gauge", async || get(&gateway, "/metrics").await.text().lines().any(is_shown)).await;

    command(&engines[1 - home], "/sleep?level=0").await;
    until("all sleep", || router.eligible_ranks() == 0).await;
    let refused = post(&gateway, COMPLETIONS, &json!({ "model": "mock", "prompt": prompt, "max_tokens": 1 })).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "no_eligible_worker"));
    assert!(refused.text().contains("engines sleep"), "{}", refused.text());
    let ready = get(&gateway, "/ready").await;
    assert!(ready.status == 503 && ready.text().contains("no rank can serve: 2 ranks asleep"), "{}", ready.text());

    command(&engines[home], "/wake_up").await;
    until("one is awake", || router.eligible_ranks() == 1).await;
    assert_eq!(completion(&gateway, &prompt).await, 200);
    let expected = [(0, 64), (1, 64)];
    eventually("both have the prompt", async || cached_tokens(&router, &prompt).await == expected).await;
    gateway.shutdown(Duration::ZERO).await;
    for engine in engines {
        engine.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_requests_wait_until_an_engine_is_awake() {
    let engines = [engine().await, engine().await];
    let mut settings = on([&engines[0], &engines[1]]);
    settings.models[0].router.queue.threshold = Some(16.0);
    let gateway = gateway(settings).await;
    let router = gateway.router("mock").expect("the model is served").clone();
    for engine in &engines {
        command(engine, "/sleep?level=2").await;
    }
    until("all sleep", || router.eligible_ranks() == 0).await;
    let wake = async {
        eventually("the request waits", async || router.pending().await.expect("up")[0].depth.requests == 1).await;
        command(&engines[1], "/wake_up").await;
    };
    let (status, ()) = tokio::join!(completion(&gateway, &[1, 2, 3]), wake);
    assert_eq!((status, placements(&router)), (200, [0, 1]));
    gateway.shutdown(Duration::ZERO).await;
    for engine in engines {
        engine.shutdown().await;
    }
}
