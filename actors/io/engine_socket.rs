//! Connections to an engine's sockets: what it publishes, and what it is asked for again.
//!
//! Owns the way of the bytes: engine, [`FrameCheck`], loopback, the library that speaks ZMTP. The library makes room for
//! whatever length a frame announces (8 GiB, and the process is gone), and offers no place to look before it does; so
//! it never talks to an engine, but to a relay of ours that has looked. Promises that no connection holds more than its
//! [`Caps`] and a few fixed buffers, that connecting ends within [`CONNECT_WAIT`], that nothing is read while nobody
//! asks for it (a slow reader is felt by the publisher), and that a connection that is dropped is gone. Leaves what a
//! loss means to `ingest`, and when to try again to the reader.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage};

use crate::zmtp::{self, Caps, FrameCheck, PartsError, Replayed, StreamError};

/// The longest that connecting may take, greeting included.
const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// Bytes that the relay passes on at once.
const PIECE_BYTES: usize = 16 << 10;

/// Why a connection ended, or a message was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    #[error("no answer to the greeting within {} s", CONNECT_WAIT.as_secs())]
    ConnectTimeout,
    #[error("the peer closed the connection")]
    Closed,
    #[error("nothing comes on the connection, though there is something")]
    Deaf,
    #[error("the connection broke: {0}")]
    Broken(std::io::Error),
    #[error("the peer breaks the protocol: {0}")]
    Stream(#[from] StreamError),
    #[error("the peer breaks the protocol: {0}")]
    Protocol(ZmqError),
    #[error(transparent)]
    Parts(#[from] PartsError),
}

impl SocketError {
    /// Its name in metrics.
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

/// A standing subscription.
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
            // Known before there is a connection, so it is the first thing that is said on one.
            socket.subscribe(topic).await.map_err(SocketError::Protocol)?;
            relay.carry(socket.connect(&inner)).await?;
            Ok(Self { socket, relay })
        })
        .await
    }

    /// The next message: its number and payload. Abandoning it loses nothing. The payload is a copy: as the library gives
    /// it, a small one that is kept would keep all that was read beside it.
    ///
    /// # Errors
    /// A message of another shape, which costs only itself; or the end of the connection.
    pub(crate) async fn receive(&mut self) -> Result<(u64, Bytes), SocketError> {
        let parts = self.relay.carry(self.socket.recv()).await?.into_vec();
        let (sequence, payload) = zmtp::live(&parts)?;
        Ok((sequence, Bytes::copy_from_slice(payload)))
    }
}

/// One request for what was published before, and its answers.
pub(crate) struct ReplayRequest {
    socket: DealerSocket,
    relay: Relay,
}

impl ReplayRequest {
    /// Asks `tcp://HOST:PORT` for every message from number `from` on.
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

    /// The next answer. Abandoning it loses nothing.
    ///
    /// # Errors
    /// An answer of another shape, or the end of the connection: either way there is no more to come.
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

/// Carries bytes between an engine and a loopback connection, and looks at what the engine sends. Ends with its owner.
struct Relay {
    task: JoinHandle<SocketError>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Relay {
    /// Connects to the engine, and opens the loopback end: `tcp://127.0.0.1:PORT`, for one connection.
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
                Ok((_, SocketAddr::V6(_))) => SocketError::Closed, // it listens on IPv4
                Err(error) => SocketError::Broken(error),
            }
        });
        Ok((Self { task }, format!("tcp://{inner}")))
    }

    /// Does something on the loopback end, for as long as the relay runs.
    async fn carry<T>(&mut self, work: impl Future<Output = Result<T, ZmqError>>) -> Result<T, SocketError> {
        tokio::select! {
            biased;
            done = work => match done {
                Ok(done) => Ok(done),
                // What broke the loopback end is known best by the relay, if it has ended.
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
