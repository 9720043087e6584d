//! State of a decoder between two batches, for snapshots.

use crate::protocol::EngineHash;

/// Everything that a [`Decoder`](super::Decoder) remembers of earlier batches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecoderState {
    /// Cache groups 0 to 63 known as main attention, one bit each.
    pub main_groups: u64,
    /// Cache groups 0 to 63 known as another attention type, one bit each.
    pub other_groups: u64,
    /// Whether a connector has announced blocks in a lower tier.
    pub has_connector: bool,
    /// Blocks outside the default namespace, sorted by engine hash.
    pub namespaces: Vec<NamespaceRecord>,
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
    /// Number of copies in each tier, in the order of [`StorageTier::ALL`](crate::protocol::StorageTier::ALL).
    pub holds: [u32; 4],
}
