//! A publisher of KV events on plain TCP that follows the protocol, and building blocks for invalid ones.
//!
//! The module encodes ZMTP 3.0 for a publisher and a replay socket. Valid batches come from the writer of the engine
//! model. It sends only the bytes that a test requests. It uses no ZeroMQ library, so tests control the bytes on the
//! wire.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pointsman::protocol::{EngineHash, KvEvent, KvEventsConfig, RouterEvent};
use pointsman_trial::engine::{self, Block, CacheEvent, Tier};
use pointsman_trial::kv_events::{Dialect, Encoder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

pub(crate) const TOPIC: &str = "kv-events";

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

// ---- frames ----

pub(crate) fn greeting() -> Vec<u8> {
    greeting_of("NULL")
}

pub(crate) fn greeting_of(mechanism: &str) -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
    bytes.extend_from_slice(mechanism.as_bytes());
    bytes.resize(64, 0);
    bytes
}

/// A READY command with the socket type.
pub(crate) fn ready(socket_type: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend((socket_type.len() as u32).to_be_bytes());
    body.extend_from_slice(socket_type.as_bytes());
    frame(COMMAND, &body)
}

/// Greeting and READY.
pub(crate) fn handshake(socket_type: &str) -> Vec<u8> {
    [greeting(), ready(socket_type)].concat()
}

/// A frame header with flags and a length. The body may be missing.
pub(crate) fn header(flags: u8, bytes: u64) -> Vec<u8> {
    match u8::try_from(bytes) {
        Ok(short) => vec![flags, short],
        Err(_) => [&[flags | LONG][..], &bytes.to_be_bytes()].concat(),
    }
}

pub(crate) fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    [&header(flags, body.len() as u64)[..], body].concat()
}

pub(crate) fn message(parts: &[&[u8]]) -> Vec<u8> {
    let last = parts.len().saturating_sub(1);
    parts.iter().enumerate().flat_map(|(n, part)| frame(if n < last { MORE } else { 0 }, part)).collect()
}

pub(crate) fn live_message(sequence: u64, payload: &[u8]) -> Vec<u8> {
    message(&[TOPIC.as_bytes(), &sequence.to_be_bytes(), payload])
}

/// A replay message, in the framing without a topic.
pub(crate) fn replay_message(sequence: u64, payload: &[u8]) -> Vec<u8> {
    message(&[b"", &sequence.to_be_bytes(), payload])
}

/// Flags and body of the next frame from a correct peer.
async fn read_frame(stream: &mut (impl AsyncReadExt + Unpin)) -> std::io::Result<(u8, Vec<u8>)> {
    let flags = stream.read_u8().await?;
    let bytes = if flags & LONG == 0 { u64::from(stream.read_u8().await?) } else { stream.read_u64().await? };
    assert!(bytes < 1 << 16, "a reader announces {bytes} bytes");
    let mut body = vec![0; bytes as usize];
    stream.read_exact(&mut body).await?;
    Ok((flags, body))
}

/// Reads the next message and skips commands.
async fn read_message(stream: &mut (impl AsyncReadExt + Unpin)) -> std::io::Result<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    loop {
        let (flags, body) = read_frame(stream).await?;
        if flags & COMMAND == 0 {
            parts.push(body);
            if flags & MORE == 0 {
                return Ok(parts);
            }
        }
    }
}

// ---- batches ----

/// Encodes a batch of events as an engine writes it at `time`, which distinguishes batches of equal events. Each event
/// has the tokens of its stored blocks. All stores of a batch have one block size.
pub(crate) fn batch(dialect: Dialect, time: f64, events: &[(RouterEvent, &[u32])]) -> Vec<u8> {
    let block_size = events.iter().map(|(event, tokens)| block_size(event, tokens)).max().unwrap_or(0);
    let encoder = Encoder { format: dialect.into(), block_size, rank: 0, lora_ids: Arc::default() };
    let events: Vec<CacheEvent> = events.iter().flat_map(|(event, tokens)| cache_events(event, tokens)).collect();
    encoder.batch(time, &events)
}

/// Number of tokens per stored block; 0 for other events.
fn block_size(event: &RouterEvent, tokens: &[u32]) -> u32 {
    (tokens.len() / event.data.block_count().max(1)) as u32
}

