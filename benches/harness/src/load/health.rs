//! Whether this process keeps up with what it measures.
//!
//! Owns a timer that rings every few milliseconds, how late it rang, and the process' CPU time meanwhile. A client
//! whose timer is late sees answers late, too, and one that uses all of its CPU soon will. Leaves thresholds to
//! [`crate::results`].

use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::measure::{Stopwatch, process_cpu};
use crate::results::ClientHealth;

/// How often it rings. Timers of the runtime are exact to a millisecond.
const EVERY: Duration = Duration::from_millis(5);

/// Longest lag that is told apart, in µs: an hour.
const LAG_US_MAX: u64 = 3_600_000_000;

/// Cores that this process may use; 1 where nobody knows.
#[must_use]
pub fn cores() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}

/// Watches until its end, or until it is dropped.
#[derive(Debug)]
pub struct Watch {
    lags_us: Arc<Mutex<Histogram<u64>>>,
    task: JoinHandle<()>,
    wall: Stopwatch,
    cpu: Duration,
}

impl Watch {
    /// Begins to watch the runtime that this is called on.
    #[must_use]
    pub fn start() -> Self {
        let lags_us = Histogram::new_with_bounds(1, LAG_US_MAX, 2).expect("bounds in order");
        let lags_us = Arc::new(Mutex::new(lags_us));
        let out = Arc::clone(&lags_us);
        let task = tokio::spawn(async move {
            loop {
                let due = Instant::now() + EVERY;
                sleep_until(due).await;
                let lag_us = u64::try_from(due.elapsed().as_micros()).unwrap_or(LAG_US_MAX);
                out.lock().unwrap_or_else(PoisonError::into_inner).saturating_record(lag_us);
            }
        });
        Self { lags_us, task, wall: Stopwatch::start(), cpu: process_cpu() }
    }

    /// What was seen.
    #[must_use]
    pub fn end(self) -> ClientHealth {
        let wall = self.wall.elapsed().as_secs_f64().max(1e-9);
        let cpu = (process_cpu() - self.cpu).as_secs_f64();
        let lags_us = self.lags_us.lock().unwrap_or_else(PoisonError::into_inner);
        ClientHealth { cpu_share: cpu / wall / cores() as f64, lag_p99_us: lags_us.value_at_quantile(0.99) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::thread_cpu;

    #[tokio::test]
    async fn a_busy_thread_is_seen_in_timers_and_cpu() {
        let watch = Watch::start();
        for _ in 0..3 {
            // The watch waits for its timer; then the only thread has no time for it.
            tokio::task::yield_now().await;
            let from = thread_cpu();
            while thread_cpu() - from < Duration::from_millis(40) {
                std::hint::black_box(from);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let health = watch.end();
        assert!(health.lag_p99_us > 30_000, "{health:?}");
        assert!(health.cpu_share > 0.0, "{health:?}");
    }
}
