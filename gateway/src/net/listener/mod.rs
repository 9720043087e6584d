//! Listener and its connections: plain or TLS, HTTP/1.1 or HTTP/2 (h2c with prior knowledge, or ALPN).
//!
//! Limits the number of connections; further ones receive one response and are closed if the listener has routes for
//! them (`Overflow`). A client that sends or reads too slowly is cut off without effect on others. A drain accepts no
//! new connections and serves every request that arrives on open ones. Each response then carries `Connection: close`.
//! A connection of HTTP/2 receives GOAWAY behind the last of its responses. Idle connections close after the last request
//! in flight. The drain reports the number of requests broken at its deadline.
//! Routes and body readers have timeouts of their own.

mod acceptor;
mod busy;
mod leaving;
mod passed;
mod socket;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::ConnectInfo;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, StatusCode, Version};
use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use metrics::Counter;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tower::Service as _;

use acceptor::{Accepted, Acceptor};
use busy::{Activity, Connection, keep_busy};
use leaving::ClientStream;
pub(crate) use passed::PassedSockets;
pub use socket::ListenError;
pub(crate) use socket::{Reserved, ReservedSockets};

use super::budget::RequestBudget;
use super::cores::{Cores, Streams};

/// Maximum length of a request head, and of buffered unread data; HTTP/1.1 may exceed it by one read. Longer heads, and
/// heads with more headers, are rejected with 431.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;

/// Maximum headers of a request or response of HTTP/1.1; the parser clears the places of all for each message. Those of
/// HTTP/2 are limited by their bytes.
pub(super) const HEADERS_MAX: usize = 400;

/// Maximum unread bytes of the bodies of an HTTP/2 connection.
const WINDOW_BYTES: u32 = 256 << 10;

/// Maximum unsent bytes of a response of HTTP/2.
const SEND_BYTES_MAX: usize = 64 << 10;

/// Maximum lifetime of a connection above the limit, from handshake to end of response.
const OVERFLOW_TIME_MAX: Duration = Duration::from_secs(3);

/// Maximum idle time of such a connection: a client with a request sends it immediately, and others are waiting.
const OVERFLOW_HEAD_TIME_MAX: Duration = Duration::from_millis(300);

/// Time without any request before a drain closes idle connections. The next request of a client whose last response did
/// not announce the close may be on its way.
const QUIET: Duration = Duration::from_secs(1);

/// Result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Requests broken at the deadline.
    pub broken: usize,
}

/// Listener options.
#[derive(Clone)]
pub(crate) struct ListenerOptions {
    /// Name in logs and metrics.
    pub(crate) name: &'static str,
    /// Maximum open connections.
    pub(crate) connections_max: u32,
    /// Handling of further connections; `None` leaves them in the kernel's backlog.
    pub(crate) overflow: Option<Overflow>,
    /// Timeout of a TLS handshake and of each request head; also the idle timeout.
    pub(crate) head_timeout: Duration,
    /// Timeout of a client that does not read.
    pub(crate) stall_max: Duration,
    /// Time of a drain after which HTTP/2 connections receive GOAWAY beside open streams too. Proxies then complete their
    /// streams, some clients lose them.
    pub(crate) busy_max: Duration,
    /// Threads of the connections; `None`: the shared runtime.
    pub(crate) cores: Option<Cores>,
    /// Budget of the requests; `None`: all are served.
    pub(crate) budget: Option<Arc<RequestBudget>>,
    /// Maximum concurrent requests of an HTTP/2 connection.
    pub(crate) streams_max: u32,
    /// TLS; `None`: plain HTTP.
    pub(crate) tls: Option<Arc<rustls::ServerConfig>>,
}

/// Handling of connections above the limit, one response, then close; and of requests above the budget.
#[derive(Clone)]
pub(crate) struct Overflow {
    /// Maximum concurrent ones; more wait in the kernel's backlog.
    pub(crate) connections_max: u32,
    /// Routes for these connections.
    pub(crate) routes: Router,
}

