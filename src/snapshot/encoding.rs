//! Bytes of a snapshot, with version and checksum; other bytes are errors.

use xxhash_rust::xxh3::xxh3_64;

use super::error::SnapshotError;
use super::types::{RankSnapshot, Snapshot, SnapshotLayout};
use super::{MAGIC, VERSION};
use crate::ingest::{ColdPosition, DegradationReason, SourcePosition};
use crate::protocol::{KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerRank};
use crate::record::bytes::{Reader, Recorded, put_number, put_word, recorded, recorded_variants};
use crate::wire::{DecoderState, GroupRecord, NamespaceRecord};

impl Snapshot {
    /// The snapshot as bytes: about 16 per block.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Vec::with_capacity(self.block_count() * 17 + self.ranks.len() * 640 + 64);
        to.extend_from_slice(MAGIC);
        to.extend_from_slice(&VERSION.to_le_bytes());
        self.put(&mut to);
        let checksum = xxh3_64(&to);
        put_word(&mut to, checksum);
        to
    }

    /// Decodes a snapshot. The layout is not compared: see [`Snapshot::check_layout`].
    ///
    /// # Errors
    /// Bytes that [`Snapshot::encode`] of this version does not produce, damaged ones included.
    pub fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            return Err(SnapshotError::Magic { found: bytes[..bytes.len().min(MAGIC.len())].to_vec() });
        };
        let (version, rest) = rest.split_first_chunk().ok_or(SnapshotError::Malformed)?;
        let found = u32::from_le_bytes(*version);
        if found != VERSION {
            return Err(SnapshotError::Version { found, supported: VERSION });
        }
        let (contents, checksum) = rest.split_last_chunk().ok_or(SnapshotError::Malformed)?;
        let checked = &bytes[..bytes.len() - checksum.len()];
        let (found, computed) = (u64::from_le_bytes(*checksum), xxh3_64(checked));
        if found != computed {
            return Err(SnapshotError::Checksum { found, computed });
        }
        let mut from = Reader::with_any_numbers(contents);
        let read = Self::read(&mut from).filter(|snapshot| from.is_empty() && is_valid(snapshot));
        let mut snapshot = read.ok_or(SnapshotError::Malformed)?;
        for RankSnapshot { rank, events, .. } in &mut snapshot.ranks {
            events.iter_mut().for_each(|event| event.rank = *rank);
        }
        Ok(snapshot)
    }
}

fn is_valid(snapshot: &Snapshot) -> bool {
    snapshot.ranks.is_sorted_by(|one, next| one.rank < next.rank)
        && snapshot.ranks.iter().all(|RankSnapshot { position, decoder, .. }| {
            let hashes = position.payload_hashes.len();
            (1..=SourcePosition::HASHES_MAX).contains(&hashes)
                && (hashes as u64..u64::MAX).contains(&position.next)
                && decoder.namespaces.iter().all(|record| record.holds != [0; 5])
        })
}

impl Recorded for ColdPosition {
    fn put(&self, to: &mut Vec<u8>) {
        let (tag, from, first) = match self.cause {
            DegradationReason::ReplayGap { from, first } => (1, from, first),
            DegradationReason::ReplayHole { from } => (2, from, 0),
            DegradationReason::NoReplay { from } => (4, from, 0),
            DegradationReason::ReplayFailed { from } => (3, from, 0),
            // Only the losses make a source cold.
            DegradationReason::NotConnected { .. }
            | DegradationReason::NeverPublished { .. }
            | DegradationReason::BlockSize { .. }
            | DegradationReason::ForeignRank { .. }
            | DegradationReason::Eagle
            | DegradationReason::Undecodable { .. }
            | DegradationReason::LostRemoval { .. }
            | DegradationReason::ReaderDied { .. } => (3, 0, 0),
        };
        to.push(tag);
        [from, first, self.stored_blocks].into_iter().for_each(|number| put_number(to, number));
    }

    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let (tag, from, first) = (reader.u8()?, reader.number()?, reader.number()?);
        let cause = match (tag, first) {
            (1, first) => DegradationReason::ReplayGap { from, first },
            (2, 0) => DegradationReason::ReplayHole { from },
            (3, 0) => DegradationReason::ReplayFailed { from },
            (4, 0) => DegradationReason::NoReplay { from },
            _ => return None,
        };
        Some(Self { stored_blocks: reader.number()?, cause })
    }
}

recorded! {
    Snapshot { layout, created_ms, ranks }
    SnapshotLayout { pool, block_size, is_eagle, hash_seed }
    RankSnapshot { rank, endpoint, position, decoder, events, evicted_blocks }
    RouterEvent { tier, data; rank: WorkerRank::default() }
    SourcePosition { next, payload_hashes, cold }
    DecoderState { groups, has_connector, identities, namespaces }
    NamespaceRecord { engine_hash, lora, salt, holds }
    GroupRecord { group, is_main, window_blocks }
    StoredBlock { engine_hash, block_hash }
}

recorded_variants! {
    StorageTier { 0 => Device {} 1 => HostPinned {} 2 => Disk {} 3 => External {} }
    KvEvent {
        0 => Stored { parent, blocks }
        1 => Removed { blocks }
        2 => Offloaded { parent, blocks }
        3 => Cleared {}
        4 => TierCleared {}
        5 => GroupStored { group, window_blocks, starts_prompt, blocks }
        6 => GroupRemoved { group, blocks }
    }
}
