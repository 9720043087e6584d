//! How much a rank holds, and since when that is known: what a shard publishes for others to read.
//!
//! Owns two numbers a rank. Promises that a reader never waits; the two may be of different moments. Written by the
//! rank's index shard only.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::protocol::Timestamp;

/// One rank's published holdings.
///
/// ```
/// use pointsman::index::Holdings;
/// use pointsman::protocol::Timestamp;
///
/// let holdings = Holdings::default();
/// assert_eq!((holdings.held_blocks(), holdings.changed_at()), (0, None));
/// holdings.publish(12, Timestamp(5));
/// assert_eq!((holdings.held_blocks(), holdings.changed_at()), (12, Some(Timestamp(5))));
/// ```
#[derive(Debug, Default)]
pub struct Holdings {
    held_blocks: AtomicU32,
    /// Plus one; 0 before the first event.
    changed_at: AtomicU64,
}

impl Holdings {
    /// Shows what the rank holds after an event at `now`.
    pub fn publish(&self, held_blocks: usize, now: Timestamp) {
        self.held_blocks.store(u32::try_from(held_blocks).unwrap_or(u32::MAX), Ordering::Relaxed);
        self.changed_at.store(now.0.saturating_add(1), Ordering::Relaxed);
    }

    /// Blocks held, each counted once per tier.
    #[must_use]
    pub fn held_blocks(&self) -> u32 {
        self.held_blocks.load(Ordering::Relaxed)
    }

    /// When its last event was applied.
    #[must_use]
    pub fn changed_at(&self) -> Option<Timestamp> {
        self.changed_at.load(Ordering::Relaxed).checked_sub(1).map(Timestamp)
    }
}
