//! Test clients of a mock engine: an HTTP client that exposes raw responses, and an event reader that is independent of
//! the encoder.
//!
//! Contains no assertions about engines. Every wait has a generous timeout.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use pointsman_trial::mock::{MockEngine, Tier};
use rmpv::Value;
use serde_json::Value as Json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

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

/// A numbered batch as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) sequence: u64,
    pub(crate) payload: Bytes,
}

/// Frames of all responses to one replay request, including the end marker, without the delimiter.
pub(crate) async fn replay_frames(engine: &MockEngine, rank: u16, from: u64) -> Vec<Vec<Bytes>> {
    let mut socket = DealerSocket::new();
    socket.connect(&engine.replay_endpoint(rank)).await.expect("the rank listens");
    let frames = vec![Bytes::new(), Bytes::copy_from_slice(&from.to_be_bytes())];
    socket.send(ZmqMessage::try_from(frames).expect("two frames")).await.expect("the rank is connected");
    let mut answers = Vec::new();
    loop {
        let answer = timeout(PATIENCE, socket.recv())
            .await
            .expect("a response before the timeout")
            .expect("a response")
            .into_vec();
        assert!(answer[0].is_empty(), "replies begin with the delimiter");
        let is_end = answer[answer.len() - 2].as_ref() == [0xff; 8];
        answers.push(answer[1..].to_vec());
        if is_end {
            return answers;
        }
    }
}

/// Batches in a rank's replay ring, from a sequence number on.
pub(crate) async fn replay(engine: &MockEngine, rank: u16, from: u64) -> Vec<Batch> {
    let mut answers = replay_frames(engine, rank, from).await;
    answers.pop();
    answers.iter().map(|frames| batch(&frames[frames.len() - 2..])).collect()
}

fn batch(frames: &[Bytes]) -> Batch {
    let sequence = frames[0].as_ref().try_into().expect("a sequence is eight bytes");
    Batch { sequence: u64::from_be_bytes(sequence), payload: frames[1].clone() }
}

/// A subscriber to one rank.
pub(crate) struct Subscriber(SubSocket);

impl Subscriber {
    /// Subscribes and returns when messages arrive; `provoke` makes the rank publish a message.
    pub(crate) async fn new(engine: &MockEngine, rank: u16, provoke: impl AsyncFnMut()) -> Self {
        let mut socket = SubSocket::new();
        socket.connect(&engine.event_endpoint(rank)).await.expect("the rank listens");
        socket.subscribe("kv-events").await.expect("the rank is connected");
        let mut subscriber = Self(socket);
        subscriber.provoked(provoke).await;
        subscriber
    }

    /// Returns the first message. Calls `provoke` repeatedly, because subscriptions take effect with a delay.
    pub(crate) async fn provoked(&mut self, mut provoke: impl AsyncFnMut()) -> Batch {
        loop {
            provoke().await;
            // A timeout only costs another round.
            if let Ok(Ok(message)) = timeout(Duration::from_millis(50), self.0.recv()).await {
                return live(&message.into_vec());
            }
        }
    }

    /// Returns the next message.
    pub(crate) async fn next(&mut self) -> Batch {
        loop {
            // An error is the end of a connection; the socket reconnects on its own.
            if let Ok(message) = timeout(PATIENCE, self.0.recv()).await.expect("a message before the timeout") {
                return live(&message.into_vec());
            }
        }
    }

    /// All messages up to and including `sequence`.
    pub(crate) async fn until(&mut self, sequence: u64) -> Vec<Batch> {
        let mut batches = Vec::new();
        while batches.last().is_none_or(|batch: &Batch| batch.sequence != sequence) {
            batches.push(self.next().await);
        }
        batches
    }
}

fn live(frames: &[Bytes]) -> Batch {
    assert_eq!((frames.len(), frames[0].as_ref()), (3, b"kv-events".as_slice()));
    batch(&frames[1..])
}

/// A block as described by events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) parent: Option<u64>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) lora_name: Option<String>,
    /// Salt in this block's own event.
    pub(crate) cache_salt: Option<String>,
    /// Number of stores without a removal.
    pub(crate) copies: u32,
}

/// A rank's cache rebuilt from its events, per medium.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rebuilt {
    pub(crate) by_medium: BTreeMap<String, BTreeMap<u64, Known>>,
}

