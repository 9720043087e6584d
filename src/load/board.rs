//! The load board: each rank's latest load, readable by anyone without a message.
//!
//! Owns two cache lines a rank. Its single writer is the rank's sequence actor, under its turn; readers are
//! the scheduler and the handle. Promises that a read is one consistent snapshot, never half of two. Leaves
//! to the scheduler what it booked since (the overlay). What may be stale, and why that is harmless, is in
//! the README beside this file.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::{ActiveSequences, PrefillCurve, PromptSketch};
use crate::protocol::Timestamp;

/// One rank's load as its sequence actor last published it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BoardLoad {
    /// Incarnation of the sequence actor that published.
    pub incarnation: u32,
    /// Number of the last Book it had seen, counted per incarnation from 1; 0 when none.
    pub applied: u32,
    /// Active blocks, rounded.
    pub active_blocks: u32,
    /// Active requests.
    pub requests: u32,
    /// Prefill tokens still to compute, as parameters: the load falls without a message.
    pub prefill: PrefillCurve,
    /// What a newcomer can share with the active prompts, at most.
    pub prompts: PromptSketch,
}

impl BoardLoad {
    /// What an incarnation of a sequence actor with these bookings has to publish, its `applied`th Book counted in.
    #[must_use]
    pub fn of(active: &ActiveSequences, incarnation: u32, applied: u32, now: Timestamp) -> Self {
        let load = active.load(now);
        Self {
            incarnation,
            applied,
            active_blocks: load.active_blocks,
            requests: load.requests,
            prefill: active.prefill_curve(),
            prompts: active.sketch(),
        }
    }
}

/// One rank's place on the board: a seqlock of plain atomics on two cache lines.
///
/// ```
/// use pointsman::load::{BoardLoad, BoardSlot};
///
/// let slot = BoardSlot::default();
/// slot.publish(&BoardLoad { active_blocks: 7, ..BoardLoad::default() });
/// assert_eq!(slot.read().map(|load| load.active_blocks), Some(7));
/// ```
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct BoardSlot {
    /// Odd while a write is under way.
    version: AtomicU64,
    /// Incarnation (high half), applied (low half).
    applied: AtomicU64,
    /// Active blocks (high half), requests (low half).
    active: AtomicU64,
    prefill: [AtomicU64; PrefillCurve::WORDS],
    prompts: [AtomicU64; PromptSketch::WORDS],
}

const _: () = assert!(size_of::<BoardSlot>() == 128, "a slot is two cache lines");

/// Reads tried before the reader keeps what it had: a writer that died mid-publish must hang nobody.
const READS_MAX: usize = 2;

impl BoardSlot {
    /// Publishes a snapshot. Only the rank's sequence actor may call this.
    ///
    /// A version left odd by a writer that died is taken over: the next even one follows.
    pub fn publish(&self, load: &BoardLoad) {
        let writing = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(writing, Ordering::Relaxed);
        fence(Ordering::Release);
        self.applied.store(halves(load.incarnation, load.applied), Ordering::Relaxed);
        self.active.store(halves(load.active_blocks, load.requests), Ordering::Relaxed);
        store(&self.prefill, load.prefill.to_words());
        store(&self.prompts, load.prompts.to_words());
        self.version.store(writing.wrapping_add(1), Ordering::Release);
    }

    /// Leaves the board as a writer does that is in the middle of [`publish`](Self::publish).
    #[cfg(test)]
    pub(crate) fn begin_write(&self) {
        self.version.fetch_or(1, Ordering::Relaxed);
    }

    /// The latest snapshot, or `None` when a write was under way at every try: keep the last good copy.
    #[must_use]
    pub fn read(&self) -> Option<BoardLoad> {
        self.read_since(&mut BoardVersion::default())
    }

    /// The latest snapshot if there is a newer one than `seen`, which moves on to it. Also `None` when a write was
    /// under way at every try. Where nothing has changed it costs one load.
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

    /// Whether there may be a newer snapshot than `seen`: what [`read_since`](Self::read_since) costs where nothing has
    /// changed, and nothing more.
    #[must_use]
    #[inline]
    pub fn has_news(&self, seen: BoardVersion) -> bool {
        seen.0 != self.version.load(Ordering::Relaxed)
    }

    /// Fields that belong together only if no write was under way.
    fn read_fields(&self) -> BoardLoad {
        let (incarnation, applied) = split(self.applied.load(Ordering::Relaxed));
        let (active_blocks, requests) = split(self.active.load(Ordering::Relaxed));
        let prefill = PrefillCurve::from_words(load(&self.prefill));
        let prompts = PromptSketch::from_words(load(&self.prompts));
        BoardLoad { incarnation, applied, active_blocks, requests, prefill, prompts }
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

    #[test]
    fn a_writer_that_died_mid_publish_hangs_nobody() {
        let slot = BoardSlot::default();
        slot.publish(&BoardLoad { active_blocks: 1, ..BoardLoad::default() });
        slot.begin_write(); // the writer dies here
        assert_eq!(slot.read(), None);
        let next = BoardLoad { active_blocks: 2, incarnation: 1, ..BoardLoad::default() };
        slot.publish(&next);
        assert_eq!(slot.read(), Some(next));
    }

    #[test]
    fn a_reader_that_has_seen_the_latest_reads_nothing() {
        let (slot, mut seen) = (BoardSlot::default(), BoardVersion::default());
        assert!(slot.read_since(&mut seen).is_some(), "even an empty board is news once");
        assert_eq!(slot.read_since(&mut seen), None);
        slot.publish(&BoardLoad { requests: 3, ..BoardLoad::default() });
        assert_eq!(slot.read_since(&mut seen).map(|load| load.requests), Some(3));
        assert_eq!(slot.read_since(&mut seen), None);
    }

    #[test]
    fn readers_never_see_half_of_two_snapshots() {
        let slot = BoardSlot::default();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..200_000u32 {
                    let prefill = PrefillCurve::from_words([u64::from(n); PrefillCurve::WORDS]);
                    let prompts = PromptSketch::from_words([u64::from(n); PromptSketch::WORDS]);
                    let (applied, active_blocks, requests) = (n, n, n);
                    slot.publish(&BoardLoad { incarnation: 0, applied, active_blocks, requests, prefill, prompts });
                }
                done.store(true, Ordering::Release);
            });
            let mut last = 0;
            while !done.load(Ordering::Acquire) {
                if let Some(load) = slot.read() {
                    assert_eq!((load.active_blocks, load.requests), (load.applied, load.applied));
                    assert_eq!(load.prefill.to_words(), [u64::from(load.applied); PrefillCurve::WORDS]);
                    assert_eq!(load.prompts.to_words(), [u64::from(load.applied); PromptSketch::WORDS]);
                    assert!(load.applied >= last, "time does not run backwards");
                    last = load.applied;
                }
            }
        });
    }
}
