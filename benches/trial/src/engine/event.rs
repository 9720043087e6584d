//! Memory tiers of an engine, and the changes of its cache that it publishes.

use std::sync::Arc;

use crate::engine::block::{Block, EngineHash};

/// Memory tier of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Accelerator memory.
    Device,
    /// Host memory.
    Host,
    /// Accelerator memory of the group beside the main one ([`EngineConfig::beside_window_blocks`](crate::engine::EngineConfig::beside_window_blocks)).
    Beside,
}

/// A change of the cache, as an engine publishes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks were stored: at least one, each the parent of the next, all with one adapter and salt. Copies in other
    /// tiers stay there. [`Tier::Beside`] keeps the last ones only, as many as its window has.
    Stored {
        /// Tier of the blocks.
        tier: Tier,
        /// The blocks. The parent of the first one was published before, or it has none.
        blocks: Vec<Arc<Block>>,
    },
    /// A block was removed.
    Removed {
        /// Tier of the block.
        tier: Tier,
        /// Hash of the block.
        hash: EngineHash,
    },
    /// All blocks of the device were removed, and those of the host unless they were kept.
    Cleared,
}
