//! A rank's active prompts in 64 bytes: how much a newcomer can share with them, at most.
//!
//! Owns eight small Bloom filters, one for each of the depths 1, 2, 4, ... 128 blocks: which sequence hashes active
//! prompts have there. A hash missing at some depth proves that less than that is shared. Promises never to deny a
//! block that is shared. Leaves the exact answer to the rank, which need be asked only where this one is too wide.
//!
//! The alternative, asking every rank whose load leaves it a chance, was most of the cost of a request on a large
//! fleet: with 512 ranks the shortlist had some 200 of them, nearly all of which shared nothing.

use crate::protocol::SequenceHash;

/// Depths looked at: 2^0 to 2^(LEVELS − 1) blocks.
const LEVELS: usize = 8;

/// Bits of one level's filter.
const BITS: u64 = u64::BITS as u64;

/// Which hashes active prompts have at each depth.
///
/// ```
/// use pointsman::load::{PromptMark, PromptSketch};
/// use pointsman::protocol::SequenceHash;
///
/// let newcomer = PromptMark::of(&[SequenceHash(11), SequenceHash(12), SequenceHash(13)]);
/// assert_eq!(PromptSketch::default().shared_blocks_max(&newcomer), 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptSketch {
    levels: [u64; LEVELS],
}

/// Where one prompt stands in a sketch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptMark {
    /// Its bit in each level that it is long enough for.
    bits: [u8; LEVELS],
    levels: u8,
    block_count: u32,
}

impl PromptMark {
    /// The mark of a prompt. Reads eight of its hashes at most.
    #[must_use]
    pub fn of(prompt: &[SequenceHash]) -> Self {
        let mut bits = [0; LEVELS];
        let mut levels = 0;
        for (level, bit) in bits.iter_mut().enumerate() {
            let Some(hash) = prompt.get((1 << level) - 1) else { break };
            *bit = (hash.0 % BITS) as u8;
            levels += 1;
        }
        Self { bits, levels, block_count: u32::try_from(prompt.len()).unwrap_or(u32::MAX) }
    }

    /// The mark of a prompt whose content is not known: it shares with nobody.
    #[must_use]
    pub fn unshared() -> Self {
        Self::of(&[])
    }

    /// Blocks of the prompt that others may share.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.block_count
    }

    fn positions(&self) -> impl Iterator<Item = (usize, u8)> {
        self.bits.into_iter().enumerate().take(usize::from(self.levels))
    }
}

impl PromptSketch {
    /// Number of words of [`to_words`](Self::to_words).
    pub const WORDS: usize = LEVELS;

    /// No active prompt shares more leading blocks than this with the prompt of `mark`.
    #[must_use]
    #[inline]
    pub fn shared_blocks_max(&self, mark: &PromptMark) -> u32 {
        // A plain loop: it runs for every rank, and nearly always ends in its first rounds.
        for (level, (filter, bit)) in self.levels.iter().zip(mark.bits).enumerate().take(usize::from(mark.levels)) {
            if filter >> bit & 1 == 0 {
                return (1 << level) - 1;
            }
        }
        mark.block_count // all it has to show is there
    }

    /// The sketch as words, for publication through atomics.
    #[must_use]
    pub fn to_words(self) -> [u64; Self::WORDS] {
        self.levels
    }

    /// The sketch that [`to_words`](Self::to_words) was called on.
    #[must_use]
    pub fn from_words(levels: [u64; Self::WORDS]) -> Self {
        Self { levels }
    }
}

/// A sketch that prompts can leave again: it counts them.
#[derive(Clone, Debug)]
pub(super) struct SketchCounts {
    counts: Box<[[u32; BITS as usize]; LEVELS]>,
    sketch: PromptSketch,
}

impl SketchCounts {
    pub(super) fn new() -> Self {
        Self { counts: Box::new([[0; BITS as usize]; LEVELS]), sketch: PromptSketch::default() }
    }

    pub(super) fn sketch(&self) -> PromptSketch {
        self.sketch
    }

    pub(super) fn add(&mut self, mark: &PromptMark) {
        for (level, bit) in mark.positions() {
            self.counts[level][usize::from(bit)] += 1;
            self.sketch.levels[level] |= 1 << bit;
        }
    }

    pub(super) fn remove(&mut self, mark: &PromptMark) {
        for (level, bit) in mark.positions() {
            let count = &mut self.counts[level][usize::from(bit)];
            debug_assert!(*count > 0, "a prompt leaves that was not there");
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.sketch.levels[level] &= !(1 << bit);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hashing::{hash_bytes, sequence_hashes};
    use crate::load::PromptBlocks;
    use crate::protocol::BlockHash;

    fn prompt(family: u64, branch: u64, depth: usize, length: usize) -> std::sync::Arc<[SequenceHash]> {
        let content = |n: usize| family << 32 | if n < depth { 0 } else { 1 + branch } << 16 | n as u64;
        let block = |n: usize| BlockHash(hash_bytes(&content(n).to_le_bytes()));
        sequence_hashes(&(0..length).map(block).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn what_is_shared_is_never_denied(
            prompts in prop::collection::vec((0u64..3, 0u64..4, 0usize..300, 0usize..300, any::<bool>()), 1..40),
            newcomer in (0u64..3, 0u64..4, 0usize..300, 0usize..300),
        ) {
            let mut counts = SketchCounts::new();
            let newcomer = prompt(newcomer.0, newcomer.1, newcomer.2, newcomer.3);
            let mut shared = 0;
            for (family, branch, depth, length, leaves) in prompts {
                let hashes = prompt(family, branch, depth, length);
                counts.add(&PromptMark::of(&hashes));
                if leaves {
                    counts.remove(&PromptMark::of(&hashes));
                } else {
                    let both = PromptBlocks::Hashed(hashes).shared_blocks(&PromptBlocks::Hashed(newcomer.clone()));
                    shared = shared.max(both);
                }
            }
            let most = counts.sketch().shared_blocks_max(&PromptMark::of(&newcomer));
            prop_assert!(shared <= most, "{shared} shared, at most {most} said");
            prop_assert!(most as usize <= newcomer.len());
        }
    }

    #[test]
    fn strangers_share_next_to_nothing() {
        let mut counts = SketchCounts::new();
        for family in 0..8 {
            counts.add(&PromptMark::of(&prompt(family, 0, 0, 190)));
        }
        let most = |family| counts.sketch().shared_blocks_max(&PromptMark::of(&prompt(family, 0, 0, 190)));
        assert_eq!(most(3), 190, "a twin may share everything");
        let strangers: u32 = (100..200).map(most).sum();
        assert!(strangers < 100, "a hundred strangers share {strangers} blocks at most");
    }

    #[test]
    fn a_shared_system_prompt_bounds_what_is_shared() {
        let mut counts = SketchCounts::new();
        counts.add(&PromptMark::of(&prompt(1, 1, 20, 190)));
        let most = counts.sketch().shared_blocks_max(&PromptMark::of(&prompt(1, 2, 20, 190)));
        assert!((20..64).contains(&most), "{most}");
        assert_eq!(counts.sketch().shared_blocks_max(&PromptMark::unshared()), 0);
    }
}
