//! Set of the slots whose boards have changed.
//!
//! The publishers of boards insert, and one reader takes everything, so that its cost depends on the number of changes
//! and not on the number of ranks. Slots are counted modulo [`BoardChanges::SLOTS`]: the reader checks each slot with
//! the same remainder, which is one slot in all but the largest fleets.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::Slot;

const WORDS: usize = u64::BITS as usize;

/// Slots whose boards have changed since the reader last took them.
///
/// ```
/// use pointsman::internals::load::BoardChanges;
/// use pointsman::internals::protocol::Slot;
///
/// let changes = BoardChanges::default();
/// changes.insert(Slot(70));
/// changes.insert(Slot(70));
/// assert_eq!(changes.take().collect::<Vec<_>>(), [70]);
/// assert_eq!(changes.take().count(), 0);
/// ```
#[derive(Debug)]
pub struct BoardChanges {
    /// The words that are not empty.
    summary: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl Default for BoardChanges {
    fn default() -> Self {
        Self { summary: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; WORDS] }
    }
}

impl BoardChanges {
    /// Number of slots with different remainders.
    pub const SLOTS: usize = WORDS * WORDS;

    /// Inserts a slot, after the publication of its board.
    pub fn insert(&self, slot: Slot) {
        let bit = slot.index() % Self::SLOTS;
        // The word first: a reader that finds its summary bit finds the slot, and sees what was published before.
        self.words[bit / WORDS].fetch_or(1 << (bit % WORDS), Ordering::Release);
        self.summary.fetch_or(1 << (bit / WORDS), Ordering::Release);
    }

    /// Takes the remainders of all inserted slots.
    pub fn take(&self) -> impl Iterator<Item = usize> {
        let words = if self.summary.load(Ordering::Relaxed) == 0 { 0 } else { self.summary.swap(0, Ordering::Acquire) };
        ones(words)
            .flat_map(|word| ones(self.words[word].swap(0, Ordering::Acquire)).map(move |bit| word * WORDS + bit))
    }
}

/// Numbers of the set bits.
fn ones(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros();
        word &= word.wrapping_sub(1);
        (bit < u64::BITS).then_some(bit as usize)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_inserted_slot_is_taken_once(slots in prop::collection::vec(0u32..10_000, 0..200)) {
            let changes = BoardChanges::default();
            slots.iter().for_each(|slot| changes.insert(Slot(*slot)));
            let expected: BTreeSet<usize> = slots.iter().map(|slot| *slot as usize % BoardChanges::SLOTS).collect();
            let taken: Vec<usize> = changes.take().collect();
            prop_assert_eq!(taken.len(), expected.len());
            prop_assert_eq!(taken.into_iter().collect::<BTreeSet<_>>(), expected);
            prop_assert_eq!(changes.take().count(), 0);
        }
    }

    /// The reader sees every value that a publisher stored before its insertion.
    #[test]
    fn no_concurrent_insertion_is_lost() {
        const SLOTS: usize = 200;
        let published: Vec<AtomicUsize> = (0..SLOTS).map(|_| AtomicUsize::new(0)).collect();
        let changes = Arc::new(BoardChanges::default());
        let mut seen = vec![0; SLOTS];
        std::thread::scope(|scope| {
            for first in 0..2 {
                let (changes, published) = (&changes, &published);
                scope.spawn(move || {
                    for n in 1..=2_000 {
                        for slot in (first..SLOTS).step_by(2) {
                            published[slot].store(n, Ordering::Relaxed);
                            changes.insert(Slot(slot as u32));
                        }
                    }
                });
            }
            while seen.iter().any(|seen| *seen < 2_000) {
                for slot in changes.take() {
                    seen[slot] = published[slot].load(Ordering::Relaxed);
                }
            }
        });
        // A value that is seen before its own insertion leaves that insertion behind.
        assert!(changes.take().all(|slot| seen[slot] == published[slot].load(Ordering::Relaxed)));
        assert_eq!(changes.take().count(), 0);
    }
}
