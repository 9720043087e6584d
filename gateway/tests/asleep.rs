//! Engines that sleep behind a gateway.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pointsman::policy::Policy;
use pointsman::protocol::{LoadSource, WorkerConfig, WorkerId};

use pointsman::{HealthState, NamedWorker, Prompt, RouteRequest, Router, RouterConfig};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::Settings;
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;

use crate::common::proxy::{
    Act, FINE_JSON, Scripted, answer, eventually, full_response, gateway, get, post, published, request, settings,
    until,
};

const COMPLETIONS: &str = "/v1/completions";

async fn engine() -> MockEngine {
    let config = MockConfig { block_size: 4, time_scale: 0.0, ..MockConfig::default() };
    MockEngine::start(config).await.expect("the engine starts")
}

/// A worker whose page is polled.
fn polled(n: u64, config: WorkerConfig) -> NamedWorker {
    let load = Some(LoadSource::Metrics(format!("{}/metrics", config.endpoint)));
    NamedWorker { id: Some(WorkerId(n)), config: WorkerConfig { load, ..config }, probe: false }
}

/// `kv` over these engines, whose pages are polled often.
fn on(engines: [&MockEngine; 2]) -> Settings {
    let mut settings = settings((0..).zip(engines).map(|(n, engine)| polled(n, published(engine))).collect());
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

/// An engine that falls asleep at the first request, unless another one has.
async fn sleepy(n: usize, asleep: &Arc<OnceLock<usize>>) -> Scripted {
    let asleep = Arc::clone(asleep);
    Scripted::with(Vec::new(), move |_, got| match got.head.contains("/metrics") {
        true => {
            let awake = u8::from(asleep.get() != Some(&n));
            vec![full_response("200 OK", &format!("vllm:engine_sleep_state{{sleep_state=\"awake\"}} {awake}\n"))]
        }
        false if asleep.set(n).is_ok() => vec![Act::Hang],
        false => answer("200 OK", FINE_JSON),
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_at_an_engine_that_falls_asleep_are_retried() {
    for (n_engines, status) in [(1, 503), (2, 200)] {
        let asleep = Arc::default();
        let engines = [sleepy(0, &asleep).await, sleepy(1, &asleep).await];
        let workers = (0..).zip(&engines[..n_engines]).map(|(n, engine)| polled(n, WorkerConfig::at(engine.url())));
        let mut settings = settings(workers.collect());
        settings.models[0].router.engine_load.interval_ms = 5;
        settings.gateway.retry_share_max = 0.0;
        let gateway = gateway(settings).await;
        let answer = post(&gateway, COMPLETIONS, &json!({ "model": "mock", "prompt": [1] })).await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(answer.text() == FINE_JSON || answer.code() == "no_eligible_worker", "{answer:?}");
        let ranks = gateway.router("mock").expect("the model is served").rank_health().await.expect("up");
        let in_state = |state| ranks.iter().filter(|rank| rank.state == state).count();
        assert_eq!((in_state(HealthState::Asleep), in_state(HealthState::Healthy)), (1, n_engines - 1), "{ranks:?}");
        gateway.shutdown(Duration::ZERO).await;
    }
}
