//! Decoding findings: typed causes, their counts, and the report of one batch.
//!
//! Defines the causes and their metric label values. Counting allocates no memory. The reader of the stream decides on
//! the reaction to a cause.

use std::fmt;
use std::ops::AddAssign;

use crate::protocol::RouterEvent;

macro_rules! findings {
    ($($(#[$doc:meta])* $cause:ident = $name:literal,)*) => {
        /// Reason for which an event, a part of it, or a batch was rejected, or used in a separate namespace.
        ///
        /// ```
        /// assert_eq!(pointsman::internals::wire::Finding::UnknownMedium.name(), "unknown_medium");
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Finding {
            $($(#[$doc])* $cause,)*
        }

        impl Finding {
            /// Every cause, in the order of the counts.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$cause),*];

            /// The cause as a metric label.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$cause => $name,)*
                }
            }
        }
    };
}

findings! {
    /// The bytes end inside an item; the rest of the batch is lost.
    Truncated = "truncated",
    /// An undefined msgpack marker; the rest of the batch is lost.
    Malformed = "malformed",
    /// More bytes, events, hashes, tokens or keys than the limits allow; the event or batch is rejected.
    TooLarge = "too_large",
    /// Nested deeper than the limits allow; the event is rejected.
    TooDeep = "too_deep",
    /// An item of an unexpected type.
    WrongType = "wrong_type",
    /// A batch or event without a required item.
    WrongShape = "wrong_shape",
    /// An unknown event tag.
    UnknownEvent = "unknown_event",
    /// An invalid block hash; rejects the rest of the blocks of a store, or a single removal.
    BadHash = "bad_hash",
    /// An invalid token id; rejects the rest of the blocks of a store.
    BadToken = "bad_token",
    /// A store with a block size other than the pool's.
    BlockSize = "block_size",
    /// A store with too few tokens for its blocks; rejects the incomplete blocks.
    TokensMissing = "tokens_missing",
    /// Token ids in a pool that hashes EAGLE pairs.
    Eagle = "eagle",
    /// A store of parts of blocks behind an unknown one, so that their position in a block is unknown.
    UnknownPage = "unknown_page",
    /// An unknown storage medium.
    UnknownMedium = "unknown_medium",
    /// Blocks of a cache group that has no effect on hits.
    NotMainAttention = "not_main_attention",
    /// A store of a model without full attention; the blocks count while all of the prompt's blocks are held.
    NoMainAttention = "no_main_attention",
    /// Blocks at a location other than the publishing engine.
    NonLocal = "non_local",
    /// Several extra keys that could be the salt; used in a separate namespace.
    AmbiguousNamespace = "ambiguous_namespace",
    /// Extra keys of an unknown type; used in a separate namespace.
    UnknownNamespace = "unknown_namespace",
    /// An adapter number without its name; used in a separate namespace.
    UnnamedLora = "unnamed_lora",
    /// Blocks in namespaces exceed the limit; the store is rejected.
    NamespacesFull = "namespaces_full",
    /// A batch of a rank other than the stream's; rejected.
    ForeignRank = "foreign_rank",
    /// A timestamp that is not finite; ignored.
    NotFinite = "not_finite",
    /// Bytes after the batch; ignored.
    TrailingBytes = "trailing_bytes",
}

impl Finding {
    /// Whether blocks that the engine holds are then not found, without any other degradation.
    #[must_use]
    pub const fn costs_hits(self) -> bool {
        match self {
            Self::Truncated
            | Self::Malformed
            | Self::TooLarge
            | Self::TooDeep
            | Self::WrongType
            | Self::WrongShape
            | Self::UnknownEvent
            | Self::BadHash
            | Self::BadToken
            | Self::TokensMissing
            | Self::UnknownPage
            | Self::UnknownMedium
            | Self::AmbiguousNamespace
            | Self::UnknownNamespace
            | Self::UnnamedLora
            | Self::NamespacesFull => true,
            Self::BlockSize
            | Self::Eagle
            | Self::NotMainAttention
            | Self::NoMainAttention
            | Self::NonLocal
            | Self::ForeignRank
            | Self::NotFinite
            | Self::TrailingBytes => false,
        }
    }

    /// Whether the start of the next item is unknown.
    pub(super) fn ends_batch(self) -> bool {
        matches!(self, Self::Truncated | Self::Malformed)
    }
}

/// Counts by cause.
///
/// ```
/// use pointsman::internals::wire::{Finding, Findings};
///
/// let mut findings = Findings::default();
/// findings.add(Finding::BadHash);
/// assert_eq!(findings.iter().collect::<Vec<_>>(), [(Finding::BadHash, 1)]);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Findings {
    counts: [u64; Finding::ALL.len()],
}

impl Findings {
    /// The most frequent cause.
    #[must_use]
    pub fn main(&self) -> Option<Finding> {
        self.iter().max_by_key(|(_, count)| *count).map(|(finding, _)| finding)
    }

    /// Counts one finding.
    pub fn add(&mut self, finding: Finding) {
        self.counts[finding as usize] += 1;
    }

    pub(super) fn add_many(&mut self, finding: Finding, count: u64) {
        self.counts[finding as usize] += count;
    }

    /// Number of findings of a cause.
    #[must_use]
    pub fn get(&self, finding: Finding) -> u64 {
        self.counts[finding as usize]
    }

    /// Whether there are no findings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }

    /// Causes with a nonzero count.
    pub fn iter(&self) -> impl Iterator<Item = (Finding, u64)> + '_ {
        Finding::ALL.into_iter().zip(self.counts).filter(|(_, count)| *count > 0)
    }
}

impl AddAssign for Findings {
    fn add_assign(&mut self, other: Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
    }
}

impl fmt::Debug for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(finding, count)| (finding.name(), count))).finish()
    }
}

/// Reason for which a store of tokens in device memory is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMismatch {
    /// Another block size than the pool's, in tokens.
    BlockSize(u32),
    /// Token ids in a pool that hashes EAGLE pairs.
    Eagle,
    /// Invalid tokens or hashes.
    Invalid(Finding),
}

/// Result of decoding one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of events declared by the batch.
    pub events: u32,
    /// Events that were decoded and, unless they have no effect, at least partly used.
    pub usable: u32,
    /// Blocks of the used stores in device memory.
    pub stored_blocks: u32,
    /// Block size of the engine, if its blocks are parts of the pool's.
    pub page_size: Option<u32>,
    /// Unusable events that prove nothing about the blocks in device memory: of other tiers, cache groups and locations.
    pub side_events: u32,
    /// Why a removal could not be read, or a part of the batch that may have contained one. The blocks that it may have
    /// named are cleared.
    pub lost_removals: Option<Finding>,
    /// Why the last rejected store of tokens in device memory is unusable.
    pub mismatch: Option<StoreMismatch>,
    /// Whether an event cleared the rank's whole cache.
    pub cleared: bool,
    /// Findings of the batch.
    pub findings: Findings,
    /// The rank label of the batch, if it differs from the stream's rank.
    pub foreign_rank: Option<u32>,
}

/// Events and report of a batch.
pub(super) struct Output<'e> {
    pub(super) events: &'e mut Vec<RouterEvent>,
    /// Number of events before those of the batch.
    pub(super) n_before: usize,
    pub(super) report: Report,
}

impl Output<'_> {
    /// The events of the batch.
    pub(super) fn of_batch(&mut self) -> &mut [RouterEvent] {
        &mut self.events[self.n_before..]
    }
}
