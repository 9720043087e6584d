//! Tokenizer thread pool with bounded, fair queues.
//!
//! Texts wait in a lane for their length. Short lanes go first, and each lane leaves threads to the others, so that the
//! system divides the processors among long and short texts in time slices. In a lane, tenants have equal shares by bytes
//! (start-time fair queuing). Abandoned work is dropped before it starts, and a panic in one task affects no other.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ahash::AHashMap;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::reason::NoTokens;

/// Maximum queued tasks.
const QUEUE_MAX: usize = 1_024;

/// Maximum threads; more do not help one model.
const THREADS_MAX: usize = 64;

/// Maximum bytes of a text in each lane but the last.
const LANE_BYTES_MAX: [usize; LANES - 1] = [64 << 10, 512 << 10];
const LANES: usize = 3;

/// Cost of a task besides its bytes.
const TASK_BYTES: u64 = 1 << 10;

/// Stack size: templates and tokenizers recurse deeper than the runtime's threads allow.
const STACK_BYTES: usize = 8 << 20;

type Work = Box<dyn FnOnce() + Send>;

/// A task of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job<'a> {
    /// Length of its text.
    pub(super) bytes: usize,
    /// Tenant of the client, if any.
    pub(super) tenant: Option<&'a str>,
    /// Maximum wait, queue and execution together.
    pub(super) wait_max: Duration,
}

/// The threads. After the drop of the pool they finish their current task and end.
pub(super) struct Pool(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    /// Notified after a change of the queue.
    changed: Condvar,
}

/// Position of a task: its virtual start time, and its number.
type Key = (u64, u64);

/// Waiting tasks.
#[derive(Default)]
struct Queue {
    lanes: [Lane; LANES],
    /// Threads at work for each lane.
    busy: [usize; LANES],
    /// Maximum of `busy` for each lane with those of longer texts.
    busy_max: [usize; LANES],
    waiting_max: usize,
    next_id: u64,
    is_closed: bool,
}

#[derive(Default)]
struct Lane {
    tasks: BTreeMap<Key, Work>,
    /// Virtual time: the start of the last task.
    now: u64,
    /// Virtual time at which each tenant has used its share.
    used: AHashMap<Option<Box<str>>, u64>,
}

impl Queue {
    fn new(threads: usize, waiting_max: usize) -> Self {
        // One thread is left to short texts, and one to those of medium length.
        let threads = threads.clamp(1, THREADS_MAX);
        let (medium, long) = (threads.max(2), (threads / 2).max(1));
        Self { busy_max: [medium + 1, medium, long], waiting_max, ..Self::default() }
    }

    /// Adds a task, or returns the work if the queue is full.
    fn push(&mut self, job: Job<'_>, work: Work) -> Result<(usize, Key), Work> {
        if self.lanes.iter().map(|lane| lane.tasks.len()).sum::<usize>() >= self.waiting_max {
            return Err(work);
        }
        let n = LANE_BYTES_MAX.iter().take_while(|max| job.bytes > **max).count();
        let lane = &mut self.lanes[n];
        let tenant = job.tenant.map(Box::from);
        let start = lane.used.get(&tenant).map_or(lane.now, |used| lane.now.max(*used));
        lane.used.insert(tenant, start + TASK_BYTES + job.bytes as u64);
        let key = (start, self.next_id);
        self.next_id += 1;
        lane.tasks.insert(key, work);
        Ok((n, key))
    }

    /// Starts the next task that leaves a thread to the other lanes.
    fn start(&mut self) -> Option<(usize, Work)> {
        let n = (0..LANES).find(|n| {
            let is_free = (0..=*n).all(|lane| self.busy[lane..].iter().sum::<usize>() < self.busy_max[lane]);
            // Short texts leave a thread to longer ones that wait.
            let others_wait = self.lanes[1..].iter().any(|lane| !lane.tasks.is_empty());
            let is_fair = *n > 0 || self.busy[0] + 1 < self.busy_max[0] || !others_wait;
            is_free && is_fair && !self.lanes[*n].tasks.is_empty()
        })?;
        let lane = &mut self.lanes[n];
        let ((start, _), work) = lane.tasks.pop_first()?;
        lane.now = start;
        if lane.tasks.is_empty() {
            lane.used.retain(|_, used| *used > start);
        }
        self.busy[n] += 1;
        Some((n, work))
    }
}

