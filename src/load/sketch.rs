//! Sketch of a rank's active prompts in 64 bytes: upper bound of the blocks that a new request can share.
//!
//! Eight small Bloom filters, one for each of the depths 1, 2, 4, ... 128 blocks, with the sequence hashes of the
//! active prompts at that depth. A missing hash at a depth proves that fewer blocks are shared. There are no false
//! negatives. The rank itself has the exact value and is queried only if this bound is too loose.
//!
//! The alternative, querying every rank whose load makes it a candidate, was the largest part of the cost of a request
//! on a large fleet: with 512 ranks the shortlist had about 200 ranks, of which nearly all shared no blocks.

use crate::protocol::SequenceHash;

/// Number of depths: 2^0 to 2^(LEVELS − 1) blocks.
const LEVELS: usize = 8;

/// Bits of one level's filter.
const BITS: u64 = u64::BITS as u64;

/// Filters of the active prompts' hashes at each depth.
///
/// ```
/// use pointsman::internals::load::{PromptFingerprint, PromptSketch};
/// use pointsman::internals::protocol::SequenceHash;
///
/// let newcomer = PromptFingerprint::of(&[SequenceHash(11), SequenceHash(12), SequenceHash(13)]);
/// assert_eq!(PromptSketch::default().shared_blocks_max(&newcomer), 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptSketch {
    levels: [u64; LEVELS],
}

/// Fingerprint of a prompt: its positions in a sketch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptFingerprint {
    /// Its bit in each level that it is long enough for.
    bits: [u8; LEVELS],
    levels: u8,
    block_count: u32,
}

impl PromptFingerprint {
    /// The fingerprint of a prompt. Reads at most eight of its hashes.
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

    /// The fingerprint of a prompt with unknown content, which shares no blocks.
    #[must_use]
    pub fn unshared() -> Self {
        Self::of(&[])
    }

    /// Number of shareable blocks of the prompt.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.block_count
    }

    /// Whether the first blocks of both prompts are probably equal, up to 128 or the end of the shorter prompt.
    pub(crate) fn agrees_with(&self, other: &Self) -> bool {
        let levels = usize::from(self.levels.min(other.levels));
        levels > 0 && self.bits[..levels] == other.bits[..levels]
    }

    /// Its bit in each level that it is long enough for.
    pub(crate) fn bits(&self) -> &[u8] {
        &self.bits[..usize::from(self.levels)]
    }

    /// The fingerprint with these [`bits`](Self::bits); `None` if there are too many.
    pub(crate) fn from_bits(known: &[u8], block_count: u32) -> Option<Self> {
        let mut bits = [0; LEVELS];
        bits.get_mut(..known.len())?.copy_from_slice(known);
        known.iter().all(|bit| u64::from(*bit) < BITS).then_some(())?;
        Some(Self { bits, levels: known.len() as u8, block_count })
    }

    /// Its level and bit in each level.
    pub(crate) fn positions(&self) -> impl Iterator<Item = (usize, u8)> {
        self.bits.into_iter().enumerate().take(usize::from(self.levels))
    }
}

impl PromptSketch {
    /// Number of words of [`to_words`](Self::to_words).
    pub const WORDS: usize = LEVELS;

    /// Upper bound of the leading blocks that any active prompt shares with the fingerprinted prompt.
    #[must_use]
    #[inline]
    pub fn shared_blocks_max(&self, fingerprint: &PromptFingerprint) -> u32 {
        // A plain loop: it runs for every rank, and nearly always ends in its first iterations.
        for (level, (filter, bit)) in
            self.levels.iter().zip(fingerprint.bits).enumerate().take(usize::from(fingerprint.levels))
        {
            if filter >> bit & 1 == 0 {
                return (1 << level) - 1;
            }
        }
        fingerprint.block_count // all levels of the prompt match
    }

    /// The sketch as words, for publication in atomics.
    #[must_use]
    pub fn to_words(self) -> [u64; Self::WORDS] {
        self.levels
    }

    /// The inverse of [`to_words`](Self::to_words).
    #[must_use]
    pub fn from_words(levels: [u64; Self::WORDS]) -> Self {
        Self { levels }
    }
}

/// Counting version of the sketch, which supports removals.
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

    pub(super) fn add(&mut self, fingerprint: &PromptFingerprint) {
        for (level, bit) in fingerprint.positions() {
            self.counts[level][usize::from(bit)] += 1;
            self.sketch.levels[level] |= 1 << bit;
        }
    }

    pub(super) fn remove(&mut self, fingerprint: &PromptFingerprint) {
        for (level, bit) in fingerprint.positions() {
            let count = &mut self.counts[level][usize::from(bit)];
            debug_assert!(*count > 0, "only added prompts are removed");
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
        fn bound_has_no_false_negatives(
            prompts in prop::collection::vec((0u64..3, 0u64..4, 0usize..300, 0usize..300, any::<bool>()), 1..40),
            newcomer in (0u64..3, 0u64..4, 0usize..300, 0usize..300),
        ) {
            let mut counts = SketchCounts::new();
            let newcomer = prompt(newcomer.0, newcomer.1, newcomer.2, newcomer.3);
            let mut shared = 0;
            for (family, branch, depth, length, leaves) in prompts {
                let hashes = prompt(family, branch, depth, length);
                counts.add(&PromptFingerprint::of(&hashes));
                if leaves {
                    counts.remove(&PromptFingerprint::of(&hashes));
                } else {
                    let both = PromptBlocks::Hashed(hashes).shared_blocks(&PromptBlocks::Hashed(newcomer.clone()));
                    shared = shared.max(both);
                }
            }
            let most = counts.sketch().shared_blocks_max(&PromptFingerprint::of(&newcomer));
            prop_assert!(shared <= most, "{shared} shared, bound {most}");
            prop_assert!(most as usize <= newcomer.len());
        }
    }

    #[test]
    fn unrelated_prompts_have_low_bounds() {
        let mut counts = SketchCounts::new();
        for family in 0..8 {
            counts.add(&PromptFingerprint::of(&prompt(family, 0, 0, 190)));
        }
        let most = |family| counts.sketch().shared_blocks_max(&PromptFingerprint::of(&prompt(family, 0, 0, 190)));
        assert_eq!(most(3), 190, "a twin may share everything");
        let strangers: u32 = (100..200).map(most).sum();
        assert!(strangers < 100, "a hundred strangers share {strangers} blocks at most");
    }

    #[test]
    fn shared_system_prompt_limits_the_bound() {
        let mut counts = SketchCounts::new();
        counts.add(&PromptFingerprint::of(&prompt(1, 1, 20, 190)));
        let most = counts.sketch().shared_blocks_max(&PromptFingerprint::of(&prompt(1, 2, 20, 190)));
        assert!((20..64).contains(&most), "{most}");
        assert_eq!(counts.sketch().shared_blocks_max(&PromptFingerprint::unshared()), 0);
    }
}
