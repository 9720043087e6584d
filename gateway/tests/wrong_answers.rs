//! One worker of four responds quickly and incorrectly: responses to the clients with default settings, and the
//! worker's share of the requests.

use std::sync::Arc;
use std::time::Duration;

use pointsman::RouterConfig;
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{ModelSettings, Settings, TokenSourceChoice, TokensSettings};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;
use tokio::sync::Semaphore;

use crate::common::proxy::{
    Act, Answer, EVENT, Scripted, chunk, chunked_head, full_response, gateway, request, stream_end, worker, write,
};
use crate::faults::{DONE, metric};

const REQUESTS: u32 = 150;
/// Time between the starts of two requests.
const PAUSE: Duration = Duration::from_millis(10);
/// Default number of consecutive failures that eject a rank.
const FAILURES: usize = 5;
/// Maximum number of requests in flight, so that few have started at the bad worker when it is ejected.
const IN_FLIGHT_MAX: usize = FAILURES;
const GOOD: u64 = 3;

/// Default settings except for tokenization: prompts are token ids.
fn default_settings(urls: &[String]) -> Settings {
    let workers = (1..).zip(urls).map(|(n, url)| worker(n, url, 1)).collect();
    let mut settings = Settings::default();
    settings.gateway.listen = ([127, 0, 0, 1], 0).into();
    let tokens = TokensSettings { source: TokenSourceChoice::None, ..TokensSettings::default() };
    let router = RouterConfig::default();
    settings.models = vec![ModelSettings { workers, router, tokens, ..ModelSettings::named("mock") }];
    settings
}

/// Three healthy engines and one worker with this response to generation requests. Its health endpoint is healthy.
struct Fleet {
    engines: Vec<MockEngine>,
    bad: Scripted,
    gateway: Gateway,
}

impl Fleet {
    async fn start(bad: Vec<Act>) -> Self {
        let mut engines = Vec::new();
        for seed in 0..GOOD {
            let config = MockConfig { seed, time_scale: 2.0, ..MockConfig::default() };
            engines.push(MockEngine::start(config).await.expect("start succeeds"));
        }
        let bad = Scripted::with(Vec::new(), move |_, got| {
            if got.head.starts_with("POST /v1/") { bad.clone() } else { vec![full_response("200 OK", "{}")] }
        });
        let bad = bad.await;
        let urls: Vec<_> = engines.iter().map(MockEngine::url).chain([bad.url()]).collect();
        let gateway = gateway(default_settings(&urls)).await;
        Self { engines, bad, gateway }
    }

    /// Number of requests that the bad worker received.
    fn drawn(&self) -> usize {
        self.bad.seen(|seen| seen.requests.iter().filter(|got| got.head.starts_with("POST /v1/")).count())
    }

    async fn end(self) {
        self.gateway.shutdown(Duration::ZERO).await;
        for engine in self.engines {
            engine.shutdown().await;
        }
    }
}

fn is_served(answer: &Answer, streamed: bool) -> bool {
    let content = if streamed { answer.text().ends_with(DONE) } else { answer.json()["choices"].is_array() };
    answer.status == 200 && answer.is_whole && content
}

/// Sends all requests with a pause before each. Returns the number of failed requests and the number of truncated
/// responses.
async fn send_all(fleet: &Fleet, streamed: bool) -> (usize, usize) {
    let address = fleet.gateway.address();
    let (mut clients, slots) = (tokio::task::JoinSet::new(), Arc::new(Semaphore::new(IN_FLIGHT_MAX)));
    for n in 0..REQUESTS {
        tokio::time::sleep(PAUSE).await;
        let slot = Arc::clone(&slots).acquire_owned().await.expect("open");
        clients.spawn(async move {
            let _slot = slot;
            let prompt: Vec<u32> = (0..500).map(|i| n * 1_000 + i).collect();
            let body = json!({ "model": "mock", "prompt": prompt, "max_tokens": 30, "stream": streamed }).to_string();
            request(address, "POST", "/v1/completions", "", body.as_bytes()).await
        });
    }
    let (mut failed, mut cut) = (0, 0);
    while let Some(answer) = clients.join_next().await {
        let answer = answer.expect("no panic");
        let is_cut = answer.status == 200 && !answer.is_whole;
        cut += usize::from(is_cut);
        failed += usize::from(!is_cut && !is_served(&answer, streamed));
    }
    (failed, cut)
}

