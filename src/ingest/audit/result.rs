//! Results of audits.

use super::BlockName;
use crate::protocol::Timestamp;

/// Blocks by which index and engine differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Blocks of the index that the engine no longer has.
    pub stale: Vec<BlockName>,
    /// Blocks of the engine that the index does not have.
    pub missing: Vec<BlockName>,
    /// Time of the last audit without a difference, after which this one arose. `None` without such an audit.
    pub since: Option<Timestamp>,
}

/// Result of an audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditResult {
    /// Index and engine hold the same blocks.
    Equal,
    /// They differ.
    Different(Difference),
    /// No comparison was possible: no reply in time, or the contents changed too much.
    Inconclusive,
    /// The engine does not support audits, and its replay buffer gives no evidence.
    Unsupported,
}

impl AuditResult {
    /// All names.
    pub const NAMES: [&'static str; 4] = ["equal", "different", "inconclusive", "unsupported"];

    /// Name in metrics and reports.
    ///
    /// ```
    /// assert_eq!(pointsman::internals::ingest::AuditResult::Equal.name(), "equal");
    /// ```
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Equal => Self::NAMES[0],
            Self::Different(_) => Self::NAMES[1],
            Self::Inconclusive => Self::NAMES[2],
            Self::Unsupported => Self::NAMES[3],
        }
    }
}
