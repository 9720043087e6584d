//! Expiry of bookings by request id without recent reports.
//!
//! A placement keeps its booking for its own lifetime, so long requests keep their load. A booking by id lasts while
//! its embedder reports on it. It ends at most one and a quarter of `load.booking_liveness_ms` after the last report,
//! or with the router.

use std::sync::Arc;
use std::time::Duration;

use metrics::Counter;

use super::io::clock::Clock;
use super::lease_ender::LeaseEnder;
use super::views::status::RouterStatus;
use crate::directory::Directory;
use crate::protocol::Timestamp;

/// Sweeps per liveness period.
const SWEEPS: u32 = 4;

/// Dependencies of the sweep.
pub(crate) struct LeaseExpiry {
    pub(crate) clock: Clock,
    pub(crate) directory: Arc<Directory>,
    pub(crate) ender: Arc<LeaseEnder>,
    pub(crate) status: Arc<RouterStatus>,
    pub(crate) expired: Counter,
}

impl LeaseExpiry {
    /// Starts the sweep. With the router it ends all bookings by id.
    pub(crate) fn watch(self, liveness: Duration) {
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    biased;
                    _ = self.status.down() => return self.end_all(),
                    () = tokio::time::sleep(liveness / SWEEPS) => self.sweep(liveness),
                }
            }
        });
    }

    fn end_all(&self) {
        for lease in self.directory.silent(Duration::ZERO, Timestamp(u64::MAX)) {
            self.ender.end(&lease);
        }
    }

    fn sweep(&self, liveness: Duration) {
        for lease in self.directory.silent(liveness, self.clock.now()) {
            if !lease.is_silent(liveness, self.clock.now()) {
                continue; // reported since the sweep found it
            }
            tracing::warn!(request_id = lease.request_id(), "booking expired without a report");
            self.expired.increment(1);
            self.ender.end(&lease);
        }
    }
}
