//! Whether a connection has a request.
//!
//! Owns the count of requests between their head and the last frame of their answer. Promises that an answer counts until its
//! body has been handed over, however that ends. Leaves what is done with idle connections to the listener.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body::{Frame, SizeHint};
use tokio::sync::watch;
use tokio::time::timeout;

/// Requests of one connection. HTTP/1.1 answers them one by one.
#[derive(Default)]
pub(super) struct Busy(watch::Sender<usize>);

/// One request, until it is dropped.
pub(super) struct Begun(watch::Sender<usize>);

impl Busy {
    /// A request has come.
    pub(super) fn begin(&self) -> Begun {
        self.0.send_modify(|requests| *requests += 1);
        Begun(self.0.clone())
    }

    /// Returns once there has been no request for `time`.
    pub(super) async fn idle_for(&self, time: Duration) {
        let mut requests = self.0.subscribe();
        loop {
            // The sender is this value's own.
            let _ = requests.wait_for(|requests| *requests == 0).await;
            if !matches!(timeout(time, requests.wait_for(|requests| *requests > 0)).await, Ok(Ok(_))) {
                return;
            }
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.send_modify(|requests| *requests -= 1);
    }
}

/// An answer's body, which keeps its connection busy.
pub(super) struct BusyBody {
    body: Body,
    _begun: Begun,
}

impl BusyBody {
    pub(super) fn new(body: Body, begun: Begun) -> Self {
        Self { body, _begun: begun }
    }
}

impl http_body::Body for BusyBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_once_its_last_answer_has_ended() {
        let busy = Busy::default();
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        busy.idle_for(second).await;
        assert_eq!(start.elapsed(), second);
        let first = busy.begin();
        let ends = async {
            tokio::time::sleep(second * 5).await;
            drop(BusyBody::new(Body::empty(), first));
            tokio::time::sleep(second / 2).await;
            // A request within the time begins it anew.
            let request = busy.begin();
            tokio::task::yield_now().await;
            drop(request);
        };
        tokio::join!(busy.idle_for(second), ends);
        assert_eq!(start.elapsed(), second + second * 5 + second / 2 + second);
    }
}
