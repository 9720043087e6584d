//! Metrics per worker: requests by status and outcome, retries, latency.
//!
//! A worker's series leave the page when the worker leaves its router, because endpoints change with pods and a
//! recorder would keep all of them. These series are therefore rendered here instead of through the recorder. This
//! module also counts response frames per rank, to distinguish a timeout from a long queue, and failures whose requests
//! have not ended, so that a quickly failing rank attracts no requests in the meantime.

mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ahash::AHashMap;
use axum::http::StatusCode;
use parking_lot::Mutex;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{Outcome, Placement, Router, WorkerEntry};
use tokio::time::Instant;

use crate::observe::page::SECONDS;
use crate::observe::requests::RetryReason;

pub(crate) use page::series;

/// Tables of all models of the process, for the page.
static TABLES: Mutex<Vec<Weak<WorkerTable>>> = Mutex::new(Vec::new());

/// Workers of one model.
pub(crate) struct WorkerTable {
    model: String,
    router: Router,
    workers: Mutex<AHashMap<WorkerId, Arc<WorkerMeters>>>,
    unsettled: UnsettledFailures,
}

/// Unsettled failures of a rank from which other ranks are preferred.
const UNSETTLED_MAX: usize = 3;

/// Failed attempts of requests in progress, whose outcome for the rank is not known yet. References count them.
#[derive(Default)]
struct UnsettledFailures {
    by_rank: Mutex<BTreeMap<WorkerRank, Arc<()>>>,
    all: Arc<()>,
}

/// One such failure, until dropped.
pub(crate) struct UnsettledFailure {
    _of_rank: Arc<()>,
    _of_any: Arc<()>,
}

/// Failures that refer to the count.
fn unsettled(count: &Arc<()>) -> usize {
    Arc::strong_count(count) - 1
}

impl WorkerTable {
    pub(crate) fn new(model: &str, router: Router) -> Arc<Self> {
        let (model, workers, unsettled) = (model.to_owned(), Mutex::default(), UnsettledFailures::default());
        let table = Arc::new(Self { model, router, workers, unsettled });
        let mut tables = TABLES.lock();
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(&table));
        table
    }

    /// Records an attempt at the rank of a placement.
    pub(crate) fn sent(&self, placement: &Placement) -> WorkerRequest {
        let rank = placement.rank();
        let worker = meters_of(&mut self.workers.lock(), rank.worker, placement.endpoint());
        WorkerRequest::new(worker, rank)
    }

    /// Records a failed attempt at this rank; the end of its request decides its outcome.
    pub(crate) fn failed(&self, rank: WorkerRank) -> UnsettledFailure {
        let mut by_rank = self.unsettled.by_rank.lock();
        by_rank.retain(|_, count| unsettled(count) > 0);
        let _of_rank = Arc::clone(by_rank.entry(rank).or_default());
        UnsettledFailure { _of_rank, _of_any: Arc::clone(&self.unsettled.all) }
    }

    /// Ranks with several unsettled failures; usually none, detected by one atomic read.
    pub(crate) fn failing(&self) -> BTreeSet<WorkerRank> {
        if unsettled(&self.unsettled.all) < UNSETTLED_MAX {
            return BTreeSet::new();
        }
        let by_rank = self.unsettled.by_rank.lock();
        by_rank.iter().filter(|(_, count)| unsettled(count) >= UNSETTLED_MAX).map(|(rank, _)| *rank).collect()
    }

    /// Meters of the router's current workers; others are dropped.
    fn current(&self) -> Vec<(WorkerId, Arc<WorkerMeters>)> {
        let present = self.router.workers();
        let mut workers = self.workers.lock();
        workers.retain(|id, _| present.iter().any(|entry| entry.worker == *id));
        // Includes workers without requests, because a rate needs a series that starts at 0.
        let meters =
            |entry: &WorkerEntry| (entry.worker, meters_of(&mut workers, entry.worker, &entry.config.endpoint));
        present.iter().map(meters).collect()
    }
}

/// Meters of a worker; new ones after a change of its endpoint.
fn meters_of(workers: &mut AHashMap<WorkerId, Arc<WorkerMeters>>, id: WorkerId, endpoint: &str) -> Arc<WorkerMeters> {
    if let Some(known) = workers.get(&id).filter(|meters| meters.endpoint == endpoint) {
        return Arc::clone(known);
    }
    let meters = Arc::new(WorkerMeters::of(endpoint));
    workers.insert(id, Arc::clone(&meters));
    meters
}

