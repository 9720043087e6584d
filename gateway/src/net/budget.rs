//! Budget of all requests in flight: memory, and connections to workers.
//!
//! A request takes its permit when its head has arrived, before any other work: the memory of its head, its state and
//! its buffers, and one connection to a worker. Its body takes bytes of the same budget as it arrives. The sum never
//! exceeds the budget. Requests without a permit, and responses to unknown clients, have a small share of their own with
//! HTTP/2. Connections of HTTP/1.1 have one response each, and the limit of connections applies, so that probes are
//! answered.
//!
//! A connection of HTTP/2 has at most as much as is free, so that its limit falls as the load rises.
//!
//! Bodies have seven eighths. An exhausted budget leads to a rejection within [`ROOM_WAIT_MAX`]. Earlier bodies make
//! progress: without free bytes, a body that has been arriving for longer than [`ARRIVAL_GRACE`] is rejected first,
//! otherwise the newest. Complete bodies are never rejected. A slow or silent sender therefore holds its bytes against
//! others for at most [`ARRIVAL_GRACE`]. `admission::intake` reads the bodies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Gauge};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::formats::openai::ApiError;
use crate::observe::requests::{BODY_BYTES, REQUEST_BUDGET_BYTES, REQUESTS_REFUSED};
use crate::observe::throttle::LogThrottle;

/// Maximum arrival time of a body before it is rejected first. Sixteen megabytes take 5 s at 27 Mbit/s.
const ARRIVAL_GRACE: Duration = Duration::from_secs(5);

/// Maximum wait for the bytes of a rejected body to be freed.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(1);

/// Log interval of an exhausted budget.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Memory of a request besides its head and its body: state of the connection and the proxy, and buffers of the response.
const REQUEST_BYTES: u64 = 48 << 10;

/// Copies of a head: as received, and for the worker.
const HEAD_COPIES: u64 = 2;

/// Memory of a refused request with its response.
const REFUSED_BYTES: u64 = 16 << 10;

/// Part of the budget for refused requests, and part that bodies leave to others.
const REFUSED_SHARE: u64 = 16;
const HEADS_SHARE: u64 = 8;

/// Maximum bytes of the heads of one HTTP/2 connection.
const CONNECTION_HEADS_MAX: u64 = 1 << 20;

/// The budget is exhausted, and this body is rejected.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exhausted;

/// Requests and their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    requests: u64,
    bytes: u64,
}

/// A [`Use`] in one atomic, so that a request costs one operation at its start and one at its end.
#[derive(Default)]
pub(super) struct Held(AtomicU64);

/// One request. The bits below count bytes, up to a tebibyte.
const ONE: u64 = 1 << 40;

impl Held {
    fn load(&self) -> Use {
        Self::of(self.0.load(Ordering::Relaxed))
    }

    fn of(used: u64) -> Use {
        Use { requests: used / ONE, bytes: used % ONE }
    }

    /// Adds a request, and returns the sum.
    fn begin(&self, bytes: u64) -> Use {
        Self::of(self.0.fetch_add(ONE + bytes, Ordering::Relaxed) + ONE + bytes)
    }

    fn end(&self, bytes: u64) {
        self.0.fetch_sub(ONE + bytes, Ordering::Relaxed);
    }

    /// Adds a request within a limit, or nothing.
    fn begin_within(&self, max: Use, bytes: u64) -> bool {
        let used = self.begin(bytes);
        let fits = used.requests <= max.requests && used.bytes <= max.bytes;
        if !fits {
            self.end(bytes);
        }
        fits
    }
}

/// Permit of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Permit {
    /// In the budget with these bytes.
    Served(u64),
    /// In the share of refused requests.
    Refused,
    /// No memory for a response: the stream is reset.
    None,
}

/// Limit that refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The budget.
    Budget,
    /// The part of one connection.
    Connection,
    /// The heads of one connection.
    Heads,
}

impl Refusal {
    fn name(self) -> &'static str {
        match self {
            Self::Budget => "budget",
            Self::Connection => "connection",
            Self::Heads => "heads",
        }
    }

    pub(super) fn error(self) -> ApiError {
        match self {
            Self::Budget => ApiError::request_budget_exhausted(),
            Self::Connection => ApiError::connection_overloaded(),
            Self::Heads => ApiError::heads_too_large(),
        }
    }
}

/// The budget. See the module documentation.
pub(crate) struct RequestBudget {
    max: Use,
    /// All requests, with their bodies.
    served: Held,
    refused: Held,
    state: Mutex<State>,
    /// Notified after bytes are freed.
    freed: Notify,
    bytes: Gauge,
    rejected: Counter,
    logged: LogThrottle,
}

