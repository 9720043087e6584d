//! Byte budget of an index and the clock for least-recently-used eviction.
//!
//! Holds the limit, the running total of bytes owned by individual ranks, and a coarse clock that advances with queries
//! and events. Runs are stamped with this clock. Stamps keep the order of their times, also after the clock is reset to
//! half. [`super::evict`] selects the blocks to evict.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::Relaxed};

/// Fill level of an index with a budget, for gauges.
///
/// ```
/// use pointsman::internals::index::Index;
///
/// let mut index = Index::new();
/// assert_eq!(index.budget_state(), None);
/// index.set_budget(Some(1 << 20));
/// let state = index.budget_state().expect("a budget was set");
/// assert!(state.bytes < state.bytes_max && state.evicted_blocks == 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetState {
    /// Limit of the heap bytes that the index owns.
    pub bytes_max: u64,
    /// Heap bytes that the index owns.
    pub bytes: u64,
    /// Blocks evicted since the budget was set, including pending blocks.
    pub evicted_blocks: u64,
}

/// Byte limit, its accounting, and the clock.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) bytes_max: usize,
    /// Total heap bytes of all ranks' own parts: the sum of [`super::rank::RankBlocks::counted`].
    pub(super) ranks_bytes: usize,
    pub(super) evicted_blocks: u64,
    /// Whether more than half of the budget is used. Below, no eviction is near and nothing is stamped.
    pub(super) is_filling: bool,
    /// Queries and events since the last tick of the clock. Atomic, like the clock, because a query has only shared
    /// access.
    ops: AtomicU32,
    now: AtomicU16,
}

impl Budget {
    /// Number of ticks in which every run is visited once on average: the clock advances once per `runs / TICKS`
    /// queries and events. A run is many events old when it is evicted, so stamps resolve thousandths of an age, and 16
    /// bits last for many ages.
    const TICKS: usize = 1024;

    pub(super) fn new(bytes_max: usize) -> Self {
        let (ops, now) = (AtomicU32::new(0), AtomicU16::new(0));
        Self { bytes_max, ranks_bytes: 0, evicted_blocks: 0, is_filling: false, ops, now }
    }

    /// Counts a query or an event on an index with `runs` runs. Returns the stamp for the runs that it visits.
    pub(super) fn tick(&self, runs: usize) -> u16 {
        let (ops, now) = (self.ops.load(Relaxed) + 1, self.now.load(Relaxed));
        if (ops as usize) < runs / Self::TICKS {
            self.ops.store(ops, Relaxed);
            return now;
        }
        let next = now.saturating_add(1);
        self.ops.store(0, Relaxed);
        self.now.store(next, Relaxed);
        next
    }

    /// Resets the clock to half of its range if it is exhausted. Returns true in that case: the caller must halve all
    /// stamps.
    pub(super) fn wind(&self) -> bool {
        let spent = self.now.load(Relaxed) == u16::MAX;
        if spent {
            self.now.store(u16::MAX / 2, Relaxed);
        }
        spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_ticks_less_often_with_more_runs() {
        let budget = Budget::new(0);
        assert_eq!((0..3).map(|_| budget.tick(10)).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!((0..6).map(|_| budget.tick(3 * Budget::TICKS)).collect::<Vec<_>>(), [3, 3, 4, 4, 4, 5]);
    }

    #[test]
    fn exhausted_clock_is_halved_once() {
        let budget = Budget::new(0);
        let last = (0..100_000).map(|_| budget.tick(0)).last();
        assert_eq!(last, Some(u16::MAX));
        assert_eq!((budget.wind(), budget.wind()), (true, false));
        assert_eq!(budget.tick(0), u16::MAX / 2 + 1);
    }
}
