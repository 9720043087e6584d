//! Load board: the latest load of each rank, readable without messages.
//!
//! Three cache lines per rank. The rank's sequence actor is the only writer; the scheduler and the handle read. A read
//! returns one consistent snapshot, never parts of two. The scheduler adds its later bookings itself (the overlay). The
//! README beside this file documents staleness and its effects.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use super::{ActiveSequences, BoardChanges, PrefillCurve, PromptSketch};
use crate::protocol::{Slot, Timestamp};

/// Load of a rank as last published by its sequence actor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BoardLoad {
    /// Incarnation of the publishing sequence actor.
    pub incarnation: u32,
    /// Number of the last processed Book message, counted per incarnation from 1; 0 before the first.
    pub applied: u32,
    /// Active blocks, rounded.
    pub active_blocks: u32,
    /// Blocks that a decode step reads, shared or not.
    pub read_blocks: u32,
    /// Active requests.
    pub requests: u32,
    /// Prefills that are not known to be complete.
    pub prefills: u32,
    /// Prefill tokens to compute, as a curve, so that the load decreases without further messages.
    pub prefill: PrefillCurve,
    /// Upper bound of the blocks that a new request can share with the active prompts.
    pub prompts: PromptSketch,
}

impl BoardLoad {
    /// The snapshot of a sequence actor with these bookings, including the Book message number `applied`.
    #[must_use]
    pub fn of(active: &ActiveSequences, incarnation: u32, applied: u32, now: Timestamp) -> Self {
        let load = active.load(now);
        Self {
            incarnation,
            applied,
            active_blocks: load.active_blocks,
            read_blocks: load.read_blocks,
            requests: load.requests,
            prefills: active.unfinished_prefills(),
            prefill: active.prefill_curve(),
            prompts: active.sketch(),
        }
    }

    /// Number of words of [`to_words`](Self::to_words).
    pub const WORDS: usize = 3 + PrefillCurve::WORDS + PromptSketch::WORDS;

    /// The load as words.
    #[must_use]
    pub fn to_words(self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        let (counts, rest) = words.split_at_mut(3);
        let (prefill, prompts) = rest.split_at_mut(PrefillCurve::WORDS);
        counts.copy_from_slice(&[
            halves(self.incarnation, self.applied),
            halves(self.active_blocks, self.requests),
            halves(self.prefills, self.read_blocks),
        ]);
        prefill.copy_from_slice(&self.prefill.to_words());
        prompts.copy_from_slice(&self.prompts.to_words());
        words
    }

    /// The inverse of [`to_words`](Self::to_words).
    #[must_use]
    pub fn from_words(words: [u64; Self::WORDS]) -> Self {
        let (incarnation, applied) = split(words[0]);
        let (active_blocks, requests) = split(words[1]);
        let (prefills, read_blocks) = split(words[2]);
        let prefill = PrefillCurve::from_words(std::array::from_fn(|at| words[3 + at]));
        let prompts = PromptSketch::from_words(std::array::from_fn(|at| words[3 + PrefillCurve::WORDS + at]));
        Self { incarnation, applied, active_blocks, read_blocks, requests, prefills, prefill, prompts }
    }
}

/// One rank's entry on the board: a seqlock of atomics on three cache lines.
///
/// ```
/// use pointsman::internals::load::{BoardLoad, BoardSlot};
///
/// let slot = BoardSlot::default();
/// slot.publish(&BoardLoad { active_blocks: 7, ..BoardLoad::default() });
/// assert_eq!(slot.read().map(|load| load.active_blocks), Some(7));
/// ```
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct BoardSlot {
    /// Odd during a write.
    version: AtomicU64,
    /// Incarnation (high half), applied (low half).
    applied: AtomicU64,
    /// Active blocks (high half), requests (low half).
    active: AtomicU64,
    /// Prefills (high half), read blocks (low half).
    read_blocks: AtomicU64,
    prefill: [AtomicU64; PrefillCurve::WORDS],
    prompts: [AtomicU64; PromptSketch::WORDS],
    /// Receives a notice of every publication.
    changes: OnceLock<(Arc<BoardChanges>, Slot)>,
}

const _: () = assert!(size_of::<BoardSlot>() == 192, "a slot is three cache lines");

/// Attempts before a reader keeps its previous copy, so that a writer that died during a publication does not block
/// readers.
const READS_MAX: usize = 2;

impl BoardSlot {
    /// Publishes a snapshot. Only the rank's sequence actor may call this.
    ///
    /// If a previous writer died and left an odd version, the next even version follows.
    pub fn publish(&self, load: &BoardLoad) {
        let writing = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(writing, Ordering::Relaxed);
        fence(Ordering::Release);
        self.applied.store(halves(load.incarnation, load.applied), Ordering::Relaxed);
        self.active.store(halves(load.active_blocks, load.requests), Ordering::Relaxed);
        self.read_blocks.store(halves(load.prefills, load.read_blocks), Ordering::Relaxed);
        store(&self.prefill, load.prefill.to_words());
        store(&self.prompts, load.prompts.to_words());
        self.version.store(writing.wrapping_add(1), Ordering::Release);
        if let Some((changes, slot)) = self.changes.get() {
            changes.insert(*slot);
        }
    }

