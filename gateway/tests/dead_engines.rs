//! Most or all engines behind a gateway die and restart on the same ports.
//!
//! The tests assert counts: failed requests, exported metrics and the state of `/ready`. Every wait is bounded.

use pointsman::internals::config::HealthConfig;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use pointsman::{Fault, RouterConfig};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{ModelSettings, Settings};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;
use tokio::task::JoinSet;

use crate::common::proxy::{self, eventually, get, post, request, settings, worker};

/// Concurrent clients.
const CLIENTS: usize = 50;

async fn engines() -> Vec<Option<MockEngine>> {
    let mut engines = Vec::new();
    for _ in 0..4 {
        let config = MockConfig { time_scale: 20.0, ..MockConfig::default() };
        engines.push(Some(MockEngine::start(config).await.expect("the engine starts")));
    }
    engines
}

/// Settings of a gateway in front of these engines.
fn before(engines: &[Option<MockEngine>], router: RouterConfig) -> Settings {
    let workers = engines.iter().flatten().zip(1..).map(|(engine, n)| worker(n, &engine.url(), 1)).collect();
    let mut settings = settings(workers);
    settings.gateway.metrics_public = Some(true);
    settings.models =
        settings.models.into_iter().map(|model| ModelSettings { router: router.clone(), ..model }).collect();
    settings
}

/// Stops an engine. Returns the configuration that restarts it on the same port.
async fn kill(engine: &mut Option<MockEngine>) -> MockConfig {
    let engine = engine.take().expect("the engine runs");
    let config = MockConfig { port: engine.address().port(), ..engine.config().clone() };
    engine.shutdown().await;
    config
}

/// True if a streamed request receives a complete response.
async fn is_served(gateway: &Gateway, n: usize) -> bool {
    let body = json!({
        "model": "mock", "stream": true, "max_tokens": 16,
        "messages": [{ "role": "user", "content": format!("a different prompt for client {n}") }],
    });
    let answer = post(gateway, "/v1/chat/completions", &body).await;
    answer.status == 200 && answer.is_whole && answer.text().contains("data: [DONE]")
}

/// Sends `each` consecutive requests from each of [`CLIENTS`] concurrent clients. Returns the number of failures.
async fn load(gateway: &Arc<Gateway>, each: usize) -> usize {
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let gateway = Arc::clone(gateway);
        clients.spawn(async move {
            let mut failed = 0;
            for n in 0..each {
                failed += usize::from(!is_served(&gateway, client * each + n).await);
            }
            failed
        });
    }
    clients.join_all().await.into_iter().sum()
}

/// Exported metrics by name, summed over all label values.
async fn exported(gateway: &Gateway) -> BTreeMap<String, f64> {
    let page = get(gateway, "/metrics").await;
    let mut values = BTreeMap::new();
    for line in page.text().lines().filter(|line| !line.starts_with('#')) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let name = series.split('{').next().unwrap_or(series).to_owned();
        *values.entry(name).or_insert(0.0) += value.parse().unwrap_or(0.0);
    }
    values
}

/// Evaluates the expression of a rule in `deploy/alerts.yml`: `A == B` or `A < B`, where each side is a metric, a
/// number or a product.
async fn holds(gateway: &Gateway, alert: &str) -> bool {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/alerts.yml");
    let rules = fs::read_to_string(path).expect("alert rules are readable");
    let rule = rules.split("- alert: ").find(|rule| rule.starts_with(&format!("{alert}\n"))).expect("the rule exists");
    let expression = rule.lines().find_map(|line| line.trim().strip_prefix("expr: ")).expect("an expression");
    let values = exported(gateway).await;
    let value = |side: &str| -> f64 {
        let factor = |factor: &str| {
            let factor = factor.trim();
            factor.parse().unwrap_or_else(|_| *values.get(factor).unwrap_or_else(|| panic!("{factor} is not exported")))
        };
        side.split('*').map(factor).product()
    };
    match (expression.split_once("=="), expression.split_once('<')) {
        (Some((a, b)), _) => value(a) == value(b),
        (None, Some((a, b))) => value(a) < value(b),
        (None, None) => panic!("unknown form: {expression}"),
    }
}