/// Statuses and outcomes used by alerts: their series exist from the start.
const WATCHED: [(u16, Outcome); 6] = [
    (200, Outcome::InvalidAnswer),
    (401, Outcome::Misconfigured),
    (403, Outcome::Misconfigured),
    (404, Outcome::Misconfigured),
    (429, Outcome::Refused { retry_after: None }),
    (503, Outcome::Refused { retry_after: None }),
];

/// Counters of one worker.
pub(crate) struct WorkerMeters {
    endpoint: String,
    /// By status (if any) and outcome.
    requests: Mutex<BTreeMap<(Option<u16>, &'static str), u64>>,
    retries: [AtomicU64; RetryReason::ALL.len()],
    first_token: Durations,
    request: Durations,
    /// Response frames by rank.
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

    /// Number of failed attempts, and of all.
    fn attempts(&self) -> (u64, u64) {
        let requests = self.requests.lock();
        let is_failure = |outcome: &str| !["ok", "client_error", "cancelled"].contains(&outcome);
        let failed = requests.iter().filter(|((_, outcome), _)| is_failure(outcome)).map(|(_, count)| count).sum();
        (failed, requests.values().sum())
    }

    /// Counts a retry on another rank after a failure here.
    pub(crate) fn retried(&self, reason: RetryReason) {
        self.retries[reason as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// A histogram with the page's duration buckets.
#[derive(Default)]
struct Durations {
    /// One count per bucket, then those above all bounds.
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

/// One attempt at a worker, until the end of its response. Counted once: a drop before the end counts as cancelled, by
/// a client disconnect or the end of the gateway.
pub(crate) struct WorkerRequest {
    worker: Arc<WorkerMeters>,
    frames: Arc<AtomicU64>,
    /// Frames of the rank at the start of this attempt.
    frames_before: u64,
    sent: Instant,
    status: Option<u16>,
    has_first_token: bool,
    is_over: bool,
}

impl WorkerRequest {
    fn new(worker: Arc<WorkerMeters>, rank: WorkerRank) -> Self {
        let frames = Arc::clone(worker.frames.lock().entry(rank.rank).or_default());
        let frames_before = frames.load(Ordering::Relaxed);
        let sent = Instant::now();
        Self { worker, frames, frames_before, sent, status: None, has_first_token: false, is_over: false }
    }

    /// Restarts the time of an attempt that is sent only now.
    pub(crate) fn begin(&mut self) {
        self.sent = Instant::now();
        self.frames_before = self.frames.load(Ordering::Relaxed);
    }

    /// Ends an attempt that was never sent. It is not counted.
    pub(crate) fn withdraw(&mut self) {
        self.is_over = true;
    }

    pub(crate) fn worker(&self) -> &Arc<WorkerMeters> {
        &self.worker
    }

    /// Records the response head.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.status = Some(status.as_u16());
    }

    /// Records a response frame.
    pub(crate) fn received(&self) {
        self.frames.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the rank has sent a frame to any request since the start of this attempt.
    pub(crate) fn has_rank_sent(&self) -> bool {
        self.frames.load(Ordering::Relaxed) != self.frames_before
    }

    /// Records the first token of a streamed response; repeated calls have no effect.
    pub(crate) fn first_token(&mut self) {
        if !std::mem::replace(&mut self.has_first_token, true) {
            self.worker.first_token.record(self.sent.elapsed());
        }
    }

    /// Records the complete end of the response.
    pub(crate) fn completed(&mut self) {
        if !self.is_over {
            self.worker.request.record(self.sent.elapsed());
        }
        let is_success = self.status.is_some_and(|status| status < 400);
        self.ended(if is_success { "ok" } else { "client_error" });
    }

    /// Records the end; only the first call counts.
    pub(crate) fn ended(&mut self, outcome: &'static str) {
        if !std::mem::replace(&mut self.is_over, true) {
            *self.worker.requests.lock().entry((self.status, outcome)).or_default() += 1;
        }
    }
}

impl Drop for WorkerRequest {
    fn drop(&mut self) {
        self.ended("cancelled");
    }
}