/// The events of an engine for `event`, which publishes each removed block as an event of its own.
fn cache_events(event: &RouterEvent, tokens: &[u32]) -> Vec<CacheEvent> {
    let tier = Tier::Device;
    match &event.data {
        KvEvent::Stored { parent, blocks } => {
            let hashes = blocks.iter().map(|block| engine_hash(block.engine_hash));
            let parents = std::iter::once(parent.map(engine_hash)).chain(hashes.clone().map(Some));
            let chunks = tokens.chunks_exact(block_size(event, tokens) as usize);
            let blocks = hashes.zip(parents).zip(chunks).zip(0..).map(|(((hash, parent), tokens), depth)| {
                Arc::new(Block { hash, parent, depth, tokens: tokens.into(), lora_name: None, cache_salt: None })
            });
            vec![CacheEvent::Stored { tier, blocks: blocks.collect() }]
        }
        KvEvent::Removed { blocks } => {
            blocks.iter().map(|block| CacheEvent::Removed { tier, hash: engine_hash(*block) }).collect()
        }
        KvEvent::Offloaded { .. } | KvEvent::TierCleared => panic!("not of the device"),
        KvEvent::Cleared => vec![CacheEvent::Cleared],
        KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => unreachable!("the engine has one cache group"),
    }
}

/// The engine's hash of 32 bytes, of which it publishes the last eight.
fn engine_hash(hash: EngineHash) -> engine::EngineHash {
    let mut bytes = [0; 32];
    bytes[24..].copy_from_slice(&hash.0.to_be_bytes());
    engine::EngineHash(bytes)
}

// ---- a publisher that keeps the rules ----

/// Event and replay sockets of one engine rank.
pub(crate) struct Publisher {
    live: SocketAddr,
    replay: SocketAddr,
    state: Arc<Mutex<State>>,
    tasks: Vec<JoinHandle<()>>,
    connections: Arc<Connections>,
    cut: watch::Sender<u64>,
}

#[derive(Default)]
struct Connections {
    accepted: AtomicUsize,
    open: AtomicUsize,
}

struct State {
    /// Number and payload of the most recent messages.
    ring: VecDeque<(u64, Vec<u8>)>,
    ring_max: usize,
    next: u64,
    replays_with_topic: bool,
    subscribers: Vec<mpsc::UnboundedSender<Vec<u8>>>,
    /// Connections that have not subscribed yet.
    greeting: usize,
}

impl State {
    fn keep(&mut self, payload: &[u8]) -> u64 {
        let sequence = self.next;
        self.next += 1;
        self.ring.push_back((sequence, payload.to_vec()));
        while self.ring.len() > self.ring_max {
            self.ring.pop_front();
        }
        sequence
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        let _ = self.cut.send(u64::MAX);
    }
}

impl Publisher {
    /// A publisher that keeps the last `ring_max` messages for replay.
    pub(crate) async fn start(ring_max: usize, replays_with_topic: bool) -> Self {
        let state = State {
            ring: VecDeque::new(),
            ring_max,
            next: 0,
            replays_with_topic,
            subscribers: Vec::new(),
            greeting: 0,
        };
        let state = Arc::new(Mutex::new(state));
        let (live, replay) = (listen().await, listen().await);
        let addresses = [&live, &replay].map(|listener| listener.local_addr().expect("bound"));
        let (connections, cut) = (Arc::new(Connections::default()), watch::Sender::new(0));
        let tasks = vec![
            tokio::spawn(accept(live, Arc::clone(&state), Arc::clone(&connections), cut.subscribe(), publish_to)),
            tokio::spawn(accept(replay, Arc::clone(&state), Arc::clone(&connections), cut.subscribe(), answer)),
        ];
        let [live, replay] = addresses;
        Self { live, replay, state, tasks, connections, cut }
    }

    pub(crate) fn kv_events(&self) -> KvEventsConfig {
        kv_events(self.live, Some(self.replay))
    }

    /// Sends to all subscribers. Returns the message's number.
    pub(crate) fn publish(&self, payload: &[u8]) -> u64 {
        let mut state = self.state();
        let sequence = state.keep(payload);
        let message = live_message(sequence, payload);
        state.subscribers.retain(|subscriber| subscriber.send(message.clone()).is_ok());
        sequence
    }

