//! Helpers for fault tests: clients that stop reading at any byte, and checks for leftover state.
//!
//! Every wait has a generous limit. Expectations belong to the tests.

use std::net::SocketAddr;

use pointsman::{Outcome, Prompt, RouteRequest, Router};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{Settings, TokenSourceChoice};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::common::proxy::{self, Answer, PATIENCE, at_rest, eventually, get, kept, send, worker};

/// Final event of a stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// Completions of token ids: bookings use the prompt length, and no tokenizer is involved.
pub(crate) const PATH: &str = "/v1/completions";

/// A request of 64 tokens.
pub(crate) fn body() -> String {
    serde_json::json!({ "model": "mock", "prompt": (0..64).collect::<Vec<u32>>(), "max_tokens": 8, "stream": true })
        .to_string()
}

/// The same on a connection that stays open.
pub(crate) fn kept_request() -> String {
    let body = body();
    format!("POST {PATH} HTTP/1.1\r\nhost: g\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// One model with one-rank workers at these URLs. No timeout fires by accident.
pub(crate) fn settings(urls: &[String]) -> Settings {
    let workers = (1..).zip(urls).map(|(n, url)| worker(n, url, 1)).collect();
    let mut settings = proxy::settings(workers);
    settings.models[0].tokens.source = TokenSourceChoice::None;
    settings.models[0].tokens.parity_check = false;
    settings
}

/// A client that controls how much it reads.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    bytes: Vec<u8>,
}

impl Client {
    /// Connects without sending anything.
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(address).await.expect("connection accepted"), bytes: Vec::new() }
    }

    /// Sends a request and reads nothing.
    pub(crate) async fn ask(gateway: &Gateway) -> Self {
        Self::of(send(gateway.address(), "POST", PATH, "", body().as_bytes()).await)
    }

    /// A client that has sent its request.
    pub(crate) fn of(stream: TcpStream) -> Self {
        Self { stream, bytes: Vec::new() }
    }

    /// Sends a request on this connection, which stays open, and reads the response.
    pub(crate) async fn ask_again(&mut self) -> Answer {
        kept(&mut self.stream, &kept_request()).await.expect("response received")
    }

    /// Writes the bytes. Returns whether the peer accepted all of them.
    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok()
    }

    /// Reads until the response body equals `body`, and no further.
    pub(crate) async fn expect_body(&mut self, body: &[u8]) {
        self.expect(|answer| answer.body == body).await;
    }

    /// Reads until the response holds the condition, and no further.
    pub(crate) async fn expect(&mut self, holds: impl Fn(&Answer) -> bool) {
        let arrival = async {
            loop {
                let answer = Answer::parse(&self.bytes);
                if answer.as_ref().is_some_and(&holds) {
                    return;
                }
                let read = self.stream.read_buf(&mut self.bytes).await.unwrap_or(0);
                assert!(read > 0, "connection closed after {answer:?}");
            }
        };
        let has_arrived = timeout(PATIENCE, arrival).await.is_ok();
        assert!(has_arrived, "after {:?}", String::from_utf8_lossy(&self.bytes));
    }

    /// Reads everything until the connection ends, in order or by a reset.
    pub(crate) async fn rest(mut self) -> Vec<u8> {
        // A reset also ends the response.
        let has_ended = timeout(PATIENCE, self.stream.read_to_end(&mut self.bytes)).await.is_ok();
        assert!(has_ended, "connection still open after {:?}", String::from_utf8_lossy(&self.bytes));
        self.bytes
    }

    /// The response at the end of the connection. `None` if it ended without one.
    pub(crate) async fn answer(self) -> Option<Answer> {
        Answer::parse(&self.rest().await)
    }
}

pub(crate) fn router(gateway: &Gateway) -> Router {
    gateway.router("mock").expect("model is served").clone()
}

/// Sum of the metric's series whose label text contains all of `labels`.
pub(crate) async fn metric(gateway: &Gateway, name: &str, labels: &[&str]) -> f64 {
    get(gateway, "/metrics").await.metric(name, labels)
}

/// Waits until no booking, no load and no request in flight remains.
pub(crate) async fn expect_idle(gateway: &Gateway) {
    at_rest(gateway).await;
    let router = router(gateway);
    eventually("all loads are zero", async || {
        let loads =
            router.potential_loads(RouteRequest::query(Prompt::Tokens(&[]))).await.expect("the router has ranks");
        let sums = loads.iter().map(|load| load.potential_prefill_tokens + load.potential_decode_blocks);
        sums.sum::<u64>() == 0 && loads.iter().all(|load| load.active_requests == 0)
    })
    .await;
    eventually("nothing is in flight", async || {
        metric(gateway, "pointsman_gateway_requests_in_flight", &[]).await == 0.0
    })
    .await;
}

/// Lowers the ejection threshold to one failure, which makes each counted outcome visible.
pub(crate) fn counting_outcomes(mut settings: Settings) -> Settings {
    settings.models[0].router.health.outcome_failures_max = 1;
    settings
}

/// Waits until the last failure of some rank has this outcome.
pub(crate) async fn expect_outcome(gateway: &Gateway, case: &str, outcome: Outcome) {
    let router = router(gateway);
    let expected = format!("the last: {}", outcome.name());
    eventually(&format!("{case}: {expected}"), async || {
        let ranks = router.rank_health().await.expect("router is running");
        ranks.iter().any(|rank| rank.reason.ends_with(&expected))
    })
    .await;
}

/// Asserts that no failure counts against any rank.
pub(crate) async fn expect_no_failure(gateway: &Gateway) {
    let ranks = router(gateway).rank_health().await.expect("router is running");
    assert!(ranks.iter().all(|rank| rank.reason.is_empty()), "{ranks:?}");
}