#[derive(Default)]
struct State {
    /// Bytes of rejected bodies that are not dropped yet.
    leaving: u64,
    next_id: u64,
    /// Bodies that may still be rejected, in order of their start.
    receiving: BTreeMap<u64, Receiving>,
}

/// An incomplete body.
struct Receiving {
    since: Instant,
    bytes: u64,
    rejected: Arc<Notify>,
}

impl State {
    /// The body to reject in favor of `requester`: the earliest late body, otherwise the newest; `None` for its own.
    fn victim(&self, requester: u64, now: Instant) -> Option<u64> {
        let is_late = |(_, body): &(&u64, &Receiving)| now.saturating_duration_since(body.since) >= ARRIVAL_GRACE;
        let late = self.receiving.first_key_value().filter(is_late);
        let victim = late.or_else(|| self.receiving.last_key_value());
        victim.map(|(id, _)| *id).filter(|id| *id != requester)
    }

    /// Removes a body from the list and notifies its reader.
    fn reject(&mut self, id: u64) {
        if let Some(body) = self.receiving.remove(&id) {
            self.leaving += body.bytes;
            body.rejected.notify_one();
        }
    }
}

impl RequestBudget {
    pub(crate) fn new(bytes: u64, requests: u64) -> Arc<Self> {
        metrics::gauge!(REQUEST_BUDGET_BYTES.name).set(bytes as f64);
        Arc::new(Self {
            max: Use { requests, bytes: bytes.min(ONE / 2) },
            served: Held::default(),
            refused: Held::default(),
            state: Mutex::default(),
            freed: Notify::new(),
            bytes: metrics::gauge!(BODY_BYTES.name),
            rejected: metrics::counter!(REQUESTS_REFUSED.name, "reason" => "body"),
            logged: LogThrottle::new(LOG_INTERVAL),
        })
    }

    /// A budget with this many bytes for bodies.
    #[cfg(test)]
    pub(crate) fn for_bodies(bytes: u64) -> Arc<Self> {
        Self::new(bytes + bytes / (HEADS_SHARE - 1), u64::from(u32::MAX))
    }

    /// A permit for a request with a head of this length. `connection`: the requests of its HTTP/2 connection.
    pub(super) fn begin(&self, head_bytes: u64, connection: Option<&Held>) -> (Permit, Option<Refusal>) {
        let bytes = REQUEST_BYTES + HEAD_COPIES * head_bytes;
        let refusal = match connection.map(|held| held.begin(bytes)) {
            Some(Use { requests, bytes }) if bytes - requests * REQUEST_BYTES > HEAD_COPIES * CONNECTION_HEADS_MAX => {
                Some(Refusal::Heads)
            }
            Some(Use { bytes, .. }) if bytes > self.max.bytes.saturating_sub(self.served.load().bytes) => {
                Some(Refusal::Connection)
            }
            _ => (!self.served.begin_within(self.max, bytes)).then_some(Refusal::Budget),
        };
        let Some(refusal) = refusal else { return (Permit::Served(bytes), None) };
        if let Some(held) = connection {
            held.end(bytes);
        }
        self.warn(refusal.name());
        metrics::counter!(REQUESTS_REFUSED.name, "reason" => refusal.name()).increment(1);
        (self.begin_refused(connection), Some(refusal))
    }

    fn begin_refused(&self, connection: Option<&Held>) -> Permit {
        let bytes = connection.map_or(u64::MAX, |_| self.max.bytes / REFUSED_SHARE);
        let max = Use { requests: u64::MAX, bytes };
        if self.refused.begin_within(max, REFUSED_BYTES) { Permit::Refused } else { Permit::None }
    }

    /// Returns a permit.
    pub(super) fn end(&self, permit: Permit, connection: Option<&Held>) {
        match permit {
            Permit::Served(bytes) => {
                self.served.end(bytes);
                connection.inspect(|held| held.end(bytes));
            }
            Permit::Refused => self.refused.end(REFUSED_BYTES),
            Permit::None => {}
        }
    }

    /// Moves a permit to the share of refused requests.
    pub(super) fn refuse(&self, permit: Permit, connection: Option<&Held>) -> Permit {
        let Permit::Served(_) = permit else { return permit };
        self.end(permit, connection);
        self.begin_refused(connection)
    }

