//! State and steps shared by the closed and the open loop: the prepared workload, the simulated fleet, one request from
//! its route to the end of its prefill, and the counts.
//!
//! **Order of events.** A rank's events are delivered in the order of its engine, by one request at a time. A request
//! that finds a delivery in progress leaves its events to that delivery and continues. No request waits for a lock
//! during a delivery.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use hdrhistogram::Histogram;
use pointsman::protocol::{StoredBlock, WorkerRank};
use pointsman_trial::workload::Prompt;

use crate::engine::{self, Change, Engine};
use crate::fleet::Fleet;
use crate::measure::{Stopwatch, process_cpu, rss_bytes, thread_cpu};
use crate::progress::Progress;
use crate::target::{Call, Refusal, Target};

/// Number of requests between load samples and updates of the progress bar.
const SAMPLE_STRIDE: usize = 64;

/// Fleet of a run, and the requests in flight on it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Shape of the simulated fleet.
    pub fleet: Fleet,
    /// Number of blocks in the cache of one rank.
    pub kv_blocks: usize,
    /// Maximum number of requests in flight.
    pub inflight: usize,
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
    /// Route times in nanoseconds. In the closed loop from the call of `route`, in the open loop from the scheduled
    /// arrival.
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

    /// The two halves: the warm-up and the measured one.
    pub(crate) fn halves(&self) -> Result<[Range<usize>; 2], LoopError> {
        match (self.len(), self.len() / 2) {
            (all, 0) => Err(LoopError::TooFew(all)),
            (all, half) => Ok([0..half, half..all]),
        }
    }
}

/// Conversion of a target's rejection of `step`.
pub(crate) fn refused<T: Target>(step: &'static str, request: usize) -> impl FnOnce(Refusal) -> LoopError {
    move |reason| LoopError::Refused { target: T::NAME, step, request, reason }
}

/// The target, its workload and its simulated fleet.
pub(crate) struct LoopState<T: Target> {
    pub(crate) target: T,
    requests: Vec<Request>,
    fleet: Fleet,
    ranks: Vec<Rank<T>>,
    /// Position of the next request.
    cursor: AtomicUsize,
    progress: Progress,
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
    /// True while a request delivers events; it checks the outbox again at the end.
    delivering: bool,
}

impl<T: Target> RankState<T> {
    fn new(kv_blocks: usize) -> Self {
        Self { engine: Engine::new(kv_blocks), outbox: Vec::new(), delivering: false }
    }

    /// Next batch of the present delivery; none ends it.
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

/// A routed request with a completed prefill.
pub(crate) struct InFlight<T: Target> {
    number: usize,
    rank_idx: usize,
    handle: T::Handle,
}

impl<T: Target> LoopState<T> {
    pub(crate) fn new(target: T, workload: Workload, shape: &Shape, progress: Progress) -> Self {
        let rank = |_| Rank { engine: Mutex::new(RankState::new(shape.kv_blocks)), inflight: AtomicU32::new(0) };
        let ranks = (0..shape.fleet.ranks()).map(rank).collect();
        Self { target, requests: workload.0, fleet: shape.fleet, ranks, cursor: AtomicUsize::new(0), progress }
    }

    /// Sets the position of the next request.
    pub(crate) fn rewind(&self, next: usize) {
        self.cursor.store(next, Relaxed);
    }

    /// Takes the next request before `end` and creates a call for it.
    pub(crate) fn take(&self, end: usize) -> Option<(usize, Call)> {
        let number = self.cursor.fetch_add(1, Relaxed);
        let request = (number < end).then(|| &self.requests[number])?;
        Some((number, Call { id: format!("request-{number}"), tokens: request.tokens.to_vec() }))
    }

    /// Routes a request, lets the chosen rank serve it, delivers the events and completes the prefill. The route time is
    /// read from `clock`. `then` runs after the service, as a part of the simulated side.
    pub(crate) async fn perform<R>(
        &self,
        (number, call): (usize, Call),
        clock: Stopwatch,
        counts: &mut Counts,
        change: &mut Change,
        then: impl FnOnce() -> R,
    ) -> Result<(InFlight<T>, Duration, R), LoopError> {
        let routed = self.target.route(call).await.map_err(refused::<T>("route", number))?;
        let route_time = clock.elapsed();
        let rank_idx = self.fleet.index(routed.rank).ok_or(LoopError::UnknownRank {
            target: T::NAME,
            request: number,
            rank: routed.rank,
        })?;
        let (mut events, next) =
            counts.simulated(|counts| (self.serve(number, routed.rank, rank_idx, counts, change), then()));
        while let Some(batch) = events {
            self.target.apply_events(batch).await.map_err(refused::<T>("apply the events of", number))?;
            events = self.ranks[rank_idx].lock().next_batch();
        }
        let mut handle = routed.handle;
        self.target.prefill_completed(&mut handle).await.map_err(refused::<T>("complete the prefill of", number))?;
        Ok((InFlight { number, rank_idx, handle }, route_time, next))
    }

