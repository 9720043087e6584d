//! Limits of tenants: rejections with retry time and headers, settlement with the usage, and metrics.

use std::path::PathBuf;

use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{Settings, TenantSettings};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::time::timeout;

use crate::common::admin::file;
use crate::common::proxy::{Answer, PATIENCE, eventually, gateway, get, request, send, settings, worker};

const COMPLETIONS: &str = "/v1/completions";

fn key_of(tenant: &str) -> String {
    format!("key-of-{tenant}-0123456789")
}

/// Settings of one tenant with limits. Metrics are shared by all tests, so each has a tenant of its own.
pub(crate) fn limited(mut settings: Settings, tenant: TenantSettings) -> Settings {
    settings.gateway.salt_secret_file = Some(file(b"0123456789abcdef"));
    let keys_file: PathBuf = file(key_of(&tenant.name).as_bytes());
    settings.gateway.metrics_public = Some(true);
    settings.tenants = vec![TenantSettings { keys_file, ..tenant }];
    settings
}

/// Header with the key of a tenant.
pub(crate) fn authorization(tenant: &str) -> String {
    format!("authorization: Bearer {}\r\n", key_of(tenant))
}

async fn complete(gateway: &Gateway, tenant: &str, prompt_tokens: u32, max_tokens: u32) -> Answer {
    let prompt: Vec<u32> = (1..=prompt_tokens).collect();
    let body = json!({ "model": "mock", "prompt": prompt, "max_tokens": max_tokens }).to_string();
    request(gateway.address(), "POST", COMPLETIONS, &authorization(tenant), body.as_bytes()).await
}

async fn until_series(gateway: &Gateway, series: &str, expected: u64) {
    let line = format!("{series} {expected}");
    eventually(&line, async || get(gateway, "/metrics").await.text().lines().any(|shown| shown == line)).await;
}