/// Lifecycle phase of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Open,
    /// Accepts and serves everything; responses close their connections.
    Draining,
    /// The same without new connections.
    Stopped,
    /// Idle connections close.
    Closing,
}

/// Handle to change options for future connections.
#[derive(Clone)]
pub(crate) struct ListenerControl(Arc<watch::Sender<Arc<Protocol>>>);

impl ListenerControl {
    /// Applies TLS and timeouts of `options` to future connections; name and connection limit are fixed at startup.
    pub(crate) fn set(&self, options: ListenerOptions) {
        self.0.send_modify(|protocol| *protocol = Arc::new(protocol.with(options)));
    }
}

/// A listening socket. Dropping it closes the socket and breaks its connections.
pub(crate) struct Listener {
    address: SocketAddr,
    phase: watch::Sender<Phase>,
    control: ListenerControl,
    activity: Arc<Activity>,
    task: JoinHandle<JoinSet<()>>,
}

impl Listener {
    /// Accepts on `listener` and serves `routes`, with the client address in [`ConnectInfo`].
    pub(crate) fn start(listener: TcpListener, options: ListenerOptions, routes: Router) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (phase, seen) = watch::channel(Phase::Open);
        let (acceptor, activity) = (Acceptor::new(listener, &options), Arc::default());
        let protocol = Arc::new(Protocol::new(options, routes, acceptor.handshakes_refused()));
        let control = ListenerControl(Arc::new(watch::Sender::new(protocol)));
        let task = tokio::spawn(accept(acceptor, control.clone(), Arc::clone(&activity), seen));
        Ok(Self { address, phase, control, activity, task })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn control(&self) -> ListenerControl {
        self.control.clone()
    }

    /// Continues to accept and serve, but each response closes its connection.
    pub(crate) fn begin_drain(&self) {
        self.phase.send_if_modified(|phase| {
            let is_new = *phase == Phase::Open;
            if is_new {
                *phase = Phase::Draining;
            }
            is_new
        });
    }

    /// Closes the socket, serves open connections until no request is in flight, then closes them. Breaks the rest at
    /// the deadline, after `before_breaking`.
    pub(crate) async fn drain(self, deadline: Duration, before_breaking: impl FnOnce()) -> Drained {
        let end = Instant::now() + deadline;
        self.phase.send_replace(Phase::Stopped);
        let Ok(mut connections) = self.task.await else { return Drained { broken: 0 } };
        let closing = async {
            let _ = timeout(deadline, self.activity.idle_for(QUIET.min(deadline / 2))).await;
            self.phase.send_replace(Phase::Closing);
            std::future::pending().await
        };
        let all_ended = async { while connections.join_next().await.is_some() {} };
        let ended = async {
            tokio::select! { biased; () = all_ended => {}, () = closing => {} }
        };
        if timeout_at(end, ended).await.is_ok() {
            return Drained { broken: 0 };
        }
        before_breaking();
        let broken = self.activity.in_flight();
        connections.shutdown().await;
        Drained { broken }
    }
}

async fn accept(
    mut from: Acceptor,
    control: ListenerControl,
    activity: Arc<Activity>,
    mut phase: watch::Receiver<Phase>,
) -> JoinSet<()> {
    let mut connections = JoinSet::new();
    let seen = phase.clone();
    let serve = |connections: &mut JoinSet<()>, Accepted { stream, peer, place, is_overflow }: Accepted| {
        let protocol = Arc::clone(&control.0.borrow());
        let client = Connection::of(&activity, protocol.options.budget.clone());
        let seen = Seen { peer, client, phase: seen.clone() };
        let (cores, stream) = (protocol.options.cores.clone(), stream.into_std());
        let served = async move {
            // Only in the runtime of the connection.
            if let Ok(stream) = stream.and_then(TcpStream::from_std) {
                protocol.serve_connection(stream, is_overflow, seen).await;
            }
            drop(place);
        };
        match cores {
            Some(cores) => cores.serve(connections, served),
            None => drop(connections.spawn(served)),
        }
    };
    loop {
        tokio::select! {
            biased;
            () = until(&mut phase, |phase| phase >= Phase::Stopped) => {
                from.waiting().into_iter().for_each(|accepted| serve(&mut connections, accepted));
                return connections;
            }
            // Ended connections are only removed; the way a client disconnects is irrelevant.
            Some(_) = connections.join_next() => {}
            accepted = from.next() => serve(&mut connections, accepted),
        }
    }
}

