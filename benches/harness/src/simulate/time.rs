//! Virtual time: a paused clock that only the simulation advances, and exact detection of idleness.
//!
//! Configures the runtime and controls its clock. Only [`VirtualTime::reach`] advances time. [`VirtualTime::settle`]
//! returns exactly when no task can run. Events are ordered by the driver, because tokio's timers have a resolution of
//! milliseconds while a step of an engine takes microseconds.
//!
//! **Idleness.** A current-thread runtime calls its `on_thread_park` hook when its task queue is empty, before it
//! sleeps. The hook wakes the task in `settle`. The runtime then checks its timers without sleeping and continues with
//! the driver alone. A hook call without a waiting task has no effect.
//!
//! **Time.** A paused clock jumps to the next timer when its runtime sleeps. During `settle` the runtime does not
//! sleep, because the hook has created work. But a target with its own threads may make the driver wait for one of
//! them, and the runtime would sleep. Therefore one blocking task is held while the driver controls time: tokio's clock
//! does not jump while a blocking task is running.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Signals that the runtime is about to sleep.
#[derive(Clone, Debug, Default)]
pub(super) struct Rest(Arc<Notify>);

/// Creates a single-threaded runtime with a paused clock and without I/O drivers.
pub(super) fn runtime() -> io::Result<(Runtime, Rest)> {
    let rest = Rest::default();
    let hook = rest.clone();
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .on_thread_park(move || hook.0.notify_waiters())
        .build()?;
    Ok((runtime, rest))
}

/// Clock of one simulation in µs since its start.
#[derive(Debug)]
pub(super) struct VirtualTime {
    rest: Rest,
    epoch: Instant,
    /// Largest jump of the clock in µs.
    slice_us: u64,
    /// Its drop ends the blocking task that keeps the clock from jumping.
    _hold: mpsc::Sender<()>,
}

impl VirtualTime {
    /// Takes control of the clock of the current runtime, which must be created by [`runtime`].
    pub(super) fn start(rest: Rest, slice_us: u64) -> Self {
        let (hold, end) = mpsc::channel();
        drop(tokio::task::spawn_blocking(move || end.recv()));
        Self { rest, epoch: Instant::now(), slice_us, _hold: hold }
    }

    /// Advances the clock to `at_us`, if that is in the future, and runs the tasks whose timers fire.
    pub(super) async fn reach(&self, at_us: u64) {
        loop {
            let ahead = Duration::from_micros(at_us).saturating_sub(self.epoch.elapsed());
            if ahead.is_zero() {
                return;
            }
            tokio::time::advance(ahead.min(Duration::from_micros(self.slice_us))).await;
            self.settle().await;
        }
    }

    /// Returns when no task can run.
    pub(super) async fn settle(&self) {
        self.rest.0.notified().await;
    }
}
