//! Examples. `tests/load_properties.rs` compares the sequences with their reference model after any calls.

use super::*;

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
