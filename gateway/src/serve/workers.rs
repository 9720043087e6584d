//! Metrics by worker: requests by status and outcome, retries, latency.
//!
//! Owns the counts of each worker of each model, and their part of the metrics page. Promises that a worker's series leave
//! the page when it leaves its router: endpoints come and go with pods, and a recorder would keep every one of them. So these
//! series are written here and not through the recorder. Also counts, for each rank, the frames of its answers, so that a
//! timeout can be told from a long wait, and the failures that wait for the end of their requests, so that a rank that fails
//! quickly does not attract requests meanwhile.

mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use ahash::AHashMap;
use axum::http::StatusCode;
use pointsman::health::Outcome;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{Placement, Router, WorkerEntry};
use tokio::time::Instant;

use super::metrics::RetryReason;
use super::telemetry::SECONDS;

pub(crate) use page::page;

/// The tables of all models of this process, for the page.
static TABLES: Mutex<Vec<Weak<WorkerTable>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Maps and counts are whole after every statement.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The workers of one model.
pub(crate) struct WorkerTable {
    model: String,
    router: Router,
    workers: Mutex<AHashMap<WorkerId, Arc<WorkerMeters>>>,
    unsettled: Arc<UnsettledFailures>,
}

/// Failures of a rank whose requests have not ended, from which on other ranks are preferred.
const UNSETTLED_MAX: usize = 3;

/// Failed attempts whose requests have not ended: whether they count against the rank is not known yet.
#[derive(Default)]
struct UnsettledFailures {
    by_rank: Mutex<BTreeMap<WorkerRank, usize>>,
    total: AtomicUsize,
}

/// One of them, until it is dropped.
pub(crate) struct UnsettledFailure {
    all: Arc<UnsettledFailures>,
    rank: WorkerRank,
}

impl Drop for UnsettledFailure {
    fn drop(&mut self) {
        let mut by_rank = lock(&self.all.by_rank);
        if let Some(count) = by_rank.get_mut(&self.rank) {
            *count -= 1;
            if *count == 0 {
                by_rank.remove(&self.rank);
            }
        }
        self.all.total.fetch_sub(1, Ordering::Relaxed);
    }
}

impl WorkerTable {
    pub(crate) fn new(model: &str, router: Router) -> Arc<Self> {
        let (model, workers, unsettled) = (model.to_owned(), Mutex::default(), Arc::default());
        let table = Arc::new(Self { model, router, workers, unsettled });
        let mut tables = lock(&TABLES);
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(&table));
        table
    }

    /// A request that is sent to the rank of a placement now.
    pub(crate) fn sent(&self, placement: &Placement) -> WorkerRequest {
        let rank = placement.rank();
        let worker = meters_of(&mut lock(&self.workers), rank.worker, placement.endpoint());
        WorkerRequest::new(worker, rank)
    }

    /// An attempt at this rank has failed, and the end of its request decides whether that counts.
    pub(crate) fn failed(&self, rank: WorkerRank) -> UnsettledFailure {
        *lock(&self.unsettled.by_rank).entry(rank).or_default() += 1;
        self.unsettled.total.fetch_add(1, Ordering::Relaxed);
        UnsettledFailure { all: Arc::clone(&self.unsettled), rank }
    }

    /// Ranks with several such failures now; mostly none, at the cost of reading a number.
    pub(crate) fn failing(&self) -> BTreeSet<WorkerRank> {
        if self.unsettled.total.load(Ordering::Relaxed) < UNSETTLED_MAX {
            return BTreeSet::new();
        }
        let by_rank = lock(&self.unsettled.by_rank);
        by_rank.iter().filter(|(_, count)| **count >= UNSETTLED_MAX).map(|(rank, _)| *rank).collect()
    }

    /// The meters of the workers that the router has; the others are dropped.
    fn current(&self) -> Vec<(WorkerId, Arc<WorkerMeters>)> {
        let present = self.router.workers();
        let mut workers = lock(&self.workers);
        workers.retain(|id, _| present.iter().any(|entry| entry.worker == *id));
        // Those without a request, too: a rate needs a series that begins at 0.
        let meters =
            |entry: &WorkerEntry| (entry.worker, meters_of(&mut workers, entry.worker, &entry.config.endpoint));
        present.iter().map(meters).collect()
    }
}

