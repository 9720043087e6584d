//! Latency targets over HTTP: headers and early rejections.

use pointsman::config::OnTargetMiss;
use pointsman::policy::Policy;
use pointsman_gateway::app::Gateway;
use serde_json::json;

use crate::common::proxy::{Answer, FINE, Scripted, answer, at_rest, gateway, request, settings, worker};

const COMPLETIONS: &str = "/v1/completions";

/// A prompt of 6,400 tokens: 0.7 s of prefill at the prior speed, 4 ms a token.
async fn complete(gateway: &Gateway, headers: &str) -> Answer {
    let prompt: Vec<u32> = (1..=6_400).collect();
    let body = json!({ "model": "mock", "prompt": prompt, "max_tokens": 9, "stream": true }).to_string();
    request(gateway.address(), "POST", COMPLETIONS, headers, body.as_bytes()).await
}

async fn gateway_of(policy: Policy, on_target_miss: OnTargetMiss, engine: &Scripted) -> Gateway {
    let mut settings = settings(vec![worker(1, &engine.url(), 1)]);
    settings.models[0].router.policy = policy.into();
    settings.models[0].router.on_target_miss = on_target_miss;
    gateway(settings).await
}

#[tokio::test]
async fn requests_without_a_chance_are_rejected_early() {
    let engine = Scripted::start(|_| answer("200 OK", FINE)).await;
    let served = gateway_of(Policy::Latency, OnTargetMiss::Serve, &engine).await;
    let rejecting = gateway_of(Policy::Latency, OnTargetMiss::Reject, &engine).await;
    let reject = "x-pointsman-on-target-miss: reject\r\n";
    for (gateway, headers, part) in [
        (&served, format!("x-pointsman-ttft-ms: 100.5\r\n{reject}"), "time to first token: predicted "),
        (&served, format!("x-llm-d-slo-ttft-ms: 100.5\r\n{reject}"), "target 100.5 ms"),
        (&served, format!("x-slo-tpot-ms: 1.5\r\n{reject}"), "inter-token latency: predicted 4.4 ms, target 1.5 ms"),
        (&rejecting, "x-slo-ttft-ms: 100.5\r\n".to_owned(), "target 100.5 ms"),
        (&rejecting, "x-llm-d-slo-tpot-ms: 1.5\r\n".to_owned(), "target 1.5 ms"),
    ] {
        let refused = complete(gateway, &headers).await;
        assert_eq!((refused.status, refused.code().as_str()), (429, "targets_missed"), "{headers}: {refused:?}");
        assert!(refused.text().contains(part), "{headers}: {refused:?}");
        assert_eq!(refused.header("retry-after"), Some("1"));
    }
    assert!(engine.requests().is_empty());
    for (gateway, headers) in [
        (&served, "x-slo-ttft-ms: 100\r\nx-slo-tpot-ms: 1\r\n"),
        (&rejecting, "x-slo-ttft-ms: 100\r\nx-pointsman-on-target-miss: serve\r\n"),
        (&rejecting, "x-slo-ttft-ms: 60000\r\nx-slo-tpot-ms: 100\r\n"),
        (&rejecting, ""),
    ] {
        assert_eq!(complete(gateway, headers).await.status, 200, "{headers}");
    }
    at_rest(&served).await;
    at_rest(&rejecting).await;
}

#[tokio::test]
async fn targets_that_cannot_be_predicted_are_refused() {
    let engine = Scripted::start(|_| answer("200 OK", FINE)).await;
    let blind = gateway_of(Policy::LeastLoaded, OnTargetMiss::Serve, &engine).await;
    let refused = complete(&blind, "x-slo-ttft-ms: 9\r\nx-pointsman-on-target-miss: reject\r\n").await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "invalid_header"), "{refused:?}");
    assert!(refused.text().contains("learns no prefill speeds"), "{refused:?}");
    assert_eq!(complete(&blind, "x-slo-ttft-ms: 9\r\n").await.status, 200, "without effect on the choice");
    at_rest(&blind).await;
}
