//! Publisher process: sends the stream's batches at a constant rate and replays the most recent ones.
//!
//! It listens on three consecutive ports: PUB, replay, and progress. The PUB protocol is implemented here because
//! libraries offer no control over the queue length per subscriber.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::interval;
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::stream::{EVENTS_PER_SECOND, Stream, batch};

/// First argument that runs the benchmark binary as a publisher.
pub(super) const COMMAND: &str = "publish";

const TOPIC: &[u8] = b"kv-events";

#[derive(Default)]
struct State {
    published: u64,
    prompt: u64,
    ring: VecDeque<(u64, Bytes)>,
    subscriber: Option<mpsc::Sender<Bytes>>,
}

/// Arguments: `EVENTS_PER_MESSAGE HIGH_WATER_MARK RING_MESSAGES MESSAGES`. Prints its first port and runs until it is
/// killed.
pub(super) async fn run(arguments: &[String]) {
    let numbers: Vec<u64> = arguments.iter().map(|argument| argument.parse().expect("a number")).collect();
    let [events, high_water_mark, ring_messages, messages] = numbers[..] else { panic!("four numbers") };
    let (first, [live, replay, progress]) = listeners().await;
    let state = Arc::new(Mutex::new(State::default()));
    tokio::spawn(take_subscribers(live, Arc::clone(&state), high_water_mark as usize));
    tokio::spawn(answer_replays(replay, Arc::clone(&state)));
    tokio::spawn(serve_progress(progress, Arc::clone(&state)));
    println!("{first}");
    while state.lock().expect("lock not poisoned").subscriber.is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (begun, mut stream, mut pace) = (Instant::now(), Stream::default(), interval(Duration::from_millis(1)));
    let mut published = 0;
    loop {
        pace.tick().await;
        let due = begun.elapsed().as_micros() as u64 * EVENTS_PER_SECOND / events / 1_000_000;
        while published < due.min(messages) {
            let payload = Bytes::from(batch(&mut stream, published, events));
            let mut state = state.lock().expect("lock not poisoned");
            if state.ring.len() == ring_messages as usize {
                state.ring.pop_front();
            }
            state.ring.push_back((published, payload.clone()));
            if let Some(subscriber) = &state.subscriber {
                let _ = subscriber.try_send(framed(published, &payload)); // dropped beyond the high-water mark
            }
            published += 1;
            (state.published, state.prompt) = (published, stream.prompt());
        }
    }
}

async fn listeners() -> (u16, [TcpListener; 3]) {
    for first in (21_000..31_000).step_by(3) {
        let at = |offset: u16| TcpListener::bind(("127.0.0.1", first + offset));
        if let (Ok(live), Ok(replay), Ok(progress)) = (at(0).await, at(1).await, at(2).await) {
            return (first, [live, replay, progress]);
        }
    }
    panic!("no three free ports in a row");
}

fn framed(sequence: u64, payload: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(payload.len() + 40);
    out.put_slice(&[1, TOPIC.len() as u8]);
    out.put_slice(TOPIC);
    out.put_slice(&[1, 8]);
    out.put_u64(sequence);
    match u8::try_from(payload.len()) {
        Ok(length) => out.put_slice(&[0, length]),
        Err(_) => {
            out.put_u8(2);
            out.put_u64(payload.len() as u64);
        }
    }
    out.put_slice(payload);
    out.freeze()
}

async fn take_subscribers(listener: TcpListener, state: Arc<Mutex<State>>, high_water_mark: usize) {
    loop {
        let (stream, _) = listener.accept().await.expect("connection accepted");
        let state = Arc::clone(&state);
        tokio::spawn(async move {
            // An error means that the subscriber disconnected.
            let _ = serve_subscriber(stream, &state, high_water_mark).await;
        });
    }
}

/// The part of ZMTP 3.0 (ZeroMQ RFC 23) that a PUB socket needs.
async fn serve_subscriber(mut stream: TcpStream, state: &Mutex<State>, mark: usize) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    stream.read_exact(&mut greeting).await?;
    let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB";
    stream.write_all(&[4, ready.len() as u8]).await?;
    stream.write_all(ready).await?;
    loop {
        let mut head = [0; 2];
        stream.read_exact(&mut head).await?;
        let mut body = vec![0; head[1].into()];
        stream.read_exact(&mut body).await?;
        let is_command = head[0] & 4 != 0;
        if !is_command {
            break; // the subscription
        }
    }
    let (sender, mut waiting) = mpsc::channel(mark);
    state.lock().expect("lock not poisoned").subscriber = Some(sender);
    while let Some(message) = waiting.recv().await {
        stream.write_all(&message).await?;
    }
    Ok(())
}

async fn answer_replays(listener: TcpListener, state: Arc<Mutex<State>>) {
    let mut socket = RouterSocket::new();
    let listener = listener.into_std().expect("a TCP listener");
    socket.bind_listener(listener).await.expect("listener is bound");
    loop {
        let Ok(request) = socket.recv().await.map(ZmqMessage::into_vec) else { continue };
        let [identity, _, from] = &request[..] else { continue };
        let from = u64::from_be_bytes(from.as_ref().try_into().expect("eight bytes"));
        let kept: Vec<_> = {
            let state = state.lock().expect("lock not poisoned");
            state.ring.iter().filter(|(sequence, _)| *sequence >= from).cloned().collect()
        };
        for (sequence, payload) in kept.into_iter().chain([(u64::MAX, Bytes::new())]) {
            let sequence = Bytes::copy_from_slice(&sequence.to_be_bytes());
            let frames = vec![identity.clone(), Bytes::new(), sequence, payload];
            if socket.send(ZmqMessage::try_from(frames).expect("four frames")).await.is_err() {
                break; // the reader requests the replay again
            }
        }
    }
}

async fn serve_progress(listener: TcpListener, state: Arc<Mutex<State>>) {
    let (mut stream, _) = listener.accept().await.expect("connection accepted");
    while stream.read_u8().await.is_ok() {
        let (published, prompt) = {
            let state = state.lock().expect("lock not poisoned");
            (state.published, state.prompt)
        };
        let progress = [published.to_be_bytes(), prompt.to_be_bytes()].concat();
        if stream.write_all(&progress).await.is_err() {
            return;
        }
    }
}

/// Progress of a publisher, a few milliseconds old.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Messages published.
    pub(super) published: AtomicU64,
    /// Number of the prompt being stored.
    pub(super) prompt: AtomicU64,
}

/// Polls the publisher's progress until the connection ends.
pub(super) async fn poll_progress(port: u16, progress: Arc<Progress>) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.set_nodelay(true)?;
    let mut pace = interval(Duration::from_millis(2));
    loop {
        pace.tick().await;
        stream.write_u8(0).await?;
        progress.published.store(stream.read_u64().await?, Ordering::Relaxed);
        progress.prompt.store(stream.read_u64().await?, Ordering::Relaxed);
    }
}
