//! KV event stream of one engine rank: ordering, de-duplication, and detection of missing messages.
//!
//! [`Source`] is the state machine of one event source. It determines the next message, drops duplicates, holds
//! messages until a gap is closed, and derives the [`StreamState`] with its [`DegradationReason`]. [`Backoff`] gives
//! the delays between connection attempts.
//!
//! Batches in [`IngestEffect::Apply`] are in the publisher's order without gaps, and no message is applied twice. Lost
//! messages lead to [`IngestEffect::Clear`], so the index content of the rank is correct, but may be incomplete. A
//! message is applied, dropped as a duplicate or as obsolete, held for a bounded time, or rejected; all except the
//! first are reported as [`Note`].
//!
//! Decoding, sockets and clocks are outside this module. Publishers number their messages from 0, restart with each
//! incarnation, and keep the last few messages for replay. Duplicates are detected by a hash of the payload, so two
//! incarnations with equal payloads under equal numbers are indistinguishable; engines include the time in every batch.

mod audit;
mod backoff;
mod fit;
mod hashes;
mod held;
mod pieces;
mod position;
mod recovery;
mod replay;
mod resume;
mod source;
mod state;
mod subscription;

pub use audit::{
    Audit, AuditCause, AuditResult, AuditStep, BlockName, DIGEST_REQUEST, Difference, EngineContents, Heal,
    NAMES_REQUEST,
};
pub use backoff::Backoff;
pub use pieces::pieces;
pub use position::{ColdPosition, RestoreState, SourcePosition};
pub use source::Source;
pub use state::{DegradationReason, StreamState};

use std::time::Duration;

use crate::wire::Report;

/// Buffer limits, timeouts and known facts of one source.
///
/// ```
/// use pointsman::internals::ingest::SourceConfig;
///
/// let config = SourceConfig { has_replay: false, ..SourceConfig::default() };
/// assert_eq!(config.remembered_max, 1024);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceConfig {
    /// Whether the publisher has a replay socket. Default: true. Without it, every gap makes the rank cold.
    pub has_replay: bool,
    /// Maximum number of messages held during a gap. Default: 4,096.
    pub held_messages_max: usize,
    /// Maximum payload bytes held during a gap. Default: 16 MiB.
    pub held_bytes_max: usize,
    /// Number of applied messages whose hashes (8 bytes each) are kept for duplicate detection. Default: 1,024; clamped
    /// to 1..=2^20.
    pub remembered_max: usize,
    /// Time until a source is silent: without a connection, or connected without any message although prompts were
    /// served. Default: 10 s.
    pub silent_after: Duration,
    /// Time until a cold rank is considered complete, because its cache has turned over. Default: 600 s.
    pub cold_heals_after: Duration,
    /// Maximum time of a replay without progress. Default: 5 s.
    pub replay_timeout: Duration,
    /// Idle time after which the replay socket is queried once for messages after the last one. A missing last message
    /// is otherwise undetectable, because no message follows it. Default: 2 s.
    pub end_check_after: Duration,
    /// Interval of further such queries while no message arrives: a connection whose remote end disappeared silently
    /// looks the same. Default: 30 s.
    pub end_check_interval: Duration,
    /// Capacity of the rank's cache in blocks, if known. After that number of stored blocks, all earlier content is
    /// evicted.
    pub capacity_blocks: Option<u32>,
    /// The pool's block size in tokens, for the mismatch message.
    pub block_size: Option<u32>,
    /// Seed of the back-off's jitter.
    pub seed: u64,
}

impl Default for SourceConfig {
    fn default() -> Self {
        Self {
            has_replay: true,
            held_messages_max: 4096,
            held_bytes_max: 16 << 20,
            remembered_max: 1024,
            silent_after: Duration::from_secs(10),
            cold_heals_after: Duration::from_secs(600),
            replay_timeout: Duration::from_secs(5),
            end_check_after: Duration::from_secs(2),
            end_check_interval: Duration::from_secs(30),
            capacity_blocks: None,
            block_size: None,
            seed: 0,
        }
    }
}

