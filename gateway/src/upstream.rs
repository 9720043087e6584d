//! HTTP client for workers.
//!
//! Pools connections by address, plain or TLS. Errors state how far a request came, and dropping a body early closes
//! its connection. Callers retry and report outcomes.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use std::{fmt, io};

use axum::body::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use pointsman::health::Outcome;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower::ServiceExt as _;
use tower::util::MapResponse;

use self::ended::{Observed, Signaling};

mod ended;

/// Maximum idle connections per worker.
const IDLE_PER_WORKER_MAX: usize = 512;

/// Idle timeout, shorter than that of engines, so that they rarely close a connection during its reuse (uvicorn closes
/// after 5 s).
const IDLE_KEPT: Duration = Duration::from_secs(4);

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
    /// Unexpected status of a query by the gateway itself.
    #[error("response status is {0}, must be 200")]
    Status(StatusCode),
    /// Response above the limit.
    #[error("response exceeds {0} bytes")]
    TooLong(usize),
    /// Invalid address.
    #[error("{0:?} is not an address")]
    Address(String),
}

/// Reason of a connection failure.
#[derive(Debug)]
pub struct ConnectError {
    causes: String,
    is_unreachable: bool,
}

impl ConnectError {
    fn of(error: &(dyn Error + 'static)) -> Self {
        let (mut next, mut is_unreachable) = (Some(error), false);
        while let Some(cause) = next {
            is_unreachable |= cause.downcast_ref::<io::Error>().is_some_and(|cause| {
                matches!(
                    cause.kind(),
                    io::ErrorKind::ConnectionRefused
                        | io::ErrorKind::HostUnreachable
                        | io::ErrorKind::NetworkUnreachable
                        | io::ErrorKind::TimedOut
                )
            });
            next = cause.source();
        }
        Self { causes: causes(error), is_unreachable }
    }

    /// Whether the host or port is unreachable, so that no engine has seen the attempt.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        self.is_unreachable
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.causes)
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
            Self::Broken(_) | Self::TooLong(_) => Outcome::Reset,
            Self::Status(_) => Outcome::ServerError,
        }
    }
}

/// Error while loading the worker CA bundle.
#[derive(Debug, thiserror::Error)]
pub enum WorkerTlsError {
    /// Invalid CA bundle.
    #[error("worker_ca_file {}: {reason}", path.display())]
    Authorities {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
}

/// TLS configuration that trusts the CA bundle in a PEM file, or the system bundle.
///
/// # Errors
/// A file that cannot be read or has no certificate. A system without a bundle is no error; then no certificate is
/// trusted.
pub fn worker_tls(authorities: Option<&Path>) -> Result<ClientConfig, WorkerTlsError> {
    let builder = || {
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring supports TLS 1.2 and 1.3")
    };
    let with_roots = match authorities {
        Some(path) => builder().with_root_certificates(roots_of(path)?),
        None => builder().with_native_roots().unwrap_or_else(|error| {
            tracing::warn!("no worker certificate will be trusted: {error}");
            builder().with_root_certificates(RootCertStore::empty())
        }),
    };
    Ok(with_roots.with_no_client_auth())
}

fn roots_of(path: &Path) -> Result<RootCertStore, WorkerTlsError> {
    let wrong = |reason: String| WorkerTlsError::Authorities { path: path.to_owned(), reason };
    let certificates = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates {
        let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
        roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
    }
    if roots.is_empty() { Err(wrong("the file has no certificate".to_owned())) } else { Ok(roots) }
}

/// Client for workers. Clones are cheap and share their connections.
#[derive(Clone, Debug)]
pub struct Upstream(Arc<RwLock<Connector>>);

#[derive(Clone, Debug)]
struct Connector {
    client: HttpsClient,
    connect_timeout: Duration,
    /// `Authorization` for queries of the gateway itself. Marked sensitive, so that it is never printed.
    key: Option<HeaderValue>,
}

type HttpsClient = Client<SignalingConnector, Full<Bytes>>;
type SignalingConnector = MapResponse<HttpsConnector<HttpConnector>, fn(Stream) -> Signaling<Stream>>;
type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

impl Upstream {
    /// A client without connections. `tls` defines the trusted certificates.
    #[must_use]
    pub fn new(tls: ClientConfig, connect_timeout: Duration) -> Self {
        Self(Arc::new(RwLock::new(Connector { client: client(tls, connect_timeout), connect_timeout, key: None })))
    }