/// A connection, and the phase of its listener.
struct Seen {
    peer: SocketAddr,
    client: Arc<Connection>,
    phase: watch::Receiver<Phase>,
}

impl Seen {
    /// Resolves when hyper must end the connection: at the end of a drain, idle for too long, or with several requests
    /// `busy_max` after the begin of a drain. Without several, HTTP/2 connections end with their last request, and clients
    /// of HTTP/1.1 see a header in their next response.
    async fn over(&self, idle_max: Duration, busy_max: Duration) {
        let (mut phase, client, mut is_over) = (self.phase.clone(), &self.client, false);
        loop {
            let (now, counts) = (*phase.borrow_and_update(), client.activity.counts());
            let is_idle = counts.in_flight() == 0;
            is_over |= now == Phase::Closing;
            if client.is_http2() && (is_over || client.is_leaving() || now != Phase::Open && !is_idle) {
                client.leave();
                // The connection reads.
                yield_now().await;
                sleep(busy_max).await;
                // A single request ends the connection.
                while client.activity.in_flight() <= 1 {
                    client.activity.changed().await;
                }
                return;
            }
            if is_over {
                return;
            }
            tokio::select! {
                biased;
                changed = phase.changed() => if changed.is_err() { return },
                () = client.activity.changed() => {}
                // For connections that have sent no request, and for HTTP/2: hyper limits the other waits.
                () = sleep(idle_max), if is_idle => is_over = client.activity.counts() == counts,
            }
        }
    }
}

/// Protocol settings of a connection.
struct Protocol {
    options: ListenerOptions,
    http: Http,
    /// For connections above the limit.
    overflow_http: Http,
    handshakes_refused: Counter,
    routes: Router,
}

/// HTTP settings of a connection.
struct Http {
    builder: auto::Builder<Streams>,
    /// Maximum time without a request.
    idle_max: Duration,
}

impl Http {
    fn new(head_timeout: Duration, options: &ListenerOptions) -> Self {
        let mut builder = auto::Builder::new(Streams(options.cores.clone()));
        let mut http1 = builder.http1();
        http1.timer(TokioTimer::new()).header_read_timeout(head_timeout);
        http1.max_buf_size(HEAD_BYTES_MAX).max_headers(HEADERS_MAX);
        let mut http2 = builder.http2();
        http2.timer(TokioTimer::new()).max_header_list_size(HEAD_BYTES_MAX as u32);
        http2.max_concurrent_streams(options.streams_max);
        http2.initial_connection_window_size(WINDOW_BYTES).initial_stream_window_size(WINDOW_BYTES);
        http2.max_send_buf_size(SEND_BYTES_MAX);
        Self { builder, idle_max: head_timeout }
    }
}

impl Protocol {
    fn new(options: ListenerOptions, routes: Router, handshakes_refused: Counter) -> Self {
        let http = |head_timeout| Http::new(head_timeout, &options);
        let mut overflow_http = http(options.head_timeout.min(OVERFLOW_HEAD_TIME_MAX));
        overflow_http.builder.http1().keep_alive(false);
        Self { http: http(options.head_timeout), overflow_http, options, handshakes_refused, routes }
    }

    /// The same routes with other options. The acceptor enforces the number of connections.
    fn with(&self, options: ListenerOptions) -> Self {
        let ListenerOptions { overflow, budget, cores, .. } = self.options.clone();
        let options = ListenerOptions { overflow, budget, cores, ..options };
        Self::new(options, self.routes.clone(), self.handshakes_refused.clone())
    }

