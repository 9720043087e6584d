//! KV events: what an engine's cache says about itself.

use serde::{Deserialize, Serialize};

use super::{BlockHash, EngineHash, WorkerRank};

/// Where a block lies. A store on a second tier is a second residence, not a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StorageTier {
    /// Accelerator memory: a hit costs nothing.
    #[default]
    Device,
    /// Pinned host memory.
    HostPinned,
    /// Local disk.
    Disk,
    /// A network or shared store.
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
    /// The tier it changed in. A [`KvEvent::Cleared`] clears every tier of the rank.
    #[serde(default)]
    pub tier: StorageTier,
    /// What changed.
    pub data: KvEvent,
}

/// What changed in a rank's cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvEvent {
    /// Blocks were stored, one after the other, behind `parent` (at the start of a prompt when absent).
    Stored {
        /// The engine's name of the block that the first stored one follows.
        parent: Option<EngineHash>,
        /// The stored blocks, in prompt order.
        blocks: Vec<StoredBlock>,
    },
    /// Blocks were removed, in any order.
    Removed {
        /// The engine's names of the removed blocks.
        blocks: Vec<EngineHash>,
    },
    /// The rank's whole cache was dropped.
    Cleared,
}

impl KvEvent {
    /// Number of blocks the event names: what applying it costs.
    #[must_use]
    pub fn block_count(&self) -> usize {
        match self {
            Self::Stored { blocks, .. } => blocks.len(),
            Self::Removed { blocks } => blocks.len(),
            Self::Cleared => 0,
        }
    }
}

/// One stored block: the engine's name for it, and the hash of its content that requests are matched by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredBlock {
    /// The engine's own name, used by later parents and removals.
    pub engine_hash: EngineHash,
    /// Content of the block, as [`crate::hashing`] computes it from the event's tokens.
    pub block_hash: BlockHash,
}
