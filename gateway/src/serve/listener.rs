//! A listener and its connections.
//!
//! Owns the socket and the connections accepted on it, plain or over TLS, HTTP/1.1 only. Promises that there are never
//! more connections than it may have, that a client that is slow to say what it wants, or takes nothing of what it is
//! told, is cut off without harm to others,
//! and that a drain accepts nothing new, closes idle connections, lets requests in flight end, and says how many it had
//! to break. Leaves what is answered to the routes, and how long a body or an answer may take to whoever reads it.

mod takes;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::response::Response;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics::{Counter, Gauge};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower::Service as _;

use takes::Takes;

/// Longest head of a request, and most that is kept of a body or an answer that the other side does not take: together
/// with the limit of connections this bounds what they cost. Longer heads are answered with 431, and so are those of
/// more than hyper's 100 headers.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// How long the listener rests when the system has no descriptor for another connection.
const ACCEPT_REST: Duration = Duration::from_millis(20);

/// How often trouble of accepting is logged.
const ACCEPT_TROUBLE_LOGGED_EVERY: Duration = Duration::from_secs(10);

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Connections that were still busy at the deadline, and were broken.
    pub broken: usize,
}

/// What a listener takes.
#[derive(Clone)]
pub(crate) struct ListenerOptions {
    /// The listener's name in logs and metrics.
    pub(crate) name: &'static str,
    /// Open connections; more wait in the system's queue.
    pub(crate) connections_max: u32,
    /// How long a TLS handshake, and then each head of a request, may take; so long a connection may be idle, too.
    pub(crate) head_timeout: Duration,
    /// How long a client may take nothing of what it is sent.
    pub(crate) stall_max: Duration,
    /// TLS; `None`: plain HTTP.
    pub(crate) tls: Option<Arc<rustls::ServerConfig>>,
}

/// A listening socket. Dropping it closes the socket and breaks its connections.
pub(crate) struct Listener {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: JoinHandle<JoinSet<()>>,
}

impl Listener {
    /// Listens at `address` and answers with `routes`, which find the peer's address in [`ConnectInfo`].
    pub(crate) async fn start(address: SocketAddr, options: ListenerOptions, routes: Router) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let (stop, stopped) = watch::channel(false);
        let connections_max = options.connections_max.max(1) as usize;
        let acceptor = Acceptor {
            listener,
            free: Arc::new(Semaphore::new(connections_max.min(Semaphore::MAX_PERMITS))),
            meters: Meters::new(options.name),
            trouble_logged: None,
            name: options.name,
        };
        let protocol = Arc::new(Protocol::new(options, routes, &acceptor.meters));
        Ok(Self { address, stop, task: tokio::spawn(accept(acceptor, protocol, stopped)) })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the socket, lets requests in flight end, and breaks what is left at the deadline, after `before_breaking`.
    pub(crate) async fn drain(self, deadline: Duration, before_breaking: impl FnOnce()) -> Drained {
        self.stop.send_replace(true);
        let Ok(mut connections) = self.task.await else { return Drained { broken: 0 } };
        let all_ended = async { while connections.join_next().await.is_some() {} };
        if timeout(deadline, all_ended).await.is_ok() {
            return Drained { broken: 0 };
        }
        before_breaking();
        while connections.try_join_next().is_some() {}
        let broken = connections.len();
        connections.shutdown().await;
        Drained { broken }
    }
}

/// What is counted of one listener.
struct Meters {
    connections: Gauge,
    handshakes_refused: Counter,
    accept_errors: Counter,
}

impl Meters {
    fn new(name: &'static str) -> Self {
        Self {
            connections: metrics::gauge!("pointsman_gateway_connections", "listener" => name),
            handshakes_refused: metrics::counter!("pointsman_gateway_handshakes_refused_total", "listener" => name),
            accept_errors: metrics::counter!("pointsman_gateway_accept_errors_total", "listener" => name),
        }
    }
}

/// A place among the connections, as long as one of them has it.
struct Place {
    connections: Gauge,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.decrement(1.0);
    }
}

/// Where connections come from.
struct Acceptor {
    listener: TcpListener,
    free: Arc<Semaphore>,
    meters: Meters,
    trouble_logged: Option<Instant>,
    name: &'static str,
}

