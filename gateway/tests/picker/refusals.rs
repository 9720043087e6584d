//! Requests without a pick, and messages that the protocol does not allow.

use pointsman::internals::config::QueueConfig;
use pointsman_gateway::settings::{ModelSettings, TenantSettings};
use prost::Message as _;

use super::client::Refusal;
use super::messages::{HttpBody, HttpHeaders, HttpTrailers, Part, ProcessingRequest};
use super::{COMPLETIONS, Pool, workers};
use crate::common::proxy::until;
use crate::limits::{authorization, limited};

const INVALID_ARGUMENT: i32 = 3;
const INTERNAL: i32 = 13;

fn of(refusal: &Refusal) -> (i32, &str) {
    assert_eq!(refusal.headers["content-type"], "application/json", "{refusal:?}");
    assert!(!refusal.headers.contains_key("content-length"), "the proxy counts the body itself: {refusal:?}");
    (refusal.status, refusal.code.as_str())
}

#[tokio::test]
async fn invalid_requests_are_refused_with_the_error_of_the_gateway() {
    let pool = Pool::start_with("picker-invalid", workers(1), |settings| {
        settings.gateway.body_bytes_max = 10_000;
        let other = ModelSettings { router: settings.models[0].router.clone(), ..ModelSettings::named("picker-other") };
        settings.models.push(other);
    });
    let pool = pool.await;
    let mut connection = pool.connect().await;
    let long = pool.request_of(10_000);
    for (body, expected) in [
        (&br#"{"model":"unknown","prompt":[1]}"#[..], (404, "model_not_found")),
        (br#"{"prompt":[1]}"#, (400, "missing_field")),
        (br#"{"model":"picker-other","prompt":[1]}"#, (503, "no_workers")),
        (b"{", (400, "invalid_json")),
        (b"", (400, "invalid_json")),
        (&long, (413, "body_too_large")),
    ] {
        let mut exchange = connection.process().await;
        exchange.post(COMPLETIONS, body, None).await;
        let refusal = exchange.immediate().await;
        assert_eq!(of(&refusal), expected);
    }
    pool.at_rest().await;
}

/// The prompt of a booked request keeps the only rank busy until its first token.
#[tokio::test]
async fn requests_that_exceed_the_queue_are_refused_with_a_retry_time() {
    let pool = Pool::start_with("picker-busy", workers(1), |settings| {
        settings.models[0].router.queue = QueueConfig { threshold: Some(0.0), ..QueueConfig::default() };
    });
    let pool = pool.await;
    let mut connection = pool.connect().await;
    let mut busy = connection.process().await;
    busy.post(COMPLETIONS, &pool.request(), None).await;
    busy.pick().await;
    for (headers, code) in [
        (&[("content-type", "application/json"), ("x-pointsman-no-queue", "true")][..], "would_queue"),
        (&[("content-type", "application/json"), ("x-pointsman-deadline-ms", "1")], "deadline_exceeded"),
    ] {
        let mut exchange = connection.process().await;
        exchange.begin(("POST", COMPLETIONS), headers, false, None).await;
        exchange.body(&pool.request(), true).await;
        let refusal = exchange.immediate().await;
        assert_eq!(of(&refusal), (429, code));
        assert_eq!(refusal.headers["retry-after"], "1");
    }
    assert_eq!(pool.metric(&pool.requests(429)).await, 2);
    // A request without these limits waits for the end of the first one.
    let mut waiting = connection.process().await;
    waiting.post(COMPLETIONS, &pool.request(), None).await;
    busy.leave();
    assert_eq!(waiting.pick().await.endpoint(), "10.0.0.1:8000");
    waiting.leave();
    pool.at_rest().await;
}

#[tokio::test]
async fn requests_above_the_limits_of_a_tenant_are_refused() {
    let pool = Pool::start_with("picker-limited", workers(1), |settings| {
        let name = "picker-limited".to_owned();
        let tenant = TenantSettings { name, requests_per_minute: Some(1), ..TenantSettings::default() };
        *settings = limited(settings.clone(), tenant);
    });
    let pool = pool.await;
    let mut connection = pool.connect().await;
    let authorization = authorization("picker-limited");
    let (name, key) = authorization.trim_end().split_once(": ").expect("a header");
    let headers = [("content-type", "application/json"), (name, key)];
    let mut first = connection.process().await;
    first.begin(("POST", COMPLETIONS), &headers, false, None).await;
    first.body(&pool.request(), true).await;
    let endpoint = first.pick().await.endpoint().to_owned();
    first.respond("200", "text/event-stream", false, Some(&endpoint)).await;
    let shown = first.response_headers().await;
    assert_eq!(shown.get("x-ratelimit-remaining-requests").map(String::as_str), Some("0"), "{shown:?}");
    let mut second = connection.process().await;
    second.begin(("POST", COMPLETIONS), &headers, false, None).await;
    second.body(&pool.request(), true).await;
    let refusal = second.immediate().await;
    assert_eq!(of(&refusal), (429, "rate_limit_exceeded"));
    assert_eq!(refusal.headers["x-ratelimit-limit-requests"], "1");
    assert!(refusal.headers.contains_key("retry-after"), "{refusal:?}");
    // Paths without a prompt count as well.
    let mut list = connection.process().await;
    list.begin(("GET", "/v1/models"), &headers, true, None).await;
    assert_eq!(of(&list.immediate().await), (429, "rate_limit_exceeded"));
    first.leave();
    pool.at_rest().await;
}

#[tokio::test]
async fn invalid_messages_end_only_their_exchange() {
    let pool = Pool::start("picker-garbage", workers(2)).await;
    let mut connection = pool.connect().await;
    let message = |part| ProcessingRequest { request: Some(part), ..ProcessingRequest::default() }.encode_to_vec();
    let head = || message(Part::RequestHeaders(HttpHeaders::default()));
    let response_head = || message(Part::ResponseHeaders(HttpHeaders::default()));
    // A neighbour on the same connection is in its response.
    let mut neighbour = connection.process().await;
    neighbour.post(COMPLETIONS, &pool.request(), None).await;
    let served = neighbour.pick().await;
    neighbour.respond("200", "application/json", false, Some(served.endpoint())).await;
    neighbour.response_headers().await;
    for (messages, (code, text)) in [
        (vec![b"\xff\xff\xff".to_vec()], (INTERNAL, "")),
        (vec![head(), b"\x22\x7f".to_vec()], (INTERNAL, "")),
        (
            vec![message(Part::RequestBody(HttpBody::default()))],
            (INVALID_ARGUMENT, "received a request body before the headers"),
        ),
        (
            vec![message(Part::RequestTrailers(HttpTrailers::default()))],
            (INVALID_ARGUMENT, "received request trailers before the headers"),
        ),
        (
            vec![head(), message(Part::ResponseBody(HttpBody::default()))],
            (INVALID_ARGUMENT, "received a response body before the headers"),
        ),
        (vec![head(), head()], (INVALID_ARGUMENT, "received request headers twice")),
        (vec![Vec::new()], (INVALID_ARGUMENT, "received a message without a known part of a request or response")),
    ] {
        let mut exchange = connection.process().await;
        for message in &messages {
            exchange.send_bytes(message).await;
        }
        let status = exchange.status().await;
        assert_eq!(status.0, code, "{messages:?}: {status:?}");
        assert!(if code == INTERNAL { status.1.contains("decode") } else { status.1 == text }, "{status:?}");
    }
    // After a pick and a response head.
    for second_head in [true, false] {
        let mut exchange = connection.process().await;
        exchange.post(COMPLETIONS, &pool.request(), None).await;
        exchange.pick().await;
        exchange.respond("200", "application/json", false, None).await;
        exchange.response_headers().await;
        exchange.send_bytes(&if second_head { response_head() } else { b"\xff".to_vec() }).await;
        assert_eq!(exchange.status().await.0, if second_head { INVALID_ARGUMENT } else { INTERNAL });
        until("only the neighbour is booked", || pool.router.health().leases == 1).await;
    }
    neighbour.response_body(b"{}", true).await;
    assert!(neighbour.response_piece().await.end_of_stream);
    assert_eq!(neighbour.finish().await, (0, String::new()));
    pool.at_rest().await;
}