impl Rebuilt {
    pub(crate) fn from_batches<'a>(batches: impl IntoIterator<Item = &'a Batch>) -> Self {
        let mut rebuilt = Self::default();
        batches.into_iter().for_each(|batch| rebuilt.apply(batch));
        rebuilt
    }

    pub(crate) fn apply(&mut self, batch: &Batch) {
        let value = rmpv::decode::read_value(&mut batch.payload.as_ref()).expect("a batch is MessagePack");
        for event in value[1].as_array().expect("a batch has events") {
            self.event(event);
        }
    }

    fn event(&mut self, event: &Value) {
        let at = |name: &str, index: usize| match event {
            Value::Map(_) => event[name].clone(),
            Value::Array(fields) => fields.get(index).cloned().unwrap_or(Value::Nil),
            other => panic!("{other} is no event"),
        };
        let hashes = || at("block_hashes", 1).as_array().expect("hashes").iter().map(hash).collect::<Vec<_>>();
        match at("type", 0).as_str().expect("a tag") {
            "BlockStored" => {
                let held = self.by_medium.entry(text(&at("medium", 6)).expect("a medium")).or_default();
                let (tokens, size) = (at("token_ids", 3), at("block_size", 4).as_u64().expect("a block size"));
                let tokens: Vec<u32> = tokens.as_array().expect("tokens").iter().map(token).collect();
                let (named_salt, extra_keys) = (named(event, "cache_salt"), at("extra_keys", 8));
                let mut parent = Some(at("parent_block_hash", 2)).filter(|parent| !parent.is_nil()).map(|h| hash(&h));
                let lora_name = text(&at("lora_name", 7));
                let hashes = hashes();
                let size = usize::try_from(size).expect("a size");
                assert_eq!(tokens.len(), hashes.len() * size, "{event}");
                for (block_idx, (hash, tokens)) in hashes.into_iter().zip(tokens.chunks(size)).enumerate() {
                    let keys = extra_keys.as_array().and_then(|keys| keys[block_idx].as_array());
                    let salted =
                        keys.into_iter().flatten().filter_map(text).find(|key| lora_name.as_ref() != Some(key));
                    let cache_salt = named_salt.clone().or(salted);
                    let known =
                        Known { parent, tokens: tokens.to_vec(), lora_name: lora_name.clone(), cache_salt, copies: 1 };
                    let held = held.entry(hash).or_insert(Known { copies: 0, ..known.clone() });
                    held.copies += 1;
                    assert_eq!(Known { copies: 1, ..held.clone() }, known, "a hash identifies one block: {event}");
                    parent = Some(hash);
                }
            }
            "BlockRemoved" => {
                let medium = text(&at("medium", 2)).expect("a medium");
                for hash in hashes() {
                    let medium = self.by_medium.get_mut(&medium).expect("something was stored there");
                    let held = medium.get_mut(&hash).unwrap_or_else(|| panic!("a removed block was not held: {event}"));
                    held.copies -= 1;
                    if held.copies == 0 {
                        medium.remove(&hash);
                    }
                }
            }
            "AllBlocksCleared" => self.by_medium.clear(),
            other => panic!("{other:?} is no event"),
        }
    }

    /// Hashes, parents and tokens in a medium, which every dialect provides.
    pub(crate) fn blocks(&self, medium: &str) -> BTreeMap<u64, (Option<u64>, Vec<u32>)> {
        let held = self.by_medium.get(medium).into_iter().flatten();
        held.map(|(hash, known)| (*hash, (known.parent, known.tokens.clone()))).collect()
    }
}

/// The same fields from the rank itself.
pub(crate) fn held(engine: &MockEngine, rank: u16, tier: Tier) -> BTreeMap<u64, (Option<u64>, Vec<u32>)> {
    let blocks = engine.held(rank, tier);
    let entry = |block: &pointsman_trial::mock::Block| {
        (block.hash.as_u64(), (block.parent.map(|parent| parent.as_u64()), block.tokens.to_vec()))
    };
    blocks.iter().map(|block| entry(block)).collect()
}

/// Reads integers of either sign and hashes of 32 bytes as their last eight bytes.
fn hash(value: &Value) -> u64 {
    match value {
        Value::Binary(bytes) => u64::from_be_bytes(bytes[24..].try_into().expect("32 bytes")),
        value => value.as_u64().or(value.as_i64().map(i64::cast_unsigned)).expect("a hash"),
    }
}

fn token(value: &Value) -> u32 {
    u32::try_from(value.as_u64().expect("a token")).expect("a token of 32 bits")
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// A field that only the map layouts contain.
fn named(event: &Value, name: &str) -> Option<String> {
    if event.is_map() { text(&event[name]) } else { None }
}
