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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use tokio::sync::oneshot;

    use super::*;

    fn simulate<F: Future>(work: impl FnOnce(VirtualTime) -> F) -> F::Output {
        let (runtime, rest) = runtime().expect("a runtime");
        runtime.block_on(async { work(VirtualTime::start(rest, u64::MAX)).await })
    }

    #[test]
    fn only_the_driver_advances_time() {
        simulate(|time| async move {
            let rung = Arc::new(AtomicU32::new(0));
            let bell = Arc::clone(&rung);
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    bell.fetch_add(1, Relaxed);
                }
            });
            for _ in 0..100 {
                time.settle().await;
            }
            // Waiting for another thread does not advance time either.
            let (sender, receiver) = oneshot::channel();
            let other = std::thread::spawn(move || sender.send(()));
            receiver.await.expect("reported");
            other.join().expect("no panic").expect("heard");
            assert_eq!((rung.load(Relaxed), time.epoch.elapsed()), (0, Duration::ZERO));

            for (at_us, times) in [(9_999, 0), (10_000, 1), (10_001, 1), (30_500, 2)] {
                time.reach(at_us).await;
                assert_eq!((time.epoch.elapsed(), rung.load(Relaxed)), (Duration::from_micros(at_us), times));
            }
        });
    }
}
