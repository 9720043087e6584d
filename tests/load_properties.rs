//! Compares the load model with its slow reference after every step of arbitrary calls.
//!
//! `PROPTEST_CASES` sets the number of cases; a failure prints its seed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pointsman::internals::load::{
    ActiveSequences, Change, OutputBlocks, PrefillCurve, PrefillLoadHint, Projection, PromptBlocks, RankLoad, Weight,
};
use pointsman::internals::protocol::{BookingId, SequenceHash};
use pointsman::protocol::Timestamp;
use proptest::prelude::*;

use crate::effort::effort;
use crate::load_reference::ReferenceSequences;

/// Few ids, so that repeated, unknown and reused ids are common.
const IDS: u64 = 8;

#[derive(Clone, Debug)]
enum Step {
    Book {
        id: u64,
        prompt: Prompt,
        hint: Option<PrefillLoadHint>,
    },
    CompletePrefill {
        id: u64,
    },
    /// The caller reports output blocks. The rank may read them later.
    Output {
        id: u64,
        decays: Vec<Option<f64>>,
        look: bool,
    },
    Free {
        id: u64,
    },
    Project {
        prompt: Prompt,
    },
    /// Time advances, or moves backwards: callers have different clocks.
    Time {
        nanos: i64,
    },
}

#[derive(Clone, Debug)]
enum Prompt {
    /// A path in a small tree, so that prefixes are shared at every depth.
    Words(Vec<u64>),
    Counted(u32),
    Several(u32, u32, u32),
}

impl Prompt {
    fn blocks(&self) -> PromptBlocks {
        self.salted(0)
    }

    /// The prompt with hashes that are unique to the salt.
    fn salted(&self, salt: u64) -> PromptBlocks {
        let words = match self {
            Self::Words(words) => words,
            Self::Counted(blocks) => return PromptBlocks::Counted(*blocks),
            Self::Several(blocks, sequences, read_blocks) => {
                let (blocks, sequences, read_blocks) = (*blocks, *sequences, *read_blocks);
                return PromptBlocks::Several { blocks, sequences, read_blocks };
            }
        };
        let mut hash = salt;
        let chain = words.iter().map(|word| {
            hash = (hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash ^= hash >> 29;
            SequenceHash(hash)
        });
        PromptBlocks::Hashed(chain.collect::<Arc<[_]>>())
    }
}

/// The implementation and the model with equal inputs.
struct Rank {
    real: ActiveSequences,
    model: ReferenceSequences,
    outputs: BTreeMap<u64, Reported>,
    now: Timestamp,
}

/// Reported output of a request, and the part that the rank has not read.
#[derive(Default)]
struct Reported {
    output: OutputBlocks,
    unseen: Vec<Option<Weight>>,
}

impl Rank {
    fn new(assume_kv_reuse: bool) -> Self {
        Self {
            real: ActiveSequences::new(assume_kv_reuse),
            model: ReferenceSequences::new(assume_kv_reuse),
            outputs: BTreeMap::new(),
            now: Timestamp(1_000_000),
        }
    }

    /// Executes a step, with prompts made by `blocks`.
    fn take(&mut self, step: &Step, blocks: impl Fn(&Prompt) -> PromptBlocks) {
        match step {
            Step::Book { id, prompt, hint } => self.book(*id, blocks(prompt), *hint),
            Step::CompletePrefill { id } => {
                let change = self.real.complete_prefill(BookingId(*id), self.now);
                assert_eq!(change == Change::Applied, self.model.complete_prefill(BookingId(*id), self.now));
            }
            Step::Output { id, decays, look } => self.output(*id, decays, *look),
            Step::Free { id } => {
                let change = self.real.free(BookingId(*id), self.now);
                assert_eq!(change == Change::Applied, self.model.free(BookingId(*id), self.now));
            }
            Step::Project { prompt } => {
                self.project(&blocks(prompt));
            }
            Step::Time { nanos } => self.now = Timestamp(self.now.0.saturating_add_signed(*nanos)),
        }
    }

    fn book(&mut self, id: u64, prompt: PromptBlocks, hint: Option<PrefillLoadHint>) {
        let projection = self.project(&prompt);
        let expected = self.model.book(BookingId(id), &prompt, hint, self.now);
        let booked = self.real.book(BookingId(id), prompt, hint, self.now).ok();
        assert_eq!(booked, expected);
        if let Some(booked) = booked {
            assert_eq!(booked.shared_blocks, projection.shared_blocks);
            assert_eq!(self.real.load(self.now).active_blocks, projection.potential_blocks, "as projected");
            self.outputs.insert(id, Reported::default());
        }
    }

    fn output(&mut self, id: u64, decays: &[Option<f64>], look: bool) {
        let reported = self.outputs.entry(id).or_default();
        for decay in decays {
            let decay = decay.map(|fraction| Weight::new(fraction).expect("from 0 to 1"));
            reported.output.push(decay);
            reported.unseen.push(decay);
        }
        if look {
            let unseen = std::mem::take(&mut reported.unseen);
            let change = self.real.set_output(BookingId(id), &reported.output);
            assert_eq!(change == Change::Applied, self.model.push_output(BookingId(id), &unseen));
            assert_eq!(self.real.set_output(BookingId(id), &reported.output), Change::NoChange, "the same twice");
        }
    }

    fn project(&self, prompt: &PromptBlocks) -> Projection {
        let projection = self.real.project(prompt);
        assert_eq!(projection, self.model.project(prompt));
        projection
    }

