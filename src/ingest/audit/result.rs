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

/// Cause of an inconclusive audit.
///
/// ```
/// assert_eq!(pointsman::internals::ingest::AuditCause::NoReply.name(), "no_reply");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditCause {
    /// No reply in time.
    NoReply,
    /// The connection failed, or the reply was malformed.
    BrokenReply,
    /// The reply does not reach the position of the index, or messages in its middle are missing, also after repeated
    /// requests.
    IncompleteReply,
    /// The replay buffer contains events that cannot be decoded and may remove blocks.
    RejectedEvents,
    /// The replay buffer has too many blocks.
    TooLarge,
    /// The contents changed too much during the request.
    Changed,
    /// A difference that no other audit has confirmed yet.
    Unconfirmed,
}

impl AuditCause {
    /// All names, in the order of the causes.
    pub const NAMES: [&'static str; 7] =
        ["no_reply", "broken_reply", "incomplete_reply", "rejected_events", "too_large", "changed", "unconfirmed"];

    /// Name in metrics and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// Result of an audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditResult {
    /// Index and engine hold the same blocks.
    Equal,
    /// Two consecutive findings agree that these blocks differ.
    Different(Difference),
    /// No comparison, or a single finding.
    Inconclusive(AuditCause),
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
            Self::Inconclusive(_) => Self::NAMES[2],
            Self::Unsupported => Self::NAMES[3],
        }
    }

    /// Cause of an inconclusive result.
    #[must_use]
    pub const fn cause(&self) -> Option<AuditCause> {
        match self {
            Self::Inconclusive(cause) => Some(*cause),
            Self::Equal | Self::Different(_) | Self::Unsupported => None,
        }
    }
}
