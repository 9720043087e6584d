//! Threads that serve clients: one per core, each with a runtime of its own.
//!
//! A connection stays on one of them with its requests and their connections to workers, so that a chunk crosses no
//! thread. Everything else runs on the shared runtime, in which the gateway was started, also requests that would occupy
//! a core. Streams of a busy HTTP/2 connection move to other cores.

use std::cell::{Cell, OnceCell};
use std::future::Future;
use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, mpsc};
use std::thread;
use std::time::Duration;

use hyper::rt::Executor;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// Stack size of serving threads: chat templates recurse deeper than the default allows.
const STACK_BYTES: usize = 8 << 20;

/// Connections that wait for a core without being served, above which it counts as blocked.
const UNSERVED_MAX: usize = 8;

/// Minimum time between the allocations of a thread in `return_memory`. Five of them cause a collection.
const COLLECTION_INTERVAL: Duration = Duration::from_secs(1);

/// Difference in load from which a stream leaves the core of its connection.
const STREAM_LEAD: usize = 4;

thread_local! {
    /// Number of this core, from one, and the shared runtime. Unset in threads of the shared runtime.
    static THIS: OnceCell<(usize, Handle)> = const { OnceCell::new() };
}

/// Number of cores of a gateway.
pub(super) static COUNT: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));

/// Number of the core of this thread, from one; zero on the shared runtime.
pub(super) fn number() -> usize {
    THIS.with(|this| this.get().map_or(0, |(number, _)| *number))
}

/// The shared runtime, on a core.
pub(crate) fn shared() -> Option<Handle> {
    THIS.with(|this| this.get().map(|(_, shared)| shared.clone()))
}

/// The cores of one gateway. Their threads end with the last clone and the last connection.
#[derive(Clone)]
pub(crate) struct Cores(Arc<[Arc<Core>]>);

/// A thread. Its connections hold it, and the streams of HTTP/2, so that its references count its load.
struct Core {
    runtime: Handle,
    /// Connections that have not been polled yet.
    unserved: AtomicUsize,
    /// Its drop ends the thread.
    _alive: oneshot::Sender<()>,
}

impl Cores {
    /// Starts the threads. Must be called in the shared runtime.
    pub(crate) fn start() -> io::Result<Self> {
        let start = |number| Ok(Arc::new(Core::start(number, Handle::current())?));
        (1..=*COUNT).map(start).collect::<io::Result<_>>().map(Self)
    }

    /// Serves a connection on the core with the least load.
    pub(super) fn serve(&self, connections: &mut JoinSet<()>, served: impl Future<Output = ()> + Send + 'static) {
        let core = Arc::clone(self.least());
        let runtime = core.runtime.clone();
        core.unserved.fetch_add(1, Ordering::Relaxed);
        let served = async move {
            core.unserved.fetch_sub(1, Ordering::Relaxed);
            served.await;
        };
        connections.spawn_on(served, &runtime);
    }

    fn least(&self) -> &Arc<Core> {
        let least = self.0.iter().min_by_key(|core| {
            let is_blocked = core.unserved.load(Ordering::Relaxed) > UNSERVED_MAX;
            (is_blocked, Arc::strong_count(core))
        });
        least.expect("a gateway has a core")
    }

    /// The core for a stream of a connection on this one.
    fn of_stream(&self) -> &Arc<Core> {
        let least = self.least();
        let own = number().checked_sub(1).and_then(|n| self.0.get(n));
        own.filter(|own| Arc::strong_count(own) < Arc::strong_count(least) + STREAM_LEAD).unwrap_or(least)
    }
}

/// A runtime whose threads return the memory of ended requests to the system, once they have waited five times, a second
/// apart. The cores do so by themselves, threads of the shared runtime with their work.
pub(crate) fn build(runtime: &mut Builder) -> io::Result<Runtime> {
    runtime.thread_stack_size(STACK_BYTES).on_thread_park(return_memory).enable_all().build()
}

/// Makes mimalloc 3 return the free memory of a thread that is about to wait. It does so only in that thread, with every
/// 10,000th allocation outside its lists of small blocks (option `generic_collect`), which idle threads do not reach.
fn return_memory() {
    thread_local!(static LAST: Cell<Option<Instant>> = const { Cell::new(None) });
    let now = Instant::now();
    if LAST.get().is_none_or(|last| now.saturating_duration_since(last) >= COLLECTION_INTERVAL) {
        LAST.set(Some(now));
        (0..2_000).for_each(|_| drop(black_box(Vec::<u8>::with_capacity(2_048))));
    }
}

