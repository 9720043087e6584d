//! Detection of engines whose batches do not match the pool.
//!
//! A stream is judged by its stores of tokens in device memory. Until one was usable, a store of another form, or a few
//! batches without any usable event, are a mismatch. Afterwards only several batches with such stores and without a
//! usable one are: lower tiers, unknown events and partial blocks prove nothing about the blocks that fit. One batch with
//! a usable store ends the mismatch. The wire decoder determines usability.

use super::DegradationReason;
use crate::wire::{Finding, Report, StoreMismatch};

/// Number of consecutive batches without a usable event that count as a mismatch.
const MISMATCHES_MAX: u32 = 3;

/// Mismatches since the last usable store.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fit {
    mismatches: u32,
    mismatch: Option<StoreMismatch>,
    foreign_rank: Option<u32>,
    finding: Option<Finding>,
    /// Whether this incarnation of the publisher has stored a usable block. An engine with caches of several block sizes
    /// publishes all of them: the size that fits is its size.
    has_fitted: bool,
    /// Block size of the engine, if its blocks are parts of the pool's.
    page_size: Option<u32>,
}

impl Fit {
    pub(super) fn observe(&mut self, applied: &Report, pool_block_size: Option<u32>) {
        let is_form_known = self.form_mismatch(pool_block_size).is_some();
        self.page_size = applied.page_size.or(self.page_size.filter(|_| applied.stored_blocks == 0));
        if applied.stored_blocks > 0 || applied.cleared {
            let has_fitted = self.has_fitted || applied.stored_blocks > 0;
            *self = Self { has_fitted, page_size: self.page_size, ..Self::default() };
        } else if applied.foreign_rank.is_some()
            || applied.mismatch.is_some_and(|found| self.counts(found, pool_block_size))
        {
            self.mismatches = self.mismatches.saturating_add(1);
            self.mismatch = applied.mismatch.or(self.mismatch);
            self.foreign_rank = applied.foreign_rank.or(self.foreign_rank);
            self.finding = applied.findings.main();
        } else if self.has_fitted || applied.usable > 0 {
            // Removals match any block size, so they do not show that stores do.
            let is_kept = self.has_fitted || is_form_known;
            self.mismatches = if is_kept { self.mismatches } else { 0 };
        } else if events_of_note(applied) > 0 {
            self.mismatches = self.mismatches.saturating_add(1);
            self.finding = applied.findings.main();
        }
    }

    /// Whether a rejected store proves anything. An engine cannot change its block size, and one whose blocks fit also
    /// announces partial blocks, which are smaller.
    fn counts(&self, mismatch: StoreMismatch, pool_block_size: Option<u32>) -> bool {
        match mismatch {
            StoreMismatch::BlockSize(size) => !(self.has_fitted && pool_block_size.is_some_and(|pool| size < pool)),
            StoreMismatch::Eagle | StoreMismatch::Invalid(_) => true,
        }
    }

    /// Whether this incarnation of the publisher has stored a usable block.
    pub(super) fn has_fitted(&self) -> bool {
        self.has_fitted
    }

    /// A restarted engine may have another block size.
    pub(super) fn start_incarnation(&mut self) {
        (self.has_fitted, self.page_size) = (false, None);
    }

    /// Block size of the events, if known.
    pub(super) fn block_size(&self, pool_block_size: Option<u32>) -> Option<u32> {
        match self.mismatch {
            _ if self.page_size.is_some() => self.page_size,
            _ if self.has_fitted => pool_block_size,
            Some(StoreMismatch::BlockSize(size)) => Some(size),
            Some(StoreMismatch::Eagle | StoreMismatch::Invalid(_)) | None => None,
        }
    }

    /// Degradation reason if the rank's batches do not match the pool.
    pub(super) fn degradation(&self, pool_block_size: Option<u32>) -> Option<DegradationReason> {
        let is_repeated = self.mismatches >= MISMATCHES_MAX;
        let form = self.form_mismatch(pool_block_size).filter(|_| is_repeated || !self.has_fitted);
        let undecodable = DegradationReason::Undecodable { batches: self.mismatches, finding: self.finding };
        form.or_else(|| is_repeated.then_some(undecodable))
    }

    /// The difference in form that one store proves.
    fn form_mismatch(&self, pool: Option<u32>) -> Option<DegradationReason> {
        match self.mismatch {
            Some(StoreMismatch::BlockSize(engine)) => Some(DegradationReason::BlockSize { engine, pool }),
            Some(StoreMismatch::Eagle) => Some(DegradationReason::Eagle),
            Some(StoreMismatch::Invalid(_)) | None => {
                self.foreign_rank.map(|found| DegradationReason::ForeignRank { found })
            }
        }
    }
}

/// Number of events in a batch that show whether the format is understood. An undecodable batch counts as one
/// undecodable event.
fn events_of_note(report: &Report) -> u32 {
    let others = report.events.saturating_sub(report.side_events);
    if report.findings.is_empty() || report.side_events > 0 { others } else { others.max(1) }
}
