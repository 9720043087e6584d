//! What is noticed on the way of engines' KV events.
//!
//! Handles are made when something is first noticed: there are many causes, and most are never seen.

use std::time::Duration;

use metrics::Histogram;

use super::Pool;
use crate::ingest::Note;
use crate::wire::Findings;

/// The instruments.
pub(crate) struct IngestMeters {
    pool: Pool,
    heal_seconds: Histogram,
}

impl IngestMeters {
    pub(super) fn new(pool: &Pool) -> Self {
        Self { pool: pool.clone(), heal_seconds: pool.histogram("pointsman_kv_source_heal_seconds", &[]) }
    }

    /// A connection that ended, or a message that was refused.
    pub(crate) fn error(&self, cause: &'static str) {
        self.pool.counter("pointsman_kv_source_errors_total", &[("cause", cause)]).increment(1);
    }

    pub(crate) fn note(&self, note: Note) {
        self.pool.counter("pointsman_kv_source_notes_total", &[("note", note.name())]).increment(note.count());
    }

    /// What could not be read in a batch.
    pub(crate) fn findings(&self, findings: &Findings) {
        for (finding, count) in findings.iter() {
            self.pool.counter("pointsman_kv_findings_total", &[("finding", finding.name())]).increment(count);
        }
    }

    /// A source is trusted again, so long after it was first doubted.
    pub(crate) fn healed(&self, after: Duration) {
        self.heal_seconds.record(after.as_secs_f64());
    }
}
