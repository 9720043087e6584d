//! Broken responses: garbage instead of a response, and bodies that end in their middle.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use http_body::Frame;

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

/// A body that ends in the middle: after one and a half chunks of a stream, or half of a body with one chunk.
pub(super) struct HalfBody {
    body: Body,
    rest: Rest,
    /// The first chunk, which is held back until a second one proves that it is not the whole body.
    first: Option<Bytes>,
    end: End,
}

/// Progress of the end of a body.
#[derive(Clone, Copy)]
enum End {
    /// Not reached.
    Ahead,
    /// The last data has been returned.
    Sending,
    /// It has been sent, because hyper drops unsent data at an error of the body.
    Sent,
}

impl HalfBody {
    pub(super) fn new(body: Body, rest: Rest) -> Self {
        Self { body, rest, first: None, end: End::Ahead }
    }
}

/// The injected end of a body.
#[derive(Debug, thiserror::Error)]
#[error("injected fault: the body ends in its middle")]
pub(super) struct Cut;

impl http_body::Body for HalfBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let this = &mut *self;
        match (this.end, this.rest) {
            (End::Ahead, _) => {}
            (End::Sending, Rest::Closed) => {
                this.end = End::Sent;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            (End::Sent, Rest::Closed) => return Poll::Ready(Some(Err(Cut))),
            (_, Rest::Never) => return Poll::Pending,
        }
        loop {
            let next = ready!(Pin::new(&mut this.body).poll_frame(context));
            let data = next.and_then(Result::ok).and_then(|frame| frame.into_data().ok());
            let half = |data: Bytes| data.slice(..data.len() / 2);
            let part = match (this.first.take(), data) {
                (None, Some(data)) => {
                    this.first = Some(data);
                    continue;
                }
                (Some(first), Some(second)) => [first, half(second)].concat().into(),
                (Some(only), None) => half(only),
                (None, None) => Bytes::new(),
            };
            this.end = End::Sending;
            return Poll::Ready(Some(Ok(Frame::data(part))));
        }
    }
}
