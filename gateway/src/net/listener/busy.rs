//! Activity tracking of a connection.
//!
//! Counts requests from their head to the last frame of their response, however it ends. The listener closes idle
//! connections.

use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body_util::BodyExt as _;
use tokio::sync::watch;
use tokio::time::timeout;

/// Requests of one connection. HTTP/1.1 serves them in order.
#[derive(Default)]
pub(super) struct Busy {
    requests: watch::Sender<usize>,
    is_http2: watch::Sender<bool>,
}

/// One request, until dropped.
pub(super) struct Begun(watch::Sender<usize>);

impl Busy {
    /// Records the start of a request.
    pub(super) fn begin(&self) -> Begun {
        self.requests.send_modify(|requests| *requests += 1);
        Begun(self.requests.clone())
    }

    /// Records that the connection has HTTP/2 requests.
    pub(super) fn set_http2(&self) {
        self.is_http2.send_if_modified(|is_http2| !std::mem::replace(is_http2, true));
    }

    /// Resolves when the connection has had an HTTP/2 request.
    pub(super) async fn until_http2(&self) {
        // The sender belongs to this value, so the wait cannot fail.
        let _ = self.is_http2.subscribe().wait_for(|is_http2| *is_http2).await;
    }

    /// Resolves after `time` without a request.
    pub(super) async fn idle_for(&self, time: Duration) {
        let mut requests = self.requests.subscribe();
        loop {
            // The sender belongs to this value, so the wait cannot fail.
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

/// The body of a response, which keeps its connection busy until it is dropped.
pub(super) fn keep_busy(body: Body, begun: Begun) -> impl http_body::Body<Data = Bytes, Error = axum::Error> {
    // The closure owns the request as long as there is a body.
    body.inspect_err(move |_| {
        let _begun = &begun;
    })
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_after_its_last_response() {
        let busy = Busy::default();
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        busy.idle_for(second).await;
        assert_eq!(start.elapsed(), second);
        let first = busy.begin();
        let ends = async {
            tokio::time::sleep(second * 5).await;
            drop(keep_busy(Body::empty(), first));
            tokio::time::sleep(second / 2).await;
            // A request within the time restarts it.
            let request = busy.begin();
            tokio::task::yield_now().await;
            drop(request);
        };
        tokio::join!(busy.idle_for(second), ends);
        assert_eq!(start.elapsed(), second + second * 5 + second / 2 + second);
    }
}
