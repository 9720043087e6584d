//! Broken responses: garbage instead of a response, and bodies that end in their middle.

use std::future::pending;

use axum::body::{Body, Bytes};
use futures_util::StreamExt as _;
use futures_util::stream::unfold;
use tokio::task::yield_now;

/// Bytes of invalid responses. The connection closes after them.
const GARBAGE: [&[u8]; 5] = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is not HTTP\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 26\r\nconnection: close\r\n\r\n<html>starting up</html>\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 21\r\nconnection: close\r\n\r\n{\"id\":\"x\",\"choices\":[",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{\"id\":\"x\",\"choices\":[",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n90\r\ndata: {\"id\":\"x\",",
];

/// One of the invalid responses.
pub(super) fn garbage(draw: u64) -> &'static [u8] {
    GARBAGE[usize::try_from(draw % GARBAGE.len() as u64).expect("an index")]
}

/// What follows the first half of a body.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rest {
    /// The end of the connection.
    Closed,
    /// Nothing, on an open connection.
    Never,
}

/// The injected end of a body.
#[derive(Debug, thiserror::Error)]
#[error("injected fault: the body ends in its middle")]
struct Cut;

/// The first half of a body: one and a half chunks of a stream, or half of a body with one chunk.
pub(super) fn half(body: Body, rest: Rest) -> Body {
    Body::from_stream(unfold((body.into_data_stream(), false), move |(mut body, is_over)| async move {
        if !is_over {
            let first = body.next().await.and_then(Result::ok);
            let second = if first.is_some() { body.next().await.and_then(Result::ok) } else { None };
            let half = |data: Bytes| data.slice(..data.len() / 2);
            let part = match (first, second) {
                (Some(first), Some(second)) => [first, half(second)].concat().into(),
                (Some(only), None) => half(only),
                (None, _) => Bytes::new(),
            };
            return Some((Ok(part), (body, true)));
        }
        match rest {
            // The part is sent first, because hyper drops unsent data at an error of the body.
            Rest::Closed => yield_now().await,
            Rest::Never => pending().await,
        }
        Some((Err(Cut), (body, true)))
    }))
}
