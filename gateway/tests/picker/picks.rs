//! Answers to requests: endpoints, headers and bodies.

use pointsman::policy::Policy;
use pointsman_gateway::settings::DisaggregationSettings;

use super::client::{Exchange, Pick};
use super::messages::{Metadata, StreamedBodyResponse};
use super::{COMPLETIONS, ENDPOINTS, Pool, workers};
use crate::common::proxy::worker;

const JSON: &str = "application/json";

fn subset(text: &str) -> Metadata {
    Metadata::text("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", text)
}

/// The pick for a request for completions.
async fn pick(exchange: &mut Exchange, body: &[u8], metadata: Option<Metadata>) -> Pick {
    exchange.post(COMPLETIONS, body, metadata).await;
    exchange.pick().await
}

#[tokio::test]
async fn a_prefill_worker_is_named_for_the_sidecar_until_the_response_starts() {
    let pool = Pool::start_with("picker-decode", workers(2), |settings| {
        let mut prefill = settings.models[0].clone();
        prefill.name = "picker-prefill".to_owned();
        prefill.workers = vec![worker(1, "http://10.0.1.1:8000", 1)];
        settings.models.push(prefill);
        let disaggregation =
            DisaggregationSettings { prefill: "picker-prefill".to_owned(), ..DisaggregationSettings::default() };
        settings.models[0].disaggregation = Some(disaggregation);
    });
    let pool = pool.await;
    let prefills = pool.gateway.router("picker-prefill").expect("the model exists");
    let mut connection = pool.connect().await;
    let mut exchange = connection.process().await;
    let body = pool.request();
    let length = body.len().to_string();
    let headers =
        [("content-type", JSON), ("content-length", length.as_str()), ("x-prefiller-host-port", "10.9.9.9:2")];
    exchange.begin(("POST", COMPLETIONS), &headers, false, None).await;
    exchange.body(&body, true).await;
    let pick = exchange.pick().await;
    assert_eq!(pick.headers["x-prefiller-host-port"], "10.0.1.1:8000");
    assert!(ENDPOINTS.contains(&pick.endpoint()), "{pick:?}");
    assert_eq!((prefills.health().leases, pool.router.health().leases), (1, 1));
    exchange.respond("200", "text/event-stream", false, Some(pick.endpoint())).await;
    crate::common::proxy::until("the prefill ends with the head", || prefills.health().leases == 0).await;
    assert_eq!(pool.router.health().leases, 1);
    exchange.leave();
    pool.at_rest().await;
}

#[tokio::test]
async fn header_and_metadata_name_workers_and_the_body_is_edited() {
    let pool = Pool::start_with("picker-edited", workers(3), |settings| {
        settings.models[0].upstream_name = Some("the-engine's".to_owned());
    });
    let pool = pool.await;
    let mut connection = pool.connect().await;
    let mut exchange = connection.process().await;
    let body = pool.request();
    let length = body.len().to_string();
    let headers = [
        ("content-type", JSON),
        ("content-length", &length),
        ("x-request-id", "request-7"),
        ("x-gateway-destination-endpoint", "10.9.9.9:1"),
        ("x-data-parallel-rank", "7"),
        ("x-prefiller-host-port", "10.9.9.9:2"),
    ];
    exchange.begin(("POST", COMPLETIONS), &headers, false, None).await;
    for chunk in body.chunks(100) {
        exchange.body(chunk, false).await;
    }
    exchange.body(b"", true).await;
    let pick = exchange.pick().await;

    assert_eq!(pick.endpoints.len(), 2, "{pick:?}");
    assert!(pick.endpoints.iter().all(|endpoint| ENDPOINTS.contains(&endpoint.as_str())), "{pick:?}");
    assert_ne!(pick.endpoints[0], pick.endpoints[1]);
    assert_eq!(pick.headers["x-request-id"], "request-7");
    let edited = String::from_utf8(body).expect("text").replace("\"picker-edited\"", "\"the-engine's\"");
    assert_eq!(String::from_utf8_lossy(&pick.body()), edited);
    assert_eq!(pick.headers["content-length"], edited.len().to_string());
    for removed in ["x-data-parallel-rank", "x-prefiller-host-port"] {
        assert!(pick.removed_headers.iter().any(|name| name == removed), "{removed}: {pick:?}");
    }
    assert!(pick.removed_headers.iter().all(|name| !pick.headers.contains_key(name)), "{pick:?}");
    let chosen = ENDPOINTS.iter().position(|endpoint| *endpoint == pick.endpoint()).expect("a worker");
    pool.until_booked(&[0, 1, 2].map(|n| u32::from(n == chosen))).await;
    exchange.leave();
    pool.at_rest().await;
}

