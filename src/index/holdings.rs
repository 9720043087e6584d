//! Published holdings of a rank: number of held blocks and time of the last event.
//!
//! Written by the rank's index shard only. Reads are wait-free; the two values may be from different moments.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::protocol::Timestamp;

/// One rank's published holdings.
///
/// ```
/// use pointsman::internals::index::Holdings;
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
    /// Timestamp plus one; 0 before the first event.
    changed_at: AtomicU64,
}

impl Holdings {
    /// Publishes the number of held blocks after an event at `now`.
    pub fn publish(&self, held_blocks: usize, now: Timestamp) {
        self.held_blocks.store(u32::try_from(held_blocks).unwrap_or(u32::MAX), Ordering::Relaxed);
        self.changed_at.store(now.0.saturating_add(1), Ordering::Relaxed);
    }

    /// Number of held blocks, counted once per tier.
    #[must_use]
    pub fn held_blocks(&self) -> u32 {
        self.held_blocks.load(Ordering::Relaxed)
    }

    /// Time of the last applied event.
    #[must_use]
    pub fn changed_at(&self) -> Option<Timestamp> {
        self.changed_at.load(Ordering::Relaxed).checked_sub(1).map(Timestamp)
    }
}
