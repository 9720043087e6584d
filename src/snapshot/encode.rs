//! Encoder of snapshots.

use xxhash_rust::xxh3::xxh3_64;

use super::types::{RankSnapshot, Snapshot};
use super::{CHECKSUM_BYTES, GROUP_REMOVED, GROUP_STORED, MAGIC, VERSION};
use crate::ingest::{ColdPosition, DegradationReason};
use crate::protocol::{EngineHash, KvEvent, RouterEvent, StorageTier};
use crate::record::bytes::{put_number, put_text, put_word};

impl Snapshot {
    /// The snapshot as bytes: about 16 per block.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Vec::with_capacity(self.block_count() * 17 + self.ranks.len() * 640 + 64);
        to.extend_from_slice(MAGIC);
        to.extend_from_slice(&VERSION.to_le_bytes());
        put_text(&mut to, &self.layout.pool);
        to.extend_from_slice(&self.layout.block_size.to_le_bytes());
        to.push(u8::from(self.layout.is_eagle));
        put_word(&mut to, self.layout.hash_seed);
        put_word(&mut to, self.created_ms);
        put_number(&mut to, self.ranks.len() as u64);
        for rank in &self.ranks {
            put_rank(&mut to, rank);
        }
        let checksum: [u8; CHECKSUM_BYTES] = xxh3_64(&to).to_le_bytes();
        to.extend_from_slice(&checksum);
        to
    }
}

fn put_rank(to: &mut Vec<u8>, rank: &RankSnapshot) {
    put_word(to, rank.rank.worker.0);
    put_number(to, u64::from(rank.rank.rank));
    put_text(to, &rank.endpoint);
    put_number(to, rank.position.next);
    put_number(to, rank.position.payload_hashes.len() as u64);
    for hash in &rank.position.payload_hashes {
        put_word(to, *hash);
    }
    put_cold(to, rank.position.cold);
    put_number(to, rank.decoder.groups.len() as u64);
    for record in &rank.decoder.groups {
        to.extend([record.group, u8::from(record.is_main)]);
        put_number(to, u64::from(record.window_blocks));
    }
    to.push(u8::from(rank.decoder.has_connector));
    put_number(to, rank.decoder.identities.len() as u64);
    rank.decoder.identities.iter().for_each(|(name, identity)| {
        put_word(to, *name);
        put_word(to, *identity);
    });
    put_number(to, rank.decoder.namespaces.len() as u64);
    for record in &rank.decoder.namespaces {
        put_word(to, record.engine_hash.0);
        put_word(to, record.lora);
        put_word(to, record.salt);
        for holds in record.holds {
            put_number(to, u64::from(holds));
        }
    }
    put_number(to, rank.events.len() as u64);
    for event in &rank.events {
        put_event(to, event);
    }
    put_number(to, rank.evicted_blocks);
}

/// Of the reasons, only the losses make a source cold. Any other one is encoded as a failed replay.
fn put_cold(to: &mut Vec<u8>, cold: Option<ColdPosition>) {
    let Some(ColdPosition { stored_blocks, cause }) = cold else { return to.push(0) };
    let (tag, from, first) = match cause {
        DegradationReason::ReplayGap { from, first } => (1, from, first),
        DegradationReason::ReplayHole { from } => (2, from, 0),
        DegradationReason::NoReplay { from } => (4, from, 0),
        DegradationReason::ReplayFailed { from } => (3, from, 0),
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
    put_number(to, from);
    put_number(to, first);
    put_number(to, stored_blocks);
}

fn put_event(to: &mut Vec<u8>, event: &RouterEvent) {
    let tier = match event.tier {
        StorageTier::Device => 0,
        StorageTier::HostPinned => 1,
        StorageTier::Disk => 2,
        StorageTier::External => 3,
    };
    match &event.data {
        KvEvent::Stored { parent, blocks } => {
            to.push(u8::from(parent.is_some()) + 8 * tier);
            if let Some(parent) = parent {
                put_word(to, parent.0);
            }
            put_number(to, blocks.len() as u64);
            for block in blocks {
                put_word(to, block.engine_hash.0);
                put_word(to, block.block_hash.0);
            }
        }
        KvEvent::Removed { blocks } => {
            to.push(2 + 8 * tier);
            put_names(to, blocks);
        }
        KvEvent::Cleared => to.push(3 + 8 * tier),
        KvEvent::Offloaded { parent, blocks } => {
            to.push(4 + u8::from(parent.is_some()) + 8 * tier);
            if let Some(parent) = parent {
                put_word(to, parent.0);
            }
            put_number(to, blocks.len() as u64);
            for (engine_hash, block_hash) in blocks {
                put_word(to, engine_hash.0);
                to.push(u8::from(block_hash.is_some()));
                if let Some(hash) = block_hash {
                    put_word(to, hash.0);
                }
            }
        }
        KvEvent::TierCleared => to.push(6 + 8 * tier),
        KvEvent::GroupStored { group, window_blocks, starts_prompt, blocks } => {
            to.extend([GROUP_STORED + u8::from(*starts_prompt), *group]);
            put_number(to, u64::from(window_blocks.get()));
            put_names(to, blocks);
        }
        KvEvent::GroupRemoved { group, blocks } => {
            to.extend([GROUP_REMOVED, *group]);
            put_names(to, blocks);
        }
    }
}

fn put_names(to: &mut Vec<u8>, names: &[EngineHash]) {
    put_number(to, names.len() as u64);
    names.iter().for_each(|name| put_word(to, name.0));
}
