//! Metrics of KV event ingestion.
//!
//! Handles are created at first use: there are many causes, and most never occur.

use std::time::Duration;

use metrics::Histogram;

use super::Pool;
use crate::ingest::Note;
use crate::wire::Findings;

/// Instruments of the ingest actors.
pub(crate) struct IngestMeters {
    pool: Pool,
    heal_seconds: Histogram,
}

impl IngestMeters {
    pub(super) fn new(pool: &Pool) -> Self {
        Self { pool: pool.clone(), heal_seconds: pool.histogram("pointsman_kv_source_heal_seconds", &[]) }
    }

    /// Counts a closed connection or a rejected message.
    pub(crate) fn error(&self, cause: &'static str) {
        self.pool.counter("pointsman_kv_source_errors_total", &[("cause", cause)]).increment(1);
    }

    pub(crate) fn note(&self, note: Note) {
        self.pool.counter("pointsman_kv_source_notes_total", &[("note", note.name())]).increment(note.count());
    }

    /// Counts the undecodable parts of a batch.
    pub(crate) fn findings(&self, findings: &Findings) {
        for (finding, count) in findings.iter() {
            self.pool.counter("pointsman_kv_findings_total", &[("finding", finding.name())]).increment(count);
        }
    }

    /// Records the recovery of a source, with the time since its degradation.
    pub(crate) fn healed(&self, after: Duration) {
        self.heal_seconds.record(after.as_secs_f64());
    }
}
