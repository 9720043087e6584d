//! GET requests to engines: the interface of clients, and the plain HTTP client.
//!
//! Probes, health probes and polls of metrics use an [`EngineClient`]. The one of this crate has no TLS. Each of its
//! requests has its own connection, ends with a response or an error within the timeout, reads at most the given number of
//! bytes, follows no redirect and leaves no task behind. Callers interpret the response.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Body as _, Bytes};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONNECTION, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use super::BoxFuture;
use crate::discovery::{HttpUrl, HttpUrlError};

/// Size of the read buffer in bytes; the response head must fit.
const BUFFER_BYTES: usize = 64 << 10;

/// Maximum number of response headers.
const HEADERS_MAX: usize = 1_000;

/// Maximum length of an API key.
const KEY_BYTES_MAX: usize = 4 << 10;

/// OS errors for a process or a machine without a free file descriptor: EMFILE and ENFILE, on Unix.
const NO_DESCRIPTOR: [i32; 2] = [24, 23];

/// Client for GET requests to engines. An embedder with TLS, a proxy or other credentials provides its own to
/// [`RouterBuilder::engine_client`](crate::RouterBuilder::engine_client) and
/// [`ProbeOptions::client`](crate::ProbeOptions::client); the default is plain HTTP.
///
/// ```
/// use pointsman::{BoxFuture, EngineClient, EngineGet, EngineHttpError};
///
/// /// Responds without engines, in a test.
/// #[derive(Debug)]
/// struct Healthy;
///
/// impl EngineClient for Healthy {
///     fn get(&self, request: EngineGet) -> BoxFuture<'_, Result<Vec<u8>, EngineHttpError>> {
///         let is_health = request.url.ends_with("/health");
///         Box::pin(async move { if is_health { Ok(Vec::new()) } else { Err(EngineHttpError::Status(404)) } })
///     }
/// }
/// ```
pub trait EngineClient: fmt::Debug + Send + Sync + 'static {
    /// Sends the request and returns the body of a response with status 200. Ends within the timeout of the request.
    fn get(&self, request: EngineGet) -> BoxFuture<'_, Result<Vec<u8>, EngineHttpError>>;
}

/// A GET request to an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineGet {
    /// Address, `http` or `https`.
    pub url: String,
    /// [`WorkerConfig::api_key_file`](crate::protocol::WorkerConfig::api_key_file) of the worker.
    pub api_key_file: Option<PathBuf>,
    /// Timeout of the whole request.
    pub timeout: Duration,
    /// Maximum length of the response in bytes.
    pub bytes_max: usize,
}

/// Failure of a request to an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineHttpError {
    /// The URL is invalid.
    #[error(transparent)]
    Url(#[from] HttpUrlError),
    /// The client has no TLS. The state of the server is unknown.
    #[error("https requires an engine client with TLS (RouterBuilder::engine_client and ProbeOptions::client)")]
    NoTls,
    /// The API key cannot be used. No request was sent.
    #[error("{0}")]
    Key(String),
    /// No free file descriptor in the process or on the machine. The state of the server is unknown.
    #[error("no file descriptor for a connection")]
    NoDescriptor,
    /// The connection failed.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The request timed out.
    #[error("no response within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The engine requires another API key: status 401 or 403.
    #[error("response status is {status}: {advice}")]
    Unauthorized {
        /// The status.
        status: u16,
        /// The setting to change.
        advice: String,
    },
    /// Another status than 200.
    #[error("response status is {0}, must be 200")]
    Status(u16),
    /// The body exceeds the limit.
    #[error("response exceeds {0} bytes")]
    TooLong(usize),
    /// The response is not HTTP, or is truncated.
    #[error("invalid HTTP response: {0}")]
    Broken(String),
}

/// Client without TLS. It sends the key of a worker as `Authorization: Bearer` and reads the file at every request.
///
/// Requests to `https` addresses fail with [`EngineHttpError::NoTls`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainEngineClient;

impl EngineClient for PlainEngineClient {
    /// Cancel-safe: dropping the future closes the connection.
    fn get(&self, request: EngineGet) -> BoxFuture<'_, Result<Vec<u8>, EngineHttpError>> {
        Box::pin(async move {
            let timeout = request.timeout;
            match tokio::time::timeout(timeout, get_untimed(request)).await {
                Ok(answer) => answer,
                Err(_) => Err(EngineHttpError::Timeout(timeout)),
            }
        })
    }
}