    /// Serves the connection to its end; above the limit, for one response.
    async fn serve_connection(&self, stream: TcpStream, is_overflow: bool, seen: Seen) {
        // Tokens are small and latency-critical; a failure is not fatal.
        let _ = stream.set_nodelay(true);
        match self.options.overflow.as_ref().filter(|_| is_overflow) {
            Some(Overflow { routes, .. }) => {
                let served = self.handshake(stream, &self.overflow_http, routes, seen);
                let _ = timeout(OVERFLOW_TIME_MAX, served).await;
            }
            None => self.handshake(stream, &self.http, &self.routes, seen).await,
        }
    }

    /// Performs the TLS handshake if configured.
    async fn handshake(&self, stream: TcpStream, http: &Http, routes: &Router, mut seen: Seen) {
        let Some(tls) = self.options.tls.clone() else {
            return self.serve_http(stream, http, routes, seen).await;
        };
        let accepted = tokio::select! {
            biased;
            accepted = timeout(self.options.head_timeout, TlsAcceptor::from(tls).accept(stream)) => accepted,
            () = until(&mut seen.phase, |phase| phase == Phase::Closing) => return,
        };
        if let Ok(Ok(stream)) = accepted {
            self.serve_http(stream, http, routes, seen).await;
        } else {
            self.handshakes_refused.increment(1);
        }
    }

    async fn serve_http<S>(&self, stream: S, http: &Http, routes: &Router, seen: Seen)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let service = service_fn(|request| self.respond(routes, request, &seen));
        // A client that reads anything within the time is never cut off, however slow. Reads are not affected.
        let stream = ClientStream::new(stream, self.options.stall_max, Arc::clone(&seen.client));
        let connection = http.builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let over = seen.over(http.idle_max, self.options.busy_max);
        tokio::select! {
            biased;
            // The way a client disconnects is irrelevant.
            _ = connection.as_mut() => {}
            () = over => {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        }
    }

    /// Serves a request that the budget permits. Further ones receive an error, or a reset if there are too many of them.
    fn respond(
        &self,
        routes: &Router,
        mut request: Request<Incoming>,
        seen: &Seen,
    ) -> impl Future<Output = Result<Response<impl Body<Data = Bytes, Error = axum::Error> + use<>>, h2::Error>> + use<>
    {
        let is_http2 = request.version() == Version::HTTP_2;
        let (mut begun, refusal) = seen.client.begin(is_http2, head_bytes(&request));
        let (phase, extensions) = (seen.phase.clone(), request.extensions_mut());
        if is_http2 && *phase.borrow() != Phase::Open {
            seen.client.leave();
        }
        extensions.insert(ConnectInfo(seen.peer));
        let response = match (refusal, &self.options.overflow) {
            (None, _) => Some(routes.clone().call(request)),
            (Some(refusal), Some(Overflow { routes, .. })) if begun.is_answered() => {
                extensions.insert(refusal.error());
                Some(routes.clone().call(request))
            }
            (Some(_), _) => None,
        };
        async move {
            let Some(response) = response else { return Err(h2::Reason::REFUSED_STREAM.into()) };
            let Ok(mut response) = response.await;
            if response.status() == StatusCode::UNAUTHORIZED {
                begun.refuse();
                if !begun.is_answered() {
                    return Err(h2::Reason::REFUSED_STREAM.into());
                }
            }
            if *phase.borrow() != Phase::Open && !is_http2 {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok(response.map(|body| keep_busy(body, begun)))
        }
    }
}

/// Length of a head with an allowance per field, as in HPACK.
fn head_bytes(request: &Request<Incoming>) -> u64 {
    let uri = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    let fields = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 32);
    (uri + fields.sum::<usize>()) as u64
}

/// Resolves in such a phase, or when the listener was dropped.
async fn until(phase: &mut watch::Receiver<Phase>, is_reached: impl Fn(Phase) -> bool) {
    let _ = phase.wait_for(|phase| is_reached(*phase)).await;
}

#[cfg(test)]
mod tests;
