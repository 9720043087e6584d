use std::time::Duration;

use super::super::reference::ReferenceSequences;
use super::*;

const A: BookingId = BookingId(1);
const B: BookingId = BookingId(2);

/// The implementation and the reference model with the same inputs.
struct Both {
    rank: ActiveSequences,
    model: ReferenceSequences,
    outputs: AHashMap<BookingId, OutputBlocks>,
    now: Timestamp,
}

impl Both {
    fn new(assume_kv_reuse: bool) -> Self {
        Self {
            rank: ActiveSequences::new(assume_kv_reuse),
            model: ReferenceSequences::new(assume_kv_reuse),
            outputs: AHashMap::new(),
            now: Timestamp(0),
        }
    }

    fn at(&mut self, seconds: f64) -> &mut Self {
        self.now = Timestamp((seconds * 1e9) as u64);
        self
    }

    fn book(
        &mut self,
        booking: BookingId,
        prompt: &PromptBlocks,
        tokens: u32,
        seconds: Option<f64>,
    ) -> Option<BookedBlocks> {
        let hint = PrefillLoadHint::new(tokens, 0, true, seconds.map(Duration::from_secs_f64));
        let booked = self.rank.book(booking, prompt.clone(), hint, self.now).ok();
        assert_eq!(booked, self.model.book(booking, prompt, hint, self.now));
        booked
    }

    fn output(&mut self, booking: BookingId, fraction: Option<f64>) {
        let decay = fraction.map(|fraction| Weight::new(fraction).expect("in range"));
        let output = self.outputs.entry(booking).or_default();
        output.push(decay);
        let change = self.rank.set_output(booking, output);
        assert_eq!(change == Change::Applied, self.model.push_output(booking, &[decay]));
        assert_eq!(self.rank.set_output(booking, output), Change::NoChange, "the same state twice");
    }

    fn complete(&mut self, booking: BookingId) -> Change {
        let change = self.rank.complete_prefill(booking, self.now);
        assert_eq!(change == Change::Applied, self.model.complete_prefill(booking, self.now));
        change
    }

    fn free(&mut self, booking: BookingId) -> Change {
        let change = self.rank.free(booking, self.now);
        assert_eq!(change == Change::Applied, self.model.free(booking, self.now));
        change
    }

    /// Active blocks, prefill tokens, requests.
    #[track_caller]
    fn assert_load(&self, active_blocks: u32, prefill_tokens: u64, requests: u32) {
        self.rank.check_invariants();
        let model = self.model.load(self.now);
        let load = RankLoad { active_blocks, read_blocks: model.read_blocks, prefill_tokens, requests };
        assert_eq!((self.rank.load(self.now), model), (load, load));
        assert_eq!(self.rank.weighted_blocks(), self.model.weighted_blocks());
    }

    #[track_caller]
    fn assert_projected(&self, prompt: &PromptBlocks, active_blocks: u32, shared_blocks: u32, potential_blocks: u32) {
        let projection = Projection { active_blocks, shared_blocks, potential_blocks };
        assert_eq!((self.rank.project(prompt), self.model.project(prompt)), (projection, projection));
    }
}

fn prompt(hashes: &[u64]) -> PromptBlocks {
    PromptBlocks::Hashed(hashes.iter().copied().map(SequenceHash).collect())
}