async fn until_alert(gateway: &Gateway, alert: &str, wanted: bool) {
    eventually(&format!("{alert} is {wanted}"), async || holds(gateway, alert).await == wanted).await;
}

async fn until_ready(gateway: &Gateway, status: u16) -> String {
    let mut text = String::new();
    eventually(&format!("/ready responds with {status}"), async || {
        let answer = get(gateway, "/ready").await;
        text = answer.text().to_owned();
        answer.status == status
    })
    .await;
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_succeed_with_one_engine_of_four() {
    alone!();
    let mut engines = engines().await;
    let gateway = Arc::new(proxy::gateway(before(&engines, RouterConfig::default())).await);
    assert_eq!(load(&gateway, 2).await, 0);

    // Three engines die during requests, which may fail. The fourth engine serves every later request.
    let mut running = JoinSet::new();
    for n in 0..CLIENTS {
        let gateway = Arc::clone(&gateway);
        running.spawn(async move { is_served(&gateway, 10_000 + n).await });
    }
    let mut dead = Vec::new();
    for engine in &mut engines[..3] {
        dead.push(kill(engine).await);
    }
    running.join_all().await;
    assert_eq!(load(&gateway, 10).await, 0, "the fourth engine has capacity");
    assert_eq!(gateway.router("mock").expect("served").eligible_ranks(), 1, "all dead engines are ejected");
    until_alert(&gateway, "PointsmanRanksFew", true).await;
    until_alert(&gateway, "PointsmanNoRank", false).await;

    dead.push(kill(&mut engines[3]).await);
    assert_eq!(load(&gateway, 2).await, 2 * CLIENTS);
    let why = until_ready(&gateway, 503).await;
    assert!(why.contains("no rank can serve: 4 of 4 are ejected"), "{why}");
    until_alert(&gateway, "PointsmanNoRank", true).await;

    // If no rank is healthy, requests are sent to ejected ranks, so the first requests reach the restarted engine.
    engines[0] = Some(MockEngine::start(dead.swap_remove(0)).await.expect("the port is free"));
    let mut tried = 1;
    while !is_served(&gateway, 20_000 + tried).await {
        tried += 1;
        assert!(tried <= 3, "requests reach the restarted engine");
    }
    assert!(until_ready(&gateway, 200).await.contains("true"));
    assert_eq!(load(&gateway, 4).await, 0);
    until_alert(&gateway, "PointsmanNoRank", false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_alone_change_readiness() {
    alone!();
    let mut engines = engines().await;
    let router = RouterConfig {
        health: HealthConfig { probe_interval_ms: 20, ..HealthConfig::default() },
        ..RouterConfig::default()
    };
    let gateway = proxy::gateway(before(&engines, router)).await;
    assert_eq!(get(&gateway, "/ready").await.status, 200);
    let mut dead = Vec::new();
    for engine in &mut engines {
        dead.push(kill(engine).await);
    }
    let why = until_ready(&gateway, 503).await;
    assert!(why.contains("no rank can serve: 4 of 4 are ejected"), "{why}");
    until_alert(&gateway, "PointsmanNoRank", true).await;
    let back = MockEngine::start(dead.remove(0)).await.expect("the port is free");
    until_ready(&gateway, 200).await;
    until_alert(&gateway, "PointsmanNoRank", false).await;
    assert!(is_served(&gateway, 1).await);
    back.shutdown().await;
}

#[tokio::test]
async fn a_failed_router_ends_liveness() {
    alone!();
    let engines = engines().await;
    let gateway = proxy::gateway(before(&engines, RouterConfig::default())).await;
    assert_eq!(get(&gateway, "/live").await.status, 200);
    assert!(gateway.router("mock").expect("served").inject(Fault::Supervisor));
    eventually("/live fails", async || get(&gateway, "/live").await.status == 503).await;
    let said = request(gateway.address(), "GET", "/live", "", b"").await;
    assert_eq!(said.text(), "the router of model mock has failed for good: restart the process\n");
    assert_eq!(get(&gateway, "/ready").await.status, 503);
}
