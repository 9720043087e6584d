//! State and steps shared by the closed and the open loop: the prepared workload, the simulated fleet, one request from
//! its route to the end of its prefill, and the counts.
//!
//! **Order of events.** A rank's events are delivered in the order of its engine, by one request at a time. A request
//! that finds a delivery in progress leaves its events to that delivery and continues. No request waits for a lock
//! during a delivery.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hdrhistogram::Histogram;
use pointsman::protocol::{StoredBlock, WorkerRank};
use pointsman_trial::workload::Prompt;

use super::{Figures, Percentiles};
use crate::Failed;
use crate::engine::{self, Change, Engine};
use crate::fleet::Fleet;
use crate::measure::{Stopwatch, process_cpu, rss_bytes, thread_cpu};
use crate::progress::Progress;
use crate::targets::{Call, Target, misplaced, refused};

/// Number of requests between load samples and updates of the progress bar.
const SAMPLE_STRIDE: usize = 64;

/// One prompt with the blocks of the engines' events.
#[derive(Debug)]
struct Request {
    tokens: Prompt,
    blocks: Box<[StoredBlock]>,
}

/// Prompts prepared for a target: hashed, and named with engine hashes. Preparation is not measured.
#[derive(Debug)]
pub(super) struct Workload {
    requests: Vec<Request>,
    /// Number of times that they are sent.
    repeat: u32,
}

impl Workload {
    /// Prepares `prompts` for `T`, to be sent `repeat` times.
    pub(super) fn prepare<T: Target>(prompts: Vec<Prompt>, block_size: NonZeroU32, repeat: u32) -> Self {
        let ready = |tokens: Prompt| Request { blocks: engine::name_blocks(&T::hash(&tokens, block_size)), tokens };
        Self { requests: prompts.into_iter().map(ready).collect(), repeat }
    }

    /// Number of requests.
    pub(super) fn len(&self) -> usize {
        self.requests.len() * self.repeat as usize
    }

    fn request(&self, number: usize) -> &Request {
        &self.requests[number % self.requests.len()]
    }

    /// The two halves: the warm-up and the measured one.
    fn halves(&self) -> Result<[Range<usize>; 2], Failed> {
        match (self.len(), self.len() / 2) {
            (all, 0) => {
                Err(format!("{all} requests are too few: one half is the warm-up, the other is measured").into())
            }
            (all, half) => Ok([0..half, half..all]),
        }
    }
}

/// The target, its workload and its simulated fleet.
pub(crate) struct LoopState<T: Target> {
    pub(crate) target: T,
    workload: Workload,
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
    pub(crate) fn new(target: T, workload: Workload, fleet: Fleet, kv_blocks: usize, progress: Progress) -> Self {
        let rank = |_| Rank { engine: Mutex::new(RankState::new(kv_blocks)), inflight: AtomicU32::new(0) };
        let ranks = (0..fleet.ranks()).map(rank).collect();
        Self { target, workload, fleet, ranks, cursor: AtomicUsize::new(0), progress }
    }

    /// The two halves of the workload: the warm-up and the measured one.
    pub(crate) fn halves(&self) -> Result<[Range<usize>; 2], Failed> {
        self.workload.halves()
    }

    /// Frees the requests in flight, checks that they leave nothing, and shuts the target down.
    pub(crate) async fn end(self: Arc<Self>, held: impl IntoIterator<Item = InFlight<T>>) -> Result<(), Failed> {
        self.progress.end();
        for request in held {
            self.free(request).await?;
        }
        self.target.check_empty().await?;
        if let Some(state) = Arc::into_inner(self) {
            state.target.shutdown().await;
        }
        Ok(())
    }

    /// Sets the position of the next request.
    pub(crate) fn rewind(&self, next: usize) {
        self.cursor.store(next, Relaxed);
    }

    /// Takes the next request before `end` and creates a call for it.
    pub(crate) fn take(&self, end: usize) -> Option<(usize, Call)> {
        let number = self.cursor.fetch_add(1, Relaxed);
        let request = (number < end).then(|| self.workload.request(number))?;
        Some((number, Call { id: format!("request-{number}"), tokens: request.tokens.to_vec(), session: None }))
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
    ) -> Result<(InFlight<T>, Duration, R), Failed> {
        let routed = self.target.route(call).await.map_err(refused::<T>("route", number))?;
        let route_time = clock.elapsed();
        let rank_idx = self.fleet.index(routed.rank).ok_or_else(|| misplaced::<T>(number, routed.rank))?;
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
        let (rank, blocks) = (&self.ranks[rank_idx], &self.workload.request(number).blocks);
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
    pub(crate) async fn free(&self, request: InFlight<T>) -> Result<(), Failed> {
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
    rss_warm_bytes: Option<u64>,
    wall: Stopwatch,
    cpu: Duration,
}

impl HalfClocks {
    pub(crate) fn start() -> Self {
        Self { rss_warm_bytes: rss_bytes(), wall: Stopwatch::start(), cpu: process_cpu() }
    }

    /// Reads the clocks at the end of the half. `tally` yields its counts afterwards.
    pub(crate) fn stop(self, requests: usize, tally: impl FnOnce() -> Tally) -> Figures {
        let (wall, cpu) = (self.wall.elapsed(), process_cpu() - self.cpu);
        let rss_bytes = rss_bytes();
        let Tally { route_ns, counts } = tally();
        let (each, count) = (1e6 / requests as f64, requests as f64);
        let percentile = |quantile| route_ns.value_at_quantile(quantile) as f64 / 1e3;
        Figures {
            requests_per_second: count / wall.as_secs_f64(),
            router_cpu_us_per_request: cpu.saturating_sub(counts.engine_cpu).as_secs_f64() * each,
            engine_cpu_us_per_request: counts.engine_cpu.as_secs_f64() * each,
            route_us: Percentiles { p50: percentile(0.5), p99: percentile(0.99), p999: percentile(0.999) },
            event_blocks_per_request: counts.event_blocks as f64 / count,
            hit_rate: counts.cached_blocks as f64 / counts.prompt_blocks.max(1) as f64,
            load_max_over_mean: counts.load_ratio_sum / f64::from(counts.load_samples.max(1)),
            rss_bytes,
            rss_before_bytes: None,
            rss_warm_bytes: self.rss_warm_bytes,
            requests,
        }
    }
}
