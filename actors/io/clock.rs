//! Clock of the router: tokio's clock, so that paused tests pause it too.

use tokio::time::Instant;

use crate::protocol::{TimeSource, Timestamp};

/// Converts the monotonic time of the runtime to [`Timestamp`]s since the start of the router.
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

impl TimeSource for Clock {
    fn now(&self) -> Timestamp {
        Self::now(self)
    }
}
