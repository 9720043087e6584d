//! HTTP faults of the mock engine.

use std::collections::BTreeSet;
use std::time::Duration;

use pointsman_trial::mock::{Fault, Faults, MockConfig, MockEngine, Scope};
use serde_json::{Value as Json, json};
use tokio::io::AsyncReadExt as _;
use tokio::time::timeout;

use crate::common::{PATIENCE, get, post, request, send};

async fn started() -> MockEngine {
    let config = MockConfig { time_scale: 0.0, ..MockConfig::default() };
    MockEngine::start(config).await.expect("the engine starts")
}

#[tokio::test]
async fn http_faults_apply_to_requests() {
    let engine = started().await;
    let body = json!({ "prompt": "x", "max_tokens": 1 });
    let set = async |faults: Json| {
        let answer = post(&engine, "/faults", &faults).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    };
    set(json!({ "status_share": 1.0, "status": 503, "scope": "generation" })).await;
    assert_eq!(post(&engine, "/v1/completions", &body).await.status, 503);
    assert_eq!(get(&engine, "/health").await.status, 200, "probes are spared");
    set(json!({ "status_share": 1.0 })).await;
    assert_eq!(get(&engine, "/health").await.status, 500, "faults apply to all requests");
    set(json!({ "reset_share": 1.0 })).await;
    assert!(request(engine.address(), "GET", "/health", "", "").await.is_none(), "the connection ends");
    set(json!({ "delay_ms": 1 })).await;
    assert_eq!(post(&engine, "/v1/completions", &body).await.status, 200);
    set(json!({ "hang_share": 1.0 })).await;
    let mut hanging = send(engine.address(), "GET", "/health", "", "").await;
    timeout(PATIENCE, async {
        while !engine.faults().done().contains_key(&Fault::Hang) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the request arrives before the timeout");
    assert!(timeout(Duration::from_millis(20), hanging.read_u8()).await.is_err(), "no response");

    let refused = post(&engine, "/faults", &json!({ "drop_share": 2 })).await;
    assert_eq!((refused.status, engine.faults().get().hang_share), (400, 1.0), "rejected faults change no setting");
    assert_eq!(post(&engine, "/faults", &json!({ "unknown": 1 })).await.status, 400);
    set(json!({ "mute_replay": true, "restart": { "dialect": "sglang-array" } })).await;
    let shown = get(&engine, "/faults").await.json();
    assert_eq!(shown["events"]["dialect"], "sglang-array");
    assert_eq!(shown["faults"]["mute_replay"], true);
    assert_eq!(shown["done"], json!({ "delay": 1, "hang": 1, "reset": 1, "status": 2 }));
    assert_eq!(engine.faults().get().scope, Scope::All);
    engine.shutdown().await;
}

#[tokio::test]
async fn broken_responses_are_not_whole() {
    let engine = started().await;
    let set = |faults: Faults| engine.set_faults(faults).expect("shares are shares");
    let body = json!({ "prompt": "x", "max_tokens": 4, "stream": true }).to_string();
    let complete = async || request(engine.address(), "POST", "/v1/completions", "", &body).await;
    let whole = complete().await.expect("a response");
    assert!(whole.is_whole && whole.events().len() == 5, "{whole:?}");
    set(Faults { cut_share: 1.0, ..Faults::default() });
    let half = complete().await.expect("a response");
    assert!(half.status == 200 && !half.is_whole, "{half:?}");
    assert_eq!(half.events().len(), 2, "one and a half events: {half:?}");
    set(Faults { garbage_share: 1.0, ..Faults::default() });
    let mut kinds = BTreeSet::new();
    for _ in 0..60 {
        let mut connection = send(engine.address(), "GET", "/health", "", "").await;
        let mut bytes = Vec::new();
        connection.read_to_end(&mut bytes).await.expect("the connection closes");
        assert!(!bytes.ends_with(b"]}") && !bytes.ends_with(b"0\r\n\r\n"), "{bytes:?}");
        kinds.insert(bytes);
    }
    assert_eq!(kinds.len(), 5);
    set(Faults { stall_share: 1.0, ..Faults::default() });
    let mut stalled = send(engine.address(), "POST", "/v1/completions", "", &body).await;
    let mut received = Vec::new();
    while !received.ends_with(b"data: ") {
        received.push(timeout(PATIENCE, stalled.read_u8()).await.expect("part of a body").expect("an open connection"));
    }
    while let Ok(byte) = timeout(Duration::from_millis(20), stalled.read_u8()).await {
        received.push(byte.expect("an open connection"));
    }
    assert!(!received.windows(6).any(|part| part == b"[DONE]"));
    engine.shutdown().await;
}
