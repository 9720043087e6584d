//! Closed loop: clients route as fast as the router allows, over engines that respond immediately.
//!
//! Each client repeats these steps: take the next request of the workload, route it, let the chosen rank's [`Engine`]
//! serve it, deliver the rank's events, complete the prefill. It frees its own oldest request once it holds more than
//! its share of `inflight`. The first half of the requests warms caches and fills the in-flight set; the second half is
//! measured. All clients stop between the halves, so each clock reading falls on a whole number of requests.
//!
//! **Turns.** A client continues with the next request immediately, unless clients take turns ([`Shape::take_turns`]).
//! In that mode it yields to the others after each request, like a caller that waits for its engine. The two modes show
//! different properties:
//!
//! - Without turns, a client that its router suspends queues behind the others inside `route`, and that queue dominates
//!   p99. A router with an immediate response rarely suspends a client. Then only as many clients as the runtime has
//!   threads run most of a half, while the requests of the others stay in flight. 16 clients over 8 ranks had a hit
//!   rate of 0.150 without turns and 0.179 with turns.
//! - With turns, clients queue between requests, outside the measured time of `route`. All clients are concurrent with
//!   any router, and `route` is the duration of a call that does not wait for a thread first.
//!
//! **Router CPU** is the process' CPU time over the measured half, all threads, minus the simulated side: engines,
//! building events, copying the next call's tokens and keeping counts, measured by the thread's CPU clock. Hashing of
//! requests, index and booking are included. The loop's own overhead is included too and is the same for every target:
//! two readings of a CPU clock, two of a wall clock, bookkeeping, and yields if clients take turns. With a target that
//! does nothing, this overhead was 0.9 to 1.0 µs per request with one client, and 1.4 to 2.0 µs with 16 clients that
//! take turns, at 8 and at 512 ranks.
//!
//! **Order of events.** A rank's events are delivered in the order of its engine, by one client at a time. A client
//! that finds a delivery in progress leaves its events to that client and continues. No client waits for a lock during
//! a delivery.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use pointsman::protocol::{StoredBlock, WorkerRank};
use tokio::task::JoinSet;

use crate::engine::{self, Change, Engine};
use crate::fleet::Fleet;
use crate::measure::{Stopwatch, process_cpu, rss_bytes, thread_cpu};
use crate::target::{Call, Refusal, Target};
use pointsman_trial::workload::Prompt;

/// Number of requests between load samples and updates of the progress bar.
const SAMPLE_STRIDE: usize = 64;

/// Shape of a run.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Shape of the simulated fleet.
    pub fleet: Fleet,
    /// Number of blocks in the cache of one rank.
    pub kv_blocks: usize,
    /// Number of requests in flight over all clients.
    pub inflight: usize,
    /// Number of concurrent clients.
    pub clients: usize,
    /// Whether clients yield to each other after each request. Without effect for a single client.
    pub take_turns: bool,
}

/// Results of the measured half.
#[derive(Debug)]
pub struct Outcome {
    /// Number of measured requests.
    pub requests: usize,
    /// Wall time.
    pub wall: Duration,
    /// CPU time of the process minus that of the simulated side.
    pub router_cpu: Duration,
    /// CPU time of the simulated side.
    pub engine_cpu: Duration,
    /// Duration of `route` calls in nanoseconds.
    pub route_ns: Histogram<u64>,
    /// Number of complete blocks in all prompts.
    pub prompt_blocks: u64,
    /// Number of those blocks in the cache of the chosen rank.
    pub cached_blocks: u64,
    /// Number of blocks in events.
    pub event_blocks: u64,
    /// In-flight requests of the most loaded rank divided by the mean of all ranks, averaged over samples. 1 is even.
    pub load_max_over_mean: f64,
    /// Resident memory at the end, including the workload and the engines.
    pub rss_bytes: Option<u64>,
    /// Resident memory before the router started: mostly the workload.
    pub rss_before_bytes: Option<u64>,
}