impl Pool {
    /// Starts `threads` threads, at least one, and those that the lanes leave to each other.
    pub(super) fn start(threads: u32) -> io::Result<Self> {
        Self::with_queue(Queue::new(threads as usize, QUEUE_MAX))
    }

    fn with_queue(queue: Queue) -> io::Result<Self> {
        let threads = queue.busy_max[0];
        let pool = Self(Arc::new(Shared { queue: Mutex::new(queue), changed: Condvar::new() }));
        for n in 0..threads {
            let shared = Arc::clone(&pool.0);
            let builder = thread::Builder::new().name(format!("tokenize-{n}")).stack_size(STACK_BYTES);
            builder.spawn(move || run_tasks(&shared))?;
        }
        Ok(pool)
    }

    /// Runs the work within its time. Cancel-safe: dropping the future removes work that has not started from the queue,
    /// with all its data.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: Job<'_>,
        work: impl FnOnce() -> Result<T, NoTokens> + Send + 'static,
    ) -> Result<T, NoTokens> {
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move || {
            // The receiver may be gone.
            let _ = reply.send(work());
        });
        let added = self.0.queue.lock().push(job, work);
        let (lane, key) = added.map_err(|_| NoTokens::BUSY)?;
        let _waiting = Waiting { shared: &self.0, lane, key };
        self.0.changed.notify_one();
        timeout(job.wait_max, answer).await.map_err(|_| NoTokens::BUSY)?.unwrap_or(Err(NoTokens::PANICKED))
    }
}

/// Runs the work on this thread.
pub(super) fn here<T>(work: impl FnOnce() -> Result<T, NoTokens>) -> Result<T, NoTokens> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(NoTokens::PANICKED))
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.queue.lock().is_closed = true;
        self.0.changed.notify_all();
    }
}

/// A waiting caller; dropping it abandons the work.
struct Waiting<'a> {
    shared: &'a Shared,
    lane: usize,
    key: Key,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // Dropped after the lock.
        let _work = self.shared.queue.lock().lanes[self.lane].tasks.remove(&self.key);
    }
}