impl Acceptor {
    /// The next connection. Cancel-safe: nothing accepted is lost.
    async fn next(&mut self) -> (TcpStream, SocketAddr, Place) {
        let permit = Arc::clone(&self.free).acquire_owned().await.expect("nobody closes the semaphore");
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    self.meters.connections.increment(1.0);
                    let place = Place { connections: self.meters.connections.clone(), _permit: permit };
                    return (stream, peer, place);
                }
                Err(error) => {
                    self.meters.accept_errors.increment(1);
                    self.log(&error);
                    sleep(ACCEPT_REST).await;
                }
            }
        }
    }

    fn log(&mut self, error: &io::Error) {
        if self.trouble_logged.is_none_or(|logged| logged.elapsed() >= ACCEPT_TROUBLE_LOGGED_EVERY) {
            self.trouble_logged = Some(Instant::now());
            tracing::warn!(listener = self.name, %error, "cannot accept connections; said at most every ten seconds");
        }
    }
}

async fn accept(mut from: Acceptor, protocol: Arc<Protocol>, mut stopped: watch::Receiver<bool>) -> JoinSet<()> {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = ended(&mut stopped) => return connections,
            // Those that have ended are only forgotten: how a client goes is its own affair.
            Some(_) = connections.join_next() => {}
            (stream, peer, place) = from.next() => {
                let (protocol, stopped) = (Arc::clone(&protocol), stopped.clone());
                connections.spawn(async move {
                    protocol.converse(stream, peer, stopped).await;
                    drop(place);
                });
            }
        }
    }
}

/// How one connection is spoken to.
struct Protocol {
    http: http1::Builder,
    tls: Option<TlsAcceptor>,
    head_timeout: Duration,
    stall_max: Duration,
    handshakes_refused: Counter,
    routes: Router,
}

impl Protocol {
    fn new(options: ListenerOptions, routes: Router, meters: &Meters) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(options.head_timeout);
        // A buffer may be overshot by one read, a head may not.
        http.max_header_size(HEAD_BYTES_MAX).max_buf_size(HEAD_BYTES_MAX);
        Self {
            http,
            tls: options.tls.map(TlsAcceptor::from),
            head_timeout: options.head_timeout,
            stall_max: options.stall_max,
            handshakes_refused: meters.handshakes_refused.clone(),
            routes,
        }
    }

    /// Speaks until either side has had enough.
    async fn converse(&self, stream: TcpStream, peer: SocketAddr, mut stopped: watch::Receiver<bool>) {
        // Tokens are small and wanted at once; a connection works without it too.
        let _ = stream.set_nodelay(true);
        let Some(tls) = &self.tls else { return self.speak(stream, peer, stopped).await };
        let shaken = tokio::select! {
            biased;
            () = ended(&mut stopped) => return,
            shaken = timeout(self.head_timeout, tls.accept(stream)) => shaken,
        };
        if let Ok(Ok(stream)) = shaken {
            self.speak(stream, peer, stopped).await;
        } else {
            self.handshakes_refused.increment(1);
        }
    }

    async fn speak<S>(&self, stream: S, peer: SocketAddr, mut stopped: watch::Receiver<bool>)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let service = service_fn(|request| self.answer(request, peer));
        let conversation = self.http.serve_connection(TokioIo::new(Takes::new(stream, self.stall_max)), service);
        tokio::pin!(conversation);
        tokio::select! {
            biased;
            // How a client goes is its own affair.
            _ = conversation.as_mut() => {}
            () = ended(&mut stopped) => {
                conversation.as_mut().graceful_shutdown();
                let _ = conversation.await;
            }
        }
    }

    fn answer(
        &self,
        mut request: Request<Incoming>,
        peer: SocketAddr,
    ) -> impl Future<Output = Result<Response, Infallible>> + use<> {
        request.extensions_mut().insert(ConnectInfo(peer));
        self.routes.clone().call(request)
    }
}

/// Comes back when the listener is told to stop, or is gone.
async fn ended(stopped: &mut watch::Receiver<bool>) {
    // Either answer means the same.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

#[cfg(test)]
mod tests;
