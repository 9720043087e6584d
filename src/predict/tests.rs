use super::*;
use crate::protocol::WorkerId;

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
    let mut predictions = SpeculativePrompts::new(SpeculationModel::Lru(Duration::from_secs(120)), 1 << 20);
    predictions.register(rank(), SLOT, Generation(1), Some(capacity));
    predictions
}

fn book(predictions: &mut SpeculativePrompts, booking: u64, entry: &SpeculativePrompt) {
    predictions.routed(SLOT, Generation(1), Some(BookingId(booking)), entry, &Index::new(), NOW);
    predictions.check_invariants();
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
