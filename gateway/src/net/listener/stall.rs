//! Write timeout of a connection.
//!
//! A client that reads anything within the time is never cut off, however slow. Reads are not affected.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Fails writes after the other side has read nothing for too long.
pub(super) struct StallGuard<S> {
    stream: S,
    stall_max: Duration,
    /// Set while the other side reads nothing.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl<S> StallGuard<S> {
    pub(super) fn new(stream: S, stall_max: Duration) -> Self {
        Self { stream, stall_max, alarm: None }
    }

    fn check_stall<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.alarm = None;
            return written;
        }
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep(self.stall_max)));
        ready!(alarm.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check_stall(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.check_stall(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.check_stall(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.stream).poll_shutdown(context);
        self.check_stall(context, ended)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio::time::Instant;

    use super::*;

    const STALL_MAX: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn stalled_readers_fail_and_slow_readers_do_not() {
        let (ours, mut theirs) = duplex(4);
        let mut ours = StallGuard::new(ours, STALL_MAX);
        let slow = tokio::spawn(async move {
            let mut bytes = [0; 4];
            for _ in 0..5 {
                sleep(STALL_MAX - Duration::from_secs(1)).await;
                theirs.read_exact(&mut bytes).await.expect("reads succeed");
            }
            theirs
        });
        ours.write_all(&[0; 24]).await.expect("slow reads count as progress");
        let theirs = slow.await.expect("task ends without panic");
        let stalled = Instant::now();
        let error = ours.write_all(&[0; 24]).await.expect_err("write stalls");
        assert_eq!((error.kind(), stalled.elapsed()), (io::ErrorKind::TimedOut, STALL_MAX));
        drop(theirs);
    }
}
