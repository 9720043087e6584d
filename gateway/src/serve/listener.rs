//! A listener and its connections.
//!
//! Owns the socket and the connections accepted on it, plain or over TLS, HTTP/1.1 only. Promises that there are never
//! more connections than it may have, that those beyond are answered and closed at once where the listener has routes for
//! them ([`Overflow`]), that a client that is slow to say what it wants, or takes nothing of what it is
//! told, is cut off without harm to others,
//! and that a drain accepts nothing new, closes idle connections, lets requests in flight end, and says how many it had
//! to break. While it drains, each answer carries `Connection: close`, and a connection is closed only once it has been idle
//! for a while, so that no request on a kept connection is left without an answer. Leaves what is answered to the routes, and
//! how long a body or an answer may take to whoever reads it.

mod acceptor;
mod busy;
mod socket;
mod takes;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::HeaderValue;
use axum::http::header::CONNECTION;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics::Counter;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower::Service as _;

use acceptor::{Accepted, Acceptor};
use busy::{Busy, BusyBody};
pub(crate) use socket::bind;
use takes::Takes;

/// Longest head of a request, and most that is kept of a body or an answer that the other side does not take: together
/// with the limit of connections this bounds what they cost. Longer heads are answered with 431, and so are those of
/// more than hyper's 100 headers.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// How long a connection beyond the limit may last, from its handshake to the end of its answer.
const OVERFLOW_TIME_MAX: Duration = Duration::from_secs(3);

/// How long such a connection may be without a request: whoever has one sends it at once, and others wait.
const OVERFLOW_HEAD_TIME_MAX: Duration = Duration::from_millis(300);

/// How long a connection stays open without a request once the listener has stopped. A client whose answer began before the
/// drain does not know that the connection is about to close, and may send its next request on it.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

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
    /// Open connections.
    pub(crate) connections_max: u32,
    /// What connections beyond those get; `None`: they wait in the system's queue.
    pub(crate) overflow: Option<Overflow>,
    /// How long a TLS handshake, and then each head of a request, may take; so long a connection may be idle, too.
    pub(crate) head_timeout: Duration,
    /// How long a client may take nothing of what it is sent.
    pub(crate) stall_max: Duration,
    /// TLS; `None`: plain HTTP.
    pub(crate) tls: Option<Arc<rustls::ServerConfig>>,
}

/// Connections beyond the limit: each is answered once, and closed.
#[derive(Clone)]
pub(crate) struct Overflow {
    /// As many at a time; more wait in the system's queue.
    pub(crate) connections_max: u32,
    /// What answers.
    pub(crate) routes: Router,
}

/// Where a listener is between its start and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// Everything is still accepted and answered; answers end their connections.
    Draining,
    /// Nothing is accepted; a connection that has been idle for this long is closed.
    Stopped {
        linger: Duration,
    },
}

/// Changes how connections to come are spoken to, while the listener runs.
#[derive(Clone)]
pub(crate) struct ListenerControl(Arc<watch::Sender<Arc<Protocol>>>);

impl ListenerControl {
    /// From the next connection on TLS and the time-outs are those of `options`; its name and its number of connections are
    /// fixed at the start.
    pub(crate) fn set(&self, options: ListenerOptions) {
        self.0.send_modify(|protocol| *protocol = Arc::new(protocol.with(options)));
    }
}

/// A listening socket. Dropping it closes the socket and breaks its connections.
pub(crate) struct Listener {
    address: SocketAddr,
    phase: watch::Sender<Phase>,
    control: ListenerControl,
    task: JoinHandle<JoinSet<()>>,
}

impl Listener {
    /// Accepts on `listener` and answers with `routes`, which find the peer's address in [`ConnectInfo`].
    pub(crate) fn start(listener: TcpListener, options: ListenerOptions, routes: Router) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (phase, seen) = watch::channel(Phase::Open);
        let acceptor = Acceptor::new(listener, &options);
        let protocol = Arc::new(Protocol::new(options, routes, acceptor.handshakes_refused()));
        let control = ListenerControl(Arc::new(watch::Sender::new(protocol)));
        Ok(Self { address, phase, control: control.clone(), task: tokio::spawn(accept(acceptor, control, seen)) })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn control(&self) -> ListenerControl {
        self.control.clone()
    }

    /// Goes on accepting and answering; each answer from now on ends its connection.
    pub(crate) fn begin_drain(&self) {
        self.phase.send_if_modified(|phase| {
            let is_new = *phase == Phase::Open;
            if is_new {
                *phase = Phase::Draining;
            }
            is_new
        });
    }

