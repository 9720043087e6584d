//! Helpers of all gateway tests: a gateway with given workers, a client that exposes raw responses, and workers that
//! follow a script byte by byte.
//!
//! Every wait has a generous limit. A worker passes a [`Act::Wait`] only after the test releases it. Scenarios and
//! assertions about the proxy are in the tests.

use pointsman::internals::config::HealthConfig;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pointsman::protocol::{KvEventsConfig, WorkerConfig, WorkerId};
use pointsman::{NamedWorker, RouterConfig};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{ModelSettings, Settings, TokenSourceChoice, TokensSettings};
use pointsman_trial::mock::MockEngine;
use serde_json::Value as Json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// Limit of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Polls a condition, with a limit.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(what, async || holds()).await;
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

/// Waits until the gateway at this address is ready.
pub(crate) async fn ready(address: SocketAddr) {
    eventually("the gateway is ready", async || request(address, "GET", "/ready", "", b"").await.status == 200).await;
}

/// A worker with this many ranks.
pub(crate) fn worker(n: u64, url: &str, data_parallel_size: u32) -> NamedWorker {
    let config = WorkerConfig { data_parallel_size, ..WorkerConfig::at(url) };
    NamedWorker { id: Some(WorkerId(n)), config, probe: false }
}

/// A worker at the engine, with the KV events of its first rank.
pub(crate) fn published(engine: &MockEngine) -> WorkerConfig {
    let kv_events = KvEventsConfig {
        endpoint: engine.event_endpoint(0),
        replay_endpoint: Some(engine.replay_endpoint(0)),
        topic: String::new(),
    };
    WorkerConfig { kv_events: Some(kv_events), ..WorkerConfig::at(engine.url()) }
}

/// Settings of one model, `mock`, with round-robin selection, no ejection, no tokenizer, and no heartbeats or migrations by accident.
pub(crate) fn settings(workers: Vec<NamedWorker>) -> Settings {
    let router = RouterConfig {
        policy: pointsman::policy::Policy::RoundRobin.into(),
        health: HealthConfig { probe_interval_ms: 0, outcome_failures_max: 0, ..HealthConfig::default() },
        ..RouterConfig::default()
    };
    let mut settings = Settings::default();
    settings.gateway.listen = SocketAddr::from(([127, 0, 0, 1], 0));
    settings.gateway.heartbeat_after_ms = 0;
    settings.gateway.stream_migrations_max = 0;
    let tokens = TokensSettings { source: TokenSourceChoice::None, ..TokensSettings::default() };
    settings.models = vec![ModelSettings { workers, router, tokens, ..ModelSettings::named("mock") }];
    settings
}

/// A gateway whose workers are registered.
pub(crate) async fn gateway(settings: Settings) -> Gateway {
    let wanted: Vec<_> = settings.models.iter().map(|model| (model.name.clone(), model.workers.len())).collect();
    let gateway = Gateway::start(settings).await.expect("start succeeds");
    for (model, workers) in wanted {
        let router = gateway.router(&model).expect("model is served").clone();
        until("workers registered", || router.workers().len() == workers).await;
    }
    gateway
}

/// Waits until nothing is booked.
pub(crate) async fn at_rest(gateway: &Gateway) {
    let router = gateway.router("mock").expect("model is served").clone();
    until("all bookings have ended", || router.health().leases == 0).await;
}

/// A response as received.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// Whether the body ended as its framing announced.
    pub(crate) is_whole: bool,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        str::from_utf8(&self.body).expect("text")
    }

    pub(crate) fn json(&self) -> Json {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// A header, by its name in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    /// The error code in the OpenAI error format.
    pub(crate) fn code(&self) -> String {
        let json = self.json();
        assert!(json["error"]["message"].is_string() && json["error"]["type"].is_string(), "{json}");
        json["error"]["code"].as_str().expect("a code").to_owned()
    }

    /// Sum of a metric over its series with all of these labels, on a metrics page; 0 without any.
    pub(crate) fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let of_it = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        let lines = self.text().lines().filter(of_it).filter(|line| labels.iter().all(|label| line.contains(label)));
        lines.map(|line| line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number")).sum()
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(4).position(|end| end == b"\r\n\r\n")?;
        let head = String::from_utf8(bytes[..end].to_vec()).expect("a head is text");
        let status = head.split(' ').nth(1)?.parse().ok()?;
        let rest = &bytes[end + 4..];
        let (body, is_whole) = if header(&head, "transfer-encoding") == Some("chunked") {
            unchunked(rest)
        } else {
            let length = header(&head, "content-length").and_then(|length| length.parse().ok());
            (rest.to_vec(), length.is_none_or(|length: usize| length == rest.len()))
        };
        Some(Self { status, head, body, is_whole })
    }
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let lines = head.lines().skip(1).filter_map(|line| line.split_once(": "));
    lines.filter(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
}

fn unchunked(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|end| end == b"\r\n") {
        let length = usize::from_str_radix(str::from_utf8(&rest[..end]).expect("digits"), 16).expect("a length");
        if length == 0 {
            return (body, true);
        }
        let Some(chunk) = rest.get(end + 2..end + 2 + length) else { break };
        body.extend_from_slice(chunk);
        rest = rest.get(end + 4 + length..).unwrap_or_default();
    }
    (body, false)
}

