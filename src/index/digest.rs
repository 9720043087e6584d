//! Digest of the blocks that a rank holds: order-free and incremental.
//!
//! The digest is the wrapping sum of one mixed value per name and tier. Sums do not depend on the order of events, and
//! a removal subtracts what the store has added. An engine that computes the same sum over its cache proves with 16
//! bytes that the index equals it. Copies of a block do not count, because the rule for copies leaves some uncounted.
//! The mix is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): two multiplications a block.
//!
//! Names are hashes, and an engine that chose colliding ones would only hide its own errors, so 64 bits suffice.

use crate::protocol::{EngineHash, StorageTier};

/// Digest of the blocks of one rank.
///
/// ```
/// use pointsman::internals::index::BlockDigest;
/// use pointsman::protocol::{EngineHash, StorageTier};
///
/// let blocks = [(StorageTier::Device, EngineHash(7)), (StorageTier::HostPinned, EngineHash(7))];
/// let digest: BlockDigest = blocks.into_iter().collect();
/// let reversed: BlockDigest = blocks.into_iter().rev().collect();
/// assert_eq!((digest, digest.blocks), (reversed, 2));
/// assert_ne!(digest, blocks.into_iter().take(1).collect());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockDigest {
    /// Wrapping sum of the mixed names.
    pub sum: u64,
    /// Number of names, each counted once per tier.
    pub blocks: u64,
}

impl FromIterator<(StorageTier, EngineHash)> for BlockDigest {
    fn from_iter<I: IntoIterator<Item = (StorageTier, EngineHash)>>(names: I) -> Self {
        names.into_iter().fold(Self::default(), |digest, (tier, name)| Self {
            sum: digest.sum.wrapping_add(mixed(tier, name)),
            blocks: digest.blocks + 1,
        })
    }
}

/// Value of one name in the sum.
#[inline]
pub(super) fn mixed(tier: StorageTier, name: EngineHash) -> u64 {
    finalize(name.0.wrapping_add(offset(tier)))
}

/// Offset of the names of a tier: equal names in two tiers have unrelated values.
pub(super) const fn offset(tier: StorageTier) -> u64 {
    let number = match tier {
        StorageTier::Device => 1,
        StorageTier::HostPinned => 2,
        StorageTier::Disk => 3,
        StorageTier::External => 4,
    };
    0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(number)
}

/// The finalizer of SplitMix64.
#[inline]
pub(super) const fn finalize(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