impl Core {
    fn start(number: usize, shared: Handle) -> io::Result<Self> {
        let (alive, mut ended) = oneshot::channel::<()>();
        let (started, start) = mpsc::channel();
        let serve = move || {
            let runtime = build(&mut Builder::new_current_thread());
            // The receiver waits.
            let _ = started.send(runtime.as_ref().map(|runtime| runtime.handle().clone()).map_err(io::Error::kind));
            let Ok(runtime) = runtime else { return };
            THIS.with(|this| this.set((number, shared))).expect("the thread is new");
            // An idle core also parks once per interval.
            runtime.block_on(async { while timeout(COLLECTION_INTERVAL, &mut ended).await.is_err() {} });
            runtime.shutdown_background();
        };
        thread::Builder::new().name(format!("serve-{number}")).stack_size(STACK_BYTES).spawn(serve)?;
        let runtime = start.recv().map_err(io::Error::other)??;
        Ok(Self { runtime, unserved: AtomicUsize::new(0), _alive: alive })
    }
}

/// Runs the streams of HTTP/2 connections; without cores, on the runtime of their connection.
#[derive(Clone)]
pub(super) struct Streams(pub(super) Option<Cores>);

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let Some(cores) = &self.0 else { return drop(tokio::spawn(stream)) };
        let core = Arc::clone(cores.of_stream());
        core.runtime.clone().spawn(async move {
            stream.await;
            drop(core);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Cores on a machine with two.
    fn two() -> Cores {
        let start = |number| Core::start(number, Handle::current()).map(Arc::new);
        Cores([1, 2].map(|number| start(number).expect("a thread")).into())
    }

    /// Waits on other cores for what these do.
    async fn until(is_reached: impl Fn() -> bool) {
        while !is_reached() {
            tokio::task::yield_now().await;
        }
    }

    fn loads(cores: &Cores) -> Vec<usize> {
        cores.0.iter().map(|core| Arc::strong_count(core) - 1).collect()
    }

    #[tokio::test]
    async fn connections_go_to_the_core_with_the_fewest() {
        let (cores, mut connections) = (two(), JoinSet::new());
        for n in 1..=5_usize {
            cores.serve(&mut connections, std::future::pending());
            assert_eq!(loads(&cores), [n.div_ceil(2), n / 2]);
        }
        connections.shutdown().await;
        assert_eq!(loads(&cores), [0, 0]);
    }

    #[tokio::test]
    async fn a_blocked_core_receives_few_connections() {
        let (cores, mut connections) = (two(), JoinSet::new());
        let (release, released) = mpsc::channel::<()>();
        let is_blocked = Arc::new(AtomicBool::new(false));
        let begun = Arc::clone(&is_blocked);
        cores.serve(&mut connections, async move {
            begun.store(true, Ordering::Relaxed);
            let _ = released.recv();
        });
        until(|| is_blocked.load(Ordering::Relaxed)).await;
        let served = Arc::new(AtomicUsize::new(0));
        for n in 1..=100 {
            let count = Arc::clone(&served);
            cores.serve(&mut connections, async move {
                count.fetch_add(1, Ordering::Relaxed);
                std::future::pending().await
            });
            until(|| served.load(Ordering::Relaxed) + UNSERVED_MAX + 1 >= n).await;
        }
        drop(release);
        connections.shutdown().await;
        until(|| loads(&cores) == [0, 0]).await;
    }

    #[tokio::test]
    async fn streams_leave_a_busy_core_and_stay_on_others() {
        let cores = two();
        let (ends, mut ended) = tokio::sync::mpsc::channel::<()>(1);
        let streams = Streams(Some(cores.clone()));
        let all = streams.clone();
        // Polled on the first core, like a connection of HTTP/2.
        let open = async move {
            for _ in 0..20 {
                let end = ends.clone();
                all.execute(async move { end.closed().await });
            }
        };
        let mut connections = JoinSet::new();
        cores.serve(&mut connections, open);
        while connections.join_next().await.is_some() {}
        // The connection was a part of the load.
        let [own, other] = loads(&cores)[..] else { panic!("two cores") };
        assert!(own + other == 20 && own.abs_diff(other) <= STREAM_LEAD, "{own} and {other}");
        assert!(own >= STREAM_LEAD, "the first ones stay");
        ended.close();
        until(|| loads(&cores) == [0, 0]).await;
    }
}
