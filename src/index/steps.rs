//! Step counter for tests of algorithmic cost.
//!
//! Counts steps whose number is not bounded by the size of an event. Each thread of the crate's own tests has a
//! counter; other builds compile the counting away. Callers define a step.

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Adds to the step count.
#[cfg(test)]
pub(super) fn add(steps: usize) {
    STEPS.with(|count| count.set(count.get() + steps));
}

/// No operation outside tests.
#[cfg(not(test))]
pub(super) fn add(_steps: usize) {}

/// Steps counted on this thread so far.
#[cfg(test)]
pub(super) fn count() -> usize {
    STEPS.with(std::cell::Cell::get)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Index;
    use crate::protocol::{BlockHash, EngineHash, Generation, KvEvent, RouterEvent, Slot, StorageTier, StoredBlock};
    use crate::test_support::rank;

    fn index() -> Index {
        let mut index = Index::new();
        index.register(rank(0), Slot(0), Generation(1));
        index
    }

    fn apply(index: &mut Index, data: KvEvent) {
        index.apply(&RouterEvent { rank: rank(0), tier: StorageTier::Device, data });
    }

    /// Stores blocks as pairs of a name and a content.
    fn store(index: &mut Index, parent: Option<u64>, blocks: impl Iterator<Item = (u64, u64)>) {
        let block = |(name, hash)| StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(hash) };
        apply(index, KvEvent::Stored { parent: parent.map(EngineHash), blocks: blocks.map(block).collect() });
    }

    fn remove(index: &mut Index, names: std::ops::Range<u64>) {
        apply(index, KvEvent::Removed { blocks: names.map(EngineHash).collect() });
    }

    /// Each prompt of two blocks leaves the previous one after its first block.
    fn fork(index: &mut Index, n: u64) {
        store(index, (2 * n).checked_sub(2), (2 * n..2 * n + 2).map(|name| (name, name)));
    }

    /// Steps per block of the second half of a chain of forks, in an index that is more than half full.
    fn steps_of_forks(blocks: u64) -> u64 {
        let mut full = index();
        (0..blocks / 2).for_each(|n| fork(&mut full, n));
        let mut index = index();
        index.set_budget(Some(full.bytes_used() as u64 * 6 / 5));
        (0..blocks * 3 / 8).for_each(|n| fork(&mut index, n));
        let started = count();
        (blocks * 3 / 8..blocks / 2).for_each(|n| fork(&mut index, n));
        assert_eq!(index.budget_state().map(|state| state.evicted_blocks), Some(0));
        (count() - started) as u64 / (blocks / 4)
    }

    /// Steps per block of a list in which every block has the name of the previous one.
    fn steps_of_one_name(blocks: u64) -> u64 {
        let mut index = index();
        let started = count();
        store(&mut index, None, (0..blocks).map(|hash| (7, hash)));
        assert_eq!(index.held_blocks(), 1);
        (count() - started) as u64 / blocks
    }

    /// Steps per block of small changes after the removal of most prompts.
    fn steps_after_many_prompts(blocks: u64) -> u64 {
        const AGAIN: u64 = 128;
        let mut index = index();
        (0..blocks).for_each(|n| store(&mut index, None, std::iter::once((n, n))));
        (1..blocks).for_each(|n| remove(&mut index, n..n + 1));
        let started = count();
        for _ in 0..4 {
            (1..=AGAIN).for_each(|n| store(&mut index, None, std::iter::once((n, n))));
            remove(&mut index, 1..AGAIN + 1);
        }
        (count() - started) as u64 / (8 * AGAIN)
    }

    /// Steps to remove a block in the middle of a prompt and to store it again.
    fn steps_of_one_hole(blocks: u64) -> u64 {
        let mut index = index();
        store(&mut index, None, (0..blocks).map(|name| (name, name)));
        let middle = blocks / 2;
        let started = count();
        remove(&mut index, middle..middle + 1);
        store(&mut index, Some(middle - 1), std::iter::once((middle, middle)));
        (count() - started) as u64
    }

    /// Causes: each event walked to the root of a chain, each moved name compared the rest of its list, rebuilt tables
    /// visited every span that had ever existed, and the bits of a hole covered runs of a million blocks.
    #[test]
    fn hostile_events_have_bounded_steps() {
        for (steps, steps_max) in [
            (steps_of_forks as fn(u64) -> u64, 1_100),
            (steps_of_one_name, 4),
            (steps_after_many_prompts, 16),
            (steps_of_one_hole, 600),
        ] {
            let found = [1 << 10, 1 << 13, 1 << 15].map(steps);
            assert!(found.iter().all(|found| *found <= steps_max), "{found:?}, at most {steps_max}");
        }
    }
}
