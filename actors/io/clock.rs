//! The router's clock: tokio's, so that paused tests pause it too.

use tokio::time::Instant;

use crate::protocol::Timestamp;

/// Turns the runtime's monotonic time into [`Timestamp`]s since the router's start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    epoch: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { epoch: Instant::now() }
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::default() + self.epoch.elapsed()
    }
}
