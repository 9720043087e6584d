//! Memory budget of request bodies.
//!
//! Covers bodies being received and bodies of requests in flight. The sum never exceeds the budget, and an exhausted
//! budget leads to a rejection within [`ROOM_WAIT_MAX`]. Earlier bodies make progress: without free bytes, a body that
//! has been arriving for longer than [`ARRIVAL_GRACE`] is rejected first, otherwise the newest. Complete bodies are
//! never rejected. A slow or silent sender therefore holds its bytes against others for at most [`ARRIVAL_GRACE`].
//! `admission::intake` reads the bodies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::observe::requests::{BODIES_REJECTED, BODY_BYTES, BODY_BYTES_MAX};
use crate::observe::throttle::LogThrottle;

/// Maximum arrival time of a body before it is rejected first. Sixteen megabytes take 5 s at 27 Mbit/s.
const ARRIVAL_GRACE: Duration = Duration::from_secs(5);

/// Maximum wait for the bytes of a rejected body to be freed.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(1);

/// Log interval of an exhausted budget.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The budget is exhausted, and this body is rejected.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exhausted;

/// The budget. See the module documentation.
pub(crate) struct BodyBudget {
    bytes_max: u64,
    state: Mutex<State>,
    /// Notified after bytes are freed.
    freed: Notify,
    bytes: Gauge,
    rejected: Counter,
    logged: LogThrottle,
}

#[derive(Default)]
struct State {
    /// Bytes of all bodies.
    reserved: u64,
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

impl BodyBudget {
    pub(crate) fn new(bytes_max: u64) -> Arc<Self> {
        metrics::gauge!(BODY_BYTES_MAX.name).set(bytes_max as f64);
        Arc::new(Self {
            bytes_max,
            state: Mutex::default(),
            freed: Notify::new(),
            bytes: metrics::gauge!(BODY_BYTES.name),
            rejected: metrics::counter!(BODIES_REJECTED.name),
            logged: LogThrottle::new(LOG_INTERVAL),
        })
    }

    /// An empty reservation for a body with its first bytes.
    pub(crate) fn begin(self: &Arc<Self>) -> Reservation {
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
        if let Some(suppressed) = self.logged.next_line(Instant::now()) {
            tracing::warn!(
                body_budget_bytes = self.bytes_max,
                suppressed = suppressed,
                "request body rejected: the budget over all request bodies (gateway.body_budget_bytes) is exhausted"
            );
        }
        Exhausted
    }
}

/// Reserved bytes of one body, released on drop.
pub(crate) struct Reservation {
    budget: Arc<BodyBudget>,
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
            if state.reserved + more <= self.budget.bytes_max {
                own.bytes += more;
                state.reserved += more;
                self.bytes += more;
                self.budget.bytes.increment(more as f64);
                return Ok(true);
            }
            if state.reserved.saturating_sub(state.leaving) + more <= self.budget.bytes_max {
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
        state.reserved -= less;
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
        state.reserved -= self.bytes;
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

    fn reserved(budget: &BodyBudget) -> (u64, u64) {
        let state = budget.state.lock();
        (state.reserved, state.leaving)
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_body_is_rejected_first() {
        let budget = BodyBudget::new(10 * MIB);
        let (mut first, mut second) = (budget.begin(), budget.begin());
        first.grow_to(5 * MIB).await.expect("within the budget");
        second.grow_to(5 * MIB).await.expect("within the budget");
        let mut third = budget.begin();
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
        let budget = BodyBudget::new(10 * MIB);
        let (mut complete, mut stuck) = (budget.begin(), budget.begin());
        complete.grow_to(6 * MIB).await.expect("within the budget");
        complete.complete(6 * MIB).expect("not rejected");
        stuck.grow_to(4 * MIB).await.expect("within the budget");
        tokio::time::sleep(ARRIVAL_GRACE).await;
        let mut new = budget.begin();
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
