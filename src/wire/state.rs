//! State of a decoder between two batches, for snapshots.

use crate::protocol::EngineHash;

/// What a [`Decoder`](super::Decoder) remembers of earlier batches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecoderState {
    /// Cache groups of known type, in the order of their first events.
    pub groups: Vec<GroupRecord>,
    /// Whether a connector has announced blocks in a lower tier.
    pub has_connector: bool,
    /// Hashes of the name of each adapter and of the identity of its weights, sorted.
    pub identities: Vec<(u64, u64)>,
    /// Blocks outside the default namespace, sorted by engine hash.
    pub namespaces: Vec<NamespaceRecord>,
}

/// One cache group of known type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRecord {
    /// The engine's number of the group.
    pub group: u8,
    /// Blocks before the end of a hit that the group must hold; `u32::MAX` for full attention, 0 if unknown.
    pub window_blocks: u32,
    /// Whether the stores of the group build the prefix tree.
    pub is_main: bool,
}

/// One block outside the default namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceRecord {
    /// The engine's name of the block.
    pub engine_hash: EngineHash,
    /// Contribution of the adapter to the hash seed.
    pub lora: u64,
    /// Contribution of the salt and other keys to the hash seed.
    pub salt: u64,
    /// Number of copies in each tier, in the order of [`StorageTier::ALL`](crate::protocol::StorageTier::ALL), and 1 if the
    /// device may have another one.
    pub holds: [u32; 5],
}