fn run_tasks(shared: &Shared) {
    let mut queue = shared.queue.lock();
    while !queue.is_closed {
        let Some((lane, work)) = queue.start() else {
            shared.changed.wait(&mut queue);
            continue;
        };
        drop(queue);
        // A panic drops the reply sender, which informs the caller.
        let _ = catch_unwind(AssertUnwindSafe(work));
        queue = shared.queue.lock();
        queue.busy[lane] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const WAIT: Duration = Duration::from_secs(60);
    const SHORT: Job<'_> = Job { bytes: 1, tenant: None, wait_max: WAIT };
    const LONG: Job<'_> = Job { bytes: 3 << 20, ..SHORT };

    /// A pool with one thread.
    fn single(waiting_max: usize) -> Pool {
        Pool::with_queue(Queue { busy_max: [1; LANES], waiting_max, ..Queue::default() }).unwrap()
    }

    /// Adds a task without effect.
    fn add(queue: &mut Queue, bytes: usize, tenant: Option<&str>) -> u64 {
        let added = queue.push(Job { bytes, tenant, wait_max: WAIT }, Box::new(|| ()));
        added.map(|(_, (_, id))| id).unwrap_or_else(|_| panic!("the queue is full"))
    }

    /// Lanes of the tasks that start while none ends.
    fn started(queue: &mut Queue) -> Vec<usize> {
        std::iter::from_fn(|| queue.start()).map(|(lane, _)| lane).collect()
    }

    #[test]
    fn long_texts_leave_threads_to_shorter_ones() {
        for (threads, expected) in [(1, vec![2, 1, 0]), (2, vec![2, 1, 0]), (4, vec![2, 2, 1, 1, 0])] {
            let mut queue = Queue::new(threads, QUEUE_MAX);
            for _ in 0..9 {
                add(&mut queue, 3 << 20, None);
            }
            let mut lanes = started(&mut queue);
            for _ in 0..9 {
                add(&mut queue, 100 << 10, None);
            }
            lanes.extend(started(&mut queue));
            for _ in 0..9 {
                add(&mut queue, 100, None);
            }
            lanes.extend(started(&mut queue));
            assert_eq!(lanes, expected, "{threads} threads");
        }
        // Short texts go first, and leave one thread.
        let mut queue = Queue::new(2, QUEUE_MAX);
        for bytes in [3 << 20, 100 << 10, 100, 100, 100] {
            add(&mut queue, bytes, None);
        }
        assert_eq!(started(&mut queue), [0, 0, 1]);
    }

    #[test]
    fn tenants_have_equal_shares_by_bytes() {
        let mut queue = Queue { busy_max: [usize::MAX; LANES], waiting_max: 100, ..Queue::default() };
        let first: Vec<u64> = (0..20).map(|_| add(&mut queue, 10_000, Some("a"))).collect();
        let small: Vec<u64> = (0..4).map(|_| add(&mut queue, 1_000, Some("b"))).collect();
        let order: Vec<u64> = std::iter::from_fn(|| {
            let id = queue.lanes[0].tasks.first_key_value().map(|((_, id), _)| *id);
            queue.start();
            id
        })
        .collect();
        // The other tenant comes after the first task of its predecessor.
        assert_eq!(order[..6], [first[0], small[0], small[1], small[2], small[3], first[1]]);
        assert!(queue.lanes[0].used.len() <= 1, "forgotten with the last task");
    }

    #[tokio::test]
    async fn a_panic_affects_no_other_task() {
        let pool = Pool::start(1).unwrap();
        let defect = || -> Result<(), NoTokens> { panic!("a defect") };
        assert_eq!((pool.run(SHORT, defect).await, here(defect)), (Err(NoTokens::PANICKED), Err(NoTokens::PANICKED)));
        assert_eq!(pool.run(SHORT, || Ok(7)).await, Ok(7));
    }

    #[tokio::test]
    async fn long_texts_delay_no_short_one() {
        let pool = Pool::start(2).unwrap();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let long = || {
            let released = Arc::clone(&released);
            Box::pin(pool.run(LONG, move || released.lock().recv().map_err(|_| NoTokens::PANICKED)))
        };
        let mut waiting: Vec<_> = (0..10).map(|_| long()).collect();
        waiting.iter_mut().for_each(|long| assert!(futures_now(long).is_none()));
        assert_eq!(pool.run(SHORT, || Ok(7)).await, Ok(7));
        for _ in 0..10 {
            release.send(()).unwrap();
        }
        for long in waiting {
            assert_eq!(long.await, Ok(()));
        }
    }

    #[tokio::test]
    async fn full_queue_rejects_and_abandoned_work_never_starts() {
        let pool = single(1);
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let first = pool.run(SHORT, move || {
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
        let mut second = Box::pin(pool.run(SHORT, counted()));
        assert!(futures_now(&mut second).is_none());
        assert_eq!(pool.run(SHORT, counted()).await, Err(NoTokens::BUSY));
        drop(second);
        let mut third = Box::pin(pool.run(SHORT, counted()));
        assert!(futures_now(&mut third).is_none(), "its place is free");
        release.send(()).unwrap();
        assert_eq!((first.await, third.await), (Ok(1), Ok(0)));
    }

    #[tokio::test(start_paused = true)]
    async fn waits_are_limited_and_late_work_is_dropped() {
        let pool = single(9);
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let mut first = Box::pin(pool.run(SHORT, move || {
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
        assert_eq!(pool.run(SHORT, work).await, Err(NoTokens::BUSY));
        assert_eq!(from.elapsed(), WAIT);
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
