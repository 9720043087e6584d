//! Stream of a client, with an orderly end of HTTP/2 connections.
//!
//! hyper ends a connection with a GOAWAY for streams to come and a PING. Python's h2 rejects every frame after GOAWAY, so
//! its users lose the responses in flight. Here the GOAWAY is the last frame: the stream passes hyper a GOAWAY in the name
//! of the client. hyper then serves further requests, and ends the connection with the number of the last stream as soon
//! as none is open. Clients repeat a later request elsewhere, because that number excludes it. Until they close the
//! connection, its socket stays open: a reset could overtake the GOAWAY.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tokio_io_timeout::TimeoutWriter;

use super::busy::Connection;

/// Start of an HTTP/2 connection.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Frame without an error, for any stream.
const GOAWAY: [u8; 17] = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Length of a frame's head.
const FRAME_HEAD: usize = 9;

/// Frames of a request head, and the flag of its last one.
const HEAD_FRAMES: [u8; 2] = [1, 9];
const END_HEADERS: u8 = 4;

/// Time for the client to close the connection. Some notice its end with their next request only, and keep idle
/// connections for 5 s.
const LINGER: Duration = Duration::from_secs(5);

/// See the module documentation.
pub(super) struct ClientStream<S> {
    stream: Pin<Box<TimeoutWriter<S>>>,
    client: Arc<Connection>,
    /// `None` with HTTP/1.1, and after the GOAWAY.
    frames: Option<Frames>,
    linger: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncRead + AsyncWrite> ClientStream<S> {
    /// A client that reads nothing for `stall_max` is cut off.
    pub(super) fn new(stream: S, stall_max: Duration, client: Arc<Connection>) -> Self {
        let mut stream = TimeoutWriter::new(stream);
        stream.set_timeout(Some(stall_max));
        Self { stream: Box::pin(stream), client, frames: Some(Frames::default()), linger: None }
    }
}

impl<S: AsyncRead + AsyncWrite> AsyncRead for ClientStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        let read = this.stream.as_mut().poll_read(cx, buf);
        let Some(frames) = &mut this.frames else { return read };
        if !frames.follow(&buf.filled()[before..]) {
            this.frames = None;
        } else if read.is_pending()
            && this.client.is_leaving()
            && frames.is_between()
            && buf.remaining() >= GOAWAY.len()
        {
            this.frames = None;
            buf.put_slice(&GOAWAY);
            return Poll::Ready(Ok(()));
        }
        read
    }
}

impl<S: AsyncRead + AsyncWrite> AsyncWrite for ClientStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.client.is_leaving() {
            let linger = this.linger.get_or_insert_with(|| Box::pin(sleep(LINGER)));
            let mut bytes = [0; 1024];
            loop {
                let mut rest = ReadBuf::new(&mut bytes);
                match this.stream.as_mut().poll_read(cx, &mut rest) {
                    Poll::Pending => break ready!(linger.as_mut().poll(cx)),
                    Poll::Ready(Ok(())) if !rest.filled().is_empty() => {}
                    Poll::Ready(_) => break,
                }
            }
        }
        this.stream.as_mut().poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Position in the frames of a client.
#[derive(Default)]
struct Frames {
    /// Bytes of the preface.
    preface: usize,
    /// Bytes of the frame's head.
    head: [u8; FRAME_HEAD],
    read: usize,
    /// Further bytes of the frame.
    payload: usize,
    is_in_request_head: bool,
}

impl Frames {
    /// Whether the bytes are HTTP/2.
    fn follow(&mut self, mut bytes: &[u8]) -> bool {
        let preface = bytes.len().min(PREFACE.len() - self.preface);
        if bytes[..preface] != PREFACE[self.preface..][..preface] {
            return false;
        }
        self.preface += preface;
        bytes = &bytes[preface..];
        while !bytes.is_empty() {
            if self.payload > 0 {
                let skipped = self.payload.min(bytes.len());
                self.payload -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let read = bytes.len().min(FRAME_HEAD - self.read);
            self.head[self.read..][..read].copy_from_slice(&bytes[..read]);
            self.read += read;
            bytes = &bytes[read..];
            if self.read == FRAME_HEAD {
                let [high, middle, low, kind, flags, ..] = self.head;
                self.read = 0;
                self.payload = u32::from_be_bytes([0, high, middle, low]) as usize;
                self.is_in_request_head = HEAD_FRAMES.contains(&kind) && flags & END_HEADERS == 0;
            }
        }
        true
    }

    /// Whether another frame may follow.
    fn is_between(&self) -> bool {
        self.preface == PREFACE.len() && self.read + self.payload == 0 && !self.is_in_request_head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_frames_are_found_in_any_pieces() {
        let frame = |kind, flags, payload: &[u8]| {
            let length = u8::try_from(payload.len()).expect("short");
            [&[0, 0, length, kind, flags, 0, 0, 0, 1], payload].concat()
        };
        // Settings; a head in two frames; a body.
        let frames = [frame(4, 0, b""), frame(1, 0, &[7; 30]), frame(9, 4, &[7; 3]), frame(0, 1, b"body")];
        let all = [PREFACE, &frames.concat()].concat();
        for piece in [1, 2, 5, all.len()] {
            let (mut followed, mut at) = (Frames::default(), 0);
            for bytes in all.chunks(piece) {
                assert!(followed.follow(bytes));
                at += bytes.len();
                assert_eq!(followed.is_between(), [24, 33, 84, 97].contains(&at), "{piece}: {at}");
            }
            assert_eq!(at, 97);
        }
        for other in ["POST / HTTP/1.1\r\n", "PRI * HTTP/1"] {
            assert!(!Frames::default().follow(other.as_bytes()), "{other}");
        }
    }
}
