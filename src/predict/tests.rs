use super::*;
use crate::protocol::{EngineHash, StoredBlock, WorkerId};

const SLOT: Slot = Slot(0);
const NOW: Timestamp = Timestamp(0);

fn rank() -> WorkerRank {
    WorkerRank::new(WorkerId(1), 0)
}

fn guess(blocks: impl IntoIterator<Item = u64>, private_blocks: u32) -> Guess {
    Guess { hashes: blocks.into_iter().map(BlockHash).collect(), private_blocks }
}

fn depth(predictions: &Predictions, prompt: &Guess) -> u32 {
    let mut overlaps = Overlaps::default();
    predictions.merge_into(&prompt.hashes, &mut overlaps);
    overlaps.hits().first().map_or(0, |hit| hit.device_blocks)
}

fn modelled(capacity: u32) -> Predictions {
    let mut predictions = Predictions::new(Kind::Lru { fallback_ttl: Duration::from_secs(120) }, 1 << 20);
    predictions.register(rank(), SLOT, Generation(1), Some(capacity));
    predictions
}

fn book(predictions: &mut Predictions, booking: u64, guess: &Guess) {
    predictions.routed(SLOT, Generation(1), Some(BookingId(booking)), guess, &Index::new(), NOW);
    predictions.check_invariants();
}

#[test]
fn the_longest_released_go_first_and_of_one_prompt_the_deepest() {
    let mut predictions = modelled(10);
    let (old, new) = (guess(0..4, 1), guess(10..14, 0));
    book(&mut predictions, 1, &old);
    book(&mut predictions, 2, &new);
    predictions.released(BookingId(1), NOW);
    predictions.released(BookingId(2), NOW);
    assert_eq!((depth(&predictions, &old), depth(&predictions, &new)), (4, 4), "9 of 10 blocks");
    book(&mut predictions, 3, &guess(20..24, 0));
    assert_eq!(depth(&predictions, &old), 2, "its private block and two of its own have gone");
    predictions.output_blocks(BookingId(3), 3);
    assert_eq!((depth(&predictions, &old), depth(&predictions, &new)), (0, 3));
    assert_eq!(predictions.counts().evicted, 5);
}

#[test]
fn what_is_in_use_stays_over_capacity() {
    let mut predictions = modelled(4);
    let (a, b) = (guess(0..4, 0), guess(10..14, 0));
    book(&mut predictions, 1, &a);
    book(&mut predictions, 2, &b);
    assert_eq!((depth(&predictions, &a), depth(&predictions, &b)), (4, 4));
    predictions.released(BookingId(1), NOW);
    assert_eq!((depth(&predictions, &a), depth(&predictions, &b)), (0, 4));
}

/// Remembered by hand and again at its booking's release, it would stand in the order twice, and eviction never end.
#[test]
fn a_prompt_in_use_is_remembered_once() {
    let mut predictions = modelled(4);
    let prompt = guess(0..4, 0);
    book(&mut predictions, 1, &prompt);
    predictions.routed(SLOT, Generation(1), None, &prompt, &Index::new(), NOW);
    predictions.released(BookingId(1), NOW);
    predictions.check_invariants();
    book(&mut predictions, 2, &guess(10..14, 0));
    assert_eq!(depth(&predictions, &prompt), 0);
}

#[test]
fn events_confirm_and_retract_and_time_tells_the_wrong() {
    let ttl = Duration::from_secs(5);
    let (mut predictions, mut index) = (Predictions::new(Kind::BesideEvents { ttl }, 1 << 20), Index::new());
    predictions.register(rank(), SLOT, Generation(1), None);
    index.register(rank(), SLOT, Generation(1));
    let mut apply = |predictions: &mut Predictions, data| {
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
    let (whole, sibling) = (guess(0..6, 0), guess((0..4).chain(20..23), 0));
    predictions.routed(SLOT, Generation(1), None, &whole, &unknown, NOW);
    predictions.routed(SLOT, Generation(1), None, &sibling, &unknown, NOW);
    apply(&mut predictions, stored(0..6));
    assert_eq!((predictions.counts().confirmed, predictions.believed_blocks()), (2, 7), "the sibling needs the rest");
    apply(&mut predictions, KvEvent::Removed { blocks: vec![EngineHash(3)] });
    assert_eq!(predictions.counts().retracted, 7);
    predictions.routed(SLOT, Generation(1), None, &guess(30..34, 0), &unknown, NOW);
    apply(
        &mut predictions,
        KvEvent::Stored {
            parent: None,
            blocks: vec![StoredBlock { engine_hash: EngineHash(30), block_hash: BlockHash(30) }],
        },
    );
    predictions.expire(NOW + ttl);
    let Counts { guessed, confirmed, wrong, .. } = predictions.counts();
    assert_eq!((guessed, confirmed, wrong), (13, 3, 3), "one of four was right");
}

#[test]
fn messages_of_another_generation_do_nothing() {
    let mut predictions = modelled(4);
    predictions.routed(SLOT, Generation(0), Some(BookingId(1)), &guess(0..4, 0), &Index::new(), NOW);
    predictions.released(BookingId(1), NOW);
    assert_eq!(predictions.counts(), Counts::default());
}
