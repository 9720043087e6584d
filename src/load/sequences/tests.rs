//! Examples. `tests/load_properties.rs` compares the sequences with their reference model after any calls.

use std::time::Duration;

use super::*;

const A: BookingId = BookingId(1);
const B: BookingId = BookingId(2);
const NOW: Timestamp = Timestamp(0);

fn prompt(hashes: &[u64]) -> PromptBlocks {
    PromptBlocks::Hashed(hashes.iter().copied().map(SequenceHash).collect())
}

fn hint(tokens: u32, seconds: Option<u64>) -> Option<PrefillLoadHint> {
    PrefillLoadHint::new(tokens, 0, true, seconds.map(Duration::from_secs))
}

/// The worked table of block accounting, row by row.
#[test]
fn shared_prompt_and_decaying_output() {
    let (mut rank, mut output) = (ActiveSequences::new(true), OutputBlocks::default());
    let load = |rank: &ActiveSequences| {
        let load = rank.load(NOW);
        (load.active_blocks, load.prefill_tokens, load.requests)
    };
    let mut decay = |rank: &mut ActiveSequences, fraction: Option<f64>| {
        output.push(fraction.map(|fraction| Weight::new(fraction).expect("in range")));
        assert_eq!(rank.set_output(A, &output), Change::Applied);
        load(rank)
    };
    let booked = rank.book(A, prompt(&[11, 12, 13]), hint(12, None), NOW);
    assert_eq!(booked.ok(), Some(BookedBlocks { shared_blocks: 0, added_blocks: 3 }));
    assert_eq!(load(&rank), (3, 12, 1));
    let booked = rank.book(B, prompt(&[11, 12, 21]), hint(4, None), NOW);
    assert_eq!(booked.ok(), Some(BookedBlocks { shared_blocks: 2, added_blocks: 1 }));
    assert!(rank.book(B, prompt(&[11, 12, 21]), hint(4, None), NOW).is_err());
    assert_eq!(load(&rank), (4, 16, 2));
    let projection = Projection { active_blocks: 4, shared_blocks: 3, potential_blocks: 5 };
    assert_eq!(rank.project(&prompt(&[11, 12, 13, 14])), projection);
    assert_eq!(decay(&mut rank, None), (5, 16, 2));
    assert_eq!(decay(&mut rank, Some(0.5)), (5, 16, 2)); // 2 shared + 1 of B + 0.5 of A + 2 × 0.5 = 4.5
    assert_eq!(decay(&mut rank, Some(0.25)), (4, 16, 2)); // 2 + 1 + 0.25 + 3 × 0.25
    assert_eq!([rank.complete_prefill(A, NOW), rank.complete_prefill(A, NOW)], [Change::Applied, Change::NoChange]);
    assert_eq!(load(&rank), (4, 4, 2));
    assert_eq!(rank.free(B, NOW), Change::Applied);
    assert_eq!(load(&rank), (3, 0, 1));
    assert_eq!(decay(&mut rank, Some(0.25)), (2, 0, 1)); // now 11 and 12 are private to A: 7 × 0.25 = 1.75
    assert_eq!([rank.free(A, NOW), rank.free(A, NOW)], [Change::Applied, Change::NoChange]);
    assert_eq!(load(&rank), (0, 0, 0));
    assert!(rank.is_empty());
}

#[test]
fn duplicate_error_contains_the_booking() {
    let mut rank = ActiveSequences::new(true);
    let now = Timestamp::default();
    rank.book(BookingId(7), PromptBlocks::Counted(1), None, now).expect("the first");
    let error = rank.book(BookingId(7), PromptBlocks::Counted(1), None, now).expect_err("the second");
    assert_eq!(error.to_string(), "booking 7 exists already");
}

#[test]
fn extreme_counts_saturate_and_return_to_zero() {
    let mut rank = ActiveSequences::new(false);
    let now = Timestamp::default();
    for id in 0..3 {
        rank.book(BookingId(id), PromptBlocks::Counted(u32::MAX), None, now).expect("no duplicates");
    }
    assert_eq!(rank.load(now).active_blocks, u32::MAX);
    assert_eq!(rank.project(&PromptBlocks::Counted(u32::MAX)).potential_blocks, u32::MAX);
    for id in 0..3 {
        rank.free(BookingId(id), now);
        rank.check_invariants();
    }
    assert_eq!(rank.load(now), RankLoad::default());
}
