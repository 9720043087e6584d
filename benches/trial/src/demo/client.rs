//! HTTP client of the demo: sends streamed chat requests and measures the times of their tokens.
//!
//! Each client keeps one connection across requests. A successful result contains the complete answer (content, usage
//! and end marker). Every failure is an error with its reason, reported within [`PATIENCE`].

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::sse::{EventTooLong, SseReader};

/// Timeout of a whole request.
const PATIENCE: Duration = Duration::from_secs(60);

/// Maximum size of a plain response in bytes, and number of characters of an error body that are shown.
const ANSWER_BYTES_MAX: usize = 4 << 20;
const REFUSAL_CHARS_MAX: usize = 200;

/// Reasons for a failed request.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    #[error("cannot connect to {target}: {error}")]
    Connect { target: SocketAddr, error: std::io::Error },
    #[error("connection closed early: {0}")]
    Broken(#[from] hyper::Error),
    #[error("answered {status}: {body}")]
    Status { status: StatusCode, body: String },
    #[error("no response within {} s", PATIENCE.as_secs())]
    Timeout,
    #[error(transparent)]
    Event(#[from] EventTooLong),
    #[error("an event is not the expected JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the stream contains an error")]
    InStream,
    #[error("the stream ended without {0}")]
    Short(&'static str),
    #[error("cannot read the response: {0}")]
    Unreadable(String),
}

/// A complete answer with the times of its parts.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answer {
    pub(super) content: String,
    /// Time from the request to the first content.
    pub(super) first_token: Duration,
    /// Times between consecutive pieces of content.
    pub(super) gaps: Vec<Duration>,
    /// Time from the request to the end of the answer.
    pub(super) whole: Duration,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
}

/// A client with one connection, which is opened on first use.
pub(super) struct Client {
    target: SocketAddr,
    open: Option<SendRequest<Full<Bytes>>>,
}

impl Client {
    pub(super) fn new(target: SocketAddr) -> Self {
        Self { target, open: None }
    }

    /// Sends a chat request and reads the streamed answer.
    ///
    /// # Errors
    /// The request fails or times out, or the response is not a complete chat stream.
    pub(super) async fn chat(&mut self, body: Bytes) -> Result<Answer, ClientError> {
        let answered = timeout(PATIENCE, self.streamed(body)).await.unwrap_or(Err(ClientError::Timeout));
        if answered.is_err() {
            self.open = None;
        }
        answered
    }

    /// Fetches a page of text.
    ///
    /// # Errors
    /// The request fails or times out, or the status is not 200.
    pub(super) async fn get(&mut self, path: &str) -> Result<String, ClientError> {
        let exchange = async {
            let answer = self.send(Method::GET, path, Bytes::new()).await?;
            let text = text(answer).await?;
            Ok(text)
        };
        timeout(PATIENCE, exchange).await.unwrap_or(Err(ClientError::Timeout))
    }

    async fn streamed(&mut self, body: Bytes) -> Result<Answer, ClientError> {
        let mut stream = ChatStream::begin(Instant::now());
        let mut body = self.send(Method::POST, "/v1/chat/completions", body).await?.into_body();
        while let Some(frame) = body.frame().await {
            let now = Instant::now();
            if let Ok(bytes) = frame?.into_data() {
                stream.push(&bytes, now)?;
            }
            // A body of known length may have no further frame that marks its end.
            if body.is_end_stream() {
                break;
            }
        }
        stream.end()
    }

    /// Sends a request and returns the response head if the status is 200.
    async fn send(&mut self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, ClientError> {
        let request = || {
            let request = Request::builder().method(method.clone()).uri(path).header(HOST, self.target.to_string());
            let request = request.header(CONTENT_TYPE, "application/json").body(Full::new(body.clone()));
            request.expect("paths are written here, and addresses are ASCII")
        };
        if let Some(mut open) = self.open.take() {
            let is_open = open.ready().await.is_ok();
            let sent = if is_open { Some(open.send_request(request()).await) } else { None };
            match sent {
                // The request was not sent: the server had closed the idle connection.
                None => {}
                Some(Err(error)) if error.is_canceled() || error.is_closed() => {}
                Some(answer) => {
                    let answer = answer?;
                    self.open = Some(open);
                    return accepted(answer).await;
                }
            }
        }
        let target = self.target;
        let connect = |error| ClientError::Connect { target, error };
        let socket = TcpStream::connect(target).await.map_err(connect)?;
        socket.set_nodelay(true).map_err(connect)?;
        let (mut open, connection) = http1::handshake(TokioIo::new(socket)).await?;
        // Requests on the connection observe its end, so the task is detached.
        drop(tokio::spawn(connection));
        let answer = open.send_request(request()).await?;
        self.open = Some(open);
        accepted(answer).await
    }
}

async fn accepted(answer: Response<Incoming>) -> Result<Response<Incoming>, ClientError> {
    let status = answer.status();
    if status == StatusCode::OK {
        return Ok(answer);
    }
    let body = text(answer).await.unwrap_or_else(|error| error.to_string());
    Err(ClientError::Status { status, body: body.chars().take(REFUSAL_CHARS_MAX).collect() })
}

async fn text(answer: Response<Incoming>) -> Result<String, ClientError> {
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| ClientError::Unreadable(error.to_string()))?;
    Ok(String::from_utf8_lossy(&body.to_bytes()).into_owned())
}

/// Parser state of a streamed chat.
struct ChatStream {
    reader: SseReader,
    begun: Instant,
    last_content: Option<Instant>,
    answer: Answer,
    has_usage: bool,
    is_done: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<ReportedUsage>,
    error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Delta,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct ReportedUsage {
    prompt_tokens: u64,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl ChatStream {
    fn begin(begun: Instant) -> Self {
        let (reader, answer) = (SseReader::default(), Answer::default());
        Self { reader, begun, last_content: None, answer, has_usage: false, is_done: false }
    }

    fn push(&mut self, bytes: &[u8], now: Instant) -> Result<(), ClientError> {
        let mut reader = std::mem::take(&mut self.reader);
        let read = reader.push(bytes, |data| self.event(data, now));
        self.reader = reader;
        read
    }

    fn event(&mut self, data: &[u8], now: Instant) -> Result<(), ClientError> {
        if data == b"[DONE]" {
            self.is_done = true;
            self.answer.whole = now - self.begun;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(data)?;
        if chunk.error.is_some() {
            return Err(ClientError::InStream);
        }
        if let Some(usage) = chunk.usage {
            self.has_usage = true;
            self.answer.prompt_tokens = usage.prompt_tokens;
            self.answer.cached_tokens = usage.prompt_tokens_details.and_then(|d| d.cached_tokens).unwrap_or_default();
        }
        let contents = chunk.choices.into_iter().filter_map(|choice| choice.delta.content);
        for content in contents.filter(|content| !content.is_empty()) {
            match self.last_content.replace(now) {
                None => self.answer.first_token = now - self.begun,
                Some(last) => self.answer.gaps.push(now - last),
            }
            self.answer.content.push_str(&content);
        }
        Ok(())
    }

    fn end(self) -> Result<Answer, ClientError> {
        if self.last_content.is_none() {
            return Err(ClientError::Short("content"));
        }
        if !self.has_usage {
            return Err(ClientError::Short("usage"));
        }
        if !self.is_done {
            return Err(ClientError::Short("[DONE]"));
        }
        Ok(self.answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\" t1\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\" t2\"},\"finish_reason\":\"length\"}],\"usage\":null}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n\
        data: [DONE]\n\n";

    fn read(pieces: &[&[u8]]) -> Result<Answer, ClientError> {
        let begun = Instant::now();
        let mut stream = ChatStream::begin(begun);
        for (piece, second) in pieces.iter().zip(1..) {
            stream.push(piece, begun + Duration::from_secs(second))?;
        }
        stream.end()
    }

    #[test]
    fn content_and_usage_do_not_depend_on_how_the_stream_is_split() {
        for cut in 1..STREAM.len() {
            let (first, second) = STREAM.as_bytes().split_at(cut);
            let answer = read(&[first, second]).expect("complete");
            assert_eq!((answer.content.as_str(), answer.prompt_tokens, answer.cached_tokens), (" t1 t2", 9, 4));
            assert_eq!(answer.whole, Duration::from_secs(2));
            let behind = |text: &str| if cut < STREAM.find(text).expect("present") + text.len() { 2 } else { 1 };
            let (t1, t2) = (behind("t1\"}}]}\n\n"), behind("\"usage\":null}\n\n"));
            assert_eq!(answer.first_token, Duration::from_secs(t1), "cut at {cut}");
            assert_eq!(answer.gaps, [Duration::from_secs(t2 - t1)], "cut at {cut}");
        }
    }

    #[test]
    fn incomplete_streams_are_errors() {
        let ends = ["data: {\"choices\":[]", "data: {\"choices\":[{\"delta\":{\"content\":\" t2\"}", "data: [DONE]"];
        for end in ends {
            let cut = STREAM.find(end).unwrap_or(0);
            let short = read(&[&STREAM.as_bytes()[..cut]]);
            assert!(matches!(short, Err(ClientError::Short(_))), "{end}: {short:?}");
        }
        assert!(matches!(read(&[b"data: {\"error\":{}}\n\n"]), Err(ClientError::InStream)));
        assert!(matches!(read(&[b"data: no\n\n"]), Err(ClientError::Json(_))));
    }
}
