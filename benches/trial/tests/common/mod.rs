//! An HTTP client of mock engines that exposes raw responses.
//!
//! Contains no assertions about engines. Every wait has a generous timeout.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use pointsman_trial::mock::{MockEngine, Tier};
use serde_json::Value as Json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Timeout of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A response, with its body reassembled from chunks.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
    /// Whether the body was complete according to its framing.
    pub(crate) is_whole: bool,
}

impl Answer {
    pub(crate) fn json(&self) -> Json {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Data of the server-sent events.
    pub(crate) fn events(&self) -> Vec<&str> {
        self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect()
    }
}

/// Sends one request on a new connection. Returns none if the connection ends without a response.
pub(crate) async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> Option<Answer> {
    let mut stream = send(address, method, path, headers, body).await;
    let mut bytes = Vec::new();
    // A connection reset counts as the end of the response.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("a response before the timeout");
    parsed(&bytes)
}

/// Sends a request without reading the response.
pub(crate) async fn send(address: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("the engine listens");
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: mock\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.expect("the engine reads");
    stream
}

pub(crate) async fn post(engine: &MockEngine, path: &str, body: &Json) -> Answer {
    let answer = request(engine.address(), "POST", path, "", &body.to_string()).await;
    answer.unwrap_or_else(|| panic!("no answer from {path} to {body}"))
}

pub(crate) async fn get(engine: &MockEngine, path: &str) -> Answer {
    request(engine.address(), "GET", path, "", "").await.unwrap_or_else(|| panic!("no answer from {path}"))
}

fn parsed(bytes: &[u8]) -> Option<Answer> {
    let text = String::from_utf8(bytes.to_vec()).expect("responses are text");
    let (head, rest) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let is_chunked = head.to_lowercase().contains("transfer-encoding: chunked");
    let (body, is_whole) = if is_chunked { unchunked(rest) } else { (rest.to_owned(), true) };
    Some(Answer { status, body, is_whole })
}

fn unchunked(mut rest: &str) -> (String, bool) {
    let mut body = String::new();
    while let Some((length, behind)) = rest.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).expect("a chunk's length");
        if length == 0 {
            return (body, true);
        }
        let Some(chunk) = behind.get(..length) else { break };
        body.push_str(chunk);
        rest = behind.get(length + 2..).unwrap_or_default();
    }
    (body, false)
}

/// The same fields from the rank itself.
pub(crate) fn held(engine: &MockEngine, rank: u16, tier: Tier) -> BTreeMap<u64, (Option<u64>, Vec<u32>)> {
    let blocks = engine.held(rank, tier);
    let entry = |block: &pointsman_trial::mock::Block| {
        (block.hash.as_u64(), (block.parent.map(|parent| parent.as_u64()), block.tokens.to_vec()))
    };
    blocks.iter().map(|block| entry(block)).collect()
}
