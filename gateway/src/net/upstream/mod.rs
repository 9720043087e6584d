//! HTTP client for workers.
//!
//! Pools connections by address, plain or TLS. Errors state how far a request came, and dropping a body early closes
//! its connection. Callers retry and report outcomes. [`WorkerAccess`] adds the API keys of one model.

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::RwLock;
use pointsman::Outcome;
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tower::ServiceExt as _;
use tower::util::MapResponse;

use self::ended::{Observed, Signaling};
use self::keys::WorkerKeys;
use super::cores;
use super::listener::{HEAD_BYTES_MAX, HEADERS_MAX};
use crate::settings::{Secret, SecretError};

mod access;
mod ended;
mod keys;
mod tls;

pub use access::WorkerAccess;
pub(crate) use tls::WorkerTlsFiles;
pub use tls::{WorkerTlsError, worker_tls};

/// Maximum idle connections per worker, of all cores.
const IDLE_PER_WORKER_MAX: usize = 512;

/// Idle timeout, shorter than that of engines, so that they rarely close a connection during its reuse (uvicorn closes
/// after 5 s).
const IDLE_KEPT: Duration = Duration::from_secs(4);

/// Longest time from a request to the close of its kept connection that engines cause without a fault. Later, the engine
/// has worked on the request.
const CLOSE_RACE_MAX: Duration = Duration::from_secs(2);

/// Failure of a worker request.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No free descriptor in the process or the machine; no conclusion about the worker.
    #[error("no file descriptor for a connection")]
    NoDescriptor,
    /// Connection failure.
    #[error("cannot connect: {0}")]
    Connect(ConnectError),
    /// Timeout.
    #[error("no response within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// Connection broken, or invalid HTTP.
    #[error("connection closed early: {0}")]
    Broken(String),
    /// A kept connection that ended without a byte of the response, as engines close idle ones.
    #[error("kept connection closed: {0}")]
    Closed(String),
    /// Unexpected status of a query by the gateway itself.
    #[error("response status is {0}, must be 200")]
    Status(StatusCode),
    /// Response above the limit.
    #[error("response exceeds {0} bytes")]
    TooLong(usize),
    /// Invalid address.
    #[error("{0:?} is not an address")]
    Address(String),
    /// Unusable API key of the worker. No request was sent.
    #[error(transparent)]
    Key(SecretError),
}

/// Reason of a connection failure.
#[derive(Debug, thiserror::Error)]
#[error("{causes}")]
pub struct ConnectError {
    causes: String,
    /// The innermost error.
    pub cause: String,
    /// Whether the host or port is unreachable, so that no engine has seen the attempt.
    pub is_unreachable: bool,
}

impl ConnectError {
    fn of(error: &(dyn Error + 'static)) -> Self {
        let is_unreachable = |cause: &io::Error| {
            matches!(
                cause.kind(),
                io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::HostUnreachable
                    | io::ErrorKind::NetworkUnreachable
                    | io::ErrorKind::TimedOut
            )
        };
        let is_unreachable = chain(error).any(|cause| cause.downcast_ref().is_some_and(is_unreachable));
        let cause = chain(error).last().map_or_else(String::new, ToString::to_string);
        Self { causes: causes(error), cause, is_unreachable }
    }
}

impl UpstreamError {
    /// Whether the cause is in this process and not at the worker.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::NoDescriptor)
    }

    /// Health outcome of the worker.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::NoDescriptor | Self::Connect(_) | Self::Address(_) => Outcome::ConnectFailed,
            Self::Timeout(_) => Outcome::Timeout,
            Self::Broken(_) | Self::Closed(_) | Self::TooLong(_) => Outcome::Reset,
            Self::Status(_) => Outcome::ServerError,
            Self::Key(_) => Outcome::Misconfigured,
        }
    }
}

/// Client for workers. Clones are cheap and share their connections and keys. Each core has connections of its own.
#[derive(Clone)]
pub struct Upstream(Arc<Shared>);

struct Shared {
    connector: RwLock<Connector>,
    keys: Arc<WorkerKeys>,
}

struct Connector {
    /// By the number of the core.
    clients: Arc<[HttpsClient]>,
    connect_timeout: Duration,
    /// `gateway.worker_api_key_file`.
    key_file: Option<PathBuf>,
}

type HttpsClient = Client<SignalingConnector, Full<Bytes>>;
type SignalingConnector = MapResponse<HttpsConnector<HttpConnector>, fn(Stream) -> Signaling<Stream>>;
type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

impl Upstream {
    /// A client without connections and keys. `tls` defines the trusted certificates.
    #[must_use]
    pub fn new(tls: ClientConfig, connect_timeout: Duration) -> Self {
        let connector = Connector { clients: clients(&tls, connect_timeout), connect_timeout, key_file: None };
        Self(Arc::new(Shared { connector: RwLock::new(connector), keys: Arc::default() }))
    }