    /// Bytes that all requests may have while a body grows.
    fn bodies_max(&self) -> u64 {
        self.max.bytes - self.max.bytes / HEADS_SHARE
    }

    /// An empty reservation for a body with its first bytes.
    pub(crate) fn begin_body(self: &Arc<Self>) -> Reservation {
        let rejected = Arc::new(Notify::new());
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.receiving.insert(id, Receiving { since: Instant::now(), bytes: 0, rejected: Arc::clone(&rejected) });
        drop(state);
        Reservation { budget: Arc::clone(self), id, bytes: 0, is_complete: false, rejected }
    }

    /// Counts and logs a rejected body.
    fn reject(&self) -> Exhausted {
        self.rejected.increment(1);
        self.warn("body");
        Exhausted
    }

    fn warn(&self, reason: &'static str) {
        if let Some(suppressed) = self.logged.next_line(Instant::now()) {
            let Use { requests, bytes } = self.served.load();
            let request_budget_bytes = self.max.bytes;
            tracing::warn!(
                reason,
                requests,
                bytes,
                request_budget_bytes,
                suppressed,
                "request refused: budget reached"
            );
        }
    }
}

/// Reserved bytes of one body, released on drop.
pub(crate) struct Reservation {
    budget: Arc<RequestBudget>,
    id: u64,
    bytes: u64,
    /// Whether the body is permanently off the list of rejectable bodies.
    is_complete: bool,
    rejected: Arc<Notify>,
}

impl Reservation {
    /// Reserves `bytes` in total, including earlier calls.
    ///
    /// # Errors
    /// The budget is exhausted and this body is rejected.
    pub(crate) async fn grow_to(&mut self, bytes: u64) -> Result<(), Exhausted> {
        let budget = Arc::clone(&self.budget);
        let end = Instant::now() + ROOM_WAIT_MAX;
        loop {
            let freed = budget.freed.notified();
            tokio::pin!(freed);
            // Registers before the check below, so that no notification is missed.
            freed.as_mut().enable();
            if self.try_grow(bytes)? {
                return Ok(());
            }
            let waited = async {
                tokio::select! {
                    biased;
                    () = self.rejected.notified() => false,
                    () = freed => true,
                }
            };
            if !timeout_at(end, waited).await.unwrap_or(false) {
                return Err(budget.reject());
            }
        }
    }

    /// Whether bytes were available. Otherwise other bodies have been rejected for them.
    fn try_grow(&mut self, bytes: u64) -> Result<bool, Exhausted> {
        let mut guard = self.budget.state.lock();
        let state = &mut *guard;
        let more = bytes.saturating_sub(self.bytes);
        loop {
            let Some(own) = state.receiving.get_mut(&self.id) else {
                drop(guard);
                return Err(self.budget.reject());
            };
            let (used, bytes_max) = (self.budget.served.load().bytes, self.budget.bodies_max());
            if used + more <= bytes_max {
                own.bytes += more;
                self.budget.served.0.fetch_add(more, Ordering::Relaxed);
                self.bytes += more;
                self.budget.bytes.increment(more as f64);
                return Ok(true);
            }
            if used.saturating_sub(state.leaving) + more <= bytes_max {
                return Ok(false);
            }
            let Some(id) = state.victim(self.id, Instant::now()) else {
                drop(guard);
                return Err(self.budget.reject());
            };
            state.reject(id);
        }
    }

    /// Resolves when the body is rejected in favor of others, otherwise never.
    pub(crate) async fn rejected(&self) -> Exhausted {
        self.rejected.notified().await;
        self.budget.reject()
    }

