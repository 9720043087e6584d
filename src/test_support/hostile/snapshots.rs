//! Target of the snapshot decoder.

use std::num::NonZeroU32;

use crate::ingest::SourcePosition;
use crate::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock};
use crate::snapshot::{RankSnapshot, Snapshot, SnapshotLayout};
use crate::test_support::rank;
use crate::wire::{DecoderState, GroupRecord, NamespaceRecord};

/// A decoded snapshot encodes to bytes that decode to the same snapshot.
///
/// The last eight bytes are a checksum. The target also decodes the input with a valid checksum, because random inputs
/// would never pass it.
pub fn snapshot(bytes: &[u8]) {
    checked(bytes);
    if let Some((contents, _)) = bytes.split_last_chunk::<8>() {
        let sum = xxhash_rust::xxh3::xxh3_64(contents).to_le_bytes();
        checked(&[contents, &sum].concat());
    }
}

fn checked(bytes: &[u8]) {
    let Ok(decoded) = Snapshot::decode(bytes) else { return };
    let again = Snapshot::decode(&decoded.encode());
    assert_eq!(again.as_ref(), Ok(&decoded), "the encoded snapshot differs");
    assert!(decoded.block_count() <= bytes.len(), "more blocks than bytes");
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let layout = SnapshotLayout::new("llama", NonZeroU32::MIN, false);
    let stored = KvEvent::Stored {
        parent: None,
        blocks: vec![StoredBlock { engine_hash: EngineHash(5), block_hash: BlockHash(6) }; 3],
    };
    let events = [
        stored,
        KvEvent::Removed { blocks: vec![EngineHash(9)] },
        KvEvent::Cleared,
        KvEvent::GroupStored {
            group: 1,
            window_blocks: NonZeroU32::MIN,
            starts_prompt: true,
            blocks: vec![EngineHash(5)],
        },
        KvEvent::GroupRemoved { group: 1, blocks: vec![EngineHash(5)] },
    ];
    let of = |worker: u64| RankSnapshot {
        rank: rank(worker),
        endpoint: "http://10.0.0.1:8000".to_owned(),
        position: SourcePosition { next: 70, payload_hashes: vec![1, 2, 3], cold: None },
        decoder: DecoderState {
            has_connector: true,
            identities: vec![(3, 4)],
            groups: vec![GroupRecord { group: 1, window_blocks: 8, is_main: false }],
            namespaces: vec![NamespaceRecord { engine_hash: EngineHash(5), lora: 1, salt: 2, holds: [1, 0, 2, 0, 1] }],
        },
        events: events
            .iter()
            .map(|data| RouterEvent { rank: rank(worker), tier: StorageTier::Device, data: data.clone() })
            .collect(),
        evicted_blocks: 4,
    };
    let snapshots = [
        Snapshot { layout: layout.clone(), created_ms: 1, ranks: Vec::new() },
        Snapshot { layout, created_ms: 1_700_000_000_000, ranks: vec![of(1), of(2)] },
    ];
    snapshots.iter().map(Snapshot::encode).collect()
}