/// The worked table of block accounting, row by row.
#[test]
fn shared_prompt_and_decaying_output() {
    let mut both = Both::new(true);
    let booked = both.book(A, &prompt(&[11, 12, 13]), 12, None);
    assert_eq!(booked, Some(BookedBlocks { shared_blocks: 0, added_blocks: 3 }));
    both.assert_load(3, 12, 1);
    let booked = both.book(B, &prompt(&[11, 12, 21]), 4, None);
    assert_eq!(booked, Some(BookedBlocks { shared_blocks: 2, added_blocks: 1 }));
    both.assert_load(4, 16, 2);
    assert_eq!(both.book(B, &prompt(&[11, 12, 21]), 4, None), None);
    both.assert_load(4, 16, 2);
    both.assert_projected(&prompt(&[11, 12, 13, 14]), 4, 3, 5);
    both.output(A, None);
    both.assert_load(5, 16, 2);
    both.output(A, Some(0.5));
    both.assert_load(5, 16, 2); // 2 shared + 1 of B + 0.5 of A + 2 × 0.5 = 4.5
    both.output(A, Some(0.25));
    both.assert_load(4, 16, 2); // 2 + 1 + 0.25 + 3 × 0.25
    assert_eq!(both.complete(A), Change::Applied);
    assert_eq!(both.complete(A), Change::NoChange);
    both.assert_load(4, 4, 2);
    assert_eq!(both.free(B), Change::Applied);
    both.assert_load(3, 0, 1);
    both.output(A, Some(0.25));
    both.assert_load(2, 0, 1); // now 11 and 12 are private to A: 7 × 0.25 = 1.75
    assert_eq!(both.free(A), Change::Applied);
    assert_eq!(both.free(A), Change::NoChange);
    both.assert_load(0, 0, 0);
    assert!(both.rank.is_empty());
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
fn without_reuse_every_prompt_counts_in_full() {
    let mut both = Both::new(false);
    both.book(A, &prompt(&[11, 12, 13]), 0, None);
    both.book(B, &prompt(&[11, 12, 21]), 0, None);
    both.assert_load(6, 0, 2);
    both.assert_projected(&prompt(&[11, 12, 13, 14]), 6, 0, 10);
    both.output(A, Some(0.5));
    both.assert_load(5, 0, 2); // 3 of B + 4 × 0.5: the whole prompt of A is private
    both.free(B);
    both.assert_load(2, 0, 1);
    both.free(A);
    both.assert_load(0, 0, 0);
}

#[test]
fn counted_prompts_are_not_shared() {
    let mut both = Both::new(true);
    both.book(A, &PromptBlocks::Counted(3), 0, None);
    both.book(B, &prompt(&[1]), 0, None);
    both.assert_projected(&PromptBlocks::Counted(3), 4, 0, 7);
    both.output(A, Some(0.0));
    both.assert_load(1, 0, 2);
    both.free(A);
    both.free(B);
    both.assert_load(0, 0, 0);
}

#[test]
fn empty_prompts_are_booked() {
    let mut both = Both::new(true);
    both.book(A, &prompt(&[]), 9, None);
    both.book(B, &prompt(&[]), 0, None);
    both.output(A, Some(0.5));
    both.assert_load(1, 9, 2);
    both.assert_projected(&prompt(&[]), 1, 0, 1);
    both.free(A);
    both.assert_load(0, 0, 1);
    both.free(B);
    both.assert_load(0, 0, 0);
}

#[test]
fn new_request_keeps_existing_weights() {
    let mut both = Both::new(true);
    both.book(A, &prompt(&[1, 2, 3, 4]), 0, None);
    both.output(A, Some(0.0));
    both.assert_load(0, 0, 1);
    both.assert_projected(&prompt(&[1, 2, 3, 5]), 0, 3, 1);
    both.book(B, &prompt(&[1, 2, 3, 5]), 0, None);
    both.assert_load(1, 0, 2);
    both.free(A);
    both.assert_load(1, 0, 1);
    both.output(B, Some(1.0));
    both.assert_load(5, 0, 1);
}

/// The weight of the prompt changes with every report that has a decay, repeated decays included, and with no other
/// report.
#[test]
fn only_a_decay_reweighs_the_prompt() {
    let mut both = Both::new(true);
    both.book(A, &prompt(&[1, 2]), 0, None);
    both.book(B, &prompt(&[1, 2]), 0, None);
    both.output(A, Some(0.0));
    both.free(B);
    both.assert_load(2, 0, 1);
    both.output(A, None);
    both.assert_load(3, 0, 1);
    both.output(A, Some(0.0));
    both.assert_load(0, 0, 1);
}

#[test]
fn late_read_applies_the_last_decay_and_every_block() {
    let mut rank = ActiveSequences::new(true);
    let mut model = ReferenceSequences::new(true);
    let now = Timestamp::default();
    rank.book(A, prompt(&[1, 2]), None, now).expect("the first");
    model.book(A, &prompt(&[1, 2]), None, now);
    let decays = [None, Some(Weight::ZERO), Some(Weight::new(0.5).expect("in range")), None];
    let mut output = OutputBlocks::default();
    decays.iter().for_each(|&decay| output.push(decay));
    rank.set_output(A, &output);
    model.push_output(A, &decays);
    assert_eq!(rank.load(now).active_blocks, 4); // 2 × 0.5 + 3 × 0.5 + 1 = 3.5
    assert_eq!(rank.load(now), model.load(now));
}

#[test]
fn restored_rank_has_the_same_load() {
    let mut both = Both::new(true);
    both.book(A, &prompt(&[1, 2, 3]), 1000, Some(10.0));
    both.at(2.0).book(B, &prompt(&[1, 2, 4]), 500, Some(1.0));
    both.output(A, Some(0.5));
    let mut restored = ActiveSequences::new(true);
    for (booking, hashes, tokens, seconds, at) in [(A, [1, 2, 3], 1000, 10, 0), (B, [1, 2, 4], 500, 1, 2)] {
        let hint = PrefillLoadHint::new(tokens, 0, true, Some(Duration::from_secs(seconds)));
        restored.book(booking, prompt(&hashes), hint, Timestamp(at * 1_000_000_000)).expect("no duplicates");
    }
    restored.set_output(A, &both.outputs[&A]);
    for seconds in [2, 5, 10, 11] {
        let now = Timestamp(seconds * 1_000_000_000);
        assert_eq!(restored.load(now), both.rank.load(now), "at {seconds} s");
    }
    assert_eq!(restored.prefill_curve(), both.rank.prefill_curve());
}

/// Decay examples of the prefill queue, compared with the model.
#[test]
fn prefills_progress_in_arrival_order_at_their_own_rates() {
    let none = PromptBlocks::Counted(0);
    let mut both = Both::new(true);
    both.book(A, &none, 1000, Some(10.0));
    both.book(B, &none, 500, Some(1.0));
    for (seconds, left) in [(0.0, 1500), (1.0, 1400), (10.0, 500), (10.25, 375), (10.5, 250), (11.0, 0), (15.0, 0)] {
        both.at(seconds).assert_load(0, left, 2);
    }
    both.at(5.0).complete(B);
    for (seconds, left) in [(5.0, 500), (10.0, 0)] {
        both.at(seconds).assert_load(0, left, 2);
    }
    let mut mixed = Both::new(true);
    mixed.book(A, &none, 1000, Some(10.0));
    mixed.book(B, &none, 500, None);
    for (seconds, left) in [(0.0, 1500), (5.0, 1000), (10.0, 500), (20.0, 500)] {
        mixed.at(seconds).assert_load(0, left, 2);
    }
    mixed.at(8.0).free(A);
    mixed.assert_load(0, 500, 1);
    mixed.at(3.0).assert_load(0, 500, 1);
}

#[test]
fn reports_of_unknown_bookings_are_ignored() {
    let mut both = Both::new(true);
    both.complete(A);
    both.output(A, Some(0.5));
    both.free(A);
    both.assert_load(0, 0, 0);
    both.book(B, &prompt(&[1]), 1, None);
    both.book(A, &prompt(&[1]), 1, Some(1.0)); // not in the order of ids
    both.assert_load(1, 2, 2);
    both.free(A);
    both.free(B);
    both.assert_load(0, 0, 0);
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
