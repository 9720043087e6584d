//! State of a connection for the request that waits on it: its end, and whether it was used before.
//!
//! The client passes a request to a connection task through a channel. If the task ends while the request enters the
//! channel, the request stays there: it is neither sent nor returned, and its response never completes. Observed with
//! hyper 1.12 and tokio 1.54 while workers reset connections.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{future, io};

use hyper::Request;
use hyper::http::Extensions;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{CaptureConnection, Connected, Connection, capture_connection};
use tokio::sync::watch;
use tokio::time::sleep;

/// Reads after which a connection that always has bytes lets others work. An engine may flood it with interim responses,
/// which are all parsed in one poll.
const READS_MAX: u32 = 2;

/// Stream that signals its drop to the requests of its connection.
#[derive(Debug)]
pub(super) struct Signaling<S> {
    stream: S,
    open: watch::Sender<()>,
    transfers: Arc<Transfers>,
    /// Reads since the last wait.
    reads: u32,
}

/// Transfers of a connection, which carries one request at a time.
#[derive(Debug, Default)]
struct Transfers {
    /// Successful reads since the last write. The last one of a connection may be its end.
    reads: AtomicU32,
    /// Whether a request was written after a response to another one.
    is_reused: AtomicBool,
}

/// State of one connection, in the client's metadata of it.
#[derive(Clone, Debug)]
struct End {
    open: watch::Receiver<()>,
    transfers: Arc<Transfers>,
}

impl<S> Signaling<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, open: watch::Sender::new(()), transfers: Arc::default(), reads: 0 }
    }

    fn written(&self) {
        if self.transfers.reads.swap(0, Ordering::Relaxed) > 0 {
            self.transfers.is_reused.store(true, Ordering::Relaxed);
        }
    }
}

/// Connections of a request, observed from before it is sent.
pub(super) struct Observed(CaptureConnection);

impl Observed {
    pub(super) fn of<B>(request: &mut Request<B>) -> Self {
        Self(capture_connection(request))
    }

    /// Waits until a connection of the request has ended for `grace` and the request has no other. The grace is for
    /// requests that the client sends again over a new connection.
    pub(super) async fn ended(&mut self, grace: Duration) {
        while let Some(mut end) = self.end().await {
            // Nothing is ever sent: the wait ends with an error when the stream is dropped.
            let _ = end.open.changed().await;
            sleep(grace).await;
            if self.end().await.is_some_and(|newest| newest.open.same_channel(&end.open)) {
                return;
            }
        }
        // Without a connection the client reports the error.
        future::pending().await
    }

    async fn end(&mut self) -> Option<End> {
        let connected = self.0.wait_for_connection_metadata().await;
        end_of(connected.as_ref())
    }

    /// Whether the connection has served another request and has sent nothing to this one. `has_end`: its last read was
    /// the end of the stream.
    pub(super) fn is_unanswered(&self, has_end: bool) -> bool {
        end_of(self.0.connection_metadata().as_ref()).is_some_and(|End { transfers, .. }| {
            let reads = transfers.reads.load(Ordering::Relaxed);
            transfers.is_reused.load(Ordering::Relaxed) && reads <= u32::from(has_end)
        })
    }
}

fn end_of(connected: Option<&Connected>) -> Option<End> {
    let mut extras = Extensions::new();
    connected?.get_extras(&mut extras);
    extras.remove()
}

impl<S: Connection> Connection for Signaling<S> {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(End { open: self.open.subscribe(), transfers: Arc::clone(&self.transfers) })
    }
}

impl<S: Read + Unpin> Read for Signaling<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let reads = std::mem::take(&mut this.reads);
        if reads >= READS_MAX {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if let Poll::Ready(Ok(())) = read {
            this.reads = reads + 1;
            this.transfers.reads.fetch_add(1, Ordering::Relaxed);
        }
        read
    }
}

impl<S: Write + Unpin> Write for Signaling<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.written();
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.written();
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, buffers)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;
    use std::task::{Wake, Waker};

    use hyper::rt::ReadBuf;

    use super::*;

    /// A connection that always has bytes.
    struct Flood;

    impl Read for Flood {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, mut buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
            buffer.put_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
            Poll::Ready(Ok(()))
        }
    }

    #[derive(Default)]
    struct Wakes(AtomicU32);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_flood_lets_others_work_and_continues() {
        let (mut stream, wakes) = (Signaling::new(Flood), Arc::new(Wakes::default()));
        let waker = Waker::from(Arc::clone(&wakes));
        for n in 1..=3 {
            let is_read = |_: &u32| {
                let mut bytes = [MaybeUninit::uninit(); 64];
                let mut buffer = ReadBuf::uninit(&mut bytes);
                Pin::new(&mut stream).poll_read(&mut Context::from_waker(&waker), buffer.unfilled()).is_ready()
            };
            assert_eq!((0..100).take_while(is_read).count(), 2, "reads in a row");
            assert_eq!(wakes.0.load(Ordering::Relaxed), n, "each pause wakes its own task");
        }
    }
}