    /// The same with `Authorization` for queries of the gateway itself.
    #[must_use]
    pub fn with_key(self, key: Option<HeaderValue>) -> Self {
        self.set(|connector| connector.key = key.map(sensitive));
        self
    }

    /// Replaces `Authorization` for all clones and, if `tls` is given, uses it for new connections. Requests in flight
    /// keep their connections.
    pub fn change(&self, tls: Option<ClientConfig>, connect_timeout: Duration, key: Option<HeaderValue>) {
        let client = tls.map(|tls| client(tls, connect_timeout));
        self.set(|connector| {
            connector.key = key.map(sensitive);
            if let Some(client) = client {
                (connector.client, connector.connect_timeout) = (client, connect_timeout);
            }
        });
    }

    fn set(&self, change: impl FnOnce(&mut Connector)) {
        // Each part is consistent after every statement.
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
    }

    fn connector(&self) -> Connector {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends a request and returns the response head. Cancel-safe: dropping the future closes the connection.
    ///
    /// # Errors
    /// Connection failure or broken connection.
    pub async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Response<Incoming>, UpstreamError> {
        let Connector { client, connect_timeout, .. } = self.connector();
        let connections = Observed::of(&mut request);
        tokio::select! {
            biased;
            response = client.request(request) => response.map_err(error_of),
            () = connections.ended(connect_timeout) => {
                Err(UpstreamError::Broken("the connection ended without a response".to_owned()))
            }
        }
    }

    /// Sends a JSON query of the gateway itself and returns the response body of at most `bytes_max`.
    ///
    /// # Errors
    /// See [`UpstreamError`]; includes any status except 200.
    pub async fn query(
        &self,
        url: &str,
        body: Bytes,
        within: Duration,
        bytes_max: usize,
    ) -> Result<Bytes, UpstreamError> {
        let address = || UpstreamError::Address(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| address())?;
        let mut request = Request::post(uri).header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.connector().key {
            request = request.header(AUTHORIZATION, key);
        }
        let request = request.body(Full::new(body)).map_err(|_| address())?;
        let answered = async {
            let answer = self.send(request).await?;
            if answer.status() != StatusCode::OK {
                return Err(UpstreamError::Status(answer.status()));
            }
            let body = Limited::new(answer.into_body(), bytes_max).collect().await;
            body.map(http_body_util::Collected::to_bytes).map_err(|error| {
                if error.is::<http_body_util::LengthLimitError>() {
                    UpstreamError::TooLong(bytes_max)
                } else {
                    UpstreamError::Broken(error.to_string())
                }
            })
        };
        timeout(within, answered).await.unwrap_or(Err(UpstreamError::Timeout(within)))
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
    let mut next = Some(error);
    while let Some(error) = next {
        let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if code.is_some_and(|code| NO_DESCRIPTOR.contains(&code)) {
            return true;
        }
        next = error.source();
    }
    false
}

fn client(tls: ClientConfig, connect_timeout: Duration) -> HttpsClient {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(connect_timeout));
    let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_KEPT)
        .pool_max_idle_per_host(IDLE_PER_WORKER_MAX)
        .build(connector.wrap_connector(http).map_response(Signaling::new as fn(Stream) -> Signaling<Stream>))
}

fn sensitive(mut key: HeaderValue) -> HeaderValue {
    key.set_sensitive(true);
    key
}

/// An error with its causes in one line; the client's own message only names the failed step.
fn causes(error: &dyn std::error::Error) -> String {
    let mut shown = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        shown.push_str(": ");
        shown.push_str(&error.to_string());
        cause = error.source();
    }
    shown
}