#[tokio::test]
async fn fallbacks_follow_the_load_within_the_subset() {
    let pool = Pool::start_with("picker-order", workers(3), |settings| {
        settings.models[0].router.policy = Policy::Kv.into();
    });
    let pool = pool.await;
    let mut connection = pool.connect().await;
    // A long prompt at the first worker, a shorter one at the third.
    let mut loads = Vec::new();
    for (n, tokens) in [(0, 50_000), (2, 10_000)] {
        let mut exchange = connection.process().await;
        let pick = pick(&mut exchange, &pool.request_of(tokens), Some(subset(ENDPOINTS[n]))).await;
        assert_eq!(pick.endpoints, [ENDPOINTS[n]], "no fallback outside of the subset");
        loads.push(exchange);
    }
    pool.until_booked(&[1, 0, 1]).await;
    let body = br#"{"model":"picker-order","prompt":[900001,900002,900003],"max_tokens":1}"#;
    for (allowed, expected) in [
        (None, [ENDPOINTS[1], ENDPOINTS[2]]),
        (Some(subset("10.0.0.1,10.0.0.3:8000")), [ENDPOINTS[2], ENDPOINTS[0]]),
        (Some(subset("10.0.0.1:8000, 10.0.0.2:8000")), [ENDPOINTS[1], ENDPOINTS[0]]),
    ] {
        let mut exchange = connection.process().await;
        assert_eq!(pick(&mut exchange, body, allowed.clone()).await.endpoints, expected, "{allowed:?}");
        exchange.leave();
        pool.until_booked(&[1, 0, 1]).await;
    }
    drop(loads);
    pool.at_rest().await;
}

#[tokio::test]
async fn one_endpoint_is_named_without_fallback() {
    let pool = Pool::start_with("picker-single", workers(3), |settings| {
        settings.picker.as_mut().expect("present").fallback = false;
    });
    let pool = pool.await;
    let mut connection = pool.connect().await;
    let mut exchange = connection.process().await;
    let pick = pick(&mut exchange, &pool.request(), None).await;
    assert_eq!(pick.endpoints.len(), 1, "{pick:?}");
    exchange.leave();
    pool.at_rest().await;
}

#[tokio::test]
async fn subset_hints_limit_the_choice() {
    let pool = Pool::start("picker-subset", workers(3)).await;
    let mut connection = pool.connect().await;
    let key = "x-gateway-destination-endpoint-subset";
    let list = |endpoints: &[&str]| Metadata::list("envoy.lb.subset_hint", key, endpoints);
    for (allowed, expected) in [
        (subset(ENDPOINTS[2]), Some(2)),
        (subset("10.0.0.2"), Some(1)),
        (list(&[ENDPOINTS[1]]), Some(1)),
        (list(&["10.9.9.9:8000", "10.0.0.1"]), Some(0)),
        (subset("10.0.0.2:8001"), None),
        (subset(""), None),
        (list(&[]), None),
    ] {
        // Round-robin selection would reach every worker.
        for _ in 0..4 {
            let mut exchange = connection.process().await;
            exchange.post(COMPLETIONS, &pool.request(), Some(allowed.clone())).await;
            if let Some(n) = expected {
                assert_eq!(exchange.pick().await.endpoints, [ENDPOINTS[n]], "{allowed:?}");
            } else {
                let refusal = exchange.immediate().await;
                assert_eq!((refusal.status, refusal.code.as_str()), (503, "no_endpoint"), "{allowed:?}");
            }
        }
    }
    drop(connection);
    pool.at_rest().await;
}

#[tokio::test]
async fn ranks_at_one_endpoint_are_named_and_have_no_fallback() {
    let pool = Pool::start("picker-ranks", vec![worker(1, "http://10.0.0.1:8000", 2), worker(2, "http://10.0.0.2", 2)]);
    let pool = pool.await;
    let mut connection = pool.connect().await;
    let mut exchanges = Vec::new();
    let mut picked = Vec::new();
    for _ in 0..4 {
        let mut exchange = connection.process().await;
        let headers = [("content-type", JSON), ("x-data-parallel-rank", "7")];
        exchange.begin(("POST", COMPLETIONS), &headers, false, None).await;
        exchange.body(&pool.request(), true).await;
        let pick = exchange.pick().await;
        assert_eq!(pick.endpoints.len(), 1, "{pick:?}");
        assert!(!pick.removed_headers.iter().any(|name| name == "x-data-parallel-rank"), "{pick:?}");
        picked.push(format!("{} {}", pick.endpoint(), pick.headers["x-data-parallel-rank"]));
        exchanges.push(exchange);
    }
    picked.sort();
    assert_eq!(picked, ["10.0.0.1:8000 0", "10.0.0.1:8000 1", "10.0.0.2:80 0", "10.0.0.2:80 1"]);
    drop(exchanges);
    pool.at_rest().await;
}