/// The meters of a worker, new ones where its endpoint is another one.
fn meters_of(workers: &mut AHashMap<WorkerId, Arc<WorkerMeters>>, id: WorkerId, endpoint: &str) -> Arc<WorkerMeters> {
    if let Some(known) = workers.get(&id).filter(|meters| meters.endpoint == endpoint) {
        return Arc::clone(known);
    }
    let meters = Arc::new(WorkerMeters::of(endpoint));
    workers.insert(id, Arc::clone(&meters));
    meters
}

/// Statuses and outcomes that alerts look for: their series are there from the beginning.
const WATCHED: [(u16, Outcome); 6] = [
    (200, Outcome::InvalidAnswer),
    (401, Outcome::Misconfigured),
    (403, Outcome::Misconfigured),
    (404, Outcome::Misconfigured),
    (429, Outcome::Refused { retry_after: None }),
    (503, Outcome::Refused { retry_after: None }),
];

/// The counts of one worker.
pub(crate) struct WorkerMeters {
    endpoint: String,
    /// By status, if there was one, and outcome.
    requests: Mutex<BTreeMap<(Option<u16>, &'static str), u64>>,
    retries: [AtomicU64; RetryReason::ALL.len()],
    first_token: Durations,
    request: Durations,
    /// Frames of answers, by rank.
    frames: Mutex<BTreeMap<u32, Arc<AtomicU64>>>,
}

impl WorkerMeters {
    fn of(endpoint: &str) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            requests: Mutex::new(WATCHED.map(|(status, outcome)| ((Some(status), outcome.label()), 0)).into()),
            retries: Default::default(),
            first_token: Durations::default(),
            request: Durations::default(),
            frames: Mutex::default(),
        }
    }

    /// A request that failed there is sent to another rank.
    pub(crate) fn retried(&self, reason: RetryReason) {
        self.retries[reason as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// A histogram with the bounds of the page's durations.
#[derive(Default)]
struct Durations {
    /// Those up to each bound and above the one before, then those above all.
    buckets: [AtomicU64; SECONDS.len() + 1],
    micros: AtomicU64,
}

impl Durations {
    fn record(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = SECONDS.iter().position(|bound| seconds <= *bound).unwrap_or(SECONDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }
}

/// One attempt of a request at a worker, until its answer has ended. Counted once: dropped before its end it was cancelled,
/// because the client left or the gateway ended.
pub(crate) struct WorkerRequest {
    worker: Arc<WorkerMeters>,
    frames: Arc<AtomicU64>,
    /// Frames of the rank when this was sent.
    frames_before: u64,
    sent: Instant,
    status: Option<u16>,
    has_first_token: bool,
    is_over: bool,
}

impl WorkerRequest {
    fn new(worker: Arc<WorkerMeters>, rank: WorkerRank) -> Self {
        let frames = Arc::clone(lock(&worker.frames).entry(rank.rank).or_default());
        let frames_before = frames.load(Ordering::Relaxed);
        let sent = Instant::now();
        Self { worker, frames, frames_before, sent, status: None, has_first_token: false, is_over: false }
    }

    pub(crate) fn worker(&self) -> &Arc<WorkerMeters> {
        &self.worker
    }

    /// The head of the answer is there.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.status = Some(status.as_u16());
    }

    /// A frame of the answer is there.
    pub(crate) fn received(&self) {
        self.frames.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the rank has sent anything since this was sent, to whichever request.
    pub(crate) fn has_rank_sent(&self) -> bool {
        self.frames.load(Ordering::Relaxed) != self.frames_before
    }

    /// The first token of a streamed answer is there; again is harmless.
    pub(crate) fn first_token(&mut self) {
        if !std::mem::replace(&mut self.has_first_token, true) {
            self.worker.first_token.record(self.sent.elapsed());
        }
    }

    /// The answer has come to its end.
    pub(crate) fn completed(&mut self) {
        if !self.is_over {
            self.worker.request.record(self.sent.elapsed());
        }
        let is_success = self.status.is_some_and(|status| status < 400);
        self.ended(if is_success { "ok" } else { "client_error" });
    }

    /// It has ended; only the first time counts.
    pub(crate) fn ended(&mut self, outcome: &'static str) {
        if !std::mem::replace(&mut self.is_over, true) {
            *lock(&self.worker.requests).entry((self.status, outcome)).or_default() += 1;
        }
    }
}

impl Drop for WorkerRequest {
    fn drop(&mut self) {
        self.ended("cancelled");
    }
}
