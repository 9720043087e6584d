//! KV events: changes of an engine's cache.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::{BlockHash, EngineHash, WorkerRank};

/// Storage tier of a block. A store in a second tier adds a copy there; it does not move the block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StorageTier {
    /// Accelerator memory; hits have no transfer cost.
    #[default]
    Device,
    /// Pinned host memory.
    HostPinned,
    /// Local disk.
    Disk,
    /// Network or shared storage.
    External,
}

impl StorageTier {
    /// All tiers, nearest first: the order in which a match is extended.
    pub const ALL: [Self; 4] = [Self::Device, Self::HostPinned, Self::Disk, Self::External];
}

/// One change of one rank's cache.
///
/// ```
/// use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock};
/// use pointsman::protocol::{WorkerId, WorkerRank};
///
/// let event = RouterEvent {
///     rank: WorkerRank::new(WorkerId(1), 0),
///     tier: StorageTier::Device,
///     data: KvEvent::Stored {
///         parent: None,
///         blocks: vec![StoredBlock { engine_hash: EngineHash(11), block_hash: BlockHash(1) }],
///     },
/// };
/// assert_eq!(event.data.block_count(), 1);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterEvent {
    /// The rank whose cache changed.
    pub rank: WorkerRank,
    /// The tier of the change. A [`KvEvent::Cleared`] clears every tier of the rank.
    #[serde(default)]
    pub tier: StorageTier,
    /// The change.
    pub data: KvEvent,
}

/// Type of a cache change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvEvent {
    /// Consecutive blocks stored behind `parent`, or at the start of a prompt without one.
    Stored {
        /// Engine hash of the block before the first stored one.
        parent: Option<EngineHash>,
        /// The stored blocks, in prompt order.
        blocks: Vec<StoredBlock>,
    },
    /// Removed blocks, in any order.
    Removed {
        /// Engine hashes of the removed blocks.
        blocks: Vec<EngineHash>,
    },
    /// Copies of blocks that an offloading connector or another lower tier has stored, one each. A block whose name the
    /// rank holds in any tier is a copy of that block. Any other block is stored behind the previous one or `parent`, and
    /// is ignored without a content hash.
    Offloaded {
        /// Engine hash of the block before the first one.
        parent: Option<EngineHash>,
        /// Engine hash of each copy, in prompt order, and its content hash if the event states the content.
        blocks: Vec<(EngineHash, Option<BlockHash>)>,
    },
    /// The rank's whole cache was cleared.
    Cleared,
    /// The rank's cache in the tier of the event was cleared.
    TierCleared,
    /// Blocks stored by a cache group beside the main attention, whose [`KvEvent::Stored`] has their contents. The list
    /// may leave out blocks; an empty list makes the group known.
    GroupStored {
        /// Number of the group.
        group: u8,
        /// Number of blocks before the end of a hit that the group must hold, or all blocks if there are fewer:
        /// `u32::MAX` for full attention, 8 for a sliding window of 128 tokens and blocks of 16, 1 for a Mamba state.
        window_blocks: NonZeroU32,
        /// Whether the store begins at the start of a prompt.
        starts_prompt: bool,
        /// Engine hashes of the stored blocks.
        blocks: Vec<EngineHash>,
    },
    /// Blocks removed from a cache group beside the main attention, in any order.
    GroupRemoved {
        /// Number of the group.
        group: u8,
        /// Engine hashes of the removed blocks.
        blocks: Vec<EngineHash>,
    },
}

impl KvEvent {
    /// Number of blocks in the event, which determines its cost.
    #[must_use]
    pub fn block_count(&self) -> usize {
        match self {
            Self::Stored { blocks, .. } => blocks.len(),
            Self::Removed { blocks } | Self::GroupStored { blocks, .. } | Self::GroupRemoved { blocks, .. } => {
                blocks.len()
            }
            Self::Offloaded { blocks, .. } => blocks.len(),
            Self::Cleared | Self::TierCleared => 0,
        }
    }
}

/// Meaning of a store of a block that the rank holds under the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RepeatedStore {
    /// The engine announces the block again; the number of copies is unchanged.
    Announcement,
    /// The engine holds another copy of the block.
    Copy,
    /// The cache groups of the rank show which of both.
    ByGroups,
}

impl RepeatedStore {
    /// The meaning of repeated stores to `tier`, behind a parent or at the start of a prompt. vLLM recomputes blocks that it
    /// already holds: the last block of a completely cached prompt, and equal blocks that running requests generate. It
    /// keeps each copy, and stores and removes each copy under the same name. vLLM also announces blocks again without a
    /// copy if a request sets `kv_cache_report_mode`: always the first blocks of a prompt, hence without a parent. A real
    /// copy of these first blocks looks the same and is not counted, because a counted copy that does not exist would never
    /// be removed. The index knows too little from the first removal until an answer proves the copy. Only several cache
    /// groups distinguish both. Stores of lower tiers hold one block per name; copies there are
    /// offloaded.
    pub(crate) fn of(tier: StorageTier, has_parent: bool, has_groups: bool) -> Self {
        match tier {
            StorageTier::Device if has_parent => Self::Copy,
            StorageTier::Device if has_groups => Self::ByGroups,
            _ => Self::Announcement,
        }
    }
}

/// One stored block: its engine hash and its content hash for matching requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredBlock {
    /// The engine's name, used by later parents and removals.
    pub engine_hash: EngineHash,
    /// Content hash, computed by [`crate::hashing`] from the event's tokens.
    pub block_hash: BlockHash,
}