#[tokio::test]
async fn requests_without_a_body_or_a_prompt_are_placed() {
    let pool = Pool::start("picker-bodiless", workers(2)).await;
    let mut connection = pool.connect().await;
    for method_and_path in [("GET", "/v1/models"), ("GET", "/health?verbose=1"), ("POST", COMPLETIONS)] {
        let mut exchange = connection.process().await;
        exchange.begin(method_and_path, &[("accept", "*/*")], true, None).await;
        let pick = exchange.pick().await;
        assert_eq!((pick.endpoints.len(), pick.headers.get("content-length")), (2, None), "{pick:?}");
        assert_eq!(pool.booked().await.iter().sum::<u32>(), 1, "{method_and_path:?}");
        exchange.respond("200", JSON, false, Some(pick.endpoint())).await;
        assert!(exchange.response_headers().await.is_empty());
        exchange.response_body(b"{}", true).await;
        assert_eq!(exchange.response_piece().await, StreamedBodyResponse { body: "{}".into(), end_of_stream: true });
        assert_eq!(exchange.finish().await, (0, String::new()));
        pool.at_rest().await;
    }
    // A body without a readable prompt passes unchanged.
    for (body, ends_early) in [(&b"\0not JSON"[..], true), (b"not JSON", false), (b"", true)] {
        let mut exchange = connection.process().await;
        exchange.begin(("POST", "/v1/audio/transcriptions"), &[], false, None).await;
        exchange.body(body, ends_early).await;
        if !ends_early {
            exchange.body(b"", true).await;
        }
        let pick = exchange.pick().await;
        assert_eq!((pick.body(), pick.pieces.len()), (body.to_vec(), 1), "{pick:?}");
        assert_eq!(pick.headers["content-length"], body.len().to_string());
        exchange.leave();
    }
    pool.at_rest().await;
}

#[tokio::test]
async fn clients_select_endpoints_only_in_conformance_tests() {
    for is_conformance in [false, true] {
        let name = format!("picker-conformance-{is_conformance}");
        let pool = Pool::start_with(&name, workers(3), |settings| {
            settings.picker.as_mut().expect("present").conformance = is_conformance;
        });
        let pool = pool.await;
        let mut connection = pool.connect().await;
        // Endpoints that the client selects and the proxy allows, and the workers of four requests with conformance.
        for (selected, allowed, expected) in [
            ("10.0.0.2", None, vec![1]),
            ("10.0.0.3:8000", None, vec![2]),
            ("10.0.0.1:8000, 10.0.0.3", None, vec![0, 2]),
            ("10.0.0.3", Some(subset("10.0.0.2,10.0.0.3")), vec![2]),
            // Unknown endpoints, and those outside of the subset, do not limit the choice.
            ("10.9.9.9", None, vec![0, 1, 2]),
            ("10.0.0.1", Some(subset("10.0.0.2,10.0.0.3")), vec![1, 2]),
        ] {
            let mut chosen = Vec::new();
            for _ in 0..6 {
                let mut exchange = connection.process().await;
                let headers = [("content-type", JSON), ("test-epp-endpoint-selection", selected)];
                exchange.begin(("POST", COMPLETIONS), &headers, false, allowed.clone()).await;
                exchange.body(&pool.request(), true).await;
                let pick = exchange.pick().await;
                chosen.push(ENDPOINTS.iter().position(|endpoint| *endpoint == pick.endpoint()).expect("a worker"));
                exchange.respond("200", JSON, false, Some(pick.endpoint())).await;
                let headers = exchange.response_headers().await;
                let served = headers.get("x-conformance-test-served-endpoint").map(String::as_str);
                assert_eq!(served, is_conformance.then_some(pick.endpoint()));
                exchange.leave();
            }
            chosen.sort_unstable();
            chosen.dedup();
            let subset: &[usize] = if allowed.is_some() { &[1, 2] } else { &[0, 1, 2] };
            let expected = if is_conformance { &expected[..] } else { subset };
            assert_eq!(chosen, expected, "{selected} with conformance {is_conformance}");
        }
        pool.at_rest().await;
    }
}
