//! Connections to an engine's sockets: the subscription, and replay requests.
//!
//! Bytes pass from the engine through [`FrameCheck`] and a loopback connection to the ZMTP library. The library
//! allocates the announced length of a frame before its data arrives (8 GiB would end the process) and has no limit. It
//! therefore never connects to an engine, only to a local relay that checks each frame header first. A connection
//! buffers at most its [`Caps`] and a few fixed buffers. Connecting ends within [`CONNECT_WAIT`]. Without a pending
//! receive nothing is read, so a slow reader applies backpressure to the publisher. Dropping a connection closes it.
//! The effect of a loss is decided in `ingest`, the time of a reconnection by the reader.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage};

use crate::zmtp::{self, Caps, FrameCheck, PartsError, Replayed, StreamError};

/// Timeout of a connection, greeting included.
const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// Buffer size of the relay in bytes.
const PIECE_BYTES: usize = 16 << 10;

/// Reason for a closed connection or a rejected message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    #[error("no ZMTP greeting within {} s", CONNECT_WAIT.as_secs())]
    ConnectTimeout,
    #[error("the engine closed the connection")]
    Closed,
    #[error("no message on the connection although the engine has published")]
    Deaf,
    #[error("connection lost: {0}")]
    Broken(std::io::Error),
    #[error("protocol violation by the engine: {0}")]
    Stream(#[from] StreamError),
    #[error("protocol violation by the engine: {0}")]
    Protocol(ZmqError),
    #[error(transparent)]
    Parts(#[from] PartsError),
}

impl SocketError {
    /// Label value in metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::ConnectTimeout => "connect_timeout",
            Self::Closed => "closed",
            Self::Deaf => "deaf",
            Self::Broken(_) => "broken",
            Self::Stream(error) => error.name(),
            Self::Protocol(_) => "protocol",
            Self::Parts(error) => error.name(),
        }
    }
}

/// An open subscription.
pub(crate) struct Subscription {
    socket: SubSocket,
    relay: Relay,
}

impl Subscription {
    /// Connects to `tcp://HOST:PORT` and subscribes to topics that begin with `topic`.
    pub(crate) async fn connect(endpoint: &str, topic: &str, caps: Caps) -> Result<Self, SocketError> {
        within(async {
            let (mut relay, inner) = Relay::to(endpoint, caps).await?;
            let mut socket = SubSocket::new();
            // Set before the connection exists, so the subscription is its first message.
            socket.subscribe(topic).await.map_err(SocketError::Protocol)?;
            relay.carry(socket.connect(&inner)).await?;
            Ok(Self { socket, relay })
        })
        .await
    }

    /// The next message: its number and payload. Cancel-safe. The payload is a copy, because the library's small
    /// payloads share a large read buffer and would keep it alive.
    ///
    /// # Errors
    /// A malformed message, after which the connection continues; or the end of the connection.
    pub(crate) async fn receive(&mut self) -> Result<(u64, Bytes), SocketError> {
        let parts = self.relay.carry(self.socket.recv()).await?.into_vec();
        let (sequence, payload) = zmtp::live(&parts)?;
        Ok((sequence, Bytes::copy_from_slice(payload)))
    }
}

/// One replay request and its responses.
pub(crate) struct ReplayRequest {
    socket: DealerSocket,
    relay: Relay,
}

impl ReplayRequest {
    /// Requests every message from number `from` on, at `tcp://HOST:PORT`.
    pub(crate) async fn ask(endpoint: &str, from: u64, caps: Caps) -> Result<Self, SocketError> {
        within(async {
            let (mut relay, inner) = Relay::to(endpoint, caps).await?;
            let mut socket = DealerSocket::new();
            relay.carry(socket.connect(&inner)).await?;
            let mut request = ZmqMessage::from(Bytes::new());
            request.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
            relay.carry(socket.send(request)).await?;
            Ok(Self { socket, relay })
        })
        .await
    }

    /// The next response. Cancel-safe.
    ///
    /// # Errors
    /// A malformed response, or the end of the connection. Both end the replay.
    pub(crate) async fn receive(&mut self) -> Result<Replayed<Bytes>, SocketError> {
        let parts = self.relay.carry(self.socket.recv()).await?.into_vec();
        Ok(match zmtp::replayed(&parts)? {
            Replayed::Message { sequence, payload } => {
                Replayed::Message { sequence, payload: Bytes::copy_from_slice(payload) }
            }
            Replayed::End => Replayed::End,
        })
    }
}

async fn within<T>(connect: impl Future<Output = Result<T, SocketError>>) -> Result<T, SocketError> {
    tokio::time::timeout(CONNECT_WAIT, connect).await.unwrap_or(Err(SocketError::ConnectTimeout))
}

/// Relays bytes between an engine and a loopback connection, and checks the engine's frames. Ends with its owner.
struct Relay {
    task: JoinHandle<SocketError>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Relay {
    /// Connects to the engine, and opens the loopback end `tcp://127.0.0.1:PORT` for one connection.
    async fn to(endpoint: &str, caps: Caps) -> Result<(Self, String), SocketError> {
        let address = endpoint.strip_prefix("tcp://").unwrap_or(endpoint);
        let engine = TcpStream::connect(address).await.map_err(SocketError::Connect)?;
        engine.set_nodelay(true).map_err(SocketError::Connect)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(SocketError::Connect)?;
        let inner = listener.local_addr().map_err(SocketError::Connect)?;
        let task = tokio::spawn(async move {
            let accepted = listener.accept().await;
            drop(listener);
            match accepted {
                Ok((inner, SocketAddr::V4(_))) => relay(engine, inner, FrameCheck::new(caps)).await,
                Ok((_, SocketAddr::V6(_))) => SocketError::Closed, // the listener is IPv4
                Err(error) => SocketError::Broken(error),
            }
        });
        Ok((Self { task }, format!("tcp://{inner}")))
    }

    /// Runs an operation on the loopback end until the relay ends.
    async fn carry<T>(&mut self, work: impl Future<Output = Result<T, ZmqError>>) -> Result<T, SocketError> {
        tokio::select! {
            biased;
            done = work => match done {
                Ok(done) => Ok(done),
                // If the relay has ended, its error is the cause of the loopback error.
                Err(error) if !self.task.is_finished() => Err(SocketError::Protocol(error)),
                Err(_) => Err(self.end().await),
            },
            ended = &mut self.task => Err(ended.unwrap_or(SocketError::Closed)),
        }
    }

    async fn end(&mut self) -> SocketError {
        (&mut self.task).await.unwrap_or(SocketError::Closed)
    }
}

async fn relay(engine: TcpStream, inner: TcpStream, check: FrameCheck) -> SocketError {
    let ((from_engine, to_engine), (from_inner, to_inner)) = (engine.into_split(), inner.into_split());
    tokio::select! {
        biased;
        error = pass_checked(from_engine, to_inner, check) => error,
        error = pass(from_inner, to_engine) => error,
    }
}

async fn pass_checked(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut check: FrameCheck) -> SocketError {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let bytes = match from.read(&mut piece).await {
            Ok(0) => return SocketError::Closed,
            Ok(bytes) => bytes,
            Err(error) => return SocketError::Broken(error),
        };
        if let Err(error) = check.pass(&piece[..bytes]) {
            return error.into();
        }
        if let Err(error) = to.write_all(&piece[..bytes]).await {
            return SocketError::Broken(error);
        }
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> SocketError {
    match tokio::io::copy(&mut from, &mut to).await {
        Ok(_) => SocketError::Closed,
        Err(error) => SocketError::Broken(error),
    }
}
