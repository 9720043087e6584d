//! Plain HTTP GET for probes and metrics of engines.
//!
//! Each request has its own connection. It ends with a response or an error within the timeout, reads at most the given
//! number of bytes, follows no redirect and leaves no task behind. Callers interpret the response.

use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Body as _, Bytes};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, CONNECTION, HOST, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::discovery::{HttpUrl, HttpUrlError};

/// Size of the read buffer in bytes; the response head must fit.
const BUFFER_BYTES: usize = 64 << 10;

/// Maximum number of response headers.
const HEADERS_MAX: usize = 100;

/// OS errors for a process or a machine without a free file descriptor: EMFILE and ENFILE, on Unix.
const NO_DESCRIPTOR: [i32; 2] = [24, 23];

/// Failure of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HttpError {
    /// The URL is invalid.
    #[error(transparent)]
    Url(#[from] HttpUrlError),
    /// No free file descriptor in the process or on the machine. The state of the server is unknown.
    #[error("no file descriptor for a connection")]
    NoDescriptor,
    /// The connection failed.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The request timed out.
    #[error("no response within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// A status other than 200.
    #[error("response status is {0}, must be 200")]
    Status(u16),
    /// The body exceeds the limit.
    #[error("response exceeds {0} bytes")]
    TooLong(usize),
    /// The response is not HTTP, or is truncated.
    #[error("invalid HTTP response: {0}")]
    Broken(String),
}

/// Returns the body of `GET url`, at most `bytes_max` long, within `timeout` in total.
///
/// Cancel-safe: dropping the future closes the connection.
///
/// # Errors
/// See [`HttpError`]; any status but 200 is one.
pub(crate) async fn get(url: &str, timeout: Duration, bytes_max: usize) -> Result<Bytes, HttpError> {
    let url = HttpUrl::parse(url)?;
    match tokio::time::timeout(timeout, get_untimed(&url, bytes_max)).await {
        Ok(answer) => answer,
        Err(_) => Err(HttpError::Timeout(timeout)),
    }
}

async fn get_untimed(url: &HttpUrl, bytes_max: usize) -> Result<Bytes, HttpError> {
    let stream = TcpStream::connect((url.host(), url.port())).await;
    let stream = stream.map_err(|error| match error.raw_os_error() {
        Some(code) if NO_DESCRIPTOR.contains(&code) => HttpError::NoDescriptor,
        _ => HttpError::Connect(error.to_string()),
    })?;
    let mut client = http1::Builder::new();
    client.max_buf_size(BUFFER_BYTES).max_headers(HEADERS_MAX);
    let (mut sender, connection) = client.handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let request = Request::get(url.path())
        .header(HOST, url.authority())
        .header(USER_AGENT, "pointsman")
        .header(ACCEPT, "*/*")
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| HttpError::Broken(error.to_string()))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(broken)?;
        match answer.status() {
            StatusCode::OK => read(answer.into_body(), bytes_max).await,
            other => Err(HttpError::Status(other.as_u16())),
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

async fn read(mut body: hyper::body::Incoming, bytes_max: usize) -> Result<Bytes, HttpError> {
    let announced = body.size_hint().lower();
    if announced > bytes_max as u64 {
        return Err(HttpError::TooLong(bytes_max));
    }
    let mut read = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(part) = frame.map_err(broken)?.into_data() else { continue };
        if read.len() + part.len() > bytes_max {
            return Err(HttpError::TooLong(bytes_max));
        }
        read.extend_from_slice(&part);
    }
    Ok(read.into())
}

fn broken(error: hyper::Error) -> HttpError {
    HttpError::Broken(error.to_string())
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

    async fn got(answer: &[u8], bytes_max: usize) -> Result<Bytes, HttpError> {
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
            assert_eq!(got(answer.as_bytes(), 5).await, Ok(Bytes::from("hello")), "{answer}");
            assert_eq!(got(answer.as_bytes(), 4).await, Err(HttpError::TooLong(4)), "{answer}");
        }
    }

    #[tokio::test]
    async fn the_request_names_path_and_host() {
        let (url, received) = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec()).await;
        assert_eq!(get(&url, AN_HOUR, 0).await, Ok(Bytes::new()));
        let received = received.await.expect("served");
        assert!(received.starts_with("GET /metrics?a=b HTTP/1.1\r\nhost: 127.0.0.1:"), "{received}");
    }

    #[tokio::test]
    async fn invalid_responses_are_errors() {
        assert_eq!(got(b"HTTP/1.1 302 Found\r\nlocation: http://x\r\n\r\n", 9).await, Err(HttpError::Status(302)));
        assert_eq!(got(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", 9).await, Err(HttpError::TooLong(9)));
        let long_head = [b"HTTP/1.1 200 OK\r\nx: ".as_slice(), &[b'y'; 200_000]].concat();
        for answer in [b"SSH-2.0-x\r\n".as_slice(), b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhel", &long_head]
        {
            assert!(matches!(got(answer, 9).await, Err(HttpError::Broken(_))));
        }
        let gone = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", gone.local_addr().expect("bound"));
        drop(gone);
        assert!(matches!(get(&url, AN_HOUR, 9).await, Err(HttpError::Connect(_))));
        assert!(matches!(get("https://e", AN_HOUR, 9).await, Err(HttpError::Url(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn missing_responses_time_out() {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", silent.local_addr().expect("bound"));
        let timeout = Duration::from_millis(250);
        let error = get(&url, timeout, 9).await.expect_err("no response");
        assert_eq!(error.to_string(), "no response within 250 ms");
    }
}