/// Errors of a run.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// The target rejected a required operation.
    #[error("{target} could not {step} request {request}: {reason}")]
    Refused {
        /// Name of the target.
        target: &'static str,
        /// The rejected operation.
        step: &'static str,
        /// Position in the workload.
        request: usize,
        /// Reason from the target.
        reason: Refusal,
    },
    /// The target chose a rank that does not exist.
    #[error("{target} placed request {request} on {rank}, which is not in the fleet")]
    UnknownRank {
        /// Name of the target.
        target: &'static str,
        /// Position in the workload.
        request: usize,
        /// The chosen rank.
        rank: WorkerRank,
    },
    /// There are too few requests to measure.
    #[error("{0} requests are too few: one half is the warm-up, the other is measured")]
    TooFew(usize),
}

/// One prompt with the blocks of the engines' events.
#[derive(Debug)]
struct Request {
    tokens: Prompt,
    blocks: Box<[StoredBlock]>,
}

/// Prompts prepared for a target: hashed, and named with engine hashes. Preparation is not measured.
#[derive(Debug)]
pub struct Workload(Vec<Request>);

impl Workload {
    /// Prepares `prompts` for `T`.
    #[must_use]
    pub fn prepare<T: Target>(prompts: Vec<Prompt>, block_size: NonZeroU32) -> Self {
        let ready = |tokens: Prompt| Request { blocks: engine::name_blocks(&T::hash(&tokens, block_size)), tokens };
        Self(prompts.into_iter().map(ready).collect())
    }

    /// Number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Runs the loop over `target` on the current tokio runtime, and shuts the target down.
///
/// # Errors
/// The target rejects a request, or there are fewer than two requests.
pub async fn run<T: Target>(
    target: T,
    workload: Workload,
    shape: Shape,
    rss_before_bytes: Option<u64>,
    progress: ProgressBar,
) -> Result<Outcome, LoopError> {
    let requests = workload.0;
    let (all, half) = (requests.len(), requests.len() / 2);
    if half == 0 {
        return Err(LoopError::TooFew(all));
    }
    let rank = |_| Rank { engine: Mutex::new(RankState::new(shape.kv_blocks)), inflight: AtomicU32::new(0) };
    let ranks = (0..shape.fleet.ranks()).map(rank).collect();
    let shared = Arc::new(Shared {
        target,
        requests,
        fleet: shape.fleet,
        ranks,
        cursor: AtomicUsize::new(0),
        takes_turns: shape.take_turns && shape.clients > 1,
        progress,
    });

    let share = (shape.inflight / shape.clients).max(1);
    let clients = (0..shape.clients).map(|_| LoopClient::new(share)).collect();
    let mut clients = run_half(&shared, clients, 0..half).await?;
    for client in &mut clients {
        client.tally = Tally::new();
    }

    let (wall, cpu) = (Stopwatch::start(), process_cpu());
    let clients = run_half(&shared, clients, half..all).await?;
    let (wall, cpu) = (wall.elapsed(), process_cpu() - cpu);
    let rss_bytes = rss_bytes();
    shared.progress.finish_and_clear();

    let mut sum = Tally::new();
    for client in clients {
        sum.add(&client.tally);
        for (request, _, handle) in client.held {
            shared.target.free(handle).await.map_err(refused::<T>("free", request))?;
        }
    }
    if let Some(shared) = Arc::into_inner(shared) {
        shared.target.shutdown().await;
    }
    Ok(Outcome {
        requests: all - half,
        wall,
        router_cpu: cpu.saturating_sub(sum.engine_cpu),
        engine_cpu: sum.engine_cpu,
        route_ns: sum.route_ns,
        prompt_blocks: sum.prompt_blocks,
        cached_blocks: sum.cached_blocks,
        event_blocks: sum.event_blocks,
        load_max_over_mean: sum.load_ratio_sum / f64::from(sum.load_samples.max(1)),
        rss_bytes,
        rss_before_bytes,
    })
}

/// Runs all clients until the cursor leaves `half`.
async fn run_half<T: Target>(
    shared: &Arc<Shared<T>>,
    clients: Vec<LoopClient<T>>,
    half: Range<usize>,
) -> Result<Vec<LoopClient<T>>, LoopError> {
    shared.cursor.store(half.start, Relaxed);
    let mut tasks = JoinSet::new();
    for client in clients {
        tasks.spawn(client.work(Arc::clone(shared), half.end));
    }
    let mut done = Vec::with_capacity(tasks.len());
    while let Some(client) = tasks.join_next().await {
        done.push(client.expect("client tasks end without panic")?);
    }
    Ok(done)
}

fn refused<T: Target>(step: &'static str, request: usize) -> impl FnOnce(Refusal) -> LoopError {
    move |reason| LoopError::Refused { target: T::NAME, step, request, reason }
}

struct Shared<T: Target> {
    target: T,
    requests: Vec<Request>,
    fleet: Fleet,
    ranks: Vec<Rank<T>>,
    /// Position of the next request.
    cursor: AtomicUsize,
    /// Whether clients yield to each other after each request.
    takes_turns: bool,
    progress: ProgressBar,
}

struct Rank<T: Target> {
    engine: Mutex<RankState<T>>,
    /// Number of requests routed here and not yet freed.
    inflight: AtomicU32,
}

/// An engine and its undelivered events.
struct RankState<T: Target> {
    engine: Engine,
    outbox: Vec<T::Event>,
    /// True while a client delivers events; it checks the outbox again at the end.
    delivering: bool,
}

impl<T: Target> RankState<T> {
    fn new(kv_blocks: usize) -> Self {
        Self { engine: Engine::new(kv_blocks), outbox: Vec::new(), delivering: false }
    }

