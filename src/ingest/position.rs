//! Position of a source in its publisher's stream, for snapshots.
//!
//! A position belongs to the index contents that exactly the messages before it have produced. A source that resumes
//! from it requests a replay from the last applied message. If the publisher returns the same message, the contents are
//! valid and only the missing messages are applied. Otherwise the publisher has restarted or no longer has the message,
//! and the source continues as after any other restart or loss.

use super::DegradationReason;

/// Number of payload hashes in a position. One suffices to detect a restart; the others identify repeated messages.
const HASHES_MAX: usize = 64;

/// Position of a source: the last applied messages, and whether the contents are complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcePosition {
    /// Sequence number of the next message, at least 1.
    pub next: u64,
    /// xxh3-64 of the payloads of the last applied messages, the last one at the end; 1 to 64. They identify the
    /// incarnation of the publisher.
    pub payload_hashes: Vec<u64>,
    /// Set if the source was cold: the contents are correct but incomplete.
    pub cold: Option<ColdPosition>,
}

/// State of a cold source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColdPosition {
    /// Blocks stored since the loss.
    pub stored_blocks: u64,
    /// Reason of the loss.
    pub cause: DegradationReason,
}

impl SourcePosition {
    /// Maximum number of payload hashes.
    pub const HASHES_MAX: usize = HASHES_MAX;

    /// Whether the contents at this position supersede those at `other`: complete contents supersede incomplete ones,
    /// then later contents supersede earlier ones.
    ///
    /// ```
    /// use pointsman::internals::ingest::SourcePosition;
    ///
    /// let at = |next| SourcePosition { next, payload_hashes: vec![7], cold: None };
    /// assert!(at(2).is_newer_than(&at(1)) && !at(2).is_newer_than(&at(2)));
    /// ```
    #[must_use]
    pub fn is_newer_than(&self, other: &Self) -> bool {
        (self.cold.is_none(), self.next) > (other.cold.is_none(), other.next)
    }
}

/// Progress of a source that was restored from a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreState {
    /// The contents are loaded, and the publisher is not verified yet.
    Unverified,
    /// The publisher is the one of the snapshot, and every message since then is applied.
    Resumed,
    /// The contents were dropped: the publisher has restarted, or no longer has the messages since the snapshot.
    Dropped,
}

impl RestoreState {
    /// Name in metrics and reports.
    ///
    /// ```
    /// assert_eq!(pointsman::RestoreState::Resumed.name(), "resumed");
    /// ```
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unverified => "unverified",
            Self::Resumed => "resumed",
            Self::Dropped => "dropped",
        }
    }
}