/// IngestInput of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a report is as frequent as a message, and a box costs more")]
pub enum IngestInput<P> {
    /// The subscription to live messages is established.
    Connected,
    /// The subscription is lost. Aborts a running replay.
    Disconnected,
    /// A live message.
    Live {
        /// Its sequence number, counted by the publisher from 0.
        sequence: u64,
        /// Its undecoded bytes.
        payload: P,
    },
    /// A message of the most recently requested replay, never of an earlier one.
    Replayed {
        /// Its sequence number.
        sequence: u64,
        /// Its undecoded bytes.
        payload: P,
    },
    /// The most recently requested replay is complete.
    ReplayEnded,
    /// The most recently requested replay failed.
    ReplayFailed,
    /// Result of decoding an [`IngestEffect::Apply`]: one input per effect, in the same order.
    Applied(Report),
    /// The rank's engine has computed a prompt of at least one block, so missing messages now indicate a fault.
    Served,
    /// The index lost its content for this rank.
    Resync,
    /// Time has passed. Due at [`Source::next_tick`]; allowed at any time, and delays are harmless.
    Tick,
}

/// Action for the owner of a source, to be performed in the given order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IngestEffect<P> {
    /// Decode the batch and apply its events to the rank.
    Apply {
        /// Its sequence number.
        sequence: u64,
        /// Its bytes.
        payload: P,
    },
    /// Remove the rank's blocks, and the decoder state of earlier batches.
    Clear,
    /// Request a replay of all messages from this number on. Aborts a running replay.
    Replay {
        /// First requested number.
        from: u64,
    },
    /// Replace the subscription: messages that it should have delivered had to be replayed, or the replay socket does
    /// not respond. Reported as [`IngestInput::Disconnected`].
    Reconnect,
    /// The state of the stream changed.
    State(StreamState),
    /// Count this note.
    Noted(Note),
}

/// Countable occurrence in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A live message arrived before its predecessors.
    Gap,
    /// Missing or unverified messages are now complete.
    Recovered,
    /// The replayed copy of the last applied message is equal to it.
    Verified,
    /// Messages that are permanently lost.
    Lost {
        /// Their number.
        messages: u64,
    },
    /// Dropped: the message was applied before or is already held.
    Duplicate,
    /// Dropped: the message is older than all remembered ones, or belongs to a completed replay.
    Late,
    /// Dropped held messages, which a following replay contains or which are obsolete.
    Dropped {
        /// Their number.
        messages: u64,
    },
    /// Dropped: the buffer of held messages is full; a replay will repeat the message.
    HeldOverflow,
    /// Dropped: the message has the sequence number that marks the end of replays.
    Refused,
    /// The publisher restarted its numbering.
    Incarnation,
    /// The rank became cold.
    Cold,
    /// The rank is no longer cold.
    Healed,
    /// A replay failed, timed out, or had a hole.
    ReplayFailed,
    /// Contents of a snapshot were loaded.
    Restored,
    /// The publisher of restored contents is verified, and every message since the snapshot is applied.
    RestoreResumed,
    /// Restored contents were dropped, because their publisher has restarted or no longer has the messages since then.
    RestoreDropped,
}

impl Note {
    /// The metric label value.
    ///
    /// ```
    /// use pointsman::internals::ingest::Note;
    ///
    /// assert_eq!(Note::Lost { messages: 3 }.name(), "lost");
    /// ```
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Recovered => "recovered",
            Self::Verified => "verified",
            Self::Lost { .. } => "lost",
            Self::Duplicate => "duplicate",
            Self::Late => "late",
            Self::Dropped { .. } => "dropped",
            Self::HeldOverflow => "held_overflow",
            Self::Refused => "refused",
            Self::Incarnation => "incarnation",
            Self::Cold => "cold",
            Self::Healed => "healed",
            Self::ReplayFailed => "replay_failed",
            Self::Restored => "restored",
            Self::RestoreResumed => "restore_resumed",
            Self::RestoreDropped => "restore_dropped",
        }
    }

    /// Amount by which to increase its counter: the number of messages, otherwise 1. At most [`u32::MAX`], because a
    /// publisher may use arbitrary sequence numbers, and shared counters must not wrap.
    #[must_use]
    pub fn count(self) -> u64 {
        match self {
            Self::Lost { messages } | Self::Dropped { messages } => messages.min(u64::from(u32::MAX)),
            Self::Gap
            | Self::Recovered
            | Self::Verified
            | Self::Duplicate
            | Self::Late
            | Self::HeldOverflow
            | Self::Refused
            | Self::Incarnation
            | Self::Cold
            | Self::Healed
            | Self::ReplayFailed
            | Self::Restored
            | Self::RestoreResumed
            | Self::RestoreDropped => 1,
        }
    }
}
