//! A cache that the whole pool shares, asked beside the index.
//!
//! Owns the question and its deadline. Promises that a request never waits longer for the shared cache than
//! `shared_cache.timeout_ms`, and never fails for it: errors and lateness are counted, and the request goes on without.
//! Leaves to the embedder what the cache is and how it is reached.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use crate::protocol::BlockHash;
use crate::select::SharedHits;

/// Why a shared cache could not answer: the embedder's own error.
pub type SharedCacheError = Box<dyn std::error::Error + Send + Sync>;

/// What a shared cache answers: half-open ranges of block positions that it holds.
pub type SharedCacheAnswer<'a> = Pin<Box<dyn Future<Output = Result<Vec<Range<u32>>, SharedCacheError>> + Send + 'a>>;

/// A cache beside the ranks that any of them can load blocks from.
///
/// ```
/// use std::sync::Arc;
/// use pointsman::protocol::BlockHash;
/// use pointsman::{SharedCache, SharedCacheAnswer};
///
/// /// Has the first two blocks of everything.
/// struct TwoBlocks;
///
/// impl SharedCache for TwoBlocks {
///     fn query(&self, block_hashes: Arc<[BlockHash]>) -> SharedCacheAnswer<'_> {
///         let held = 0..u32::try_from(block_hashes.len()).unwrap_or(u32::MAX).min(2);
///         Box::pin(async move { Ok(vec![held]) })
///     }
/// }
/// ```
pub trait SharedCache: Send + Sync + 'static {
    /// Which of these blocks, each named by its content, it holds. Dropped when the deadline passes.
    fn query(&self, block_hashes: Arc<[BlockHash]>) -> SharedCacheAnswer<'_>;
}

/// How asking the shared cache failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedCacheFailure {
    /// It did not answer in time.
    #[error("the shared cache did not answer within {0} ms")]
    Late(u64),
    /// It answered with an error.
    #[error("the shared cache failed: {0}")]
    Error(String),
}

/// Result of a shared cache query.
pub(super) type SharedCacheResult = Result<SharedHits, SharedCacheFailure>;