/// Sends a request on a new connection and leaves the response unread.
pub(crate) async fn send(address: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("connection accepted");
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).await.expect("head written");
    // A rejected body may not be read completely.
    let _ = stream.write_all(body).await;
    stream
}

/// Sends a request on a kept connection and reads its response. `Err`: what was received before the end.
pub(crate) async fn kept(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), request: &str) -> Result<Answer, String> {
    stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    loop {
        if let Some(answer) = Answer::parse(&bytes).filter(|answer| answer.is_whole) {
            return Ok(answer);
        }
        match timeout(PATIENCE, stream.read_buf(&mut bytes)).await.expect("response before the timeout") {
            Ok(1..) => {}
            ended => return Err(format!("{ended:?} after {:?}", String::from_utf8_lossy(&bytes))),
        }
    }
}

/// Reads a response until the connection ends. `None` if it ended without a response.
pub(crate) async fn receive(mut stream: TcpStream) -> Option<Answer> {
    let mut bytes = Vec::new();
    // A reset also ends the response.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("end before the timeout");
    Answer::parse(&bytes)
}

pub(crate) async fn request(address: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
    let answer = receive(send(address, method, path, headers, body).await).await;
    answer.unwrap_or_else(|| panic!("no response to {method} {path}"))
}

pub(crate) async fn post(gateway: &Gateway, path: &str, body: &Json) -> Answer {
    request(gateway.address(), "POST", path, "", body.to_string().as_bytes()).await
}

pub(crate) async fn get(gateway: &Gateway, path: &str) -> Answer {
    request(gateway.address(), "GET", path, "", b"").await
}