async fn get_untimed(request: EngineGet) -> Result<Vec<u8>, EngineHttpError> {
    let EngineGet { url, api_key_file, timeout: _, bytes_max } = request;
    let url = HttpUrl::parse(&url)?;
    if url.is_tls() {
        return Err(EngineHttpError::NoTls);
    }
    let key = match &api_key_file {
        Some(file) => Some(bearer(file).await?),
        None => None,
    };
    let stream = TcpStream::connect((url.host(), url.port())).await;
    let stream = stream.map_err(|error| match error.raw_os_error() {
        Some(code) if NO_DESCRIPTOR.contains(&code) => EngineHttpError::NoDescriptor,
        _ => EngineHttpError::Connect(error.to_string()),
    })?;
    let mut client = http1::Builder::new();
    client.max_buf_size(BUFFER_BYTES).max_headers(HEADERS_MAX);
    let (mut sender, connection) = client.handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let mut request = Request::get(url.path())
        .header(HOST, url.authority())
        .header(USER_AGENT, "pointsman")
        .header(ACCEPT, "*/*")
        .header(CONNECTION, "close");
    if let Some(key) = key {
        request = request.header(AUTHORIZATION, key);
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(|error| EngineHttpError::Broken(error.to_string()))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(broken)?;
        match answer.status() {
            StatusCode::OK => read(answer.into_body(), bytes_max).await,
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => Err(unauthorized(status, api_key_file)),
            other => Err(EngineHttpError::Status(other.as_u16())),
        }
    };
    tokio::pin!(exchange);
    tokio::select! {
        biased;
        answer = &mut exchange => answer,
        // The connection has delivered the last bytes of the response, or its error appears in the exchange.
        _ = connection => exchange.await,
    }
}

fn unauthorized(status: StatusCode, api_key_file: Option<PathBuf>) -> EngineHttpError {
    let advice = match api_key_file {
        Some(file) => format!("the engine rejects the API key in {} (api_key_file of the worker)", file.display()),
        None => "the engine requires an API key; set api_key_file of the worker".to_owned(),
    };
    EngineHttpError::Unauthorized { status: status.as_u16(), advice }
}

/// The header for the key in a file, without the line end of the file.
async fn bearer(file: &Path) -> Result<HeaderValue, EngineHttpError> {
    let refused = |why: String| EngineHttpError::Key(format!("api_key_file is {}, {why}", file.display()));
    let unreadable = |error: std::io::Error| refused(format!("which cannot be read: {error}"));
    // A read of a pipe or device could block.
    if !tokio::fs::metadata(file).await.map_err(unreadable)?.is_file() {
        return Err(refused("which must be a regular file".to_owned()));
    }
    let opened = tokio::fs::File::open(file).await.map_err(unreadable)?;
    let mut content = b"Bearer ".to_vec();
    opened.take(KEY_BYTES_MAX as u64 + 1).read_to_end(&mut content).await.map_err(unreadable)?;
    let header = content.strip_suffix(b"\n").map_or(&content[..], |rest| rest.strip_suffix(b"\r").unwrap_or(rest));
    let key = &header[b"Bearer ".len()..];
    let is_valid = !key.is_empty() && key.len() <= KEY_BYTES_MAX && key.iter().all(u8::is_ascii_graphic);
    let header = HeaderValue::from_bytes(header).ok().filter(|_| is_valid);
    let rule = "which must hold 1 to 4096 printable ASCII characters, without spaces";
    let mut header = header.ok_or_else(|| refused(rule.to_owned()))?;
    header.set_sensitive(true);
    Ok(header)
}

async fn read(mut body: hyper::body::Incoming, bytes_max: usize) -> Result<Vec<u8>, EngineHttpError> {
    let announced = body.size_hint().lower();
    if announced > bytes_max as u64 {
        return Err(EngineHttpError::TooLong(bytes_max));
    }
    let mut read = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(part) = frame.map_err(broken)?.into_data() else { continue };
        if read.len() + part.len() > bytes_max {
            return Err(EngineHttpError::TooLong(bytes_max));
        }
        read.extend_from_slice(&part);
    }
    Ok(read)
}

