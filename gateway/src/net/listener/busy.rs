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

use super::super::budget::{Held, Permit, Refusal, RequestBudget};

/// Requests since the start.
#[derive(Default)]
pub(super) struct Activity {
    begun: AtomicU64,
    ended: AtomicU64,
    /// Notified when the last request in flight ends. One waiter.
    idle: Notify,
}

/// Counts of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    begun: u64,
    ended: u64,
}

impl Counts {
    pub(super) fn in_flight(self) -> usize {
        usize::try_from(self.begun - self.ended).unwrap_or(usize::MAX)
    }
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

    pub(super) fn counts(&self) -> Counts {
        // Ends first: the counts are equal only without a request in flight.
        let ended = self.ended.load(Ordering::SeqCst);
        Counts { begun: self.begun.load(Ordering::SeqCst), ended }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.counts().in_flight()
    }

    /// Resolves after the end of the last request in flight, or a notification.
    pub(super) async fn changed(&self) {
        self.idle.notified().await;
    }

    /// Resolves after `time` without a request.
    pub(super) async fn idle_for(&self, time: Duration) {
        loop {
            let counts = self.counts();
            tokio::select! {
                biased;
                () = self.changed() => {}
                () = sleep(time), if counts.begun == counts.ended => {
                    if self.counts() == counts {
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
    budget: Option<Arc<RequestBudget>>,
    /// Part of the budget; used by HTTP/2.
    held: Held,
    listener: Arc<Activity>,
    is_http2: AtomicBool,
    is_leaving: AtomicBool,
}

/// One request, until dropped.
pub(super) struct Begun {
    connection: Arc<Connection>,
    is_http2: bool,
    permit: Permit,
}

impl Connection {
    pub(super) fn of(listener: &Arc<Activity>, budget: Option<Arc<RequestBudget>>) -> Arc<Self> {
        let (activity, listener, held) = (Activity::default(), Arc::clone(listener), Held::default());
        let (is_http2, is_leaving) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { activity, budget, held, listener, is_http2, is_leaving })
    }

    /// Records the start of a request, with the limit that refuses it.
    pub(super) fn begin(self: &Arc<Self>, is_http2: bool, head_bytes: u64) -> (Begun, Option<Refusal>) {
        self.listener.begin();
        self.activity.begin();
        if is_http2 && !self.is_http2.load(Ordering::Relaxed) {
            self.is_http2.store(true, Ordering::Relaxed);
        }
        let held = is_http2.then_some(&self.held);
        let (permit, refusal) =
            self.budget.as_ref().map_or((Permit::None, None), |budget| budget.begin(head_bytes, held));
        (Begun { connection: Arc::clone(self), is_http2, permit }, refusal)
    }

    /// Whether the connection has had an HTTP/2 request.
    pub(super) fn is_http2(&self) -> bool {
        self.is_http2.load(Ordering::Relaxed)
    }

    /// Lets an HTTP/2 connection end as soon as no stream is open.
    pub(super) fn leave(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
        self.activity.idle.notify_one();
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed)
    }
}

impl Begun {
    /// Whether the request may have a response.
    pub(super) fn is_answered(&self) -> bool {
        self.permit != Permit::None || self.connection.budget.is_none()
    }

    /// Moves the request to the share of refused ones.
    pub(super) fn refuse(&mut self) {
        let connection = &self.connection;
        if let Some(budget) = &connection.budget {
            self.permit = budget.refuse(self.permit, self.is_http2.then_some(&connection.held));
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let connection = &self.connection;
        if let Some(budget) = &connection.budget {
            budget.end(self.permit, self.is_http2.then_some(&connection.held));
        }
        connection.activity.end();
        connection.listener.end();
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
        let (connection, other) = (Connection::of(&listener, None), Connection::of(&listener, None));
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        connection.activity.idle_for(second).await;
        assert_eq!(start.elapsed(), second);
        let (first, of_other) = (connection.begin(false, 0).0, other.begin(false, 0).0);
        let ends = async {
            sleep(second * 5).await;
            drop(keep_busy(Body::empty(), first));
            sleep(second / 2).await;
            // A request within the time restarts it.
            let request = connection.begin(false, 0);
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