    /// Marks the body complete with `bytes`, at most the reserved bytes, so that it can no longer be rejected.
    ///
    /// # Errors
    /// The body was rejected just before.
    pub(crate) fn complete(&mut self, bytes: u64) -> Result<(), Exhausted> {
        let mut state = self.budget.state.lock();
        if state.receiving.remove(&self.id).is_none() {
            drop(state);
            return Err(self.budget.reject());
        }
        let less = self.bytes.saturating_sub(bytes);
        self.budget.served.0.fetch_sub(less, Ordering::Relaxed);
        drop(state);
        self.is_complete = true;
        self.bytes -= less;
        self.budget.bytes.decrement(less as f64);
        self.budget.freed.notify_waiters();
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        self.budget.served.0.fetch_sub(self.bytes, Ordering::Relaxed);
        // An incomplete body outside the list was rejected for the bytes that it frees now.
        if !self.is_complete && state.receiving.remove(&self.id).is_none() {
            state.leaving -= self.bytes;
        }
        drop(state);
        self.budget.bytes.decrement(self.bytes as f64);
        self.budget.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn reserved(budget: &RequestBudget) -> (u64, u64) {
        let state = budget.state.lock();
        (budget.served.load().bytes, state.leaving)
    }

    #[test]
    fn a_connection_has_at_most_what_is_free() {
        let budget = RequestBudget::new(16 * REQUEST_BYTES, 100);
        let (greedy, other) = (Held::default(), Held::default());
        let begin = |connection| budget.begin(0, Some(connection));
        let served = || (0..20).filter(|_| begin(&greedy).1.is_none()).count();
        // Half of the budget is free, and then half of the rest.
        assert_eq!(served(), 8);
        assert_eq!(begin(&greedy).1, Some(Refusal::Connection));
        assert_eq!((0..20).filter(|_| begin(&other).1.is_none()).count(), 4);
        // Connections of HTTP/1.1 have one request each.
        assert_eq!((0..20).filter(|_| budget.begin(0, None).1.is_none()).count(), 4);
        assert_eq!(budget.begin(0, None).1, Some(Refusal::Budget));
        for _ in 0..8 {
            budget.end(Permit::Served(REQUEST_BYTES), Some(&greedy));
        }
        assert_eq!((greedy.load(), budget.served.load().requests), (Use { requests: 0, bytes: 0 }, 8));
    }

    #[test]
    fn heads_of_a_connection_are_limited() {
        let (budget, held) = (RequestBudget::new(1 << 30, 100), Held::default());
        let served = (0..100).filter(|_| budget.begin(60_000, Some(&held)).1.is_none()).count();
        assert_eq!(served as u64, CONNECTION_HEADS_MAX / 60_000);
        assert_eq!(budget.begin(60_000, Some(&held)).1, Some(Refusal::Heads));
    }

    #[test]
    fn refused_requests_have_a_small_share() {
        let budget = RequestBudget::new(REFUSED_SHARE * 2 * REFUSED_BYTES, 1);
        assert_eq!(budget.begin(0, None), (Permit::Served(REQUEST_BYTES), None));
        let (http2, again) = (Held::default(), || budget.begin(0, None));
        let all = [Some(&http2), Some(&http2), Some(&http2), None].map(|connection| budget.begin(0, connection).0);
        assert_eq!(all, [Permit::Refused, Permit::Refused, Permit::None, Permit::Refused]);
        budget.end(Permit::Refused, None);
        // An unknown client leaves the budget.
        assert_eq!(budget.refuse(Permit::Served(REQUEST_BYTES), None), Permit::Refused);
        assert_eq!(budget.served.load(), Use { requests: 0, bytes: 0 });
        assert_eq!(again().1, None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_body_is_rejected_first() {
        let budget = RequestBudget::for_bodies(10 * MIB);
        let (mut first, mut second) = (budget.begin_body(), budget.begin_body());
        first.grow_to(5 * MIB).await.expect("within the budget");
        second.grow_to(5 * MIB).await.expect("within the budget");
        let mut third = budget.begin_body();
        assert_eq!(third.grow_to(1).await, Err(Exhausted), "the last body is rejected");
        drop(third);
        let second = tokio::spawn(async move {
            let rejected = second.rejected().await;
            drop(second);
            rejected
        });
        first.grow_to(9 * MIB).await.expect("the second body is rejected");
        assert_eq!(second.await.expect("task ends without panic"), Exhausted);
        assert_eq!(reserved(&budget), (9 * MIB, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn complete_bodies_stay_and_waits_for_rejected_ones_are_bounded() {
        let budget = RequestBudget::for_bodies(10 * MIB);
        let (mut complete, mut stuck) = (budget.begin_body(), budget.begin_body());
        complete.grow_to(6 * MIB).await.expect("within the budget");
        complete.complete(6 * MIB).expect("not rejected");
        stuck.grow_to(4 * MIB).await.expect("within the budget");
        tokio::time::sleep(ARRIVAL_GRACE).await;
        let mut new = budget.begin_body();
        let begun = Instant::now();
        assert_eq!(new.grow_to(1).await, Err(Exhausted));
        assert_eq!(begun.elapsed(), ROOM_WAIT_MAX, "the rejected body still holds its bytes");
        drop(new);
        assert_eq!(stuck.complete(4 * MIB), Err(Exhausted));
        assert_eq!(reserved(&budget), (10 * MIB, 4 * MIB));
        drop(stuck);
        assert_eq!(reserved(&budget), (6 * MIB, 0));
    }
}
