//! Interface to a cache shared by the whole pool, queried beside the index.
//!
//! A request waits at most `shared_cache.timeout_ms` for the shared cache and never fails because of it. Errors and
//! timeouts are counted, and the request continues without the result. The embedder implements the access to the cache.

use std::ops::Range;
use std::sync::Arc;

use crate::actors::io::BoxFuture;
use crate::protocol::BlockHash;
use crate::select::SharedHits;

/// Cache outside the ranks, from which each of them can load blocks.
///
/// ```
/// use std::ops::Range;
/// use std::sync::Arc;
/// use pointsman::protocol::BlockHash;
/// use pointsman::{BoxFuture, SharedCache};
///
/// /// Has the first two blocks of everything.
/// struct TwoBlocks;
///
/// impl SharedCache for TwoBlocks {
///     fn query(&self, block_hashes: Arc<[BlockHash]>) -> BoxFuture<'_, Result<Vec<Range<u32>>, String>> {
///         let held = 0..u32::try_from(block_hashes.len()).unwrap_or(u32::MAX).min(2);
///         Box::pin(async move { Ok(vec![held]) })
///     }
/// }
/// ```
pub trait SharedCache: Send + Sync + 'static {
    /// Positions of these blocks, identified by content, that the cache holds, or the text of an error. The future is
    /// dropped at the deadline.
    fn query(&self, block_hashes: Arc<[BlockHash]>) -> BoxFuture<'_, Result<Vec<Range<u32>>, String>>;
}

/// Failure of a shared cache query.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedCacheFailure {
    /// No response within the timeout.
    #[error("no response from the shared cache within {0} ms")]
    Late(u64),
    /// The query returned an error.
    #[error("shared cache query failed: {0}")]
    Error(String),
}

/// Result of a shared cache query.
pub(super) type SharedCacheResult = Result<SharedHits, SharedCacheFailure>;
