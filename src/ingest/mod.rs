//! One engine rank's stream of KV events: in order, once, and honest about what is missing.
//!
//! Owns the state machine of one event source, [`Source`]: which message comes next, what has been seen, what waits
//! until a gap is closed, and how far what is known of the rank may be trusted ([`Trust`], [`Doubt`]). [`Backoff`] says
//! when to try a connection again.
//!
//! Promises that the batches it hands on ([`Effect::Apply`]) stand in the publisher's order without a hole between two
//! of them, that no message is applied twice, and that whatever could not be had is followed by [`Effect::Clear`]: what
//! an index holds of the rank is then true, if not complete. A message goes one of four ways: applied, dropped because
//! it was seen or is obsolete, held for a bounded while, or refused; each but the first is noted ([`Note`]).
//!
//! Leaves to others what a payload means, which sockets there are and when it is. Publishers number their messages from
//! 0 and start again with each life; they keep the last few for replay. That a payload has not been seen is judged by a
//! hash of its bytes, so two lives of a publisher that send equal bytes under equal numbers cannot be told apart:
//! engines put the time into every batch.

mod backoff;
mod fit;
mod held;
mod link;
mod pieces;
mod recovery;
mod seen;
mod source;
mod trust;

pub use backoff::Backoff;
pub use fit::Applied;
pub use pieces::pieces;
pub use source::Source;
pub use trust::{Doubt, Trust};

use std::time::Duration;

/// What one source may hold, how long it waits, and what is known of its rank.
///
/// ```
/// use pointsman::ingest::SourceConfig;
///
/// let config = SourceConfig { has_replay: false, ..SourceConfig::default() };
/// assert_eq!(config.remembered_max, 1024);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceConfig {
    /// Whether the publisher has a replay socket. Default true; without one every gap makes the rank cold.
    pub has_replay: bool,
    /// Most messages held while something is missing. Default 4,096.
    pub held_messages_max: usize,
    /// Most payload bytes held while something is missing. Default 16 MiB.
    pub held_bytes_max: usize,
    /// How many of the last applied messages are known again by a hash, 8 bytes each. Default 1,024; 1 to 2^20 count.
    pub remembered_max: usize,
    /// After how long without a connection, or connected without ever a message though prompts were served, a source is
    /// silent. Default 10 s.
    pub silent_after: Duration,
    /// After how long a cold rank counts as known again, for its cache has turned over. Default 600 s.
    pub cold_heals_after: Duration,
    /// How long a replay may make no progress. Default 5 s.
    pub replay_timeout: Duration,
    /// After how long without a message the replay socket is asked, once, whether the last one was the last: no message
    /// behind it shows that the end is missing. Default 2 s.
    pub asks_after: Duration,
    /// How often that is asked again while nothing comes: a connection whose other end is gone without a word looks just
    /// so. Default 30 s.
    pub asks_again_after: Duration,
    /// Blocks that the rank's cache holds, where known: once that many were stored, what was there before is gone.
    pub capacity_blocks: Option<u32>,
    /// The pool's block size in tokens, to be named beside the engine's where they differ.
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
            asks_after: Duration::from_secs(2),
            asks_again_after: Duration::from_secs(30),
            capacity_blocks: None,
            block_size: None,
            seed: 0,
        }
    }
}

/// What happened to a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input<P> {
    /// The subscription to live messages stands.
    Connected,
    /// It no longer does. A replay that runs is abandoned.
    Disconnected,
    /// A live message.
    Live {
        /// Its number, counted by the publisher from 0.
        sequence: u64,
        /// Its undecoded bytes.
        payload: P,
    },
    /// An answer to the replay last asked for; never to an earlier one.
    Replayed {
        /// The message's number.
        sequence: u64,
        /// Its undecoded bytes.
        payload: P,
    },
    /// The replay last asked for has brought all it has.
    ReplayEnded,
    /// The replay last asked for broke off.
    ReplayFailed,
    /// What decoding an [`Effect::Apply`] found: one for each, in their order.
    Applied(Applied),
    /// The rank's engine has computed a prompt of at least one block: from now on silence means that something is wrong.
    Served,
    /// The index has lost what it knew of this rank, and nothing of it is left there.
    Resync,
    /// Time has passed; due at [`Source::next_tick`], harmless at any time, and late is well.
    Tick,
}

/// What its owner has to do for a source, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect<P> {
    /// Decode the batch and apply its events to the rank.
    Apply {
        /// The message's number.
        sequence: u64,
        /// Its bytes.
        payload: P,
    },
    /// Drop the rank's blocks, and what the decoder remembers of earlier batches.
    Clear,
    /// Ask the replay socket for everything from this number on. A replay that runs is abandoned.
    Replay {
        /// First number asked for.
        from: u64,
    },
    /// Give the subscription up and make a new one: messages that it should have brought had to be asked for, or nobody
    /// answers. Reported as [`Input::Disconnected`].
    Reconnect,
    /// How far the rank's blocks may be trusted has changed.
    Trust(Trust),
    /// To be counted.
    Noted(Note),
}

/// Something worth counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A live message came too early: some before it are missing.
    Gap,
    /// What was missing, or had to be verified, is there.
    Recovered,
    /// The message on both sides of a replay's beginning agreed.
    Verified,
    /// So many messages cannot be had any more.
    Lost {
        /// Their number.
        messages: u64,
    },
    /// A message was dropped: it has been applied, or is held already.
    Duplicate,
    /// A message was dropped: it came behind its turn, or answers a replay that is over.
    Late,
    /// So many held messages were dropped, for a replay that follows brings them again or they are obsolete.
    Dropped {
        /// Their number.
        messages: u64,
    },
    /// A message was dropped that would have to be held, and there is no room; a replay brings it again.
    HeldOverflow,
    /// A message was dropped whose number is the end mark of replays.
    Refused,
    /// The publisher has begun to count anew.
    Incarnation,
    /// The rank is cold.
    Cold,
    /// It no longer is.
    Healed,
    /// A replay broke off, took too long, or left a hole.
    ReplayFailed,
}

impl Note {
    /// Its name in metrics.
    ///
    /// ```
    /// use pointsman::ingest::Note;
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
        }
    }

    /// How much to add to its count: messages where it speaks of several, else 1. At most [`u32::MAX`], for a publisher
    /// may make numbers up, and no counter shared with others shall wrap for it.
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
            | Self::ReplayFailed => 1,
        }
    }
}
