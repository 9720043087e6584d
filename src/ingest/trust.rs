//! How far what is known of a rank may be trusted, and what is wrong where it may not.
//!
//! Owns the words and the credit. Promises that every state but [`Trust::Live`] and [`Trust::Recovering`] comes with a
//! [`Doubt`] that says what to look at. Leaves to the source which state holds.

use std::fmt;

/// How far the blocks that a rank is known to hold may be trusted.
///
/// ```
/// use pointsman::ingest::Trust;
///
/// assert_eq!(Trust::Recovering.name(), "recovering");
/// assert!(Trust::Recovering.credit() < Trust::Cold.credit());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Everything that the publisher has said is known.
    Live,
    /// Something is missing or unverified, and has been asked for.
    Recovering,
    /// Something was lost for good. The rank's blocks were dropped then: what is known has come since.
    Cold,
    /// What the publisher says cannot be used.
    Mismatched,
    /// There is no connection, or nothing has ever been published though the engine serves requests.
    Silent,
}

impl Trust {
    /// All states, best first.
    pub const ALL: [Self; 5] = [Self::Live, Self::Recovering, Self::Cold, Self::Mismatched, Self::Silent];

    /// Its name in metrics and logs.
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

    /// What share of the rank's overlap counts, 0 to 1.
    ///
    /// A cold rank has full credit, for what is known of it is true, only not all there is. A gap, however, hides
    /// removals as well as stores: while it lasts most of what is known still holds, but less is sure. Of a rank that
    /// cannot be understood or heard nothing is known to hold.
    #[must_use]
    pub const fn credit(self) -> f64 {
        match self {
            Self::Live | Self::Cold => 1.0,
            Self::Recovering => 0.75,
            Self::Mismatched | Self::Silent => 0.0,
        }
    }
}

/// What is wrong with a source; displayed, what to look at.
///
/// ```
/// use pointsman::ingest::Doubt;
///
/// let doubt = Doubt::BlockSize { engine: 16, pool: Some(64) };
/// assert!(doubt.to_string().contains("--block-size"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// There is no connection to the publisher.
    NotConnected {
        /// For how long.
        for_ms: u64,
    },
    /// It is connected and has never published anything, though its engine has served prompts.
    NeverPublished {
        /// For how long.
        for_ms: u64,
    },
    /// The engine cuts its blocks otherwise than the pool.
    BlockSize {
        /// Tokens per block of the engine.
        engine: u32,
        /// Tokens per block of the pool, where the source was told.
        pool: Option<u32>,
    },
    /// The messages are another rank's.
    ForeignRank {
        /// The data-parallel rank that they name.
        found: u32,
    },
    /// No event of the last batches could be used.
    Undecodable {
        /// How many batches in a row.
        batches: u32,
    },
    /// The publisher no longer has what was missing.
    ReplayGap {
        /// First message asked for.
        from: u64,
        /// First message it still had.
        first: u64,
    },
    /// A replay ended and messages between others were not in it.
    ReplayHole {
        /// First message that is missing.
        from: u64,
    },
    /// A replay failed or took too long, twice.
    ReplayFailed {
        /// First message that is missing.
        from: u64,
    },
    /// Messages are missing and there is no replay socket to ask.
    NoReplay {
        /// First message that is missing.
        from: u64,
    },
    /// What reads the messages has failed again and again, and is left alone.
    ReaderDied {
        /// How often, in a short time.
        deaths: u32,
    },
}

impl Doubt {
    /// Its name in metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotConnected { .. } => "not_connected",
            Self::NeverPublished { .. } => "never_published",
            Self::BlockSize { .. } => "block_size",
            Self::ForeignRank { .. } => "foreign_rank",
            Self::Undecodable { .. } => "undecodable",
            Self::ReplayGap { .. } => "replay_gap",
            Self::ReplayHole { .. } => "replay_hole",
            Self::ReplayFailed { .. } => "replay_failed",
            Self::NoReplay { .. } => "no_replay",
            Self::ReaderDied { .. } => "reader_died",
        }
    }
}

impl fmt::Display for Doubt {
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
            Self::BlockSize { engine, pool: Some(pool) } => {
                write!(
                    f,
                    "the engine's block size is {engine}, the pool's is {pool}: start one with the other's --block-size"
                )
            }
            Self::BlockSize { engine, pool: None } => {
                write!(
                    f,
                    "the engine's block size is {engine}, not the pool's: start one with the other's --block-size"
                )
            }
            Self::ForeignRank { found } => write!(
                f,
                "the messages name data-parallel rank {found}: check the base port (each rank publishes at the base \
                 port plus its number) and the worker's start rank"
            ),
            Self::Undecodable { batches } => write!(
                f,
                "no event of the last {batches} batches could be used: check the topic, and whether something else \
                 than KV events is published there, or in a format that is not known"
            ),
            Self::ReplayGap { from, first } => write!(
                f,
                "messages from {from} were asked for and the publisher has them from {first} only: give it a larger \
                 replay buffer (buffer_steps)"
            ),
            Self::ReplayHole { from } => {
                write!(f, "message {from} is missing and replays end without it: check what stands between")
            }
            Self::ReplayFailed { from } => write!(
                f,
                "message {from} is missing and the replay socket failed or did not answer, twice: check the replay \
                 endpoint and that this rank's port is the base port plus the rank"
            ),
            Self::NoReplay { from } => write!(
                f,
                "what came from message {from} on was missed and there is no replay socket to ask: start the engine \
                 with a replay endpoint and name it here"
            ),
            Self::ReaderDied { deaths } => write!(
                f,
                "the reader of its messages died {deaths} times within a minute and is not started again: remove the \
                 worker and add it again to try once more, and report what the log says of it"
            ),
        }
    }
}
