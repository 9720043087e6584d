//! Block size of a pool, and its origin.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::names::named;

/// Block size in force in a pool.
///
/// ```
/// use pointsman::internals::protocol::PoolBlockSize;
/// use pointsman::internals::protocol::BlockSizeOrigin;
///
/// let size = PoolBlockSize { tokens: 16, origin: BlockSizeOrigin::Reported };
/// assert_eq!(size.to_string(), "16 (reported)");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBlockSize {
    /// Tokens per block.
    pub tokens: u32,
    /// Origin of the value.
    pub origin: BlockSizeOrigin,
}

impl PoolBlockSize {
    /// Block size that a pool takes from an engine: the engine's, or its smallest multiple of at least 16 tokens, because the
    /// work for a request grows with its blocks. The events of smaller blocks are folded.
    #[must_use]
    pub(crate) fn of_engine(tokens: u32) -> u32 {
        if tokens < 16 { 16_u32.next_multiple_of(tokens.max(1)) } else { tokens }
    }
}

impl fmt::Display for PoolBlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.tokens, self.origin.name())
    }
}

named! {
    /// Origin of a pool's block size.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum BlockSizeOrigin {
        /// [`RouterConfig::block_size`](crate::RouterConfig::block_size). It does not change.
        Configured = "configured",
        /// The workers of the pool report it.
        Reported = "reported",
        /// No worker of the pool reports one. It changes with the first report.
        Assumed = "assumed",
        /// No worker has joined yet.
        Awaited = "awaited",
    }
}

impl BlockSizeOrigin {
    /// Whether no worker of the pool reports a block size.
    #[must_use]
    pub fn is_assumed(self) -> bool {
        self == Self::Assumed
    }

    /// Whether the value cannot change with a first report.
    #[must_use]
    pub fn is_settled(self) -> bool {
        matches!(self, Self::Configured | Self::Reported)
    }
}
