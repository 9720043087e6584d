//! Health of the measuring process: timer lag and CPU share.
//!
//! A timer fires every few milliseconds. Its delay and the CPU time of the process are recorded. A client with late
//! timers also observes responses late, and a client near its CPU limit is about to. [`crate::results`] defines the
//! thresholds.

use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::measure::{Stopwatch, process_cpu};
use crate::results::ClientHealth;

/// Interval of the timer. The runtime's timers have a resolution of one millisecond.
const EVERY: Duration = Duration::from_millis(5);

/// Maximum lag in the histogram, in µs: an hour.
const LAG_US_MAX: u64 = 3_600_000_000;

/// Number of cores available to this process; 1 if unknown.
#[must_use]
pub fn cores() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}

/// Monitor that runs until its end or its drop.
#[derive(Debug)]
pub struct Watch {
    lags_us: Arc<Mutex<Histogram<u64>>>,
    task: JoinHandle<()>,
    wall: Stopwatch,
    cpu: Duration,
}

impl Watch {
    /// Starts to monitor the current runtime.
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

    /// Stops the monitor and returns its measurements.
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
    async fn a_busy_thread_increases_timer_lag_and_cpu_share() {
        let watch = Watch::start();
        for _ in 0..3 {
            // Let the monitor wait for its timer, then block the only thread.
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
