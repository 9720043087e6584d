//! Activity tracking of a listener and its connections.
//!
//! Counts requests from their head to the last frame of their response, however it ends. The listener closes idle
//! connections, and a drain ends after the last request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body_util::BodyExt as _;
use tokio::sync::Notify;
use tokio::time::sleep;

/// Requests since the start.
#[derive(Default)]
pub(super) struct Activity {
    begun: AtomicU64,
    ended: AtomicU64,
    /// Notified when the last request in flight ends. One waiter.
    idle: Notify,
}

impl Activity {
    fn begin(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        if self.ended.fetch_add(1, Ordering::SeqCst) + 1 == self.begun.load(Ordering::SeqCst) {
            self.idle.notify_one();
        }
    }

    /// Resolves after `time` without a request.
    pub(super) async fn idle_for(&self, time: Duration) {
        loop {
            // An end before a beginning that is read later: the values are equal only without a request in flight.
            let ended = self.ended.load(Ordering::SeqCst);
            if self.begun.load(Ordering::SeqCst) != ended {
                self.idle.notified().await;
                continue;
            }
            tokio::select! {
                biased;
                () = self.idle.notified() => {}
                () = sleep(time) => {
                    if self.begun.load(Ordering::SeqCst) == ended {
                        return;
                    }
                }
            }
        }
    }
}

/// Requests of one connection. HTTP/1.1 serves them in order.
pub(super) struct Connection {
    pub(super) activity: Activity,
    listener: Arc<Activity>,
    is_http2: AtomicBool,
    /// Notified at the first request of HTTP/2. One waiter.
    http2: Notify,
}

/// One request, until dropped.
pub(super) struct Begun(Arc<Connection>);

impl Connection {
    pub(super) fn of(listener: &Arc<Activity>) -> Arc<Self> {
        let (activity, listener) = (Activity::default(), Arc::clone(listener));
        Arc::new(Self { activity, listener, is_http2: AtomicBool::new(false), http2: Notify::new() })
    }

    /// Records the start of a request.
    pub(super) fn begin(self: &Arc<Self>, is_http2: bool) -> Begun {
        self.listener.begin();
        self.activity.begin();
        if is_http2 && !self.is_http2.load(Ordering::Relaxed) {
            self.is_http2.store(true, Ordering::Relaxed);
            self.http2.notify_one();
        }
        Begun(Arc::clone(self))
    }

    /// Resolves when the connection has had an HTTP/2 request.
    pub(super) async fn until_http2(&self) {
        if !self.is_http2.load(Ordering::Relaxed) {
            self.http2.notified().await;
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.activity.end();
        self.0.listener.end();
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
        let listener = Arc::default();
        let (connection, other) = (Connection::of(&listener), Connection::of(&listener));
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        connection.activity.idle_for(second).await;
        assert_eq!(start.elapsed(), second);
        let (first, of_other) = (connection.begin(false), other.begin(false));
        let ends = async {
            sleep(second * 5).await;
            drop(keep_busy(Body::empty(), first));
            sleep(second / 2).await;
            // A request within the time restarts it.
            let request = connection.begin(false);
            tokio::task::yield_now().await;
            drop(request);
        };
        tokio::join!(connection.activity.idle_for(second), ends);
        assert_eq!(start.elapsed(), second + second * 5 + second / 2 + second);
        let ends = async {
            sleep(second).await;
            drop(of_other);
        };
        tokio::join!(listener.idle_for(second), ends);
        assert_eq!(start.elapsed(), second * 7 + second / 2 + second * 2);
    }
}
