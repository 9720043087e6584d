//! Snapshot, its layout and its ranks.

use std::num::NonZeroU32;

use super::SnapshotError;
use crate::config::RouterConfig;
use crate::hashing::HashScheme;
use crate::ingest::SourcePosition;
use crate::protocol::{KvEvent, RouterEvent, WorkerRank};
use crate::wire::DecoderState;

/// Index contents of one pool. The format is in the module documentation.
///
/// ```
/// use std::num::NonZeroU32;
/// use pointsman::{internals::snapshot::SnapshotLayout, Snapshot};
///
/// let layout = SnapshotLayout::new("llama", NonZeroU32::new(16).expect("not zero"), false);
/// let snapshot = Snapshot { layout, created_ms: 1_700_000_000_000, ranks: Vec::new() };
/// let bytes = snapshot.encode();
/// assert_eq!(Snapshot::decode(&bytes), Ok(snapshot));
/// assert!(Snapshot::decode(&bytes[1..]).is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Pool and hash scheme.
    pub layout: SnapshotLayout,
    /// Time of creation in milliseconds since the Unix epoch, by the clock of the creator.
    pub created_ms: u64,
    /// The ranks in ascending order, each at most once.
    pub ranks: Vec<RankSnapshot>,
}

/// Facts that two routers must share to exchange index contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotLayout {
    /// Name of the pool.
    pub pool: String,
    /// Tokens per block.
    pub block_size: u32,
    /// Whether blocks are hashed as EAGLE token pairs.
    pub is_eagle: bool,
    /// Hash seed of blocks without adapter and salt. It stands for the hash scheme.
    pub hash_seed: u64,
}

/// Index contents of one rank, at a position of its KV event stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSnapshot {
    /// The rank.
    pub rank: WorkerRank,
    /// Address of the publisher of its KV events.
    pub endpoint: String,
    /// Position of the source.
    pub position: SourcePosition,
    /// State of the decoder at the position.
    pub decoder: DecoderState,
    /// Events that rebuild the contents at the position, parents first. All are of this rank.
    pub events: Vec<RouterEvent>,
    /// Blocks that a byte budget of the index had evicted from these contents.
    pub evicted_blocks: u64,
}

impl SnapshotLayout {
    /// Layout of a pool with the hash scheme of this library.
    #[must_use]
    pub fn new(pool: impl Into<String>, block_size: NonZeroU32, is_eagle: bool) -> Self {
        Self { pool: pool.into(), block_size: block_size.get(), is_eagle, hash_seed: HashScheme::BASE_SEED }
    }

    /// Layout of the router with this configuration, and this block size in force.
    #[must_use]
    pub fn of(config: &RouterConfig, block_size: u32) -> Self {
        Self::new(&*config.pool, NonZeroU32::new(block_size).unwrap_or(NonZeroU32::MIN), config.is_eagle)
    }
}

impl Snapshot {
    /// [`Snapshot::check_layout`] for a router with this configuration, whose block size is checked if it is known.
    ///
    /// # Errors
    /// As [`Snapshot::check_layout`].
    pub fn check_pool(&self, config: &RouterConfig, block_size: Option<u32>) -> Result<(), SnapshotError> {
        self.check_layout(&SnapshotLayout::of(config, block_size.unwrap_or(self.layout.block_size)))
    }

    /// Checks that the contents are valid for a router with this layout.
    ///
    /// # Errors
    /// [`SnapshotError::Layout`] with the first field that differs.
    pub fn check_layout(&self, expected: &SnapshotLayout) -> Result<(), SnapshotError> {
        let found = &self.layout;
        let fields = [
            ("pool", format!("{:?}", found.pool), format!("{:?}", expected.pool)),
            ("block size", found.block_size.to_string(), expected.block_size.to_string()),
            ("EAGLE", found.is_eagle.to_string(), expected.is_eagle.to_string()),
            ("hash seed", found.hash_seed.to_string(), expected.hash_seed.to_string()),
        ];
        match fields.into_iter().find(|(_, found, expected)| found != expected) {
            Some((field, found, expected)) => Err(SnapshotError::Layout { field, found, expected }),
            None => Ok(()),
        }
    }

    /// Number of blocks in all stores.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.ranks.iter().map(RankSnapshot::block_count).sum()
    }
}

impl RankSnapshot {
    /// Number of blocks in all stores.
    #[must_use]
    pub fn block_count(&self) -> usize {
        let stored = |event: &RouterEvent| match &event.data {
            KvEvent::Stored { blocks, .. } => blocks.len(),
            KvEvent::GroupStored { blocks, .. } => blocks.len(),
            KvEvent::Removed { .. }
            | KvEvent::Offloaded { .. }
            | KvEvent::Cleared
            | KvEvent::TierCleared
            | KvEvent::GroupRemoved { .. } => 0,
        };
        self.events.iter().map(stored).sum()
    }
}
