//! What a match is worth: blocks held per tier, weighed into one number.

use serde::{Deserialize, Serialize};

use crate::protocol::{Generation, Slot};

/// Leading blocks of one request that one rank holds, by tier. Each lower tier counts only what it adds
/// beyond the tiers above it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierOverlap {
    /// Blocks in accelerator memory.
    pub device_blocks: u32,
    /// Blocks that pinned host memory adds.
    pub host_pinned_blocks: u32,
    /// Blocks that disk adds.
    pub disk_blocks: u32,
    /// Blocks that an external store adds.
    pub external_blocks: u32,
}

/// What a block found in a lower tier is worth, as a share of one found on the device, each in [0, 1].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierWeights {
    /// Worth of a host-pinned block.
    pub host: f64,
    /// Worth of a block on disk or in an external store.
    pub disk: f64,
}

impl TierOverlap {
    /// Blocks held in any tier: how far into the prompt the match reaches.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.device_blocks + self.host_pinned_blocks + self.disk_blocks + self.external_blocks
    }

    /// Effective overlap in blocks: 1 × device + host weight × host + disk weight × (disk + external).
    /// (reference: NVIDIA Dynamo 1.6.1, `index.host_hit_weight` and `index.disk_hit_weight`)
    ///
    /// ```
    /// use pointsman::select::{TierOverlap, TierWeights};
    ///
    /// let overlap = TierOverlap { device_blocks: 2, host_pinned_blocks: 1, disk_blocks: 2, external_blocks: 0 };
    /// let weights = TierWeights { host: 0.75, disk: 0.25 };
    /// assert_eq!(overlap.effective_blocks(weights), 3.25);
    /// assert_eq!(overlap.cached_tokens(weights, 16), 52);
    /// ```
    #[must_use]
    pub fn effective_blocks(&self, weights: TierWeights) -> f64 {
        f64::from(self.device_blocks)
            + weights.host * f64::from(self.host_pinned_blocks)
            + weights.disk * f64::from(self.disk_blocks + self.external_blocks)
    }

    /// Effective overlap in tokens, rounded.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rounded count of tokens, at least 0"
    )]
    pub fn cached_tokens(&self, weights: TierWeights, block_size: u32) -> u32 {
        (self.effective_blocks(weights) * f64::from(block_size)).round() as u32
    }
}

/// What one rank holds of a request, as an index shard answers. Ranks that hold nothing are not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankOverlap {
    /// The rank's slot.
    pub slot: Slot,
    /// Its incarnation when the shard learnt of it.
    pub generation: Generation,
    /// What it holds.
    pub overlap: TierOverlap,
}