    /// Lets rank `rank_idx` serve request `number`, and updates the counts. Returns the rank's undelivered events, unless
    /// another request delivers them.
    fn serve(
        &self,
        number: usize,
        name: WorkerRank,
        rank_idx: usize,
        counts: &mut Counts,
        change: &mut Change,
    ) -> Option<Vec<T::Event>> {
        let (rank, blocks) = (&self.ranks[rank_idx], &self.requests[number].blocks);
        rank.inflight.fetch_add(1, Relaxed);
        if number.is_multiple_of(SAMPLE_STRIDE) {
            counts.load(self.load_max_over_mean());
            self.progress.add(SAMPLE_STRIDE);
        }
        let mut state = rank.lock();
        state.engine.serve(blocks, change);
        counts.serve(blocks.len(), change);
        self.target.encode(name, blocks, change, &mut state.outbox);
        if state.delivering { None } else { state.next_batch() }
    }

    /// Frees the booking of a request.
    pub(crate) async fn free(&self, request: InFlight<T>) -> Result<(), LoopError> {
        self.target.free(request.handle).await.map_err(refused::<T>("free", request.number))?;
        self.ranks[request.rank_idx].inflight.fetch_sub(1, Relaxed);
        Ok(())
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

    /// Ends the display of progress.
    pub(crate) fn finish_progress(&self) {
        self.progress.end();
    }
}

/// Sums over requests.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) engine_cpu: Duration,
    prompt_blocks: u64,
    cached_blocks: u64,
    event_blocks: u64,
    load_ratio_sum: f64,
    load_samples: u32,
}

impl Counts {
    /// Runs `work` and counts its CPU time as the simulated side's.
    pub(crate) fn simulated<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let started = thread_cpu();
        let result = work(self);
        self.engine_cpu += thread_cpu() - started;
        result
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
        self.engine_cpu += other.engine_cpu;
        self.prompt_blocks += other.prompt_blocks;
        self.cached_blocks += other.cached_blocks;
        self.event_blocks += other.event_blocks;
        self.load_ratio_sum += other.load_ratio_sum;
        self.load_samples += other.load_samples;
    }
}

/// Sums over requests, and the distribution of their route times.
pub(crate) struct Tally {
    route_ns: Histogram<u64>,
    pub(crate) counts: Counts,
}

impl Tally {
    pub(crate) fn new() -> Self {
        let route_ns = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("valid histogram bounds");
        Self { route_ns, counts: Counts::default() }
    }

    pub(crate) fn route(&mut self, route_time: Duration) {
        self.route_ns.saturating_record(u64::try_from(route_time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds one request.
    pub(crate) fn request(&mut self, route_time: Duration, counts: &Counts) {
        self.route(route_time);
        self.counts.add(counts);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.route_ns.add(&other.route_ns).expect("all histograms have the same bounds");
        self.counts.add(&other.counts);
    }
}

/// Clocks of the measured half.
pub(crate) struct HalfClocks {
    wall: Stopwatch,
    cpu: Duration,
}

impl HalfClocks {
    pub(crate) fn start() -> Self {
        Self { wall: Stopwatch::start(), cpu: process_cpu() }
    }

    /// Reads the clocks at the end of the half. `tally` yields its counts afterwards.
    pub(crate) fn stop(self, requests: usize, rss_before_bytes: Option<u64>, tally: impl FnOnce() -> Tally) -> Outcome {
        let (wall, cpu) = (self.wall.elapsed(), process_cpu() - self.cpu);
        let rss_bytes = rss_bytes();
        let Tally { route_ns, counts } = tally();
        Outcome {
            requests,
            wall,
            router_cpu: cpu.saturating_sub(counts.engine_cpu),
            engine_cpu: counts.engine_cpu,
            route_ns,
            prompt_blocks: counts.prompt_blocks,
            cached_blocks: counts.cached_blocks,
            event_blocks: counts.event_blocks,
            load_max_over_mean: counts.load_ratio_sum / f64::from(counts.load_samples.max(1)),
            rss_bytes,
            rss_before_bytes,
        }
    }
}
