//! Threads that tokenise, apart from those that serve.
//!
//! Owns a few threads and the queue before them. Promises that the queue is bounded, that work nobody waits for any more
//! is not begun, and that a panic in one piece of work harms no other. Leaves what the work is to its callers.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::oneshot;

use super::reason::NoTokens;

/// Pieces of work that wait.
const QUEUE_MAX: usize = 1_024;

/// More are of no use to one model.
const THREADS_MAX: u32 = 64;

/// Templates and tokenizers recurse; a thread of the runtime has less.
const STACK_BYTES: usize = 8 << 20;

type Work = Box<dyn FnOnce() + Send>;

/// The threads. They end when this is dropped, after what they are at.
pub(super) struct Pool {
    queue: SyncSender<Work>,
}

impl Pool {
    /// Starts `threads` threads, at least one.
    pub(super) fn start(threads: u32) -> io::Result<Self> {
        Self::with_queue(threads, QUEUE_MAX)
    }

    fn with_queue(threads: u32, queue_max: usize) -> io::Result<Self> {
        let (queue, waiting) = sync_channel::<Work>(queue_max);
        let waiting = Arc::new(Mutex::new(waiting));
        for n in 0..threads.clamp(1, THREADS_MAX) {
            let waiting = Arc::clone(&waiting);
            let builder = thread::Builder::new().name(format!("tokenize-{n}")).stack_size(STACK_BYTES);
            builder.spawn(move || work_off(&waiting))?;
        }
        Ok(Self { queue })
    }

    /// Has it done. Cancel-safe: dropping the future takes it out of the queue, unless it has begun.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, NoTokens> + Send + 'static,
    ) -> Result<T, NoTokens> {
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move || {
            if !reply.is_closed() {
                // Whoever asked may be gone by now.
                let _ = reply.send(work());
            }
        });
        self.queue.try_send(work).map_err(|_| NoTokens::Busy)?;
        answer.await.unwrap_or(Err(NoTokens::Panicked))
    }
}

fn work_off(waiting: &Mutex<Receiver<Work>>) {
    loop {
        // One thread waits in the queue, the others for its place; nothing panics in between.
        let work = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(work) = work else { return };
        // The reply is dropped with the work, which tells the one who waits.
        let _ = catch_unwind(AssertUnwindSafe(work));
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

    /// What the future has now, if it has it.
    fn futures_now<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