/// One step of a worker's script.
#[derive(Clone, Debug)]
pub(crate) enum Act {
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

/// An event of a stream that is not the last one.
pub(crate) const EVENT: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";

/// A complete stream.
pub(crate) const FINE: &str = "data: {\"choices\":[{\"text\":\"fine\"}]}\n\ndata: [DONE]\n\n";

/// A complete response without streaming.
pub(crate) const FINE_JSON: &str = "{\"choices\":[{\"text\":\"fine\"}]}";

pub(crate) fn write(text: impl AsRef<[u8]>) -> Act {
    Act::Send(text.as_ref().to_vec())
}

/// A response with a content length, as engines send it.
pub(crate) fn full_response(status: &str, body: &str) -> Act {
    let content_type = if body.starts_with("data:") { "text/event-stream" } else { "application/json" };
    let length = body.len();
    write(format!("HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n{body}"))
}

pub(crate) fn answer(status: &str, body: &str) -> Vec<Act> {
    vec![full_response(status, body)]
}

/// The head of a chunked stream.
pub(crate) fn chunked_head() -> Act {
    write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
}

pub(crate) fn chunk(data: impl AsRef<[u8]>) -> Act {
    let data = data.as_ref();
    write([format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat())
}

/// The head of a stream and these chunks. [`stream_end`] is its end.
pub(crate) fn stream(chunks: &[&str]) -> Vec<Act> {
    std::iter::once(chunked_head()).chain(chunks.iter().map(chunk)).collect()
}

pub(crate) fn stream_end() -> Act {
    write("0\r\n\r\n")
}

/// A request as a scripted worker received it.
#[derive(Clone, Debug)]
pub(crate) struct Got {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Got {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    pub(crate) fn text(&self) -> &str {
        str::from_utf8(&self.body).expect("text")
    }
}

/// Observations of a scripted worker.
#[derive(Default)]
pub(crate) struct Seen {
    /// Connections accepted so far.
    pub(crate) accepted: usize,
    /// Open connections.
    pub(crate) open: usize,
    /// Bytes written by floods.
    pub(crate) flooded: usize,
    pub(crate) requests: Vec<Got>,
    /// Connections that the other side closed while it waited for a response.
    pub(crate) hung_up: usize,
    /// Released waits that have not continued. Their permits may be assigned already, and return if the connection ends.
    unresumed: usize,
}

type Answers = dyn Fn(usize, &Got) -> Vec<Act> + Send + Sync;

/// Script of a worker: the steps after accepting a connection, and the steps for each request by its number from 0.
struct Script {
    greets: Vec<Act>,
    answers: Box<Answers>,
    seen: Mutex<Seen>,
    gate: Semaphore,
}

impl Script {
    fn seen<T>(&self, look: impl FnOnce(&mut Seen) -> T) -> T {
        look(&mut self.seen.lock().expect("lock not poisoned"))
    }

    async fn serve(&self, mut stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let mut bytes = Vec::new();
        if !self.run(&mut stream, &self.greets).await {
            return;
        }
        while let Some(got) = next_request(&mut stream, &mut bytes).await {
            let number = self.seen(|seen| {
                seen.requests.push(got.clone());
                seen.requests.len() - 1
            });
            if !self.run(&mut stream, &(self.answers)(number, &got)).await {
                return;
            }
        }
    }

    /// Returns whether the connection stays open.
    async fn run(&self, stream: &mut TcpStream, acts: &[Act]) -> bool {
        for act in acts {
            match act {
                Act::Send(bytes) => {
                    if stream.write_all(bytes).await.is_err() {
                        return false;
                    }
                }
                Act::Flood(bytes) => {
                    while stream.write_all(bytes).await.is_ok() {
                        self.seen(|seen| seen.flooded += bytes.len());
                    }
                    return false;
                }
                Act::Wait => {
                    let mut byte = [0];
                    tokio::select! {
                        biased;
                        _ = stream.read(&mut byte) => {
                            self.seen(|seen| seen.hung_up += 1);
                            return false;
                        }
                        permit = self.gate.acquire() => {
                            permit.expect("the gate stays open").forget();
                            self.seen(|seen| seen.unresumed -= 1);
                        }
                    }
                }
                Act::Close => return false,
                Act::Reset => {
                    let _ = stream.set_zero_linger();
                    return false;
                }
                Act::Hang => {
                    let mut rest = [0; 1024];
                    while matches!(stream.read(&mut rest).await, Ok(1..)) {}
                    self.seen(|seen| seen.hung_up += 1);
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

/// A worker that responds according to a script.
pub(crate) struct Scripted {
    address: SocketAddr,
    script: Arc<Script>,
    task: JoinHandle<()>,
}

impl Scripted {
    /// Responds to each request with the result of `script` for its number, counted from 0.
    pub(crate) async fn start(script: impl Fn(usize) -> Vec<Act> + Send + Sync + 'static) -> Self {
        Self::with(Vec::new(), move |number, _| script(number)).await
    }

    /// Responds to each request with these steps.
    pub(crate) async fn responding_with(acts: Vec<Act>) -> Self {
        Self::start(move |_| acts.clone()).await
    }

    pub(crate) async fn with(
        greets: Vec<Act>,
        answers: impl Fn(usize, &Got) -> Vec<Act> + Send + Sync + 'static,
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
                script.seen(|seen| (seen.accepted, seen.open) = (seen.accepted + 1, seen.open + 1));
                connections.spawn(async move {
                    script.serve(stream).await;
                    script.seen(|seen| seen.open -= 1);
                });
            }
        });
        Self { address, script, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn seen<T>(&self, look: impl FnOnce(&mut Seen) -> T) -> T {
        self.script.seen(look)
    }

    pub(crate) fn requests(&self) -> Vec<Got> {
        self.seen(|seen| seen.requests.clone())
    }

    pub(crate) fn request_count(&self) -> usize {
        self.seen(|seen| seen.requests.len())
    }

    /// Releases this many waits.
    pub(crate) fn release(&self, waits: usize) {
        self.seen(|seen| seen.unresumed += waits);
        self.script.gate.add_permits(waits);
    }

    /// Waits until all released waits have continued.
    pub(crate) async fn wait_until_resumed(&self) {
        until("the worker continues", || self.seen(|seen| seen.unresumed == 0)).await;
    }

    /// Waits until the gateway has closed all connections to the worker.
    pub(crate) async fn wait_until_closed(&self) {
        until("all connections to the worker are closed", || self.seen(|seen| seen.open) == 0).await;
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}
