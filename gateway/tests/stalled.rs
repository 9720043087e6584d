//! An engine that accepts requests and computes nothing.

use pointsman::policy::Policy;
use pointsman_gateway::app::Gateway;
use pointsman_trial::mock::{Faults, MockConfig, MockEngine, Scope};
use serde_json::json;
use tokio::task::JoinSet;

use crate::common::proxy::{eventually, gateway, get, request, settings, worker};

/// Sends a request that streams, and returns its status.
async fn complete(gateway: &Gateway, n: u32) -> u16 {
    let prompt: Vec<u32> = (n * 100..n * 100 + 40).collect();
    let body = json!({ "model": "mock", "prompt": prompt, "max_tokens": 2, "stream": true }).to_string();
    request(gateway.address(), "POST", "/v1/completions", "", body.as_bytes()).await.status
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_engine_is_named_and_gets_no_requests() {
    let mut engines = Vec::new();
    for _ in 0..4 {
        let config = MockConfig { block_size: 4, time_scale: 0.0, ..MockConfig::default() };
        engines.push(MockEngine::start(config).await.expect("the engine starts"));
    }
    let mut settings = settings((0..).zip(&engines).map(|(n, engine)| worker(n, &engine.url(), 1)).collect());
    settings.models[0].router.policy = Policy::RoundRobin.into();
    settings.models[0].router.health.stall_ms = 500;
    let gateway = std::sync::Arc::new(gateway(settings).await);
    let router = gateway.router("mock").expect("the model is served").clone();
    for n in 0..80 {
        assert_eq!(complete(&gateway, n).await, 200);
        assert!(router.stalled().is_empty());
    }

    engines[0].set_faults(Faults { hang_share: 1.0, scope: Scope::Generation, ..Faults::default() }).expect("valid");
    let (mut sent, mut waiting) = (80, JoinSet::new());
    let mut send = || {
        sent += 1;
        let (gateway, n) = (gateway.clone(), sent);
        waiting.spawn(async move { complete(&gateway, n).await });
    };
    eventually("the rank is stalled", async || {
        send();
        let page = get(&gateway, "/metrics").await;
        page.text().lines().any(|line| line.starts_with("pointsman_stalled_ranks") && line.ends_with(" 1"))
    })
    .await;
    let reason = "1 rank without progress, although first tokens are owed";
    let ready = get(&gateway, "/ready").await;
    assert!(ready.status == 200 && ready.text().contains(reason), "{}", ready.text());

    let placements = || router.rank_reports().into_iter().map(|report| report.placements).collect::<Vec<_>>();
    let before = placements();
    eventually("100 requests are placed", async || {
        send();
        placements().iter().sum::<u64>() >= before.iter().sum::<u64>() + 100
    })
    .await;
    let reached = placements()[0] - before[0];
    println!("{} requests before, {reached} of 100 after", before[0] - 20);
    assert!(reached <= 12, "{reached} of 100: at most one try after each back-off");
    waiting.abort_all();
}
