//! Tokenizer thread pool with a bounded queue.
//!
//! Waits are limited to [`WAIT_MAX`], abandoned work is dropped before it starts, and a panic in one task affects no
//! other.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::reason::NoTokens;

/// Maximum queued tasks.
const QUEUE_MAX: usize = 1_024;

/// Maximum threads; more do not help one model.
const THREADS_MAX: u32 = 64;

/// Maximum wait, queue and execution together. After it, routing by load alone is the better choice.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(5);

/// Stack size: templates and tokenizers recurse deeper than the runtime's threads allow.
const STACK_BYTES: usize = 8 << 20;

type Work = Box<dyn FnOnce() + Send>;

/// A queue entry, empty once the work has started or was abandoned.
type Task = Arc<Mutex<Option<Work>>>;

/// The threads. After the drop of the pool they finish their current task and end.
pub(super) struct Pool {
    queue: SyncSender<Task>,
}

impl Pool {
    /// Starts `threads` threads, at least one.
    pub(super) fn start(threads: u32) -> io::Result<Self> {
        Self::with_queue(threads, QUEUE_MAX)
    }

    fn with_queue(threads: u32, queue_max: usize) -> io::Result<Self> {
        let (queue, waiting) = sync_channel::<Task>(queue_max);
        let waiting = Arc::new(Mutex::new(waiting));
        for n in 0..threads.clamp(1, THREADS_MAX) {
            let waiting = Arc::clone(&waiting);
            let builder = thread::Builder::new().name(format!("tokenize-{n}")).stack_size(STACK_BYTES);
            builder.spawn(move || run_tasks(&waiting))?;
        }
        Ok(Self { queue })
    }

    /// Runs the work within [`WAIT_MAX`]. Cancel-safe: dropping the future removes work that has not started from the
    /// queue, with all its data.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, NoTokens> + Send + 'static,
    ) -> Result<T, NoTokens> {
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move || {
            // The receiver may be gone.
            let _ = reply.send(work());
        });
        let task: Task = Arc::new(Mutex::new(Some(work)));
        let _abandon = AbandonOnDrop(Arc::clone(&task));
        self.queue.try_send(task).map_err(|_| NoTokens::BUSY)?;
        timeout(WAIT_MAX, answer).await.map_err(|_| NoTokens::BUSY)?.unwrap_or(Err(NoTokens::PANICKED))
    }
}

/// A waiting caller; dropping it abandons the work.
struct AbandonOnDrop(Task);

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        drop(take_work(&self.0));
    }
}

/// Takes the work unless it has started. The lock is not held while the work runs or is dropped.
fn take_work(task: &Mutex<Option<Work>>) -> Option<Work> {
    task.lock().take()
}

fn run_tasks(waiting: &Mutex<Receiver<Task>>) {
    loop {
        // One thread waits on the channel, the others on the lock; no code in between panics.
        let task = waiting.lock().recv();
        let Ok(task) = task else { return };
        if let Some(work) = take_work(&task) {
            // A panic drops the reply sender, which informs the caller.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_panic_affects_no_other_task() {
        let pool = Pool::start(1).unwrap();
        let defect = pool.run(|| -> Result<(), NoTokens> { panic!("a defect") }).await;
        assert_eq!(defect, Err(NoTokens::PANICKED));
        assert_eq!(pool.run(|| Ok(7)).await, Ok(7));
    }

    #[tokio::test]
    async fn full_queue_rejects_and_abandoned_work_never_starts() {
        let pool = Pool::with_queue(1, 1).unwrap();
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let first = pool.run(move || {
            begun.send(()).unwrap();
            released.recv().unwrap();
            Ok(1)
        });
        let count = Arc::new(AtomicUsize::new(0));
        let counted = || {
            let count = Arc::clone(&count);
            move || Ok(count.fetch_add(1, Ordering::Relaxed))
        };
        // One poll each, in order: the first starts, the second waits, the third is rejected.
        let mut first = Box::pin(first);
        assert!(futures_now(&mut first).is_none());
        has_begun.recv().unwrap();
        let mut second = Box::pin(pool.run(counted()));
        assert!(futures_now(&mut second).is_none());
        assert_eq!(pool.run(counted()).await, Err(NoTokens::BUSY));
        drop(second);
        release.send(()).unwrap();
        assert_eq!(first.await, Ok(1));
        // The queue is processed in order: this task completes after the dropped one was skipped.
        loop {
            match pool.run(counted()).await {
                Ok(before) => break assert_eq!(before, 0),
                Err(reason) => assert_eq!(reason, NoTokens::BUSY),
            }
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn waits_are_limited_and_late_work_is_dropped() {
        let pool = Pool::start(1).unwrap();
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let mut first = Box::pin(pool.run(move || {
            begun.send(()).unwrap();
            released.recv().unwrap();
            Ok(())
        }));
        assert!(futures_now(&mut first).is_none());
        has_begun.recv().unwrap();
        let from = tokio::time::Instant::now();
        let held = Arc::new("a long text");
        let work = {
            let held = Arc::clone(&held);
            move || Ok(held.len())
        };
        // The only thread is not released before: the wait can only time out.
        assert_eq!(pool.run(work).await, Err(NoTokens::BUSY));
        assert_eq!(from.elapsed(), WAIT_MAX);
        assert_eq!(Arc::strong_count(&held), 1);
        // The wait for started work ends too.
        assert_eq!(first.await, Err(NoTokens::BUSY));
        release.send(()).unwrap();
    }

    /// Result of the future if it is ready.
    fn futures_now<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