fn broken(error: hyper::Error) -> EngineHttpError {
    EngineHttpError::Broken(error.to_string())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    const AN_HOUR: Duration = Duration::from_secs(3600);

    /// A server that sends these bytes on one connection and returns the request.
    async fn answering(answer: Vec<u8>) -> (String, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/metrics?a=b", listener.local_addr().expect("bound"));
        let received = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut received = Vec::new();
            while !received.ends_with(b"\r\n\r\n") {
                received.push(stream.read_u8().await.expect("the request's head"));
            }
            let _ = stream.write_all(&answer).await; // the client may have closed
            String::from_utf8(received).expect("text")
        });
        (url, received)
    }

    async fn get(url: &str, timeout: Duration, bytes_max: usize) -> Result<Vec<u8>, EngineHttpError> {
        PlainEngineClient.get(EngineGet { url: url.to_owned(), api_key_file: None, timeout, bytes_max }).await
    }

    async fn got(answer: &[u8], bytes_max: usize) -> Result<Vec<u8>, EngineHttpError> {
        let (url, _) = answering(answer.to_vec()).await;
        get(&url, AN_HOUR, bytes_max).await
    }

    #[tokio::test]
    async fn bodies_of_every_framing_are_read() {
        for answer in [
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
            "HTTP/1.0 200 OK\r\n\r\nhello",
        ] {
            assert_eq!(got(answer.as_bytes(), 5).await, Ok(b"hello".to_vec()), "{answer}");
            assert_eq!(got(answer.as_bytes(), 4).await, Err(EngineHttpError::TooLong(4)), "{answer}");
        }
    }

    #[tokio::test]
    async fn invalid_responses_are_errors() {
        assert_eq!(
            got(b"HTTP/1.1 302 Found\r\nlocation: http://x\r\n\r\n", 9).await,
            Err(EngineHttpError::Status(302))
        );
        assert_eq!(
            got(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", 9).await,
            Err(EngineHttpError::TooLong(9))
        );
        let long_head = [b"HTTP/1.1 200 OK\r\nx: ".as_slice(), &[b'y'; 200_000]].concat();
        for answer in [b"SSH-2.0-x\r\n".as_slice(), b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhel", &long_head]
        {
            assert!(matches!(got(answer, 9).await, Err(EngineHttpError::Broken(_))));
        }
        let gone = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", gone.local_addr().expect("bound"));
        drop(gone);
        assert!(matches!(get(&url, AN_HOUR, 9).await, Err(EngineHttpError::Connect(_))));
        assert_eq!(get("https://e", AN_HOUR, 9).await, Err(EngineHttpError::NoTls));
        assert!(matches!(get("ftp://e", AN_HOUR, 9).await, Err(EngineHttpError::Url(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn missing_responses_time_out() {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", silent.local_addr().expect("bound"));
        let timeout = Duration::from_millis(250);
        let error = get(&url, timeout, 9).await.expect_err("no response");
        assert_eq!(error.to_string(), "no response within 250 ms");
    }

    /// A file of this test with this content.
    fn key_file(name: &str, content: &[u8]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("pointsman-engine-key-{}-{name}", std::process::id()));
        std::fs::write(&path, content).expect("file written");
        path
    }

    #[tokio::test]
    async fn the_key_of_the_worker_is_sent_and_named_by_its_file_after_a_rejection() {
        let file = key_file("valid", b"secret-0123\r\n");
        let asked = |url: &str, file: Option<&PathBuf>| {
            let api_key_file = file.cloned();
            PlainEngineClient.get(EngineGet { url: url.to_owned(), api_key_file, timeout: AN_HOUR, bytes_max: 9 })
        };
        let (url, received) = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec()).await;
        assert_eq!(asked(&url, Some(&file)).await, Ok(Vec::new()));
        let received = received.await.expect("served");
        assert!(received.contains("\r\nauthorization: Bearer secret-0123\r\n"), "{received}");
        for (file, advice) in [(Some(&file), "rejects the API key in /"), (None, "set api_key_file of the worker")] {
            for status in ["401 Unauthorized", "403 Forbidden"] {
                let (url, _) = answering(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").into_bytes()).await;
                let error = asked(&url, file).await.expect_err("no key").to_string();
                let is_named = error.starts_with(&format!("response status is {}: ", &status[..3]));
                assert!(is_named && error.contains(advice) && !error.contains("secret"), "{error}");
            }
        }
    }

    #[tokio::test]
    async fn unusable_key_files_are_named_without_their_content() {
        for (file, rule) in [
            (key_file("spaced", b"hush hush"), "printable ASCII characters"),
            (key_file("empty", b"\n"), "1 to 4096"),
            (key_file("long", &[b'h'; KEY_BYTES_MAX + 1]), "1 to 4096"),
            (std::env::temp_dir(), "a regular file"),
            (PathBuf::from("/nowhere/key"), "cannot be read"),
        ] {
            let error = bearer(&file).await.expect_err("no key").to_string();
            let start = format!("api_key_file is {}, which ", file.display());
            assert!(error.starts_with(&start) && error.contains(rule) && !error.contains("hush"), "{error}");
        }
    }
}
