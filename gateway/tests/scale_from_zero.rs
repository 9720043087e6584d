//! Requests that arrive while their model has no workers.

use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;

use crate::common::proxy::{eventually, gateway, get, post, request, settings};

const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn requests_wait_for_the_first_worker() {
    let mut settings = settings(Vec::new());
    settings.gateway.hold_without_endpoints_ms = 60_000;
    settings.models[0].name = "held".to_owned();
    let gateway = gateway(settings).await;
    assert_eq!(get(&gateway, "/ready").await.status, 200, "requests must arrive to start engines");

    let body = json!({ "model": "held", "prompt": [1, 2, 3], "max_tokens": 2 });
    let (first, second) = (post(&gateway, COMPLETIONS, &body), post(&gateway, COMPLETIONS, &body));
    let start = async {
        held(&gateway, 2).await;
        let config = MockConfig { model: "held".to_owned(), ..MockConfig::default() };
        let engine = MockEngine::start(config).await.expect("the engine starts");
        let router = gateway.router("held").expect("model is served");
        router.upsert_worker(WorkerId(1), WorkerConfig::at(engine.url())).await.expect("worker registered");
        engine
    };
    let (first, second, engine) = tokio::join!(first, second, start);
    assert_eq!((first.status, second.status), (200, 200), "{} {}", first.text(), second.text());
    held(&gateway, 0).await;

    // Without workers again: at most until the deadline of the request.
    gateway.router("held").expect("model is served").remove_worker(WorkerId(1)).await.expect("worker removed");
    let deadline = "x-pointsman-deadline-ms: 50\r\ncontent-type: application/json\r\n";
    let late = request(gateway.address(), "POST", COMPLETIONS, deadline, body.to_string().as_bytes()).await;
    assert_eq!((late.status, late.code().as_str()), (503, "no_workers"));
    held(&gateway, 0).await;
    engine.shutdown().await;
}

/// Waits until the metric has this value.
async fn held(gateway: &pointsman_gateway::app::Gateway, requests: u32) {
    let line = format!("pointsman_gateway_held_requests{{model=\"held\"}} {requests}");
    eventually(&line, async || get(gateway, "/metrics").await.text().lines().any(|known| known == line)).await;
}
