//! Turns of the queues of several replicas.
//!
//! All replicas see free capacity at about the same time. Without turns each of them would dispatch a waiting request to
//! it. A replica dispatches if more ranks are open than other replicas have an older waiting request, so that the
//! longest-waiting requests of all replicas precede. A replica that does not use its turn is passed after a while: its
//! request may be restricted to other ranks.

use std::time::Duration;

use super::LoadView;
use crate::protocol::Timestamp;

/// Turn of the own queue.
#[derive(Debug)]
pub(super) struct Turn {
    patience: Duration,
    /// Older requests of other replicas have had their turn.
    passed: Option<Timestamp>,
    /// Since when a request waits only for requests of other replicas.
    yields_since: Option<Timestamp>,
}

impl Turn {
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, passed: None, yields_since: None }
    }

    /// Whether requests of other replicas precede, if `open` ranks are open and the longest-waiting own request arrived at
    /// `head`.
    pub(super) fn must_yield<V: LoadView>(&self, loads: &V, open: usize, head: Timestamp, now: Timestamp) -> bool {
        !self.is_over(now) && loads.replicas_ahead(self.passed, head) >= open
    }

    /// Whether the others have not used their turn.
    fn is_over(&self, now: Timestamp) -> bool {
        self.yields_since.is_some_and(|since| now >= since + self.patience)
    }

    /// Records that a request is dispatched, or that none could be.
    pub(super) fn end(&mut self, head: Timestamp, now: Timestamp) {
        if self.is_over(now) {
            self.passed = self.passed.max(Some(head));
        }
        self.yields_since = None;
    }

    /// Records that a request waits for requests of other replicas.
    pub(super) fn give_way(&mut self, now: Timestamp) {
        self.yields_since.get_or_insert(now);
    }

    /// Forgets the wait of a queue that is empty.
    pub(super) fn reset(&mut self) {
        self.yields_since = None;
    }

    /// When the wait for other replicas ends.
    pub(super) fn ends_at(&self) -> Option<Timestamp> {
        self.yields_since.map(|since| since + self.patience)
    }
}
