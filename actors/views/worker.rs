//! The registered workers, as the supervisor publishes them.

use crate::protocol::{WorkerConfig, WorkerId, WorkerRank};

/// One registered worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerEntry {
    /// Its id.
    pub worker: WorkerId,
    /// Its configuration.
    pub config: WorkerConfig,
    /// Its ranks.
    pub ranks: Vec<WorkerRank>,
    /// Whether it gets no new work and leaves when its last booking has ended.
    pub draining: bool,
    /// Whether it gets no new work until [`Router::uncordon_worker`](crate::Router::uncordon_worker).
    pub cordoned: bool,
}

impl WorkerEntry {
    /// Whether it may get new work: neither draining nor cordoned.
    #[must_use]
    pub fn takes_requests(&self) -> bool {
        !self.draining && !self.cordoned
    }
}
