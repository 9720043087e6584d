//! Weighted overlap: blocks per tier as one number.

use serde::{Deserialize, Serialize};

use crate::protocol::{Generation, Slot};

/// Leading blocks of a request on one rank, by tier. Each lower tier counts only blocks beyond the tiers above it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierOverlap {
    /// Blocks in accelerator memory.
    pub device_blocks: u32,
    /// Additional blocks in pinned host memory.
    pub host_pinned_blocks: u32,
    /// Additional blocks on disk.
    pub disk_blocks: u32,
    /// Additional blocks in an external store.
    pub external_blocks: u32,
}

/// Weights of blocks in lower tiers relative to device blocks, each in [0, 1].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierWeights {
    /// Weight of a host-pinned block.
    pub host: f64,
    /// Weight of a block on disk or in an external store.
    pub disk: f64,
}

impl TierOverlap {
    /// Blocks held in any tier: the length of the match.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.device_blocks + self.host_pinned_blocks + self.disk_blocks + self.external_blocks
    }

    /// Weighted overlap in blocks: 1 × device + host weight × host + disk weight × (disk + external). (reference:
    /// NVIDIA Dynamo 1.6.1, `host_cache_hit_weight` and `disk_cache_hit_weight`)
    ///
    /// ```
    /// use pointsman::internals::select::{TierOverlap, TierWeights};
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

    /// Weighted overlap in tokens, rounded.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rounded count of tokens, at least 0"
    )]
    pub fn cached_tokens(&self, weights: TierWeights, block_size: u32) -> u32 {
        if self.total_blocks() == self.device_blocks {
            return self.device_blocks.saturating_mul(block_size); // the usual case, without floating point
        }
        (self.effective_blocks(weights) * f64::from(block_size)).round() as u32
    }
}

/// Overlap of a request on one rank, as reported by an index shard. Ranks without any are omitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankOverlap {
    /// Slot of the rank.
    pub slot: Slot,
    /// Generation at the time of the report.
    pub generation: Generation,
    /// Overlap.
    pub overlap: TierOverlap,
}
