//! Detection of engines whose batches do not match the pool.
//!
//! Counts consecutive batches with events but without a usable one, and keeps their block size and rank. One batch with
//! a stored block ends the mismatch. The wire decoder determines usability.

use super::DegradationReason;

/// Number of consecutive batches without a usable event that count as a mismatch.
const MISMATCHES_MAX: u32 = 3;

/// Result of decoding and applying one batch.
///
/// ```
/// use pointsman::internals::ingest::AppliedBatch;
///
/// let batch = AppliedBatch { events: 2, usable: 2, stored_blocks: 9, ..AppliedBatch::default() };
/// assert!(!batch.cleared);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppliedBatch {
    /// Number of decoded events; 1 for a batch that is undecodable as a whole.
    pub events: u32,
    /// Number of events that the index could use.
    pub usable: u32,
    /// Number of blocks stored by them.
    pub stored_blocks: u32,
    /// Whether an event cleared the rank's whole cache.
    pub cleared: bool,
    /// The engine's block size in tokens, if it differs from the pool's.
    pub engine_block_size: Option<u32>,
    /// The data-parallel rank of the batch, if it differs from the stream's.
    pub foreign_rank: Option<u32>,
}

/// Mismatches since the last usable event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fit {
    mismatches: u32,
    engine_block_size: Option<u32>,
    foreign_rank: Option<u32>,
    /// Whether this incarnation of the publisher has stored a usable block. An engine with caches of several block sizes
    /// publishes all of them: the size that fits is its size.
    has_fitted: bool,
}

impl Fit {
    pub(super) fn observe(&mut self, applied: &AppliedBatch) {
        let is_empty = applied.events == 0 && applied.engine_block_size.is_none() && applied.foreign_rank.is_none();
        let has_mismatch = applied.engine_block_size.is_some() || applied.foreign_rank.is_some();
        let is_known_mismatch = self.engine_block_size.is_some() || self.foreign_rank.is_some();
        if applied.stored_blocks > 0 || applied.cleared {
            let has_fitted = self.has_fitted || applied.stored_blocks > 0;
            *self = Self { has_fitted, ..Self::default() };
        } else if applied.usable > 0 && !has_mismatch {
            // Removals match any block size, so they do not show that stores do.
            self.mismatches = if is_known_mismatch { self.mismatches } else { 0 };
        } else if !is_empty {
            self.mismatches = self.mismatches.saturating_add(1);
            self.engine_block_size = applied.engine_block_size.or(self.engine_block_size);
            self.foreign_rank = applied.foreign_rank.or(self.foreign_rank);
        }
    }

    /// A restarted engine may have another block size.
    pub(super) fn start_incarnation(&mut self) {
        self.has_fitted = false;
    }

    /// Block size of the events, if known.
    pub(super) fn block_size(&self, pool_block_size: Option<u32>) -> Option<u32> {
        if self.has_fitted { pool_block_size } else { self.engine_block_size }
    }

    /// Degradation reason if the rank's batches do not match the pool.
    pub(super) fn degradation(&self, pool_block_size: Option<u32>) -> Option<DegradationReason> {
        if let Some(engine) = self.engine_block_size {
            return Some(DegradationReason::BlockSize { engine, pool: pool_block_size });
        }
        if let Some(found) = self.foreign_rank {
            return Some(DegradationReason::ForeignRank { found });
        }
        (self.mismatches >= MISMATCHES_MAX).then_some(DegradationReason::Undecodable { batches: self.mismatches })
    }
}
