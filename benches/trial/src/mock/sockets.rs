//! Sockets of a rank: PUB for events, ROUTER for replay.
//!
//! Handles frames, ports and the end of connections. Invalid frames of a client are ignored at worst. Closing a socket
//! disconnects every client. The length of incoming frames is unbounded, because the ZMQ library has no limit: do not
//! expose these sockets to open networks. The publisher provides the messages.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use zeromq::{MultiPeerBackend, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use super::faults::{Fault, FaultBoard};
use super::publisher::EventMessage;

/// Topic of event messages, which subscribers select.
pub(crate) const TOPIC: &str = "kv-events";

/// Sequence number that marks the end of a replay.
const REPLAY_END: u64 = u64::MAX;

/// Timeout for sending one replay message to a slow client.
const REPLAY_WAIT: Duration = Duration::from_secs(5);

/// Range of automatically selected ports. It is below the system's ephemeral ports for outgoing connections, so that an
/// engine can bind its ports again after a restart.
const CHOSEN_PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Maximum number of checks of a closed socket for clients that joined late, and the delay between checks.
const CLOSE_ROUNDS_MAX: u32 = 1_000;
const CLOSE_ROUND: Duration = Duration::from_millis(10);

/// Sends the batches of a rank.
pub(crate) struct EventSocket(PubSocket);

impl EventSocket {
    pub(crate) async fn open(listener: TcpListener) -> Result<Self, ZmqError> {
        let mut socket = PubSocket::new();
        socket.bind_listener(listener).await?;
        Ok(Self(socket))
    }

    /// Sends messages. Slow subscribers lose some, as with real engines.
    pub(crate) async fn send(&mut self, messages: Vec<EventMessage>) {
        for EventMessage { sequence, payload } in messages {
            let frames = vec![Bytes::from_static(TOPIC.as_bytes()), sequence_frame(sequence), payload];
            let message = ZmqMessage::try_from(frames).expect("three frames");
            // A PUB socket drops messages that it cannot send.
            let _ = self.0.send(message).await;
        }
    }

    pub(crate) async fn close(self) {
        close(self.0).await;
    }
}

/// Serves the replay requests of a rank.
pub(crate) struct ReplaySocket {
    socket: RouterSocket,
    with_topic: bool,
}

impl ReplaySocket {
    pub(crate) async fn open(listener: TcpListener, with_topic: bool) -> Result<Self, ZmqError> {
        let mut socket = RouterSocket::new();
        socket.bind_listener(listener).await?;
        Ok(Self { socket, with_topic })
    }

    /// Serves requests until `stop` is sent or dropped, then closes.
    pub(crate) async fn serve(
        mut self,
        replay: impl Fn(u64) -> Vec<EventMessage> + Send + Sync,
        faults: Arc<FaultBoard>,
        mut stop: oneshot::Receiver<()>,
    ) {
        loop {
            let request = tokio::select! {
                biased;
                _ = &mut stop => break,
                request = self.socket.recv() => request,
            };
            match request.map(ZmqMessage::into_vec) {
                Ok(frames) => self.answer(&frames, &replay, &faults).await,
                Err(ZmqError::NoMessage) => break,
                // An error of one client does not affect the others.
                Err(_) => {}
            }
        }
        close(self.socket).await;
    }

    async fn answer(&mut self, frames: &[Bytes], replay: impl Fn(u64) -> Vec<EventMessage>, faults: &FaultBoard) {
        let [identity, delimiter, start] = frames else { return };
        let Ok(start) = <[u8; 8]>::try_from(start.as_ref()) else { return };
        if !delimiter.is_empty() {
            return;
        }
        if faults.get().mute_replay {
            faults.count(Fault::MuteReplay);
            return;
        }
        let end = EventMessage { sequence: REPLAY_END, payload: Bytes::new() };
        for message in replay(u64::from_be_bytes(start)).into_iter().chain([end]) {
            let mut answer = vec![identity.clone(), Bytes::new()];
            if self.with_topic {
                let is_end = message.sequence == REPLAY_END;
                answer.push(if is_end { Bytes::new() } else { Bytes::from_static(TOPIC.as_bytes()) });
            }
            answer.extend([sequence_frame(message.sequence), message.payload]);
            let answer = ZmqMessage::try_from(answer).expect("not empty");
            if !matches!(timeout(REPLAY_WAIT, self.socket.send(answer)).await, Ok(Ok(()))) {
                return;
            }
        }
    }
}

fn sequence_frame(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

/// Stops listening and ends every connection.
async fn close(mut socket: impl Socket) {
    let backend: Arc<dyn MultiPeerBackend> = socket.backend();
    // Sockets that cannot be unbound are closed by the drop.
    drop(socket.unbind_all().await);
    drop(socket);
    // A client whose handshake is in progress joins the closed socket, where it would wait indefinitely.
    tokio::spawn(async move {
        for _ in 0..CLOSE_ROUNDS_MAX {
            if Arc::strong_count(&backend) == 1 {
                return;
            }
            backend.shutdown();
            sleep(CLOSE_ROUND).await;
        }
    });
}

/// Binds `count` consecutive ports from `first` on, ports that the system assigns if it is 0, or any free range without
/// `first`.
///
/// # Errors
/// The address that is taken, with the system's reason.
pub(crate) fn listen(host: IpAddr, first: Option<u16>, count: u16) -> Result<Vec<TcpListener>, (SocketAddr, String)> {
    static CHOSEN: AtomicU32 = AtomicU32::new(0);
    if first == Some(0) {
        let address = SocketAddr::new(host, 0);
        let bind = |_| TcpListener::bind(address).map_err(|error| (address, error.to_string()));
        return (0..count).map(bind).collect();
    }
    if let Some(first) = first {
        return listen_on(host, first, count);
    }
    let ports = u32::from(CHOSEN_PORTS.end - CHOSEN_PORTS.start).saturating_sub(u32::from(count)).max(1);
    let mut answer = Err((SocketAddr::new(host, 0), format!("no {count} free ports in {CHOSEN_PORTS:?}")));
    for _ in 0..=ports / u32::from(count.max(1)) {
        // Each process starts at a different port, so that processes rarely collide.
        let begin = process::id().wrapping_mul(0x9e37_79b1);
        let offset = begin.wrapping_add(CHOSEN.fetch_add(count.into(), Ordering::Relaxed)) % ports;
        answer = listen_on(host, CHOSEN_PORTS.start + u16::try_from(offset).expect("the range is of ports"), count);
        if answer.is_ok() {
            break;
        }
    }
    answer
}

fn listen_on(host: IpAddr, first: u16, count: u16) -> Result<Vec<TcpListener>, (SocketAddr, String)> {
    (0..count)
        .map(|n| {
            let Some(port) = first.checked_add(n) else {
                return Err((SocketAddr::new(host, first), format!("no {count} ports from {first} on")));
            };
            let address = SocketAddr::new(host, port);
            TcpListener::bind(address).map_err(|error| (address, error.to_string()))
        })
        .collect()
}
