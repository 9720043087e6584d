//! Stream states and degradation reasons of KV event streams.
//!
//! Defines the states, their overlap credit, and the reasons. Every state except [`StreamState::Live`] and
//! [`StreamState::Recovering`] has a [`DegradationReason`] with advice for the operator. The source determines the
//! state.

use std::fmt;

use crate::wire::Finding;

/// State of a rank's KV event stream.
///
/// ```
/// use pointsman::StreamState;
///
/// assert_eq!(StreamState::Recovering.name(), "recovering");
/// assert!(StreamState::Recovering.credit() < StreamState::Cold.credit());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamState {
    /// Every published message is applied.
    #[default]
    Live,
    /// Messages are missing or unverified, and have been requested.
    Recovering,
    /// Messages were permanently lost. The rank's blocks were removed at that time; all current blocks were stored
    /// later.
    Cold,
    /// The published events do not match the pool or cannot be decoded.
    Mismatched,
    /// Not connected, or no message was ever published although the engine serves requests.
    Silent,
}

impl StreamState {
    /// All states.
    pub const ALL: [Self; 5] = [Self::Live, Self::Recovering, Self::Cold, Self::Mismatched, Self::Silent];

    /// Name in metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Recovering => "recovering",
            Self::Cold => "cold",
            Self::Mismatched => "mismatched",
            Self::Silent => "silent",
        }
    }

    /// Weight of the rank's overlap, 0 to 1.
    ///
    /// `Cold`: full credit; the index is correct but incomplete. `Recovering`: a gap hides removals as well as stores,
    /// so most of the index content is still valid, but less certain. `Mismatched` and `Silent`: no content is known to
    /// be valid.
    #[must_use]
    pub const fn credit(self) -> f64 {
        match self {
            Self::Live | Self::Cold => 1.0,
            Self::Recovering => 0.75,
            Self::Mismatched | Self::Silent => 0.0,
        }
    }
}

/// Reason for a degraded stream. `Display` gives advice for the operator.
///
/// ```
/// use pointsman::internals::ingest::DegradationReason;
///
/// let doubt = DegradationReason::BlockSize { engine: 16, pool: Some(64) };
/// assert!(doubt.to_string().contains("--block-size"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DegradationReason {
    /// No connection to the publisher.
    NotConnected {
        /// Duration in ms.
        for_ms: u64,
    },
    /// Connected, but no message was ever published although the engine has served prompts.
    NeverPublished {
        /// Duration in ms.
        for_ms: u64,
    },
    /// The engine's block size differs from the pool's.
    BlockSize {
        /// Tokens per block of the engine.
        engine: u32,
        /// Tokens per block of the pool, if known to the source.
        pool: Option<u32>,
    },
    /// The messages are labelled with another rank.
    ForeignRank {
        /// The data-parallel rank in the messages.
        found: u32,
    },
    /// The pool hashes EAGLE pairs and the engine does not.
    Eagle,
    /// No event of the last batches was usable.
    Undecodable {
        /// Number of consecutive batches.
        batches: u32,
        /// The most frequent finding.
        finding: Option<Finding>,
    },
    /// The publisher no longer has the missing messages.
    ReplayGap {
        /// First requested message.
        from: u64,
        /// First available message.
        first: u64,
    },
    /// A replay ended with a hole between its messages.
    ReplayHole {
        /// First missing message.
        from: u64,
    },
    /// A replay failed or timed out, twice.
    ReplayFailed {
        /// First missing message.
        from: u64,
    },
    /// Messages are missing and there is no replay socket.
    NoReplay {
        /// First missing message.
        from: u64,
    },
    /// A removal of blocks could not be read. The blocks of its tier were dropped.
    LostRemoval {
        /// The defect.
        finding: Finding,
    },
    /// The reader of the stream failed repeatedly and is no longer restarted.
    ReaderDied {
        /// Number of failures within the restart window.
        deaths: u32,
    },
}

impl DegradationReason {
    /// Name in metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotConnected { .. } => "not_connected",
            Self::NeverPublished { .. } => "never_published",
            Self::BlockSize { .. } => "block_size",
            Self::ForeignRank { .. } => "foreign_rank",
            Self::Eagle => "eagle",
            Self::Undecodable { .. } => "undecodable",
            Self::ReplayGap { .. } => "replay_gap",
            Self::ReplayHole { .. } => "replay_hole",
            Self::ReplayFailed { .. } => "replay_failed",
            Self::NoReplay { .. } => "no_replay",
            Self::LostRemoval { .. } => "lost_removal",
            Self::ReaderDied { .. } => "reader_died",
        }
    }
}

impl fmt::Display for DegradationReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NotConnected { for_ms } => write!(
                f,
                "no connection to the event publisher for {for_ms} ms: check that the engine runs with KV events \
                 enabled, its host, and that this rank's port is the base port plus the rank"
            ),
            Self::NeverPublished { for_ms } => write!(
                f,
                "connected, and no message for {for_ms} ms though the engine serves requests: check that KV events and \
                 prefix caching are enabled, the topic, and that this rank's port is the base port plus the rank"
            ),
            Self::BlockSize { engine, pool } => {
                let is_multiple = pool.is_some_and(|pool| engine > pool && engine.is_multiple_of(pool));
                let hint = if is_multiple { " (context parallelism multiplies that of the events)" } else { "" };
                let pool = pool.map_or_else(|| "another one".to_owned(), |pool| pool.to_string());
                write!(
                    f,
                    "the engine's block size is {engine}, the pool's is {pool}: start one with the other's \
                     --block-size{hint}"
                )
            }
            Self::ForeignRank { found } => write!(
                f,
                "the messages name data-parallel rank {found}: check the base port (each rank publishes at the base \
                 port plus its number) and the worker's start rank"
            ),
            Self::Eagle => f.write_str("the engine publishes no EAGLE pairs: set is_eagle = false"),
            Self::Undecodable { batches, finding } => write!(
                f,
                "no event of the last {batches} batches could be used ({}): check the topic, and whether other data \
                 than KV events is published there, or in a format that is not known",
                finding.map_or("no finding", Finding::name)
            ),
            Self::ReplayGap { from, first } => write!(
                f,
                "messages from {from} were requested and the publisher has them from {first} only: give it a larger \
                 replay buffer (buffer_steps)"
            ),
            Self::ReplayHole { from } => {
                write!(
                    f,
                    "message {from} is missing and replays end without it: check the network between router and engine"
                )
            }
            Self::ReplayFailed { from } => write!(
                f,
                "message {from} is missing and the replay socket failed or did not answer, twice: check the replay \
                 endpoint and that this rank's port is the base port plus the rank"
            ),
            Self::NoReplay { from } => write!(
                f,
                "events since message {from} were missed and there is no replay socket: start the engine \
                 with a replay endpoint and configure it here"
            ),
            Self::LostRemoval { finding } => write!(
                f,
                "a removal of blocks could not be read ({}), and the blocks of its tier were dropped: report the \
                 engine's version",
                finding.name()
            ),
            Self::ReaderDied { deaths } => write!(
                f,
                "the reader of the stream died {deaths} times within a minute and is not restarted: remove the \
                 worker and add it again to retry, and report the logged error"
            ),
        }
    }
}
