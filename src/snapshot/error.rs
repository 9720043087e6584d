//! Reasons to refuse a snapshot.

/// Reason to refuse the bytes of a snapshot. Names the value and the rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// The bytes do not begin like a snapshot.
    #[error("the first bytes are {found:02x?}, must be {:02x?} (\"PMANSNAP\"): this is not a snapshot", super::MAGIC)]
    Magic {
        /// The first bytes, at most 8.
        found: Vec<u8>,
    },
    /// Another version of the format.
    #[error("the format version is {found}, must be {supported}")]
    Version {
        /// Version of the snapshot.
        found: u32,
        /// The supported version.
        supported: u32,
    },
    /// The contents are damaged or incomplete.
    #[error("the checksum is {found:016x}, must be {computed:016x}: the snapshot is damaged or incomplete")]
    Checksum {
        /// Checksum in the snapshot.
        found: u64,
        /// Checksum of its bytes.
        computed: u64,
    },
    /// The contents belong to a pool with other hashes.
    #[error("the {field} is {found}, must be {expected}: the snapshot belongs to a pool of another layout")]
    Layout {
        /// Field that differs.
        field: &'static str,
        /// Value in the snapshot.
        found: String,
        /// Value of the router.
        expected: String,
    },
    /// The bytes end early, or are none that [`encode`](super::Snapshot::encode) produces.
    #[error("the contents end early or break a rule of the format, although their checksum may be correct")]
    Malformed,
}

impl SnapshotError {
    /// Name in metrics: the rule that is broken.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Magic { .. } => "magic",
            Self::Version { .. } => "version",
            Self::Checksum { .. } => "checksum",
            Self::Layout { .. } => "layout",
            Self::Malformed => "malformed",
        }
    }
}