    /// Compares the load now, earlier and later, and the prefill curve with it.
    fn check(&self, one_rate: bool) {
        self.real.check_invariants();
        assert_eq!(self.real.weighted_blocks(), self.model.weighted_blocks());
        let curve = self.real.prefill_curve();
        assert_eq!(PrefillCurve::from_words(curve.to_words()), curve);
        for ahead in [-700, -1, 0, 1, 37, 500, 2_000, 10_000, 100_000, 3_000_000, 77_000_001, 1 << 33] {
            let now = Timestamp(self.now.0.saturating_add_signed(ahead));
            let load = self.real.load(now);
            assert_eq!(load, self.model.load(now), "{ahead} ns from now");
            let (low, high) = curve.bounds(now);
            let tokens = load.prefill_tokens;
            assert!(low <= tokens && tokens <= high, "{tokens} is not within {low} and {high} {ahead} ns from now");
            assert!(!one_rate || low == high, "{low} and {high} should meet {ahead} ns from now");
        }
    }

    /// Frees everything and asserts that nothing remains.
    fn come_to_rest(mut self) {
        for id in 0..IDS {
            self.take(&Step::Free { id }, Prompt::blocks);
        }
        assert!(self.real.is_empty());
        self.real.check_invariants();
        assert_eq!(self.real.load(self.now), RankLoad::default());
        assert_eq!(self.real.prefill_curve().bounds(self.now), (0, 0));
    }
}

fn prompt() -> impl Strategy<Value = Prompt> {
    prop_oneof![
        9 => prop::collection::vec(0..3_u64, 0..12).prop_map(Prompt::Words),
        // A repeated word creates long common prefixes.
        3 => (0..40_usize, prop::collection::vec(0..2_u64, 0..3))
            .prop_map(|(n, end)| Prompt::Words([vec![0; n], end].concat())),
        1 => (0..9_u32).prop_map(Prompt::Counted),
        1 => (0..9_u32, 1..4_u32, 0..9_u32).prop_map(|(blocks, n, read)| Prompt::Several(blocks, n, read)),
    ]
}

fn hint(one_rate: bool) -> impl Strategy<Value = Option<PrefillLoadHint>> {
    // Small sizes, which expose rounding; realistic sizes; and nearly equal rates, which expose rounding of the curve's
    // rates.
    let size = prop_oneof![
        (0..60_u32, 0..20_u32, 0..3_000_u64),
        (0..200_000_u32, 0..100_000_u32, 0..2_000_000_000_u64),
        (100_000_000..400_000_000_u32, Just(0), Just(0)),
    ];
    (size, 0..12_u32, 0..4_u64).prop_map(move |((isl, cached, nanos), kind, more)| {
        let tokens = u64::from(isl.saturating_sub(cached));
        let nanos = match nanos {
            _ if one_rate => 11 * tokens,
            0 if more > 0 => 11 * tokens + more,
            _ if more == 0 => 0,
            nanos => nanos,
        };
        // Some hints are not tracked, and some have no duration model.
        PrefillLoadHint::new(isl, cached, kind != 0, (kind > 1).then_some(Duration::from_nanos(nanos)))
    })
}

fn step(one_rate: bool) -> impl Strategy<Value = Step> {
    let id = || 0..IDS;
    let decay = prop_oneof![Just(None), prop::sample::select(vec![0.0, 0.125, 0.3, 0.5, 0.875, 1.0]).prop_map(Some)];
    prop_oneof![
        6 => (id(), prompt(), hint(one_rate)).prop_map(|(id, prompt, hint)| Step::Book { id, prompt, hint }),
        2 => id().prop_map(|id| Step::CompletePrefill { id }),
        5 => (id(), prop::collection::vec(decay, 0..4), prop::bool::weighted(0.7))
            .prop_map(|(id, decays, look)| Step::Output { id, decays, look }),
        3 => id().prop_map(|id| Step::Free { id }),
        2 => prompt().prop_map(|prompt| Step::Project { prompt }),
        3 => prop_oneof![-200..1_500_i64, 0..100_000_000_i64].prop_map(|nanos| Step::Time { nanos }),
    ]
}

fn steps(one_rate: bool) -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(one_rate), 1..60)
}

proptest! {
    #![proptest_config(effort(200, "tests/load_properties.proptest-regressions"))]

    #[test]
    fn loads_match_the_reference_after_any_calls(assume_kv_reuse: bool, steps in steps(false)) {
        let mut rank = Rank::new(assume_kv_reuse);
        for step in &steps {
            rank.take(step, Prompt::blocks);
            rank.check(false);
        }
        rank.come_to_rest();
    }

    #[test]
    fn the_curve_is_exact_when_all_rates_agree(steps in steps(true)) {
        let mut rank = Rank::new(true);
        for step in &steps {
            rank.take(step, Prompt::blocks);
            rank.check(true);
        }
        rank.come_to_rest();
    }

    /// Other products turn reuse off by unique hashes per request. Counting blocks without hashes must yield equal
    /// numbers.
    #[test]
    fn counting_without_reuse_equals_unique_hashes(steps in steps(false)) {
        let (mut counted, mut hashed) = (Rank::new(false), Rank::new(true));
        for (number, step) in (1..).zip(&steps) {
            counted.take(step, Prompt::blocks);
            hashed.take(step, |prompt| prompt.salted(number << 32));
            assert_eq!(counted.real.load(counted.now), hashed.real.load(hashed.now));
            assert_eq!(counted.real.prefill_curve(), hashed.real.prefill_curve());
            if let Step::Project { prompt } | Step::Book { prompt, .. } = step {
                let projection = counted.real.project(&prompt.blocks());
                assert_eq!(projection, hashed.real.project(&prompt.salted(u64::MAX)));
            }
        }
        counted.come_to_rest();
        hashed.come_to_rest();
    }
}
