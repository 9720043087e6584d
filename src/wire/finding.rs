//! What was odd about a batch: typed causes, their counts, and the report of one batch.
//!
//! Owns the list of causes and their names, which are label values of a metric. Promises that counting allocates
//! nothing. Leaves what follows from a cause to who reads the stream.

use std::fmt;
use std::ops::AddAssign;

macro_rules! findings {
    ($($(#[$doc:meta])* $cause:ident = $name:literal,)*) => {
        /// Why an event, a part of one, or a batch was not used, or what was guessed about it.
        ///
        /// ```
        /// assert_eq!(pointsman::wire::Finding::UnknownMedium.name(), "unknown_medium");
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Finding {
            $($(#[$doc])* $cause,)*
        }

        impl Finding {
            /// Every cause, in the order of their counts.
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
    /// The bytes end inside an item: the rest of the batch is lost.
    Truncated = "truncated",
    /// A marker that msgpack does not have: the rest of the batch is lost.
    Malformed = "malformed",
    /// More bytes, events, hashes, tokens or keys than the limits allow: that event or batch is refused.
    TooLarge = "too_large",
    /// Nested deeper than the limits allow: that event is refused.
    TooDeep = "too_deep",
    /// An item of a type that cannot stand there.
    WrongType = "wrong_type",
    /// A batch or event without an item that it must have.
    WrongShape = "wrong_shape",
    /// An event whose tag nobody knows.
    UnknownEvent = "unknown_event",
    /// A block hash that is none: the blocks of a store from there on, or that one removal.
    BadHash = "bad_hash",
    /// A token id that is none: the blocks of a store from there on.
    BadToken = "bad_token",
    /// A store whose blocks are not of the pool's size.
    BlockSize = "block_size",
    /// A store with fewer tokens than its blocks need: the blocks that miss some are refused.
    TokensMissing = "tokens_missing",
    /// Token ids where the pool hashes EAGLE pairs, or pairs where it does not.
    Eagle = "eagle",
    /// A storage medium that nobody knows.
    UnknownMedium = "unknown_medium",
    /// Blocks of a cache group that is not the main attention's.
    NotMainAttention = "not_main_attention",
    /// Blocks that lie elsewhere than at the engine that tells of them.
    NonLocal = "non_local",
    /// Extra keys of which several could be the salt: used, in a namespace of their own.
    AmbiguousNamespace = "ambiguous_namespace",
    /// Extra keys of an unknown kind: used, in a namespace of their own.
    UnknownNamespace = "unknown_namespace",
    /// An adapter's number without its name: used, in a namespace of its own.
    UnnamedLora = "unnamed_lora",
    /// More blocks in namespaces than are remembered: the store is refused.
    NamespacesFull = "namespaces_full",
    /// A batch of another rank than the stream's: refused.
    ForeignRank = "foreign_rank",
    /// A time that is no number: ignored.
    NotFinite = "not_finite",
    /// Bytes behind the batch: ignored.
    TrailingBytes = "trailing_bytes",
}

impl Finding {
    /// Whether nobody can tell where the next item begins.
    pub(super) fn ends_batch(self) -> bool {
        matches!(self, Self::Truncated | Self::Malformed)
    }
}

/// Counts by cause.
///
/// ```
/// use pointsman::wire::{Finding, Findings};
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
    /// Counts one.
    pub fn add(&mut self, finding: Finding) {
        self.counts[finding as usize] += 1;
    }

    pub(super) fn add_many(&mut self, finding: Finding, count: u64) {
        self.counts[finding as usize] += count;
    }

    /// How often it was found.
    #[must_use]
    pub fn get(&self, finding: Finding) -> u64 {
        self.counts[finding as usize]
    }

    /// Whether nothing was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }

    /// What was found, and how often.
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

/// What came of one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Events that the batch says it has.
    pub events: u32,
    /// Events that were read and, where they say something, used at least in part.
    pub usable: u32,
    /// Blocks of the stores that were used.
    pub stored_blocks: u32,
    /// Whether the rank's whole cache was dropped by one of the events.
    pub cleared: bool,
    /// What was odd.
    pub findings: Findings,
    /// The engine's block size in tokens, where it is not the pool's.
    pub engine_block_size: Option<u32>,
    /// The rank that the batch says it is of, where that is not the stream's.
    pub foreign_rank: Option<u32>,
}
