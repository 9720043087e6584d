//! Helpers for fault tests: workers that break the connection at any byte, clients that stop reading at any byte, and
//! checks for leftover state.
//!
//! Every wait has a generous limit. A worker passes a `Wait` step only after the test releases it. Expectations belong
//! to the tests.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use pointsman::health::Outcome;
use pointsman::{Prompt, RouteRequest, Router};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{Settings, TokenSourceChoice};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Duration, sleep, timeout};

use crate::common::proxy::{self, Answer, Got, PATIENCE, at_rest, get, send, until, worker};

/// Final event of a stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// Completions of token ids: bookings use the prompt length, and no tokenizer is involved.
pub(crate) const PATH: &str = "/v1/completions";

/// A request of 64 tokens.
pub(crate) fn body() -> String {
    serde_json::json!({ "model": "mock", "prompt": (0..64).collect::<Vec<u32>>(), "max_tokens": 8, "stream": true })
        .to_string()
}

/// One model with one-rank workers at these URLs. No timeout fires by accident.
pub(crate) fn settings(urls: &[String]) -> Settings {
    let workers = (1..).zip(urls).map(|(n, url)| worker(n, url, 1)).collect();
    let mut settings = proxy::settings(workers);
    settings.models[0].tokens.source = TokenSourceChoice::None;
    settings.models[0].tokens.parity_check = false;
    settings
}

/// One step of a worker's script.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Writes these bytes.
    Send(Vec<u8>),
    /// Writes these bytes repeatedly until a write fails.
    Flood(Vec<u8>),
    /// Waits for the test's release. Ends the connection if the other side closes or sends.
    Wait,
    /// Closes the connection in order.
    Close,
    /// Resets the connection.
    Reset,
    /// Sends nothing until the other side closes the connection.
    Hang,
}

pub(crate) fn write(text: impl AsRef<[u8]>) -> Step {
    Step::Send(text.as_ref().to_vec())
}

/// A response with a content length.
pub(crate) fn full_response(status: &str, body: &str) -> Step {
    let (length, content_type) = (body.len(), proxy::content_type(body));
    write(format!("HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n{body}"))
}

/// The head of a chunked response.
pub(crate) fn chunked_head() -> Step {
    write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
}

