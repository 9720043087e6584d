//! HTTP client for requests with a streamed response, and for pages.
//!
//! Uses HTTP/1.1, with TLS for https URLs (the system's roots). A request without an idle connection opens a new one;
//! that time is part of the request, as for any client. Every request ends with a response or a failure within the
//! timeout. A request is only retried if the server had closed an idle connection before any byte was sent.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Error as SendError};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::{ClientConfig, RootCertStore};
use tokio::time::timeout;

use super::Clock;
use super::failure::Failure;
use super::stream::{Answer, error_code};

/// Maximum number of bytes read from an error response, and from a page.
const REFUSAL_BYTES_MAX: usize = 64 << 10;
const PAGE_BYTES_MAX: usize = 4 << 20;

/// Maximum number of distinct ranks.
const RANKS_MAX: usize = 1 << 16;

/// Idle timeout of a connection.
const IDLE: Duration = Duration::from_secs(60);

/// Options of a client.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClientOptions<'a> {
    /// Whether https URLs are sent to, which needs the system's root certificates.
    pub has_tls: bool,
    /// Bearer token.
    pub api_key: Option<&'a str>,
    /// Response header that identifies the rank.
    pub rank_header: Option<&'a str>,
    /// Timeout of a whole request.
    pub timeout: Duration,
    /// Maximum number of idle connections. Equal to the maximum of requests in flight, so the number of sockets is at
    /// most twice that.
    pub connections_max: u32,
}

/// Errors of creating a client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The key has invalid characters.
    #[error("the key must consist of visible ASCII characters")]
    ApiKey,
    /// The header name is invalid.
    #[error("{0:?} is not a valid header name")]
    Header(String),
    /// The system's root certificates cannot be read.
    #[error("cannot read the system's certificates: {0}")]
    Roots(io::Error),
}

/// Outcome of a request.
#[derive(Debug)]
pub struct Exchange {
    /// Time of sending in µs.
    pub sent_us: u64,
    /// Time of the last token or of the failure.
    pub ended_us: u64,
    /// Received part of the answer.
    pub answer: Answer,
    /// Dense number of the rank that served the request.
    pub rank: Option<u32>,
    /// Reason for an incomplete answer.
    pub failure: Option<Failure>,
}

/// A client with a pool of connections.
#[derive(Debug)]
pub struct HttpClient {
    http: legacy::Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    headers: HeaderMap,
    timeout: Duration,
    rank_header: Option<HeaderName>,
    /// Values of the rank header, numbered in order of appearance.
    ranks: Mutex<BTreeMap<Vec<u8>, u32>>,
}

