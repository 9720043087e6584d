//! A bound on the bytes of an index, and what is known for keeping it.
//!
//! Owns the bound, the running sum of what the ranks' own parts take, and a coarse clock of questions and events,
//! by whose stamps on runs it is told what was of use last. Promises that a stamp orders like the times it stands
//! for, also after the clock was set back. Leaves to [`super::evict`] what goes when the bound is reached.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::Relaxed};

/// How full an index with a budget is, for gauges.
///
/// ```
/// use pointsman::index::Index;
///
/// let mut index = Index::new();
/// assert_eq!(index.budget_state(), None);
/// index.set_budget(Some(1 << 20));
/// let state = index.budget_state().expect("a budget was set");
/// assert!(state.bytes < state.bytes_max && state.evicted_blocks == 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetState {
    /// Heap bytes that the index may own.
    pub bytes_max: u64,
    /// Heap bytes that it owns.
    pub bytes: u64,
    /// Blocks evicted since the budget was set, waiting ones included.
    pub evicted_blocks: u64,
}

/// A bound and its account.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) bytes_max: usize,
    /// Heap bytes of what each rank has for itself, summed up: [`super::rank::Rank::counted`].
    pub(super) ranks_bytes: usize,
    pub(super) evicted_blocks: u64,
    /// Questions and events since the clock moved. Atomic, as the clock is, because a question changes nothing else.
    ops: AtomicU32,
    now: AtomicU16,
}

impl Budget {
    /// Over how many ticks a whole index is looked upon: the clock moves once in `runs / TICKS` questions and events.
    /// A run is some events old before it goes, so stamps tell apart thousandths of an age, and 16 bits last for many.
    const TICKS: usize = 1024;

    pub(super) fn new(bytes_max: usize) -> Self {
        let (ops, now) = (AtomicU32::new(0), AtomicU16::new(0));
        Self { bytes_max, ranks_bytes: 0, evicted_blocks: 0, ops, now }
    }

    /// Counts a question or an event of an index with that many runs. Returns the stamp for what it comes to.
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

    /// Sets the clock back to half its time, if it has run out. Returns whether it has: all stamps are to be halved.
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
    fn the_clock_moves_slower_the_more_runs_there_are() {
        let budget = Budget::new(0);
        assert_eq!((0..3).map(|_| budget.tick(10)).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!((0..6).map(|_| budget.tick(3 * Budget::TICKS)).collect::<Vec<_>>(), [3, 3, 4, 4, 4, 5]);
    }

    #[test]
    fn a_clock_that_has_run_out_is_set_back_once() {
        let budget = Budget::new(0);
        let last = (0..100_000).map(|_| budget.tick(0)).last();
        assert_eq!(last, Some(u16::MAX));
        assert_eq!((budget.wind(), budget.wind()), (true, false));
        assert_eq!(budget.tick(0), u16::MAX / 2 + 1);
    }
}