    /// Replaces `gateway.worker_api_key_file` and the known keys by those of the settings, for all clones.
    pub(crate) fn set_keys(&self, key_file: Option<PathBuf>, keys: &BTreeMap<PathBuf, Secret>) {
        self.0.keys.set(keys);
        self.set(|connector| connector.key_file = key_file);
    }

    /// Uses `tls` for new connections of all clones. Requests in flight keep their connections.
    pub(crate) fn set_tls(&self, tls: ClientConfig, connect_timeout: Duration) {
        let clients = clients(&tls, connect_timeout);
        self.set(|connector| (connector.clients, connector.connect_timeout) = (clients, connect_timeout));
    }

    fn set(&self, change: impl FnOnce(&mut Connector)) {
        // Each part is consistent after every statement.
        change(&mut self.0.connector.write());
    }

    /// The client of this core, and the time limit of its connects.
    fn client(&self) -> (HttpsClient, Duration) {
        let connector = self.0.connector.read();
        (connector.clients[cores::number()].clone(), connector.connect_timeout)
    }

    fn key_file(&self) -> Option<PathBuf> {
        self.0.connector.read().key_file.clone()
    }

    /// Sends a request and returns the response head. Cancel-safe: dropping the future closes the connection.
    ///
    /// # Errors
    /// Connection failure or broken connection.
    pub async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Response<Incoming>, UpstreamError> {
        let (client, connect_timeout) = self.client();
        let (mut connections, sent_at) = (Observed::of(&mut request), Instant::now());
        let (error, has_end) = tokio::select! {
            biased;
            response = client.request(request) => match response {
                Ok(response) => return Ok(response),
                Err(error) => {
                    let is_end = |error: &hyper::Error| error.is_incomplete_message();
                    let has_end = chain(&error).any(|cause| cause.downcast_ref().is_some_and(is_end));
                    (error_of(error), has_end)
                }
            },
            () = connections.ended(connect_timeout) => {
                (UpstreamError::Broken("the connection ended without a response".to_owned()), true)
            }
        };
        Err(match error {
            UpstreamError::Broken(causes)
                if sent_at.elapsed() <= CLOSE_RACE_MAX && connections.is_unanswered(has_end) =>
            {
                UpstreamError::Closed(causes)
            }
            error => error,
        })
    }

    /// Sends a request and returns status and body, of at most `bytes_max`.
    async fn receive(
        &self,
        request: Request<Full<Bytes>>,
        bytes_max: usize,
    ) -> Result<(StatusCode, Bytes), UpstreamError> {
        let answer = self.send(request).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), bytes_max).collect().await;
        body.map(|body| (status, body.to_bytes())).map_err(|error| {
            if error.is::<http_body_util::LengthLimitError>() {
                UpstreamError::TooLong(bytes_max)
            } else {
                UpstreamError::Broken(error.to_string())
            }
        })
    }
}

fn error_of(error: legacy::Error) -> UpstreamError {
    if lacks_descriptor(&error) {
        UpstreamError::NoDescriptor
    } else if error.is_connect() {
        UpstreamError::Connect(ConnectError::of(&error))
    } else {
        UpstreamError::Broken(causes(&error))
    }
}

/// Errors for a process and a machine without free descriptors: EMFILE and ENFILE on Unix.
const NO_DESCRIPTOR: [i32; 2] = [24, 23];

/// Whether an error is a lack of descriptors.
fn lacks_descriptor(error: &(dyn Error + 'static)) -> bool {
    let mut codes = chain(error).filter_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error());
    codes.any(|code| NO_DESCRIPTOR.contains(&code))
}

fn clients(tls: &ClientConfig, connect_timeout: Duration) -> Arc<[HttpsClient]> {
    let count = *cores::COUNT + 1;
    (0..count).map(|_| client(tls.clone(), connect_timeout, IDLE_PER_WORKER_MAX.div_ceil(count))).collect()
}

fn client(tls: ClientConfig, connect_timeout: Duration, idle_max: usize) -> HttpsClient {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(connect_timeout));
    let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_KEPT)
        .pool_max_idle_per_host(idle_max)
        .http1_max_headers(HEADERS_MAX)
        .http1_max_buf_size(HEAD_BYTES_MAX)
        .build(connector.wrap_connector(http).map_response(Signaling::new as fn(Stream) -> Signaling<Stream>))
}

/// An error with its causes.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// An error with its causes in one line; the client's own message only names the failed step.
fn causes(error: &(dyn Error + 'static)) -> String {
    chain(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