/// Ejections by outcomes so far. The counter belongs to the process.
async fn ejections(fleet: &Fleet) -> f64 {
    metric(&fleet.gateway, "pointsman_ejections_total", &["cause=\"outcomes\""]).await
}

/// `cut_max`: limit of visibly truncated responses. A refusing worker need not be ejected: after each refusal the
/// router waits longer before it selects the worker again.
async fn case(name: &str, streamed: bool, bad: Vec<Act>, outcome: &str, cut_max: usize) {
    let fleet = Fleet::start(bad).await;
    let endpoint = format!("worker_endpoint=\"{}\"", fleet.bad.url());
    let ejected_before = ejections(&fleet).await;
    let (failed, cut) = send_all(&fleet, streamed).await;
    let drawn = fleet.drawn();
    let is_ejected = ejections(&fleet).await > ejected_before;
    let labels = [endpoint.as_str(), &format!("outcome=\"{outcome}\"")];
    let counted = metric(&fleet.gateway, "pointsman_gateway_worker_requests_total", &labels).await;
    let case = format!("{name}, streamed: {streamed}: {drawn} requests drawn");
    assert_eq!(failed, 0, "{case}: requests failed although three engines are healthy");
    assert!(cut <= cut_max, "{case}: {cut} answers were cut off");
    assert!(drawn <= REQUESTS as usize / 4, "{case}");
    assert!(is_ejected || outcome == "refused" || drawn < FAILURES, "{case}, and it is not ejected");
    assert_eq!(counted, drawn as f64, "{case}: each attempt is counted with outcome {outcome}");
    fleet.end().await;
}

async fn both(name: &str, bad: Vec<Act>, outcome: &str) {
    case(name, true, bad.clone(), outcome, 0).await;
    case(name, false, bad, outcome, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusing_worker_receives_at_most_its_share() {
    alone!();
    let error = r#"{"error":{"message":"no"}}"#;
    both("503", vec![full_response("503 Busy", error)], "refused").await;
    both("429", vec![full_response("429 Busy", error)], "refused").await;
    both("404", vec![full_response("404 None", error)], "misconfigured").await;
    both("401", vec![full_response("401 Who", error)], "misconfigured").await;
    both("500", vec![full_response("500 Oops", error)], "server_error").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_invalid_responses_receives_at_most_its_share() {
    alone!();
    let html = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 13\r\n\r\n<html></html>";
    both("200, HTML", vec![write(html)], "invalid_answer").await;
    let garbage = vec![chunked_head(), chunk("data: garbage\n\n"), chunk(DONE), stream_end()];
    case("200, garbage", true, garbage, "invalid_answer", 0).await;
    case("200, garbage", false, vec![full_response("200 OK", "{garbage")], "invalid_answer", 0).await;
    case("200, truncated JSON", false, vec![full_response("200 OK", "{\"choices\":[")], "invalid_answer", 0).await;
    case("200, an error", false, vec![full_response("200 OK", r#"{"error":"dead"}"#)], "server_error", 0).await;
    let unfinished = vec![chunked_head(), chunk(EVENT), stream_end()];
    // A started stream cannot be retried, so responses are truncated until the rank is ejected: those of the failures,
    // of the other requests in flight, and of as many that are placed while the ejection is reported.
    case("200, no end mark", true, unfinished, "invalid_answer", FAILURES + 2 * IN_FLIGHT_MAX).await;
}
