//! Timer lag, as a measure of whether the machine keeps up.
//!
//! A timer fires every few milliseconds and its delay is recorded. A client with late timers also observes responses late,
//! and mock engines are driven by timers too: the measured times then describe the machine and not the routing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// Interval of the timer. The runtime's timers have a resolution of one millisecond.
const EVERY: Duration = Duration::from_millis(5);

/// Timer task that records its delays until it is dropped.
#[derive(Debug)]
pub struct TimerLag {
    lags: Arc<Mutex<Vec<Duration>>>,
    task: JoinHandle<()>,
}

impl TimerLag {
    /// Starts the timer on the current runtime.
    #[must_use]
    pub fn start() -> Self {
        let lags = Arc::<Mutex<Vec<Duration>>>::default();
        let out = Arc::clone(&lags);
        let task = tokio::spawn(async move {
            loop {
                let due = Instant::now() + EVERY;
                sleep_until(due).await;
                out.lock().unwrap_or_else(PoisonError::into_inner).push(due.elapsed());
            }
        });
        Self { lags, task }
    }

    /// Recorded delays, one per tick.
    #[must_use]
    pub fn end(self) -> Vec<Duration> {
        std::mem::take(&mut *self.lags.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for TimerLag {
    fn drop(&mut self) {
        self.task.abort();
    }
}