pub(crate) fn chunk(data: impl AsRef<[u8]>) -> Step {
    let data = data.as_ref();
    write([format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat())
}

pub(crate) fn chunks_end() -> Step {
    write("0\r\n\r\n")
}

/// Observations of a worker.
#[derive(Default)]
pub(crate) struct Seen {
    /// Connections accepted so far.
    pub(crate) accepted: usize,
    /// Open connections.
    pub(crate) open: usize,
    /// Bytes written by floods.
    pub(crate) flooded: usize,
    pub(crate) requests: Vec<Got>,
}

type Answers = dyn Fn(usize, &Got) -> Vec<Step> + Send + Sync;

/// Script of a worker: the steps after accepting a connection, and the steps for each request by its number from 0.
struct Script {
    greets: Vec<Step>,
    answers: Box<Answers>,
    seen: Mutex<Seen>,
    gate: Semaphore,
}

impl Script {
    fn with_seen<T>(&self, read: impl FnOnce(&mut Seen) -> T) -> T {
        read(&mut self.seen.lock().expect("lock not poisoned"))
    }

    async fn serve(&self, mut stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut bytes = Vec::new();
        if !self.run(&mut stream, &self.greets).await {
            return;
        }
        while let Some(got) = next_request(&mut stream, &mut bytes).await {
            let number = self.with_seen(|seen| {
                seen.requests.push(got.clone());
                seen.requests.len() - 1
            });
            if !self.run(&mut stream, &(self.answers)(number, &got)).await {
                return;
            }
        }
    }

    /// Returns whether the connection stays open.
    async fn run(&self, stream: &mut TcpStream, steps: &[Step]) -> bool {
        for step in steps {
            match step {
                Step::Send(bytes) => {
                    if stream.write_all(bytes).await.is_err() {
                        return false;
                    }
                }
                Step::Flood(bytes) => {
                    while stream.write_all(bytes).await.is_ok() {
                        self.with_seen(|seen| seen.flooded += bytes.len());
                    }
                    return false;
                }
                Step::Wait => {
                    let mut byte = [0];
                    tokio::select! {
                        biased;
                        _ = stream.read(&mut byte) => return false,
                        permit = self.gate.acquire() => permit.expect("the gate stays open").forget(),
                    }
                }
                Step::Close => return false,
                Step::Reset => {
                    let _ = stream.set_zero_linger();
                    return false;
                }
                Step::Hang => {
                    let mut rest = [0; 1024];
                    while matches!(stream.read(&mut rest).await, Ok(1..)) {}
                    return false;
                }
            }
        }
        true
    }
}

async fn next_request(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<Got> {
    loop {
        if let Some(end) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
            let mut got = Got { head: String::from_utf8_lossy(&bytes[..end]).into_owned(), body: Vec::new() };
            let length = got.header("content-length").map_or(0, |length| length.parse().expect("a length"));
            if let Some(body) = bytes.get(end + 4..end + 4 + length) {
                got.body = body.to_vec();
                bytes.drain(..end + 4 + length);
                return Some(got);
            }
        }
        if stream.read_buf(bytes).await.ok()? == 0 {
            return None;
        }
    }
}

/// A worker that fails according to a script.
pub(crate) struct FaultyWorker {
    address: SocketAddr,
    script: Arc<Script>,
    task: JoinHandle<()>,
}

impl FaultyWorker {
    /// A worker that responds to each request with these steps.
    pub(crate) async fn responding_with(steps: Vec<Step>) -> Self {
        Self::start(Vec::new(), move |_, _| steps.clone()).await
    }

    pub(crate) async fn start(
        greets: Vec<Step>,
        answers: impl Fn(usize, &Got) -> Vec<Step> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("local address");
        let (seen, gate) = (Mutex::default(), Semaphore::new(0));
        let script = Arc::new(Script { greets, answers: Box::new(answers), seen, gate });
        let shared = Arc::clone(&script);
        let task = tokio::spawn(async move {
            // Dropping the set aborts the connections.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let script = Arc::clone(&shared);
                script.with_seen(|seen| (seen.accepted, seen.open) = (seen.accepted + 1, seen.open + 1));
                connections.spawn(async move {
                    script.serve(stream).await;
                    script.with_seen(|seen| seen.open -= 1);
                });
            }
        });
        Self { address, script, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn with_seen<T>(&self, read: impl FnOnce(&mut Seen) -> T) -> T {
        self.script.with_seen(read)
    }

    pub(crate) fn request_count(&self) -> usize {
        self.with_seen(|seen| seen.requests.len())
    }

    /// Releases this many waits.
    pub(crate) fn release(&self, waits: usize) {
        self.script.gate.add_permits(waits);
    }

    /// Waits until all released waits have continued.
    pub(crate) async fn wait_until_resumed(&self) {
        until("the worker continues", || self.script.gate.available_permits() == 0).await;
    }

    /// Waits until the gateway has closed all connections to the worker.
    pub(crate) async fn wait_until_closed(&self) {
        until("all connections to the worker are closed", || self.with_seen(|seen| seen.open) == 0).await;
    }
}

impl Drop for FaultyWorker {
    fn drop(&mut self) {
        self.task.abort();
    }
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
        let stream = send(gateway.address(), "POST", PATH, "", body().as_bytes()).await;
        Self { stream, bytes: Vec::new() }
    }

    /// Writes the bytes. Returns whether the peer accepted all of them.
    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok()
    }

    /// Reads until the response body equals `body`, and no further.
    pub(crate) async fn expect_body(&mut self, body: &[u8]) {
        let arrival = async {
            loop {
                let answer = Answer::parse(&self.bytes);
                if answer.as_ref().is_some_and(|answer| answer.body == body) {
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

/// Polls an asynchronous condition, with a limit.
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(timeout(PATIENCE, wait).await.is_ok(), "timed out: {what}");
}

pub(crate) fn router(gateway: &Gateway) -> Router {
    gateway.router("mock").expect("model is served").clone()
}

/// Sum of the metric's series whose label text contains all of `labels`.
pub(crate) async fn metric(gateway: &Gateway, name: &str, labels: &[&str]) -> f64 {
    let page = get(gateway, "/metrics").await;
    let of_it = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    let lines = page.text().lines().filter(of_it).filter(|line| labels.iter().all(|label| line.contains(label)));
    lines.map(|line| line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number")).sum()
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
