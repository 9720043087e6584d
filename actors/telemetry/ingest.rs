//! Metrics of KV event ingestion.
//!
//! Handles are created at first use: there are many causes, and most never occur. Those of audits exist from the start,
//! because alerts need the increase from 0.

use std::time::Duration;

use metrics::Histogram;

use super::{Counters, Pool};
use crate::ingest::{AuditCause, AuditResult, Note};
use crate::wire::Findings;

/// Instruments of the ingest actors.
pub(crate) struct IngestMeters {
    pool: Pool,
    heal_seconds: Histogram,
    audits: Counters,
    inconclusive_audits: Counters,
    audit_blocks: Counters,
}

impl IngestMeters {
    pub(super) fn new(pool: &Pool) -> Self {
        Self {
            pool: pool.clone(),
            heal_seconds: pool.histogram("pointsman_kv_source_heal_seconds", &[]),
            audits: pool.counters("pointsman_kv_audits_total", "result", &AuditResult::NAMES),
            inconclusive_audits: pool.counters("pointsman_kv_audits_inconclusive_total", "cause", &AuditCause::NAMES),
            audit_blocks: pool.counters("pointsman_kv_audit_blocks_total", "difference", &["stale", "missing"]),
        }
    }

    /// Counts a closed connection or a rejected message.
    pub(crate) fn error(&self, cause: &'static str) {
        self.pool.counter("pointsman_kv_source_errors_total", &[("cause", cause)]).increment(1);
    }

    pub(crate) fn note(&self, note: Note) {
        self.pool.counter("pointsman_kv_source_notes_total", &[("note", note.name())]).increment(note.count());
    }

    /// Counts the result of an audit, its cause, and the blocks of a difference.
    pub(crate) fn audited(&self, result: &AuditResult) {
        for name in AuditResult::NAMES {
            self.audits.add(name, u64::from(name == result.name()));
        }
        if let Some(cause) = result.cause() {
            self.inconclusive_audits.add(cause.name(), 1);
        }
        if let AuditResult::Different(difference) = result {
            self.audit_blocks.add("stale", difference.stale.len() as u64);
            self.audit_blocks.add("missing", difference.missing.len() as u64);
        }
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
