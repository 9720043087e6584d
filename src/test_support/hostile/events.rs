//! Target of the KV event decoder and of the index behind it.

use std::num::NonZeroU32;

use crate::index::{Applied, Index};
use crate::protocol::{Generation, KvEvent, RouterEvent, Slot, StorageTier, WorkerRank};
use crate::test_support::rank;
use crate::wire::{Decoder, DecoderLimits, WireConfig};

const RANK: WorkerRank = rank(7);

fn decoder_config(flags: u8) -> WireConfig {
    let block_size = NonZeroU32::new(4).expect("not zero");
    let ranks = 0..1 + u32::from(flags & 1);
    WireConfig { rank: RANK, ranks, block_size, is_eagle: flags & 2 != 0, limits: DecoderLimits::default() }
}

/// The first byte selects the configuration. The rest is one batch, which is decoded twice and applied to an index.
///
/// Counts of the report match the events, no block exists without bytes of its own, a decoder that continues from the
/// saved state decodes the same events, the index keeps its invariants, and `Cleared` empties it.
pub fn kv_events(bytes: &[u8]) {
    let Some((&flags, payload)) = bytes.split_first() else { return };
    let mut decoder = Decoder::new(decoder_config(flags));
    let mut events = Vec::new();
    let report = decoder.decode(payload, &mut events);
    let blocks: usize = events.iter().map(|event| event.data.block_count()).sum();
    // A lost removal clears a tier, or all.
    let is_used = |event: &&RouterEvent| report.lost_removals.is_none() || event.data != KvEvent::TierCleared;
    let used = events.iter().filter(is_used).count();
    assert!(used <= report.usable as usize && report.usable <= report.events, "{report:?}");
    assert!(blocks <= payload.len(), "{blocks} blocks from {} bytes", payload.len());
    let is_stored = |event: &&RouterEvent| matches!(event.data, KvEvent::Stored { .. });
    let stored: usize = events.iter().filter(is_stored).map(|event| event.data.block_count()).sum();
    assert_eq!(stored, report.stored_blocks as usize, "{report:?}");
    assert!(events.iter().all(|event| event.rank == RANK));

    let mut resumed = Decoder::resume(decoder_config(flags), &decoder.state());
    let (mut again, mut again_resumed) = (Vec::new(), Vec::new());
    let reports = (decoder.decode(payload, &mut again), resumed.decode(payload, &mut again_resumed));
    assert_eq!(reports.0, reports.1, "a resumed decoder differs");
    assert_eq!(again, again_resumed, "a resumed decoder differs");
    assert_eq!(decoder.state(), resumed.state(), "a resumed decoder differs");

    let mut index = Index::new();
    assert!(index.register(RANK, Slot(0), Generation(1)));
    let mut applied = Applied::default();
    for event in events.iter().chain(&again) {
        applied += index.apply(event);
    }
    index.check_invariants();
    assert_eq!(applied.unknown_ranks, 0);
    index.apply(&RouterEvent { rank: RANK, tier: StorageTier::Device, data: KvEvent::Cleared });
    index.check_invariants();
    assert_eq!(index.held_blocks(), 0, "blocks are left after a clear");
}

/// Batches of vLLM's layouts, with the byte of the configuration.
pub(super) fn seeds() -> Vec<Vec<u8>> {
    let head = b"\x93\xca\x3f\xc0\x00\x00"; // three items, the time 1.5
    let removed = b"\x93\xacBlockRemoved\x92\x11\xcd\x9c\x40\xa3GPU";
    // Hashes, parent, tokens, block size, adapter, medium.
    let stored = b"\x97\xabBlockStored\x92\x11\x12\xc0\x98\x01\x02\x03\x04\x05\x06\x07\x08\x04\xc0\xa3GPU";
    let child = b"\x97\xabBlockStored\x91\x13\x12\x94\x09\x01\x02\x03\x04\x07\xa3CPU";
    let map = b"\x85\xa4type\xabBlockStored\xacblock_hashes\x91\x15\xb1parent_block_hash\xc0\xa9token_ids\x94\x01\x02\x03\x04\xaablock_size\x04";
    let cleared = b"\x91\xb0AllBlocksCleared";
    let batch = |flags: u8, events: &[&[u8]]| {
        let count = 0x90 | u8::try_from(events.len()).expect("few events");
        [&[flags][..], head, &[count], &events.concat(), &[0]].concat()
    };
    vec![
        batch(0, &[stored, child, removed]),
        batch(1, &[stored, removed, cleared, child]),
        batch(2, &[map, stored]),
        batch(0, &[map, child, map]),
        batch(3, &[cleared]),
    ]
}
