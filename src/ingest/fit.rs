//! Whether an engine's batches fit the pool.
//!
//! Owns how many batches in a row had events of which none could be used, and what they said of themselves. Promises
//! that one batch with a usable event ends the doubt. Leaves decoding, and so what is usable, to the wire.

use super::Doubt;

/// So many batches in a row without one usable event are no accident.
const MISFITS_MAX: u32 = 3;

/// What decoding and applying one batch found.
///
/// ```
/// use pointsman::ingest::Applied;
///
/// let batch = Applied { events: 2, usable: 2, stored_blocks: 9, ..Applied::default() };
/// assert!(!batch.cleared);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Events in the batch, in so far as it could be read; a batch that could not be read at all counts as one.
    pub events: u32,
    /// Events that the index could use.
    pub usable: u32,
    /// Blocks that they stored.
    pub stored_blocks: u32,
    /// Whether one of them dropped the rank's whole cache.
    pub cleared: bool,
    /// The engine's block size in tokens, where it differs from the pool's.
    pub engine_block_size: Option<u32>,
    /// The data-parallel rank that the batch names, where it is another one's.
    pub foreign_rank: Option<u32>,
}

/// What has been unusable since the last usable event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fit {
    misfits: u32,
    engine_block_size: Option<u32>,
    foreign_rank: Option<u32>,
}

impl Fit {
    pub(super) fn observe(&mut self, applied: &Applied) {
        let says_nothing = applied.events == 0 && applied.engine_block_size.is_none() && applied.foreign_rank.is_none();
        let names_misfit = applied.engine_block_size.is_some() || applied.foreign_rank.is_some();
        let is_known_misfit = self.engine_block_size.is_some() || self.foreign_rank.is_some();
        if applied.stored_blocks > 0 || applied.cleared {
            *self = Self::default();
        } else if applied.usable > 0 && !names_misfit {
            // Removals fit any block size: they are no sign that stores do.
            self.misfits = if is_known_misfit { self.misfits } else { 0 };
        } else if !says_nothing {
            self.misfits = self.misfits.saturating_add(1);
            self.engine_block_size = applied.engine_block_size.or(self.engine_block_size);
            self.foreign_rank = applied.foreign_rank.or(self.foreign_rank);
        }
    }

    /// Why the rank's batches do not fit, if they do not.
    pub(super) fn doubt(&self, pool_block_size: Option<u32>) -> Option<Doubt> {
        if let Some(engine) = self.engine_block_size {
            return Some(Doubt::BlockSize { engine, pool: pool_block_size });
        }
        if let Some(found) = self.foreign_rank {
            return Some(Doubt::ForeignRank { found });
        }
        (self.misfits >= MISFITS_MAX).then_some(Doubt::Undecodable { batches: self.misfits })
    }
}
