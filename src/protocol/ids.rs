//! Ids and hashes, each with a type of its own.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// One engine instance (vLLM, SGLang, ...), named by the embedder.
    WorkerId(u64)
}
id! {
    /// Content hash of one complete block of tokens, independent of the preceding ones. See [`crate::hashing`].
    BlockHash(u64)
}
id! {
    /// Hash of the whole prefix up to and including one block: equal sequence hashes mean equal prefixes. See
    /// [`crate::hashing`].
    SequenceHash(u64)
}
id! {
    /// The engine's name of a block in KV events. Opaque: not comparable between engines or with other hashes. Signed
    /// hashes on the wire are bit-cast.
    EngineHash(u64)
}
id! {
    /// Dense number of a rank inside one router. Reused after removal, with a new [`Generation`].
    Slot(u32)
}
id! {
    /// Incarnation of the occupant of a [`Slot`]. Messages for an earlier generation are ignored.
    Generation(u32)
}
id! {
    /// Number of one booking attempt, unique within one router and ascending by arrival.
    BookingId(u64)
}

impl Slot {
    /// The slot as an index in a dense table.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One data-parallel rank of a worker: the unit of indexing, load, selection, dispatch and metrics.
///
/// Ordered by worker, then rank; candidates always have this order.
///
/// ```
/// use pointsman::protocol::{WorkerId, WorkerRank};
///
/// let rank = WorkerRank::new(WorkerId(7), 1);
/// assert_eq!(rank.to_string(), "7/1");
/// assert!(rank > WorkerRank::new(WorkerId(7), 0));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerRank {
    /// The worker.
    pub worker: WorkerId,
    /// Its data-parallel rank, counted from the worker's start rank.
    pub rank: u32,
}

impl WorkerRank {
    /// Rank `rank` of `worker`.
    #[must_use]
    pub const fn new(worker: WorkerId, rank: u32) -> Self {
        Self { worker, rank }
    }
}

impl fmt::Display for WorkerRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.rank)
    }
}
