//! Output of one request as reported by its caller.
//!
//! A small copyable summary, because it is stored in the request's lease, where the caller writes it and the rank's
//! [`ActiveSequences`](super::ActiveSequences) reads it later.

use super::Weight;

/// The output blocks of one request. They are private to it, because blocks in generation are not shared.
///
/// A late reader merges several reports into one, and a repeated read has no effect, so reports require no queue.
///
/// ```
/// use pointsman::internals::load::{OutputBlocks, Weight};
///
/// let mut output = OutputBlocks::default();
/// output.push(None);
/// output.push(None);
/// assert_eq!((output.block_count(), output.weighted_blocks()), (2, 2.0));
/// output.push(Some(Weight::new(0.5)?)); // half of the expected output is there
/// assert_eq!((output.block_count(), output.weighted_blocks()), (3, 1.5));
/// # Ok::<(), pointsman::internals::load::WeightError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputBlocks {
    /// Sum of the block weights, in units of 2^-16 blocks.
    weighted: u64,
    blocks: u32,
    decay: Weight,
    reweighs: u32,
}

impl Default for OutputBlocks {
    /// No output.
    fn default() -> Self {
        Self { weighted: 0, blocks: 0, decay: Weight::ONE, reweighs: 0 }
    }
}

impl OutputBlocks {
    /// Adds one block. Without a decay it has full weight and the others keep their weights. With a decay, the whole
    /// output of the request including this block has that weight from now on, and so has the unshared part of its
    /// prompt: blocks that are about to be freed count less.
    pub fn push(&mut self, decay: Option<Weight>) {
        let added = u32::from(self.blocks < u32::MAX);
        self.blocks += added;
        match decay {
            None => self.weighted += Weight::ONE.times(added),
            Some(decay) => {
                self.weighted = decay.times(self.blocks);
                self.decay = decay;
                self.reweighs = self.reweighs.wrapping_add(1);
            }
        }
    }

    /// Number of generated blocks.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.blocks
    }

    /// Sum of their weights, in blocks.
    #[must_use]
    pub fn weighted_blocks(&self) -> f64 {
        self.weighted as f64 / Weight::ONE.times(1) as f64
    }

    /// The decay of the last report with one; 1 before.
    #[must_use]
    pub fn decay(&self) -> Weight {
        self.decay
    }

    /// The sum of weights in the unit of [`Weight::times`].
    pub(super) fn weighted(&self) -> u64 {
        self.weighted
    }

    /// Whether a decay was reported between `seen` and this state.
    pub(super) fn reweighed_since(&self, seen: &Self) -> bool {
        self.reweighs != seen.reweighs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_counter_saturates() {
        let mut output = OutputBlocks { blocks: u32::MAX, weighted: Weight::ONE.times(u32::MAX), ..Default::default() };
        output.push(None);
        assert_eq!((output.block_count(), output.weighted()), (u32::MAX, Weight::ONE.times(u32::MAX)));
    }
}
