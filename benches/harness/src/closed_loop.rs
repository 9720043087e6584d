//! The closed loop: clients that route as fast as the router lets them, over engines that answer at once.
//!
//! Each client takes the next request of the workload, routes it, lets the chosen rank's [`Engine`] serve it, hands
//! the rank's events on, completes the prefill, and frees its own oldest request once it holds more than its share of
//! `inflight`. Half the requests warm caches and fill the in-flight set; the other half is measured. Between the two
//! every client has stopped, so each clock reading falls on a whole number of requests.
//!
//! **Turns.** A client goes from one request to the next without a pause, unless it takes turns
//! ([`Shape::take_turns`]): then it lets the others run after each request, as a caller that waits for its engine does.
//! That shows two things that one run cannot:
//!
//! - Without turns, a client that its router suspends queues behind the others inside `route`, and that queue is most
//!   of p99. A router whose answer is ready at once seldom suspends anybody: as many clients as the runtime has threads
//!   then run most of a half alone, beside what the others hold and do not free. 16 clients over 8 ranks hit 0.150
//!   where they hit 0.179 in turn.
//! - With turns they queue between requests, where nobody's `route` is timed: all clients are concurrent, whatever the
//!   router does, and `route` is what a call takes that does not wait for a thread first.
//!
//! **What counts as the router's CPU**: the process' CPU time over the measured half, all threads, less what the
//! simulated side took by its thread's CPU clock (engines, building events, copying the next call's tokens, keeping
//! counts). So hashing of requests, index and booking all count. So does the loop's own remainder, the same for
//! every target: two readings of a CPU clock, two of a wall clock, bookkeeping, and turns where clients take them.
//! Over a target that does nothing that was 0.9 to 1.0 µs a request with one client and 1.4 to 2.0 µs with 16 that
//! take turns, at 8 and at 512 ranks.
//!
//! **Order of events.** A rank's events are delivered in the order in which its engine made them, by one client at a
//! time: a client that finds a delivery under way leaves its events to it and goes on. Nobody waits for a lock.

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

/// Every how many requests the ranks' loads are sampled and the progress bar moves.
const SAMPLE_STRIDE: usize = 64;

/// Shape of a run.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The simulated fleet.
    pub fleet: Fleet,
    /// Blocks that one rank's cache holds.
    pub kv_blocks: usize,
    /// Requests held out, all clients together.
    pub inflight: usize,
    /// Concurrent callers.
    pub clients: usize,
    /// Whether they let each other run after each request. One client has nobody to let.
    pub take_turns: bool,
}

/// What the measured half cost and found.
#[derive(Debug)]
pub struct Outcome {
    /// Requests measured.
    pub requests: usize,
    /// Wall time.
    pub wall: Duration,
    /// CPU time of the process less the simulated side's.
    pub router_cpu: Duration,
    /// CPU time of the simulated side.
    pub engine_cpu: Duration,
    /// Time from call to answer of `route`, in nanoseconds.
    pub route_ns: Histogram<u64>,
    /// Complete blocks of all prompts.
    pub prompt_blocks: u64,
    /// Those of them that the chosen rank held.
    pub cached_blocks: u64,
    /// Blocks named in events.
    pub event_blocks: u64,
    /// In-flight requests of the fullest rank over the mean of all ranks, averaged over samples. 1 is even.
    pub load_max_over_mean: f64,
    /// Resident memory at the end, the workload and the engines included.
    pub rss_bytes: Option<u64>,
    /// Resident memory before the router started: mostly the workload.
    pub rss_before_bytes: Option<u64>,
}

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// The target refused what it must not refuse.
    #[error("{target} could not {step} request {request}: {reason}")]
    Refused {
        /// The target's name.
        target: &'static str,
        /// What was asked of it.
        step: &'static str,
        /// Position in the workload.
        request: usize,
        /// What it said.
        reason: Refusal,
    },
    /// The target chose a rank that does not exist.
    #[error("{target} sent request {request} to {rank}, which is no rank of the fleet")]
    UnknownRank {
        /// The target's name.
        target: &'static str,
        /// Position in the workload.
        request: usize,
        /// What it chose.
        rank: WorkerRank,
    },
    /// There is nothing to measure.
    #[error("{0} requests are too few: half warms, half is measured")]
    TooFew(usize),
}

/// One prompt with the blocks that engines will name.
#[derive(Debug)]
struct Request {
    tokens: Prompt,
    blocks: Box<[StoredBlock]>,
}

/// Prompts made ready for a target: hashed and named as its engines would. Costs no measured time.
#[derive(Debug)]
pub struct Workload(Vec<Request>);

impl Workload {
    /// Makes `prompts` ready for `T`.
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

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Runs the loop over `target` on the current tokio runtime, and ends the target.
///
/// # Errors
/// The target refused a request, or there are fewer than two.
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
    let clients = (0..shape.clients).map(|_| Client::new(share)).collect();
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

/// Lets every client work until the cursor leaves `half`.
async fn run_half<T: Target>(
    shared: &Arc<Shared<T>>,
    clients: Vec<Client<T>>,
    half: Range<usize>,
) -> Result<Vec<Client<T>>, LoopError> {
    shared.cursor.store(half.start, Relaxed);
    let mut tasks = JoinSet::new();
    for client in clients {
        tasks.spawn(client.work(Arc::clone(shared), half.end));
    }
    let mut done = Vec::with_capacity(tasks.len());
    while let Some(client) = tasks.join_next().await {
        done.push(client.expect("a client neither panics nor is aborted")?);
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
    /// The next request to take.
    cursor: AtomicUsize,
    /// Whether clients let each other run after each request.
    takes_turns: bool,
    progress: ProgressBar,
}

struct Rank<T: Target> {
    engine: Mutex<RankState<T>>,
    /// Requests routed here and not yet freed.
    inflight: AtomicU32,
}

/// An engine and the events it has made that are not yet on their way.
struct RankState<T: Target> {
    engine: Engine,
    outbox: Vec<T::Event>,
    /// A client is delivering; it will look at the outbox again.
    delivering: bool,
}

impl<T: Target> RankState<T> {
    fn new(kv_blocks: usize) -> Self {
        Self { engine: Engine::new(kv_blocks), outbox: Vec::new(), delivering: false }
    }

    /// What the one client that delivers must deliver next. Nothing ends its delivery.
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
    /// The next request before `end`, and a fresh call for it.
    fn take(&self, end: usize) -> Option<(usize, Call)> {
        let number = self.cursor.fetch_add(1, Relaxed);
        let request = (number < end).then(|| &self.requests[number])?;
        Some((number, Call { id: format!("request-{number}"), tokens: request.tokens.to_vec() }))
    }

    /// In-flight requests of the fullest rank over the mean.
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

struct Client<T: Target> {
    /// Requests routed and not yet freed, oldest first, with their rank's dense number.
    held: VecDeque<(usize, usize, T::Handle)>,
    share: usize,
    change: Change,
    tally: Tally,
}

impl<T: Target> Client<T> {
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
            // A caller would now wait for its engine, and others would have their turn.
            if shared.takes_turns {
                tokio::task::yield_now().await;
            }
        }
        Ok(self)
    }

    /// Does `work` on the simulated side's account.
    fn simulated<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let started = thread_cpu();
        let result = work(self);
        self.tally.engine_cpu += thread_cpu() - started;
        result
    }

    /// Lets rank `index` serve request `number`, and counts. Gives the rank's undelivered events, unless another
    /// client delivers them.
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

/// One client's counts.
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
        let route_ns = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("one to a minute, three digits");
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
