//! Decoder of snapshots.

use std::num::NonZeroU32;

use xxhash_rust::xxh3::xxh3_64;

use super::bytes::Reader;
use super::error::SnapshotError;
use super::types::{RankSnapshot, Snapshot, SnapshotLayout};
use super::{CHECKSUM_BYTES, GROUP_REMOVED, GROUP_STORED, MAGIC, VERSION};
use crate::ingest::{ColdPosition, DegradationReason, SourcePosition};
use crate::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerId, WorkerRank};
use crate::wire::{DecoderState, GroupRecord, NamespaceRecord};

impl Snapshot {
    /// Decodes a snapshot. The layout is not compared: see [`Snapshot::check_layout`].
    ///
    /// # Errors
    /// Bytes that [`Snapshot::encode`] of this version does not produce, damaged ones included.
    pub fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            return Err(SnapshotError::Magic { found: bytes[..bytes.len().min(MAGIC.len())].to_vec() });
        };
        let found = Reader::new(rest).u32("the format version")?;
        if found != VERSION {
            return Err(SnapshotError::Version { found, supported: VERSION });
        }
        let (contents, checksum) =
            bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(SnapshotError::Truncated { field: "the checksum" })?;
        let (found, computed) = (u64::from_le_bytes(*checksum), xxh3_64(contents));
        if found != computed {
            return Err(SnapshotError::Checksum { found, computed });
        }
        let mut reader = Reader::new(contents);
        reader.take(MAGIC.len() + size_of::<u32>(), "the format version")?;
        let snapshot = snapshot(&mut reader)?;
        match reader.bytes_left() {
            0 => Ok(snapshot),
            left => {
                let (field, rule) = ("the number of bytes behind the last rank", "0");
                Err(SnapshotError::Value { field, value: left as u64, rule })
            }
        }
    }
}

fn snapshot(reader: &mut Reader<'_>) -> Result<Snapshot, SnapshotError> {
    let pool = reader.text("the pool")?;
    let block_size = reader.u32("the block size")?;
    let is_eagle = flag(reader.u8("EAGLE")?, "EAGLE")?;
    let hash_seed = reader.u64("the hash seed")?;
    let created_ms = reader.u64("the time of creation")?;
    let layout = SnapshotLayout { pool, block_size, is_eagle, hash_seed };
    let mut ranks: Vec<RankSnapshot> = Vec::new();
    for _ in 0..reader.length(RANK_BYTES_MIN, "the number of ranks")? {
        let next = rank(reader)?;
        if ranks.last().is_some_and(|last| last.rank >= next.rank) {
            let (field, rule) = ("a worker", "behind the preceding one, or have a higher data-parallel rank");
            return Err(SnapshotError::Value { field, value: next.rank.worker.0, rule });
        }
        ranks.push(next);
    }
    Ok(Snapshot { layout, created_ms, ranks })
}

/// Bytes of a rank with the fewest: worker, data-parallel rank, endpoint, next, hashes, cold, groups, connector, identities,
/// namespaces, events, evicted blocks.
const RANK_BYTES_MIN: usize = 8 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1;

fn rank(reader: &mut Reader<'_>) -> Result<RankSnapshot, SnapshotError> {
    let worker = WorkerId(reader.u64("a worker")?);
    let rank = WorkerRank::new(worker, reader.varint_u32("a data-parallel rank")?);
    let endpoint = reader.text("an endpoint")?;
    let position = position(reader)?;
    let groups = list(reader, 3, "the number of cache groups", group)?;
    let has_connector = flag(reader.u8("the connector")?, "the connector")?;
    let identity = |reader: &mut Reader<'_>| Ok((reader.u64("an adapter")?, reader.u64("an identity")?));
    let identities = list(reader, 8 * 2, "the number of identities", identity)?;
    let namespaces = list(reader, 8 * 3 + 4, "the number of namespaces", namespace)?;
    let decoder = DecoderState { groups, has_connector, identities, namespaces };
    let events = list(reader, 1, "the number of events", |reader| event(reader, rank))?;
    let evicted_blocks = reader.varint("the number of evicted blocks")?;
    Ok(RankSnapshot { rank, endpoint, position, decoder, events, evicted_blocks })
}

fn position(reader: &mut Reader<'_>) -> Result<SourcePosition, SnapshotError> {
    let field = "the next sequence number";
    let next = reader.varint(field)?;
    if next == 0 || next == u64::MAX {
        return Err(SnapshotError::Value { field, value: next, rule: "1 to 2^64 - 2" });
    }
    let field = "the number of payload hashes";
    let payload_hashes = list(reader, 8, field, |reader| reader.u64("a payload hash"))?;
    let hashes = payload_hashes.len() as u64;
    if hashes == 0 || hashes > SourcePosition::HASHES_MAX as u64 || hashes > next {
        let rule = "1 to 64, and at most the next sequence number";
        return Err(SnapshotError::Value { field, value: hashes, rule });
    }
    Ok(SourcePosition { next, payload_hashes, cold: cold(reader)? })
}

fn cold(reader: &mut Reader<'_>) -> Result<Option<ColdPosition>, SnapshotError> {
    let field = "the cause of a loss";
    let tag = reader.u8(field)?;
    if tag == 0 {
        return Ok(None);
    }
    let (from, first) = (reader.varint("a lost message")?, reader.varint("an available message")?);
    if tag != 1 && first != 0 {
        let rule = "0 unless the cause is a replay gap";
        return Err(SnapshotError::Value { field: "an available message", value: first, rule });
    }
    let cause = match tag {
        1 => DegradationReason::ReplayGap { from, first },
        2 => DegradationReason::ReplayHole { from },
        3 => DegradationReason::ReplayFailed { from },
        4 => DegradationReason::NoReplay { from },
        other => return Err(SnapshotError::Value { field, value: u64::from(other), rule: "0 to 4" }),
    };
    Ok(Some(ColdPosition { stored_blocks: reader.varint("the blocks stored since a loss")?, cause }))
}

