//! Phase timings of requests: measured for a sample, and for each request with an enabled span.
//!
//! A measured request carries its timestamps. Other requests carry none and read no clock for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::Histogram;
use tracing::Span;
use tracing::field::Empty;

use super::Pool;
use crate::actors::io::clock::Clock;
use crate::directory::Lease;
use crate::hashing::HashedPrompt;
use crate::protocol::Timestamp;
use crate::schedule::Explanation;

/// Sampling ratio: one of this many requests is measured.
pub(super) const SAMPLED_ONE_IN: u64 = 16;

/// Maximum number of prompt hashes in a trace event.
const HASHES_SHOWN: usize = 8;

/// Timestamps of the phases that a measured request has completed.
pub(crate) struct PhaseTimestamps {
    clock: Clock,
    found: AtomicU64,
    stepped: AtomicU64,
    decided: AtomicU64,
}

/// Durations of the phases of a placed request, in this order without gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutePhases {
    /// Until the prompt is hashed.
    pub hash: Duration,
    /// Until the last index shard, and the shared cache if present, has responded.
    pub overlap: Duration,
    /// Until the step of the scheduler that decides: time in the queue, and load queries.
    pub queue: Duration,
    /// Until a rank is chosen.
    pub decide: Duration,
    /// Until the caller has the placement.
    pub book: Duration,
}

impl RoutePhases {
    /// Sum of all phases.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.hash + self.overlap + self.queue + self.decide + self.book
    }
}

impl PhaseTimestamps {
    /// Overlap query completed.
    pub(crate) fn set_found(&self) {
        self.found.store(self.clock.now().0, Ordering::Relaxed);
    }

    /// Rank chosen, in a step of the scheduler that began at `stepped`.
    pub(crate) fn set_decided(&self, stepped: Timestamp) {
        self.stepped.store(stepped.0, Ordering::Relaxed);
        self.decided.store(self.clock.now().0, Ordering::Relaxed);
    }
}

/// Histograms of phases.
pub(crate) struct Phases {
    hash: Histogram,
    overlap: Histogram,
    decide: Histogram,
    book: Histogram,
    total: Histogram,
}

impl Phases {
    pub(super) fn new(pool: &Pool) -> Self {
        let phase = |phase| pool.histogram("pointsman_phase_duration_seconds", &[("phase", phase)]);
        Self {
            hash: phase("hash"),
            overlap: phase("overlap"),
            decide: phase("decide"),
            book: phase("book"),
            total: phase("total"),
        }
    }

    /// Timestamps for a sampled request; `None` for most.
    pub(crate) fn sample(
        &self,
        lease: &Lease,
        (span, is_requested): (&Span, bool),
        clock: Clock,
    ) -> Option<Arc<PhaseTimestamps>> {
        let timed = is_requested || lease.booking().0.is_multiple_of(SAMPLED_ONE_IN) || !span.is_disabled();
        // Without an index, the overlap phase takes no time.
        timed.then(|| {
            let (found, stepped, decided) = (AtomicU64::new(lease.arrival().0), AtomicU64::new(0), AtomicU64::new(0));
            Arc::new(PhaseTimestamps { clock, found, stepped, decided })
        })
    }

    /// Records a measured request whose hashing began at `started` and whose reply has arrived.
    pub(crate) fn record(
        &self,
        timestamps: &PhaseTimestamps,
        started: Timestamp,
        lease: &Lease,
        span: &Span,
    ) -> RoutePhases {
        let (hashed, answered) = (lease.arrival(), timestamps.clock.now());
        let found = Timestamp(timestamps.found.load(Ordering::Relaxed));
        let decided = Timestamp(timestamps.decided.load(Ordering::Relaxed));
        // The step may have begun before the overlap of a later request of its batch was known.
        let stepped = Timestamp(timestamps.stepped.load(Ordering::Relaxed)).clamp(found.min(decided), decided);
        let phases = [
            (&self.hash, "hash_seconds", hashed.since(started)),
            (&self.overlap, "overlap_seconds", found.since(hashed)),
            (&self.decide, "decide_seconds", decided.since(found)),
            (&self.book, "book_seconds", answered.since(decided)),
            (&self.total, "total_seconds", answered.since(started)),
        ];
        for (histogram, field, duration) in phases {
            let seconds = Duration::as_secs_f64(&duration);
            histogram.record(seconds);
            span.record(field, seconds);
        }
        RoutePhases {
            hash: hashed.since(started),
            overlap: found.since(hashed),
            queue: stepped.since(found),
            decide: decided.since(stepped),
            book: answered.since(decided),
        }
    }
}

/// Span of a request. A disabled span costs only the check for it.
pub(crate) fn route_span(pool: &str, request_id: Option<&str>) -> Span {
    tracing::debug_span!(
        target: "pointsman::route",
        "route",
        pool,
        request_id,
        rank = Empty,
        outcome = Empty,
        reason = Empty,
        hash_seconds = Empty,
        overlap_seconds = Empty,
        decide_seconds = Empty,
        book_seconds = Empty,
        total_seconds = Empty,
    )
}

/// Records the hashes of the prompt blocks in the span, never tokens.
pub(crate) fn trace_hashes(span: &Span, prompt: Option<&HashedPrompt>) {
    if span.is_disabled() {
        return;
    }
    let Some(prompt) = prompt else { return };
    let block_hashes = first_in_hex(prompt.block_hashes().iter().map(|hash| hash.0));
    let sequence_hashes = first_in_hex(prompt.sequence_hashes().iter().map(|hash| hash.0));
    tracing::debug!(
        target: "pointsman::route",
        parent: span,
        blocks = prompt.block_hashes().len(),
        block_hashes,
        sequence_hashes,
        "hashed"
    );
}

fn first_in_hex(hashes: impl Iterator<Item = u64>) -> String {
    let hashes: Vec<String> = hashes.take(HASHES_SHOWN).map(|hash| format!("{hash:016x}")).collect();
    hashes.join(" ")
}

/// Logs one structured event for a decision sampled for the trace, with all its inputs as JSON.
pub(crate) fn trace_decision(explanation: &Explanation) {
    if !tracing::enabled!(target: "pointsman::decision", tracing::Level::INFO) {
        return;
    }
    // Serialization of plain data with string keys cannot fail.
    let Ok(record) = serde_json::to_string(explanation) else { return };
    tracing::info!(target: "pointsman::decision", schema = Explanation::SCHEMA, record, "decision sampled");
}