    /// Reports every later publication to `changes` as one of `slot`. Returns whether this is so: an entry reports to the
    /// first one only.
    pub fn report_to(&self, changes: &Arc<BoardChanges>, slot: Slot) -> bool {
        let (reports_to, of) = self.changes.get_or_init(|| (Arc::clone(changes), slot));
        Arc::ptr_eq(reports_to, changes) && *of == slot
    }

    /// The latest snapshot, or `None` if every attempt met a write: the caller keeps its last copy.
    #[must_use]
    pub fn read(&self) -> Option<BoardLoad> {
        self.read_since(&mut BoardVersion::default())
    }

    /// The latest snapshot if it is newer than `seen`, which is updated. Returns `None` also if every attempt met a
    /// write. Costs one load if nothing has changed.
    #[must_use]
    #[inline]
    pub fn read_since(&self, seen: &mut BoardVersion) -> Option<BoardLoad> {
        for _ in 0..READS_MAX {
            let before = self.version.load(Ordering::Acquire);
            if seen.0 == before {
                return None;
            }
            if before & 1 == 1 {
                continue;
            }
            let load = self.read_fields();
            fence(Ordering::Acquire);
            if self.version.load(Ordering::Relaxed) == before {
                seen.0 = before;
                return Some(load);
            }
        }
        None
    }

    /// Fields that are consistent only if no write was in progress.
    fn read_fields(&self) -> BoardLoad {
        let (incarnation, applied) = split(self.applied.load(Ordering::Relaxed));
        let (active_blocks, requests) = split(self.active.load(Ordering::Relaxed));
        let (prefills, read_blocks) = split(self.read_blocks.load(Ordering::Relaxed));
        let prefill = PrefillCurve::from_words(load(&self.prefill));
        let prompts = PromptSketch::from_words(load(&self.prompts));
        BoardLoad { incarnation, applied, active_blocks, read_blocks, requests, prefills, prefill, prompts }
    }
}

/// Version of the last snapshot that a reader has seen. The default stands for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoardVersion(u64);

impl Default for BoardVersion {
    fn default() -> Self {
        Self(u64::MAX) // odd, and complete snapshots have even versions
    }
}

fn store<const WORDS: usize>(published: &[AtomicU64; WORDS], words: [u64; WORDS]) {
    for (published, word) in published.iter().zip(words) {
        published.store(word, Ordering::Relaxed);
    }
}

fn load<const WORDS: usize>(published: &[AtomicU64; WORDS]) -> [u64; WORDS] {
    published.each_ref().map(|word| word.load(Ordering::Relaxed))
}

fn halves(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[expect(clippy::cast_possible_truncation, reason = "the halves that `halves` joined")]
fn split(joined: u64) -> (u32, u32) {
    ((joined >> 32) as u32, joined as u32)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    impl BoardSlot {
        /// Leaves the entry in the state of an unfinished [`publish`](Self::publish).
        pub(crate) fn begin_write(&self) {
            self.version.fetch_or(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn dead_writer_does_not_block_readers() {
        let slot = BoardSlot::default();
        slot.publish(&BoardLoad { active_blocks: 1, ..BoardLoad::default() });
        slot.begin_write(); // simulates the death of the writer
        assert_eq!(slot.read(), None);
        let next = BoardLoad { active_blocks: 2, incarnation: 1, ..BoardLoad::default() };
        slot.publish(&next);
        assert_eq!(slot.read(), Some(next));
    }

    #[test]
    fn unchanged_snapshot_is_not_read_again() {
        let (slot, mut seen) = (BoardSlot::default(), BoardVersion::default());
        assert!(slot.read_since(&mut seen).is_some(), "even an empty board is news once");
        assert_eq!(slot.read_since(&mut seen), None);
        slot.publish(&BoardLoad { requests: 3, ..BoardLoad::default() });
        assert_eq!(slot.read_since(&mut seen).map(|load| load.requests), Some(3));
        assert_eq!(slot.read_since(&mut seen), None);
    }

    #[test]
    fn snapshots_are_consistent() {
        let slot = BoardSlot::default();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..200_000u32 {
                    let prefill = PrefillCurve::from_words([u64::from(n); PrefillCurve::WORDS]);
                    let prompts = PromptSketch::from_words([u64::from(n); PromptSketch::WORDS]);
                    let (applied, active_blocks, read_blocks, requests, prefills) = (n, n, n, n, n);
                    let incarnation = 0;
                    let load = BoardLoad {
                        incarnation,
                        applied,
                        active_blocks,
                        read_blocks,
                        requests,
                        prefills,
                        prefill,
                        prompts,
                    };
                    slot.publish(&load);
                }
                done.store(true, Ordering::Release);
            });
            let mut last = 0;
            while !done.load(Ordering::Acquire) {
                if let Some(load) = slot.read() {
                    assert_eq!((load.active_blocks, load.requests), (load.applied, load.applied));
                    assert_eq!((load.read_blocks, load.prefills), (load.applied, load.applied));
                    assert_eq!(load.prefill.to_words(), [u64::from(load.applied); PrefillCurve::WORDS]);
                    assert_eq!(load.prompts.to_words(), [u64::from(load.applied); PromptSketch::WORDS]);
                    assert!(load.applied >= last, "time does not run backwards");
                    last = load.applied;
                }
            }
        });
    }
}