    /// Closes the socket, closes connections that have been idle for `linger`, lets requests in flight end, and breaks what is
    /// left at the deadline, after `before_breaking`.
    pub(crate) async fn drain(self, deadline: Duration, linger: Duration, before_breaking: impl FnOnce()) -> Drained {
        // An idle connection is closed before the deadline, and never counted as broken.
        let linger = linger.min(deadline / 2);
        self.phase.send_replace(Phase::Stopped { linger });
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

async fn accept(mut from: Acceptor, control: ListenerControl, mut phase: watch::Receiver<Phase>) -> JoinSet<()> {
    let mut connections = JoinSet::new();
    let seen = phase.clone();
    let converse = |Accepted { stream, peer, place, is_overflow }: Accepted| {
        let (protocol, phase) = (Arc::clone(&control.0.borrow()), seen.clone());
        async move {
            protocol.converse(stream, peer, is_overflow, phase).await;
            drop(place);
        }
    };
    loop {
        tokio::select! {
            biased;
            _ = stopped(&mut phase) => {
                from.waiting().into_iter().for_each(|accepted| drop(connections.spawn(converse(accepted))));
                return connections;
            }
            // Those that have ended are only forgotten: how a client goes is its own affair.
            Some(_) = connections.join_next() => {}
            accepted = from.next() => drop(connections.spawn(converse(accepted))),
        }
    }
}

/// How one connection is spoken to.
struct Protocol {
    http: http1::Builder,
    /// For connections beyond the limit.
    overflow: Option<(http1::Builder, Router)>,
    tls: Option<TlsAcceptor>,
    head_timeout: Duration,
    stall_max: Duration,
    handshakes_refused: Counter,
    routes: Router,
}

impl Protocol {
    fn new(options: ListenerOptions, routes: Router, handshakes_refused: Counter) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(options.head_timeout);
        // A buffer may be overshot by one read, a head may not.
        http.max_header_size(HEAD_BYTES_MAX).max_buf_size(HEAD_BYTES_MAX);
        let overflow = options.overflow.map(|overflow| {
            let mut http = http.clone();
            http.keep_alive(false).header_read_timeout(options.head_timeout.min(OVERFLOW_HEAD_TIME_MAX));
            (http, overflow.routes)
        });
        Self {
            http,
            overflow,
            tls: options.tls.map(TlsAcceptor::from),
            head_timeout: options.head_timeout,
            stall_max: options.stall_max,
            handshakes_refused,
            routes,
        }
    }

    /// The same routes, spoken to by other options.
    fn with(&self, options: ListenerOptions) -> Self {
        // How many there may be is the acceptor's to know.
        let overflow = |(_, routes): &(_, Router)| Overflow { connections_max: 0, routes: routes.clone() };
        let options = ListenerOptions { overflow: self.overflow.as_ref().map(overflow), ..options };
        Self::new(options, self.routes.clone(), self.handshakes_refused.clone())
    }

    /// Speaks until either side has had enough; beyond the limit, for one answer.
    async fn converse(&self, stream: TcpStream, peer: SocketAddr, is_overflow: bool, phase: watch::Receiver<Phase>) {
        // Tokens are small and wanted at once; a connection works without it too.
        let _ = stream.set_nodelay(true);
        match self.overflow.as_ref().filter(|_| is_overflow) {
            Some((http, routes)) => {
                let _ = timeout(OVERFLOW_TIME_MAX, self.secure(stream, peer, http, routes, phase)).await;
            }
            None => self.secure(stream, peer, &self.http, &self.routes, phase).await,
        }
    }

    /// Over TLS where that is wanted.
    async fn secure(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        http: &http1::Builder,
        routes: &Router,
        mut phase: watch::Receiver<Phase>,
    ) {
        let Some(tls) = &self.tls else { return self.speak(stream, peer, http, routes, phase).await };
        let shaken = tokio::select! {
            biased;
            shaken = timeout(self.head_timeout, tls.accept(stream)) => shaken,
            () = lingered(&mut phase) => return,
        };
        if let Ok(Ok(stream)) = shaken {
            self.speak(stream, peer, http, routes, phase).await;
        } else {
            self.handshakes_refused.increment(1);
        }
    }

    async fn speak<S>(
        &self,
        stream: S,
        peer: SocketAddr,
        http: &http1::Builder,
        routes: &Router,
        mut phase: watch::Receiver<Phase>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let (busy, seen) = (Busy::default(), phase.clone());
        let service = service_fn(|request| answer(routes, request, peer, &busy, &seen));
        let conversation = http.serve_connection(TokioIo::new(Takes::new(stream, self.stall_max)), service);
        tokio::pin!(conversation);
        let idle = async {
            let linger = stopped(&mut phase).await;
            busy.idle_for(linger).await;
        };
        tokio::select! {
            biased;
            // How a client goes is its own affair.
            _ = conversation.as_mut() => {}
            () = idle => {
                conversation.as_mut().graceful_shutdown();
                let _ = conversation.await;
            }
        }
    }
}

fn answer(
    routes: &Router,
    mut request: Request<Incoming>,
    peer: SocketAddr,
    busy: &Busy,
    phase: &watch::Receiver<Phase>,
) -> impl Future<Output = Result<Response<BusyBody>, Infallible>> + use<> {
    request.extensions_mut().insert(ConnectInfo(peer));
    let (request, began, phase) = (routes.clone().call(request), busy.begin(), phase.clone());
    async move {
        let mut response = request.await?;
        if *phase.borrow() != Phase::Open {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response.map(|body| BusyBody::new(body, began)))
    }
}

/// Returns once the listener has stopped, or is gone: how long idle connections stay open.
async fn stopped(phase: &mut watch::Receiver<Phase>) -> Duration {
    match phase.wait_for(|phase| matches!(phase, Phase::Stopped { .. })).await.as_deref() {
        Ok(Phase::Stopped { linger }) => *linger,
        _ => Duration::ZERO,
    }
}

/// Returns when a connection that has sent no request is to be closed.
async fn lingered(phase: &mut watch::Receiver<Phase>) {
    let linger = stopped(phase).await;
    sleep(linger).await;
}

#[cfg(test)]
mod tests;
