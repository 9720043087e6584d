//! Bytes of a snapshot, with version and checksum; other bytes are errors.

use xxhash_rust::xxh3::xxh3_64;

use super::error::SnapshotError;
use super::types::{RankSnapshot, Snapshot, SnapshotLayout};
use super::{MAGIC, VERSION};
use crate::ingest::{ColdPosition, DegradationReason, SourcePosition};
use crate::protocol::{KvEvent, RouterEvent, StorageTier, StoredBlock};
use crate::record::bytes::{Reader, Recorded, put_list, put_number, put_text, put_word, recorded, recorded_variants};
use crate::wire::{DecoderState, GroupRecord, NamespaceRecord};

impl Snapshot {
    /// The snapshot as bytes: about 16 per block.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Vec::with_capacity(self.block_count() * 17 + self.ranks.len() * 640 + 64);
        to.extend_from_slice(MAGIC);
        to.extend_from_slice(&VERSION.to_le_bytes());
        put_text(&mut to, &self.layout.pool);
        (self.layout.block_size, self.layout.is_eagle).put(&mut to);
        put_word(&mut to, self.layout.hash_seed);
        put_number(&mut to, self.created_ms);
        self.ranks.put(&mut to);
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
        let mut from = Reader::new(contents);
        let is_sorted = |snapshot: &Self| snapshot.ranks.is_sorted_by(|one, next| one.rank < next.rank);
        let snapshot = read(&mut from).filter(|snapshot| from.is_empty() && is_sorted(snapshot));
        snapshot.ok_or(SnapshotError::Malformed)
    }
}

fn read(from: &mut Reader<'_>) -> Option<Snapshot> {
    let pool = Recorded::read(from)?;
    let (block_size, is_eagle) = Recorded::read(from)?;
    let layout = SnapshotLayout { pool, block_size, is_eagle, hash_seed: from.word()? };
    Some(Snapshot { layout, created_ms: from.number()?, ranks: Recorded::read(from)? })
}

impl Recorded for RankSnapshot {
    fn put(&self, to: &mut Vec<u8>) {
        self.rank.put(to);
        self.endpoint.put(to);
        self.position.put(to);
        self.decoder.put(to);
        put_list(to, &self.events, |to, event| {
            event.tier.put(to);
            event.data.put(to);
        });
        put_number(to, self.evicted_blocks);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        let rank = Recorded::read(from)?;
        let event = |from: &mut Reader<'_>| {
            Some(RouterEvent { rank, tier: Recorded::read(from)?, data: Recorded::read(from)? })
        };
        Some(Self {
            rank,
            endpoint: Recorded::read(from)?,
            position: Recorded::read(from)?,
            decoder: Recorded::read(from)?,
            events: from.list(event)?,
            evicted_blocks: from.number()?,
        })
    }
}

impl Recorded for SourcePosition {
    fn put(&self, to: &mut Vec<u8>) {
        put_number(to, self.next);
        put_list(to, &self.payload_hashes, |to, hash| put_word(to, *hash));
        self.cold.put(to);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        let (next, payload_hashes) = (from.number()?, from.list(Reader::word)?);
        let hashes = payload_hashes.len();
        let is_valid = (1..=Self::HASHES_MAX).contains(&hashes) && (hashes as u64..u64::MAX).contains(&next);
        is_valid.then_some(Self { next, payload_hashes, cold: Recorded::read(from)? })
    }
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

impl Recorded for DecoderState {
    fn put(&self, to: &mut Vec<u8>) {
        self.groups.put(to);
        self.has_connector.put(to);
        put_list(to, &self.identities, |to, (name, identity)| {
            put_word(to, *name);
            put_word(to, *identity);
        });
        self.namespaces.put(to);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            groups: Recorded::read(from)?,
            has_connector: Recorded::read(from)?,
            identities: from.list(|from| Some((from.word()?, from.word()?)))?,
            namespaces: Recorded::read(from)?,
        })
    }
}

impl Recorded for NamespaceRecord {
    fn put(&self, to: &mut Vec<u8>) {
        [self.engine_hash.0, self.lora, self.salt].into_iter().for_each(|word| put_word(to, word));
        self.holds.put(to);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        let (engine_hash, lora, salt) = (Recorded::read(from)?, from.word()?, from.word()?);
        let holds = Recorded::read(from)?;
        (holds != [0; 5]).then_some(Self { engine_hash, lora, salt, holds })
    }
}

recorded! {
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