    /// Next batch for the delivering client; none ends its delivery.
    fn next_batch(&mut self) -> Option<Vec<T::Event>> {
        self.delivering = !self.outbox.is_empty();
        self.delivering.then(|| std::mem::take(&mut self.outbox))
    }
}

impl<T: Target> Rank<T> {
    fn lock(&self) -> MutexGuard<'_, RankState<T>> {
        self.engine.lock().expect("engines do not panic")
    }
}

impl<T: Target> Shared<T> {
    /// Takes the next request before `end` and creates a call for it.
    fn take(&self, end: usize) -> Option<(usize, Call)> {
        let number = self.cursor.fetch_add(1, Relaxed);
        let request = (number < end).then(|| &self.requests[number])?;
        Some((number, Call { id: format!("request-{number}"), tokens: request.tokens.to_vec() }))
    }

    /// In-flight requests of the most loaded rank divided by the mean.
    fn load_max_over_mean(&self) -> f64 {
        let (mut max, mut sum) = (0, 0);
        for rank in &self.ranks {
            let inflight = rank.inflight.load(Relaxed);
            max = max.max(inflight);
            sum += inflight;
        }
        f64::from(max) * self.ranks.len() as f64 / f64::from(sum.max(1))
    }
}

struct LoopClient<T: Target> {
    /// Requests routed and not yet freed, oldest first, with the dense number of their rank.
    held: VecDeque<(usize, usize, T::Handle)>,
    share: usize,
    change: Change,
    tally: Tally,
}

impl<T: Target> LoopClient<T> {
    fn new(share: usize) -> Self {
        Self { held: VecDeque::with_capacity(share + 1), share, change: Change::default(), tally: Tally::new() }
    }

