//! Whether the machine keeps up.
//!
//! Owns a timer that rings every few milliseconds and how late it rang. A machine without time for a timer has none for
//! engines that are made of timers either: what is measured then says nothing of routing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// How often it rings. Timers of the runtime are exact to a millisecond.
const EVERY: Duration = Duration::from_millis(5);

/// Watches until it is dropped.
pub(super) struct LagWatch {
    lags: Arc<Mutex<Vec<Duration>>>,
    task: JoinHandle<()>,
}

impl LagWatch {
    pub(super) fn start() -> Self {
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

    /// How late it was, each time.
    pub(super) fn end(self) -> Vec<Duration> {
        std::mem::take(&mut *self.lags.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for LagWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}
