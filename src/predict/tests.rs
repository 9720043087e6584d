use super::*;
use crate::protocol::{EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerId};

const SLOT: Slot = Slot(0);
const NOW: Timestamp = Timestamp(0);

fn rank() -> WorkerRank {
    WorkerRank::new(WorkerId(1), 0)
}

fn entry(blocks: impl IntoIterator<Item = u64>, private_blocks: u32) -> SpeculativePrompt {
    SpeculativePrompt { hashes: blocks.into_iter().map(BlockHash).collect(), private_blocks }
}

fn depth(predictions: &SpeculativePrompts, prompt: &SpeculativePrompt) -> u32 {
    let mut overlaps = Overlaps::default();
    predictions.merge_into(&prompt.hashes, &mut overlaps);
    overlaps.hits().first().map_or(0, |hit| hit.device_blocks)
}

fn modelled(capacity: u32) -> SpeculativePrompts {
    let mut predictions =
        SpeculativePrompts::new(SpeculationModel::Lru { fallback_ttl: Duration::from_secs(120) }, 1 << 20);
    predictions.register(rank(), SLOT, Generation(1), Some(capacity));
    predictions
}

fn book(predictions: &mut SpeculativePrompts, booking: u64, entry: &SpeculativePrompt) {
    predictions.routed(SLOT, Generation(1), Some(BookingId(booking)), entry, &Index::new(), NOW);
    predictions.check_invariants();
}

#[test]
fn eviction_starts_with_the_oldest_release_and_the_deepest_block() {
    let mut predictions = modelled(10);
    let (old, new) = (entry(0..4, 1), entry(10..14, 0));
    book(&mut predictions, 1, &old);
    book(&mut predictions, 2, &new);
    predictions.released(BookingId(1), NOW);
    predictions.released(BookingId(2), NOW);
    assert_eq!((depth(&predictions, &old), depth(&predictions, &new)), (4, 4), "9 of 10 blocks");
    book(&mut predictions, 3, &entry(20..24, 0));
    assert_eq!(depth(&predictions, &old), 2, "its private block and two of its own are evicted");
    predictions.output_blocks(BookingId(3), 3);
    assert_eq!((depth(&predictions, &old), depth(&predictions, &new)), (0, 3));
    assert_eq!(predictions.counts().evicted, 5);
}

#[test]
fn blocks_in_use_stay_over_capacity() {
    let mut predictions = modelled(4);
    let (a, b) = (entry(0..4, 0), entry(10..14, 0));
    book(&mut predictions, 1, &a);
    book(&mut predictions, 2, &b);
    assert_eq!((depth(&predictions, &a), depth(&predictions, &b)), (4, 4));
    predictions.released(BookingId(1), NOW);
    assert_eq!((depth(&predictions, &a), depth(&predictions, &b)), (0, 4));
}

/// If the prompt were remembered both directly and at the release of its booking, its LRU entry would exist twice and
/// eviction would not terminate.
#[test]
fn a_prompt_in_use_is_remembered_once() {
    let mut predictions = modelled(4);
    let prompt = entry(0..4, 0);
    book(&mut predictions, 1, &prompt);
    predictions.routed(SLOT, Generation(1), None, &prompt, &Index::new(), NOW);
    predictions.released(BookingId(1), NOW);
    predictions.check_invariants();
    book(&mut predictions, 2, &entry(10..14, 0));
    assert_eq!(depth(&predictions, &prompt), 0);
}

#[test]
fn events_confirm_and_retract_and_expiry_counts_wrong_blocks() {
    let ttl = Duration::from_secs(5);
    let (mut predictions, mut index) =
        (SpeculativePrompts::new(SpeculationModel::BesideEvents { ttl }, 1 << 20), Index::new());
    predictions.register(rank(), SLOT, Generation(1), None);
    index.register(rank(), SLOT, Generation(1));
    let mut apply = |predictions: &mut SpeculativePrompts, data| {
        let event = RouterEvent { rank: rank(), tier: StorageTier::Device, data };
        index.apply(&event);
        predictions.observe(&event, &index);
        predictions.check_invariants();
    };
    let stored = |blocks: std::ops::Range<u64>| KvEvent::Stored {
        parent: blocks.start.checked_sub(1).map(EngineHash),
        blocks: blocks.map(|n| StoredBlock { engine_hash: EngineHash(n), block_hash: BlockHash(n) }).collect(),
    };
    let unknown = Index::new();
    let (whole, sibling) = (entry(0..6, 0), entry((0..4).chain(20..23), 0));
    predictions.routed(SLOT, Generation(1), None, &whole, &unknown, NOW);
    predictions.routed(SLOT, Generation(1), None, &sibling, &unknown, NOW);
    apply(&mut predictions, stored(0..6));
    assert_eq!(
        (predictions.counts().confirmed, predictions.speculative_blocks()),
        (2, 7),
        "the sibling needs the rest"
    );
    apply(&mut predictions, KvEvent::Removed { blocks: vec![EngineHash(3)] });
    assert_eq!(predictions.counts().retracted, 7);
    predictions.routed(SLOT, Generation(1), None, &entry(30..34, 0), &unknown, NOW);
    apply(
        &mut predictions,
        KvEvent::Stored {
            parent: None,
            blocks: vec![StoredBlock { engine_hash: EngineHash(30), block_hash: BlockHash(30) }],
        },
    );
    predictions.expire(NOW + ttl);
    let SpeculationCounts { speculated, confirmed, wrong, .. } = predictions.counts();
    assert_eq!((speculated, confirmed, wrong), (13, 3, 3), "one of four was right");
}

#[test]
fn messages_of_another_generation_are_ignored() {
    let mut predictions = modelled(4);
    predictions.routed(SLOT, Generation(0), Some(BookingId(1)), &entry(0..4, 0), &Index::new(), NOW);
    predictions.released(BookingId(1), NOW);
    assert_eq!(predictions.counts(), SpeculationCounts::default());
}
