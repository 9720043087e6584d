//! Result of a choice of a rank.

use super::types::Rejection;

/// Result of a choice.
pub(super) enum Choice {
    Rank(usize),
    /// An unqueried rank could still win: query again with the rest of the batch.
    QueryAgain,
    /// All ranks are busy, although one was not at dequeue time.
    Wait,
    None(Rejection),
}