impl HttpClient {
    /// Creates a client. Does not connect yet.
    ///
    /// # Errors
    /// An option is invalid.
    pub fn new(options: &ClientOptions<'_>) -> Result<Self, ClientError> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = options.api_key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| ClientError::ApiKey)?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let rank_header = options
            .rank_header
            .map(|name| HeaderName::from_bytes(name.as_bytes()).map_err(|_| ClientError::Header(name.to_owned())));
        let mut sockets = HttpConnector::new();
        sockets.enforce_http(false);
        sockets.set_nodelay(true);
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls(options.has_tls)?).https_or_http();
        let connector = connector.enable_http1().wrap_connector(sockets);
        let mut http = legacy::Client::builder(TokioExecutor::new());
        http.pool_idle_timeout(IDLE).pool_timer(TokioTimer::new());
        http.pool_max_idle_per_host(options.connections_max as usize);
        Ok(Self {
            http: http.build(connector),
            headers,
            timeout: options.timeout,
            rank_header: rank_header.transpose()?,
            ranks: Mutex::default(),
        })
    }

    /// Status and body of a response: to a POST if there is a body, else to a GET.
    ///
    /// # Errors
    /// No complete response arrives in time.
    pub async fn fetch(&self, uri: &Uri, body: Option<Bytes>) -> Result<(StatusCode, Bytes), Failure> {
        let exchange = async {
            let method = if body.is_some() { Method::POST } else { Method::GET };
            let response = self.send(method, uri, body.unwrap_or_default()).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), PAGE_BYTES_MAX).collect().await;
            Ok((status, body.map_err(|error| Failure::Broken(root_cause(&*error)))?.to_bytes()))
        };
        timeout(self.timeout, exchange).await.unwrap_or(Err(Failure::Timeout(self.timeout)))
    }

    /// Number of ranks that have responded.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        let ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        u32::try_from(ranks.len()).expect("the number of ranks is limited")
    }

    /// Sends `body` and reads the streamed response to its end into `answer`, with times from `clock`.
    pub async fn exchange(&self, uri: &Uri, body: Bytes, clock: Clock, mut answer: Answer) -> Exchange {
        let mut rank = None;
        let sent_us = clock.now_us();
        let exchanged = timeout(self.timeout, self.stream(uri, body, clock, &mut answer, &mut rank)).await;
        let failure = exchanged.unwrap_or(Err(Failure::Timeout(self.timeout))).err();
        let ended_us = answer.last_token_us.filter(|_| failure.is_none()).unwrap_or_else(|| clock.now_us());
        Exchange { sent_us, ended_us, answer, rank, failure }
    }

    async fn send(&self, method: Method, uri: &Uri, body: Bytes) -> Result<Response<Incoming>, Failure> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri.clone();
        *request.headers_mut() = self.headers.clone();
        self.http.request(request).await.map_err(|error| not_sent(&error))
    }

    async fn stream(
        &self,
        uri: &Uri,
        body: Bytes,
        clock: Clock,
        answer: &mut Answer,
        rank: &mut Option<u32>,
    ) -> Result<(), Failure> {
        let response = self.send(Method::POST, uri, body).await?;
        *rank = self.rank(response.headers());
        let mut body = accepted(response).await?;
        while let Some(frame) = body.frame().await {
            let now_us = clock.now_us();
            let frame = frame.map_err(|error| Failure::Broken(root_cause(&error)))?;
            if let Ok(bytes) = frame.into_data() {
                answer.push(&bytes, now_us)?;
            }
        }
        answer.end()
    }

    /// Number of the rank in the header, in order of the ranks' first responses.
    fn rank(&self, headers: &HeaderMap) -> Option<u32> {
        let value = headers.get(self.rank_header.as_ref()?)?.as_bytes();
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        if !ranks.contains_key(value) && ranks.len() < RANKS_MAX {
            let next = u32::try_from(ranks.len()).expect("the number of ranks is limited");
            ranks.insert(value.to_vec(), next);
        }
        ranks.get(value).copied()
    }
}

/// TLS configuration with the system's root certificates. Without TLS the roots are empty, so that none need be
/// installed.
fn tls(wanted: bool) -> Result<ClientConfig, ClientError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("ring supports the default TLS versions");
    let trusting = if wanted {
        config.with_native_roots().map_err(ClientError::Roots)?
    } else {
        config.with_root_certificates(RootCertStore::empty())
    };
    Ok(trusting.with_no_client_auth())
}

/// Checks that a response is a stream and returns its body.
async fn accepted(response: Response<Incoming>) -> Result<Incoming, Failure> {
    let status = response.status();
    if status != StatusCode::OK {
        let body = Limited::new(response.into_body(), REFUSAL_BYTES_MAX).collect().await;
        return Err(Failure::Status { status, code: body.ok().and_then(|body| error_code(&body.to_bytes())) });
    }
    let kind = response.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    if kind.starts_with(b"text/event-stream") { Ok(response.into_body()) } else { Err(Failure::NotStreamed) }
}

fn not_sent(error: &SendError) -> Failure {
    let cause = root_cause(error);
    if error.is_connect() { Failure::Connect(cause) } else { Failure::Broken(cause) }
}

/// Innermost cause of an error, which is the informative one; the outer errors name steps of the client.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    std::iter::successors(Some(error), |error| error.source()).last().unwrap_or(error).to_string()
}