fn retry_after(answer: &Answer) -> u64 {
    answer.header("retry-after").and_then(|seconds| seconds.parse().ok()).expect("a time in seconds")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_request_within_the_minute_is_rejected() {
    let engine = MockEngine::start(MockConfig { time_scale: 0.0, ..MockConfig::default() }).await.expect("started");
    let tenant = TenantSettings { name: "paced".to_owned(), requests_per_minute: Some(1), ..TenantSettings::default() };
    let gateway = gateway(limited(settings(vec![worker(1, &engine.url(), 1)]), tenant)).await;
    let first = complete(&gateway, "paced", 10, 2).await;
    assert_eq!((first.status, first.header("x-ratelimit-limit-requests")), (200, Some("1")), "{first:?}");
    assert_eq!(first.header("x-ratelimit-remaining-requests"), Some("0"));
    assert_eq!(first.header("x-ratelimit-limit-tokens"), None, "tokens are not limited");
    let second = complete(&gateway, "paced", 10, 2).await;
    assert_eq!((second.status, second.code().as_str()), (429, "rate_limit_exceeded"), "{second:?}");
    assert!((1..=60).contains(&retry_after(&second)), "{second:?}");
    assert_eq!(second.header("x-ratelimit-limit-requests"), Some("1"));
    // Without a valid key nothing is counted.
    let body = json!({ "model": "mock", "prompt": [1] }).to_string();
    assert_eq!(request(gateway.address(), "POST", COMPLETIONS, "", body.as_bytes()).await.status, 401);
    let refusals = r#"pointsman_gateway_tenant_refusals_total{tenant="paced",limit="requests_per_minute"}"#;
    until_series(&gateway, refusals, 1).await;
    until_series(&gateway, r#"pointsman_gateway_tenant_requests_total{tenant="paced"}"#, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_charged_by_the_prompt_and_settled_with_the_usage() {
    let engine = MockEngine::start(MockConfig { time_scale: 0.0, ..MockConfig::default() }).await.expect("started");
    // A day refills less than one token during the test.
    let tenant =
        TenantSettings { name: "metered".to_owned(), tokens_per_day: Some(1_000), ..TenantSettings::default() };
    let gateway = gateway(limited(settings(vec![worker(1, &engine.url(), 1)]), tenant)).await;
    let remaining = |answer: &Answer| answer.header("x-ratelimit-remaining-tokens").map(str::to_owned);
    let tokens = |kind: &str| format!("pointsman_gateway_tenant_tokens_total{{tenant=\"metered\",kind=\"{kind}\"}}");
    let first = complete(&gateway, "metered", 100, 10).await;
    assert_eq!((first.status, remaining(&first).as_deref()), (200, Some("900")), "{first:?}");
    until_series(&gateway, &tokens("completion"), 10).await;
    until_series(&gateway, &tokens("prompt"), 100).await;
    let second = complete(&gateway, "metered", 100, 10).await;
    assert_eq!(remaining(&second).as_deref(), Some("790"), "{second:?}");
    until_series(&gateway, &tokens("completion"), 20).await;
    let third = complete(&gateway, "metered", 800, 10).await;
    assert_eq!((third.status, third.code().as_str()), (429, "quota_exceeded"), "{third:?}");
    assert_eq!((remaining(&third).as_deref(), retry_after(&third) > 60), (Some("780"), true), "{third:?}");
    // An unknown model costs nothing, and so does tokenization.
    let body = json!({ "model": "mock", "prompt": "One two three" }).to_string();
    let key = authorization("metered");
    let tokenized = request(gateway.address(), "POST", "/tokenize", &key, body.as_bytes()).await;
    assert_eq!((tokenized.status, &tokenized.json()["count"]), (200, &json!(3)), "{tokenized:?}");
    assert_eq!(remaining(&tokenized).as_deref(), Some("780"));
    let unknown = request(gateway.address(), "POST", COMPLETIONS, &key, br#"{"model":"x","prompt":[1]}"#).await;
    assert_eq!((unknown.status, remaining(&unknown).as_deref()), (404, Some("780")));
    until_series(&gateway, r#"pointsman_gateway_tenant_requests_total{tenant="metered"}"#, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_flight_are_limited_until_their_response_or_their_client_has_gone() {
    let engine = MockEngine::start(MockConfig { time_scale: 0.02, ..MockConfig::default() }).await.expect("started");
    let tenant =
        TenantSettings { name: "narrow".to_owned(), key_requests_in_flight_max: Some(1), ..TenantSettings::default() };
    let gateway = gateway(limited(settings(vec![worker(1, &engine.url(), 1)]), tenant)).await;
    let body = json!({ "model": "mock", "prompt": [1, 2], "max_tokens": 4_000, "stream": true }).to_string();
    let mut stream = send(gateway.address(), "POST", COMPLETIONS, &authorization("narrow"), body.as_bytes()).await;
    let mut first = [0; 1];
    timeout(PATIENCE, stream.read_exact(&mut first)).await.expect("in time").expect("a response");
    let second = complete(&gateway, "narrow", 1, 1).await;
    assert_eq!((second.status, second.code().as_str()), (429, "concurrency_limit_exceeded"), "{second:?}");
    assert_eq!(retry_after(&second), 1);
    drop(stream);
    eventually("the client has gone", async || complete(&gateway, "narrow", 1, 1).await.status == 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reranking_scoring_and_tokenization_are_forwarded() {
    let engine = MockEngine::start(MockConfig { time_scale: 0.0, ..MockConfig::default() }).await.expect("started");
    let tenant = TenantSettings { name: "ranker".to_owned(), tokens_per_day: Some(1_000), ..TenantSettings::default() };
    let gateway = gateway(limited(settings(vec![worker(1, &engine.url(), 1)]), tenant)).await;
    let key = authorization("ranker");
    let post = async |path: &str, body: Value| {
        let answer = request(gateway.address(), "POST", path, &key, body.to_string().as_bytes()).await;
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.json()
    };
    let documents = json!(["no word of it", "what a pointsman does"]);
    let query = "what does a pointsman do";
    let ranked = post("/v1/rerank", json!({ "model": "mock", "query": query, "documents": documents })).await;
    assert_eq!(ranked["results"][0]["index"], 1, "{ranked}");
    let scored = post("/v1/score", json!({ "model": "mock", "text_1": query, "text_2": documents })).await;
    assert_eq!(scored["data"].as_array().map(Vec::len), Some(2), "{scored}");
    let tokens = post("/tokenize", json!({ "model": "mock", "prompt": "One two" })).await["tokens"].clone();
    assert!(tokens.is_array());
    let text = post("/detokenize", json!({ "model": "mock", "tokens": [42] })).await;
    assert_eq!(text["prompt"], " t42", "{text}");
    for (path, endpoint) in
        [("/v1/rerank", "rerank"), ("/v1/score", "score"), ("/tokenize", "tokenize"), ("/detokenize", "detokenize")]
    {
        let invalid = request(gateway.address(), "POST", path, &key, br#"{"model":"mock"}"#).await;
        assert_eq!(invalid.status, 400, "{path}: the engine's own error");
        let page = get(&gateway, "/metrics").await;
        assert!(page.text().contains(&format!("endpoint=\"{endpoint}\",status=\"400\"}}")), "{endpoint}");
    }
    // None of them generates tokens.
    until_series(&gateway, r#"pointsman_gateway_tenant_tokens_total{tenant="ranker",kind="completion"}"#, 0).await;
    assert_eq!(get(&gateway, "/health").await.status, 200);
}
