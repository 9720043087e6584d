//! Guard that ends a lease on drop.

use std::sync::Arc;

use super::edge::Edge;
use crate::directory::Lease;

/// Ends its lease when dropped, unless [detached](LeaseGuard::detach).
pub(super) struct LeaseGuard {
    pub(super) edge: Arc<Edge>,
    pub(super) lease: Arc<Lease>,
    /// Cleared when the booking is detached.
    ends_lease: bool,
    /// Cleared when the request has been rejected and thus has left the queue.
    may_wait: bool,
}

impl LeaseGuard {
    pub(super) fn new(edge: &Arc<Edge>, lease: Arc<Lease>) -> Self {
        Self { edge: Arc::clone(edge), lease, ends_lease: true, may_wait: true }
    }

    /// Ends the lease of a rejected request, without a cancellation to the queue.
    pub(super) fn was_rejected(mut self) {
        self.may_wait = false;
    }

    /// Detaches the booking from the guard: it lasts until it is freed by request id, or expires.
    pub(super) fn detach(mut self) {
        self.lease.leave(self.edge.clock.now());
        self.ends_lease = false;
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if self.ends_lease {
            self.edge.ender.end_as(&self.lease, self.may_wait);
        }
    }
}