    /// Publishes as for a subscriber with a full queue: only a replay can deliver the message.
    pub(crate) fn publish_unheard(&self, payload: &[u8]) -> u64 {
        self.state().keep(payload)
    }

    /// Restarts the message numbers with an empty ring. Connections stay open.
    pub(crate) fn forget(&self) {
        let mut state = self.state();
        state.next = 0;
        state.ring.clear();
    }

    /// Closes every connection and accepts new ones.
    pub(crate) fn disconnect(&self) {
        self.state().subscribers.clear();
        self.cut.send_modify(|cut| *cut += 1);
    }

    /// Open connections.
    pub(crate) fn connections(&self) -> usize {
        self.connections.open.load(Ordering::SeqCst)
    }

    /// Connections accepted so far.
    pub(crate) fn accepted(&self) -> usize {
        self.connections.accepted.load(Ordering::SeqCst)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("lock not poisoned")
}

pub(crate) fn kv_events(live: SocketAddr, replay: Option<SocketAddr>) -> KvEventsConfig {
    let endpoint = |address| format!("tcp://{address}");
    KvEventsConfig { endpoint: endpoint(live), replay_endpoint: replay.map(endpoint), topic: TOPIC.to_owned() }
}

pub(crate) async fn listen() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port")
}

async fn accept<F>(
    listener: TcpListener,
    state: Arc<Mutex<State>>,
    connections: Arc<Connections>,
    cut: watch::Receiver<u64>,
    serve: impl Fn(TcpStream, Arc<Mutex<State>>) -> F,
) where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        connections.accepted.fetch_add(1, Ordering::SeqCst);
        connections.open.fetch_add(1, Ordering::SeqCst);
        let (served, connections) = (serve(stream, Arc::clone(&state)), Arc::clone(&connections));
        let mut cut = cut.clone();
        cut.mark_unchanged();
        tokio::spawn(async move {
            tokio::select! {
                biased;
                _ = cut.changed() => {}
                _ = served => {}
            }
            connections.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

async fn shake_hands(stream: &mut TcpStream, socket_type: &str) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.write_all(&handshake(socket_type)).await?;
    stream.read_exact(&mut [0; 64]).await?;
    read_frame(stream).await.map(drop)
}

async fn publish_to(mut stream: TcpStream, state: Arc<Mutex<State>>) -> std::io::Result<()> {
    lock(&state).greeting += 1;
    let subscription = async {
        shake_hands(&mut stream, "PUB").await?;
        read_message(&mut stream).await
    };
    let subscription = subscription.await;
    let (sender, mut messages) = mpsc::unbounded_channel();
    {
        let mut state = lock(&state);
        state.greeting -= 1;
        assert_eq!(subscription?, [[b"\x01", TOPIC.as_bytes()].concat()], "the subscription");
        state.subscribers.push(sender);
    }
    loop {
        tokio::select! {
            biased;
            message = messages.recv() => match message {
                Some(message) => stream.write_all(&message).await?,
                None => return Ok(()),
            },
            _ = stream.read_u8() => return Ok(()), // end of connection: subscribers send nothing more
        }
    }
}

async fn answer(mut stream: TcpStream, state: Arc<Mutex<State>>) -> std::io::Result<()> {
    shake_hands(&mut stream, "ROUTER").await?;
    loop {
        let request = read_message(&mut stream).await?;
        assert_eq!((request.len(), request[0].len()), (2, 0), "{request:?}");
        let from = u64::from_be_bytes(request[1][..].try_into().expect("eight bytes"));
        // The requester has already sent its subscription, and messages published from now on must reach it.
        while lock(&state).greeting > 0 {
            tokio::task::yield_now().await;
        }
        let answers = {
            let state = lock(&state);
            let topic = state.replays_with_topic.then_some(TOPIC.as_bytes());
            let parts = |sequence: u64, payload: &[u8]| match topic {
                Some(topic) => message(&[b"", topic, &sequence.to_be_bytes(), payload]),
                None => replay_message(sequence, payload),
            };
            let asked = state.ring.iter().filter(|(sequence, _)| *sequence >= from);
            let answers = asked.flat_map(|(sequence, payload)| parts(*sequence, payload));
            answers.chain(parts(u64::MAX, b"")).collect::<Vec<u8>>()
        };
        stream.write_all(&answers).await?;
    }
}
