//! Helpers of the proxy tests: a gateway with given workers, a client that exposes raw responses, and workers that
//! follow a script byte by byte.
//!
//! Every wait has a generous limit. Scenarios and assertions about the proxy are in the tests.

use pointsman::config::HealthConfig;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pointsman::RouterConfig;
use pointsman::discovery::NamedWorker;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{ModelSettings, Settings, TokenSourceChoice, TokensSettings};
use serde_json::Value as Json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Limit of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Polls a condition, with a limit.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(timeout(PATIENCE, wait).await.is_ok(), "timed out: {what}");
}

/// A worker with this many ranks.
pub(crate) fn worker(n: u64, url: &str, data_parallel_size: u32) -> NamedWorker {
    let config = WorkerConfig { data_parallel_size, ..WorkerConfig::at(url) };
    NamedWorker { id: Some(WorkerId(n)), config, probe: false }
}

/// Settings of one model, `mock`, with round-robin selection, no ejection, and no tokenizer.
pub(crate) fn settings(workers: Vec<NamedWorker>) -> Settings {
    let router = RouterConfig {
        policy: pointsman::policy::Policy::RoundRobin.into(),
        health: HealthConfig { probe_interval_ms: 0, outcome_failures_max: 0, ..HealthConfig::default() },
        ..RouterConfig::default()
    };
    let mut settings = Settings::default();
    settings.gateway.listen = SocketAddr::from(([127, 0, 0, 1], 0));
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

    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
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
    stream.write_all(&[head.as_bytes(), body].concat()).await.expect("request written");
    stream
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

/// One step of a scripted worker's response.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Writes these bytes.
    Send(Vec<u8>),
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

/// The content type of a body: an event stream if it starts like one.
pub(crate) fn content_type(body: &str) -> &'static str {
    if body.starts_with("data:") { "text/event-stream" } else { "application/json" }
}

/// A response with a content length, as engines send it.
pub(crate) fn answer(status: &str, body: &str) -> Vec<Act> {
    let (length, content_type) = (body.len(), content_type(body));
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n");
    vec![Act::Send((head + body).into_bytes())]
}

/// The head of a stream and these chunks. [`stream_end`] is its end.
pub(crate) fn stream(chunks: &[&str]) -> Vec<Act> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = |chunk: &&str| Act::Send(format!("{:x}\r\n{chunk}\r\n", chunk.len()).into_bytes());
    std::iter::once(Act::Send(head.into())).chain(chunks.iter().map(chunk)).collect()
}

pub(crate) fn stream_end() -> Act {
    Act::Send(b"0\r\n\r\n".to_vec())
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
    pub(crate) requests: Vec<Got>,
    /// Connections that the other side closed while it waited for a response.
    pub(crate) hung_up: usize,
}

/// A worker that responds according to a script.
pub(crate) struct Scripted {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Scripted {
    /// Responds to each request with the result of `script` for its number, counted from 0.
    pub(crate) async fn start(script: impl Fn(usize) -> Vec<Act> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("local address");
        let (seen, script) = (Arc::new(Mutex::new(Seen::default())), Arc::new(script));
        let all_seen = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (script, seen) = (Arc::clone(&script), Arc::clone(&all_seen));
                tokio::spawn(async move { serve(stream, &*script, &seen).await });
            }
        });
        Self { address, seen, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn seen<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.seen.lock().expect("lock not poisoned"))
    }

    pub(crate) fn requests(&self) -> Vec<Got> {
        self.seen(|seen| seen.requests.clone())
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, script: &(impl Fn(usize) -> Vec<Act> + Sync), seen: &Mutex<Seen>) {
    let _ = stream.set_nodelay(true);
    let mut bytes = Vec::new();
    loop {
        let Some(got) = next_request(&mut stream, &mut bytes).await else { return };
        let number = {
            let mut seen = seen.lock().expect("lock not poisoned");
            seen.requests.push(got);
            seen.requests.len() - 1
        };
        for act in script(number) {
            match act {
                Act::Send(bytes) => {
                    if stream.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                Act::Close => return,
                Act::Reset => {
                    let _ = stream.set_zero_linger();
                    return;
                }
                Act::Hang => {
                    let mut rest = [0; 64];
                    while matches!(stream.read(&mut rest).await, Ok(1..)) {}
                    seen.lock().expect("lock not poisoned").hung_up += 1;
                    return;
                }
            }
        }
    }
}

async fn next_request(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<Got> {
    loop {
        if let Some(end) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
            let head = String::from_utf8(bytes[..end].to_vec()).expect("a head is text");
            let length = header(&head, "content-length").map_or(0, |length| length.parse().expect("a length"));
            if let Some(body) = bytes.get(end + 4..end + 4 + length) {
                let got = Got { head, body: body.to_vec() };
                bytes.drain(..end + 4 + length);
                return Some(got);
            }
        }
        if stream.read_buf(bytes).await.ok()? == 0 {
            return None;
        }
    }
}