    async fn work(mut self, shared: Arc<Shared<T>>, end: usize) -> Result<Self, LoopError> {
        let target = &shared.target;
        let mut next = self.simulated(|_| shared.take(end));
        while let Some((number, call)) = next {
            let started = Stopwatch::start();
            let routed = target.route(call).await.map_err(refused::<T>("route", number))?;
            self.tally.route(started.elapsed());

            let index = shared.fleet.index(routed.rank).ok_or(LoopError::UnknownRank {
                target: T::NAME,
                request: number,
                rank: routed.rank,
            })?;
            let mut events;
            (events, next) = self.simulated(|client| {
                let events = client.serve(&shared, number, routed.rank, index);
                (events, shared.take(end))
            });
            while let Some(batch) = events {
                target.apply_events(batch).await.map_err(refused::<T>("apply the events of", number))?;
                events = shared.ranks[index].lock().next_batch();
            }

            let mut handle = routed.handle;
            target.prefill_completed(&mut handle).await.map_err(refused::<T>("complete the prefill of", number))?;
            self.held.push_back((number, index, handle));
            if self.held.len() > self.share
                && let Some((number, index, handle)) = self.held.pop_front()
            {
                target.free(handle).await.map_err(refused::<T>("free", number))?;
                shared.ranks[index].inflight.fetch_sub(1, Relaxed);
            }
            // A real caller would now wait for its engine while other clients run.
            if shared.takes_turns {
                tokio::task::yield_now().await;
            }
        }
        Ok(self)
    }

    /// Runs `work` and counts its CPU time as the simulated side's.
    fn simulated<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let started = thread_cpu();
        let result = work(self);
        self.tally.engine_cpu += thread_cpu() - started;
        result
    }

    /// Lets rank `index` serve request `number`, and updates the counts. Returns the rank's undelivered events, unless
    /// another client delivers them.
    fn serve(&mut self, shared: &Shared<T>, number: usize, name: WorkerRank, index: usize) -> Option<Vec<T::Event>> {
        let (rank, blocks) = (&shared.ranks[index], &shared.requests[number].blocks);
        rank.inflight.fetch_add(1, Relaxed);
        if number.is_multiple_of(SAMPLE_STRIDE) {
            self.tally.load(shared.load_max_over_mean());
            shared.progress.inc(SAMPLE_STRIDE as u64);
        }
        let mut state = rank.lock();
        state.engine.serve(blocks, &mut self.change);
        self.tally.serve(blocks.len(), &self.change);
        shared.target.encode(name, blocks, &self.change, &mut state.outbox);
        if state.delivering { None } else { state.next_batch() }
    }
}

/// Counts of one client.
struct Tally {
    route_ns: Histogram<u64>,
    engine_cpu: Duration,
    prompt_blocks: u64,
    cached_blocks: u64,
    event_blocks: u64,
    load_ratio_sum: f64,
    load_samples: u32,
}

impl Tally {
    fn new() -> Self {
        let route_ns = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("valid histogram bounds");
        Self {
            route_ns,
            engine_cpu: Duration::ZERO,
            prompt_blocks: 0,
            cached_blocks: 0,
            event_blocks: 0,
            load_ratio_sum: 0.0,
            load_samples: 0,
        }
    }

    fn route(&mut self, took: Duration) {
        self.route_ns.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    fn serve(&mut self, prompt_blocks: usize, change: &Change) {
        self.prompt_blocks += prompt_blocks as u64;
        self.cached_blocks += change.cached as u64;
        self.event_blocks += change.event_blocks() as u64;
    }

    fn load(&mut self, max_over_mean: f64) {
        self.load_ratio_sum += max_over_mean;
        self.load_samples += 1;
    }

    fn add(&mut self, other: &Self) {
        self.route_ns.add(&other.route_ns).expect("all histograms have the same bounds");
        self.engine_cpu += other.engine_cpu;
        self.prompt_blocks += other.prompt_blocks;
        self.cached_blocks += other.cached_blocks;
        self.event_blocks += other.event_blocks;
        self.load_ratio_sum += other.load_ratio_sum;
        self.load_samples += other.load_samples;
    }
}

#[cfg(test)]
mod tests;
