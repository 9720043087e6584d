//! Where a request's time goes: sampled, and for each request whose span is wanted.
//!
//! Owns the timestamps that a timed request carries. A request that is not timed carries none and reads no clock for them.

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

/// One request in so many is timed.
pub(super) const SAMPLED_ONE_IN: u64 = 16;

/// Hashes that an event shows of a prompt.
const HASHES_SHOWN: usize = 8;

/// How far a timed request has come, and when.
pub(crate) struct PhaseTimestamps {
    clock: Clock,
    found: AtomicU64,
    decided: AtomicU64,
}

impl PhaseTimestamps {
    /// The index has answered.
    pub(crate) fn set_found(&self) {
        self.found.store(self.clock.now().0, Ordering::Relaxed);
    }

    /// Its rank is chosen.
    pub(crate) fn set_decided(&self) {
        self.decided.store(self.clock.now().0, Ordering::Relaxed);
    }
}

/// The histograms of phases.
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

    /// PhaseTimestamps for a request that is to be timed, which few are.
    pub(crate) fn sample(&self, lease: &Lease, span: &Span, clock: Clock) -> Option<Arc<PhaseTimestamps>> {
        let timed = lease.booking().0.is_multiple_of(SAMPLED_ONE_IN) || !span.is_disabled();
        // Without an index, overlap is known at once.
        timed.then(|| {
            Arc::new(PhaseTimestamps { clock, found: AtomicU64::new(lease.arrival().0), decided: AtomicU64::new(0) })
        })
    }

    /// A timed request, hashed from `started` on, has its answer.
    pub(crate) fn record(&self, timestamps: &PhaseTimestamps, started: Timestamp, lease: &Lease, span: &Span) {
        let (hashed, answered) = (lease.arrival(), timestamps.clock.now());
        let found = Timestamp(timestamps.found.load(Ordering::Relaxed));
        let decided = Timestamp(timestamps.decided.load(Ordering::Relaxed));
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
    }
}

/// The span of a request. Where nobody wants it, it costs the look whether anybody does.
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

/// Says in the span which blocks the prompt has: by their hashes, never by tokens.
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