fn group(reader: &mut Reader<'_>) -> Result<GroupRecord, SnapshotError> {
    let group = reader.u8("a cache group")?;
    let is_main = flag(reader.u8("the main cache group")?, "the main cache group")?;
    Ok(GroupRecord { group, window_blocks: reader.varint_u32("the window of a cache group")?, is_main })
}

fn namespace(reader: &mut Reader<'_>) -> Result<NamespaceRecord, SnapshotError> {
    let engine_hash = EngineHash(reader.u64("an engine hash")?);
    let (lora, salt) = (reader.u64("an adapter")?, reader.u64("a salt")?);
    let mut holds = [0; 5];
    for holds in &mut holds {
        *holds = reader.varint_u32("the copies of a block")?;
    }
    if holds == [0; 5] {
        return Err(SnapshotError::Value { field: "the copies of a block", value: 0, rule: "at least 1 in all tiers" });
    }
    Ok(NamespaceRecord { engine_hash, lora, salt, holds })
}

fn event(reader: &mut Reader<'_>, rank: WorkerRank) -> Result<RouterEvent, SnapshotError> {
    let tag = reader.u8("the type of an event")?;
    if matches!(tag, GROUP_STORED..=GROUP_REMOVED) {
        return Ok(RouterEvent { rank, tier: StorageTier::Device, data: group_event(reader, tag)? });
    }
    let tier = StorageTier::ALL.get(usize::from(tag / 8)).copied().filter(|_| tag % 8 < 7);
    let Some(tier) = tier else {
        let (field, value) = ("the type of an event", u64::from(tag));
        return Err(SnapshotError::Value { field, value, rule: "8 times a tier of 0 to 3, plus 0 to 6, or 32 to 34" });
    };
    let data = match tag % 8 {
        0 => KvEvent::Stored { parent: None, blocks: stored(reader)? },
        1 => {
            let parent = Some(EngineHash(reader.u64("a parent")?));
            KvEvent::Stored { parent, blocks: stored(reader)? }
        }
        2 => KvEvent::Removed { blocks: names(reader, "the number of removed blocks")? },
        3 => KvEvent::Cleared,
        4 => KvEvent::Offloaded { parent: None, blocks: offloaded(reader)? },
        5 => {
            let parent = Some(EngineHash(reader.u64("a parent")?));
            KvEvent::Offloaded { parent, blocks: offloaded(reader)? }
        }
        _ => KvEvent::TierCleared,
    };
    Ok(RouterEvent { rank, tier, data })
}

fn group_event(reader: &mut Reader<'_>, tag: u8) -> Result<KvEvent, SnapshotError> {
    let group = reader.u8("a cache group")?;
    if tag == GROUP_REMOVED {
        return Ok(KvEvent::GroupRemoved { group, blocks: names(reader, "the number of removed blocks")? });
    }
    let field = "the window of a cache group";
    let window_blocks = NonZeroU32::new(reader.varint_u32(field)?);
    let window_blocks = window_blocks.ok_or(SnapshotError::Value { field, value: 0, rule: "at least 1" })?;
    let blocks = names(reader, "the number of stored blocks")?;
    Ok(KvEvent::GroupStored { group, window_blocks, starts_prompt: tag > GROUP_STORED, blocks })
}

fn names(reader: &mut Reader<'_>, field: &'static str) -> Result<Vec<EngineHash>, SnapshotError> {
    list(reader, 8, field, |reader| reader.u64("an engine hash").map(EngineHash))
}

fn stored(reader: &mut Reader<'_>) -> Result<Vec<StoredBlock>, SnapshotError> {
    list(reader, 16, "the number of stored blocks", |reader| {
        let engine_hash = EngineHash(reader.u64("an engine hash")?);
        Ok(StoredBlock { engine_hash, block_hash: BlockHash(reader.u64("a block hash")?) })
    })
}

fn offloaded(reader: &mut Reader<'_>) -> Result<Vec<(EngineHash, Option<BlockHash>)>, SnapshotError> {
    list(reader, 9, "the number of offloaded blocks", |reader| {
        let engine_hash = EngineHash(reader.u64("an engine hash")?);
        let is_hashed = flag(reader.u8("the content of a block")?, "the content of a block")?;
        let block_hash = if is_hashed { Some(BlockHash(reader.u64("a block hash")?)) } else { None };
        Ok((engine_hash, block_hash))
    })
}

/// A list whose elements have at least `element_bytes_min` bytes. The memory reserved in advance is bounded by the
/// bytes of the list, also for elements that need more memory than bytes.
fn list<T>(
    reader: &mut Reader<'_>,
    element_bytes_min: usize,
    field: &'static str,
    mut element: impl FnMut(&mut Reader<'_>) -> Result<T, SnapshotError>,
) -> Result<Vec<T>, SnapshotError> {
    let length = reader.length(element_bytes_min, field)?;
    let reserved = length.min(reader.bytes_left() / size_of::<T>().max(1));
    let mut elements = Vec::with_capacity(reserved);
    for _ in 0..length {
        elements.push(element(reader)?);
    }
    Ok(elements)
}

fn flag(value: u8, field: &'static str) -> Result<bool, SnapshotError> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(SnapshotError::Value { field, value: u64::from(other), rule: "0 or 1" }),
    }
}
