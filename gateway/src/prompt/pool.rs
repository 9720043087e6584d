//! Threads that tokenise, apart from those that serve.
//!
//! Owns a few threads and the queue before them. Promises that the queue is bounded, that nobody waits longer than
//! [`WAIT_MAX`], that work nobody waits for any more is dropped and not begun, and that a panic in one piece of work harms
//! no other. Leaves what the work is to its callers.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::reason::NoTokens;

/// Pieces of work that wait.
const QUEUE_MAX: usize = 1_024;

/// More are of no use to one model.
const THREADS_MAX: u32 = 64;

/// How long anybody waits, behind the work of others and for their own. Later than that a request does better by load.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(5);

/// Templates and tokenizers recurse; a thread of the runtime has less.
const STACK_BYTES: usize = 8 << 20;

type Work = Box<dyn FnOnce() + Send>;

/// A place in the queue. It is empty once the work has begun, or nobody waits for it any more.
type Place = Arc<Mutex<Option<Work>>>;

/// The threads. They end when this is dropped, after what they are at.
pub(super) struct Pool {
    queue: SyncSender<Place>,
}

impl Pool {
    /// Starts `threads` threads, at least one.
    pub(super) fn start(threads: u32) -> io::Result<Self> {
        Self::with_queue(threads, QUEUE_MAX)
    }

    fn with_queue(threads: u32, queue_max: usize) -> io::Result<Self> {
        let (queue, waiting) = sync_channel::<Place>(queue_max);
        let waiting = Arc::new(Mutex::new(waiting));
        for n in 0..threads.clamp(1, THREADS_MAX) {
            let waiting = Arc::clone(&waiting);
            let builder = thread::Builder::new().name(format!("tokenize-{n}")).stack_size(STACK_BYTES);
            builder.spawn(move || work_off(&waiting))?;
        }
        Ok(Self { queue })
    }

    /// Has it done, within [`WAIT_MAX`]. Cancel-safe: dropping the future takes the work out of the queue, with all that it
    /// holds, unless it has begun.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, NoTokens> + Send + 'static,
    ) -> Result<T, NoTokens> {
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move || {
            // Whoever asked may be gone by now.
            let _ = reply.send(work());
        });
        let place: Place = Arc::new(Mutex::new(Some(work)));
        let _waits = Waits(Arc::clone(&place));
        self.queue.try_send(place).map_err(|_| NoTokens::Busy)?;
        timeout(WAIT_MAX, answer).await.map_err(|_| NoTokens::Busy)?.unwrap_or(Err(NoTokens::Panicked))
    }
}

/// One who waits: the work goes with them.
struct Waits(Place);

impl Drop for Waits {
    fn drop(&mut self) {
        drop(taken(&self.0));
    }
}

/// The work, if it has not begun. Not held while the work is done or dropped.
fn taken(place: &Mutex<Option<Work>>) -> Option<Work> {
    place.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn work_off(waiting: &Mutex<Receiver<Place>>) {
    loop {
        // One thread waits in the queue, the others for its place; nothing panics in between.
        let place = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(place) = place else { return };
        if let Some(work) = taken(&place) {
            // The reply is dropped with the work, which tells the one who waits.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_panic_harms_no_other_work() {
        let pool = Pool::start(1).unwrap();
        let defect = pool.run(|| -> Result<(), NoTokens> { panic!("a defect") }).await;
        assert_eq!(defect, Err(NoTokens::Panicked));
        assert_eq!(pool.run(|| Ok(7)).await, Ok(7));
    }

    #[tokio::test]
    async fn a_full_queue_refuses_and_work_of_the_gone_is_not_begun() {
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
        // Polled once each, in turn: the first is begun, the second waits, the third finds no room.
        let mut first = Box::pin(first);
        assert!(futures_now(&mut first).is_none());
        has_begun.recv().unwrap();
        let mut second = Box::pin(pool.run(counted()));
        assert!(futures_now(&mut second).is_none());
        assert_eq!(pool.run(counted()).await, Err(NoTokens::Busy));
        drop(second);
        release.send(()).unwrap();
        assert_eq!(first.await, Ok(1));
        // The queue is worked off in order: after this one, the dropped one has been passed over.
        loop {
            match pool.run(counted()).await {
                Ok(before) => break assert_eq!(before, 0),
                Err(reason) => assert_eq!(reason, NoTokens::Busy),
            }
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_longer_than_that_and_their_work_is_dropped() {
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
        // The only thread is not released before: this wait has but one end.
        assert_eq!(pool.run(work).await, Err(NoTokens::Busy));
        assert_eq!(from.elapsed(), WAIT_MAX);
        assert_eq!(Arc::strong_count(&held), 1);
        // Work that has begun is waited for no longer, either.
        assert_eq!(first.await, Err(NoTokens::Busy));
        release.send(()).unwrap();
    }

    /// What the future has now, if it has it.
    fn futures_now<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
