//! A busy fleet with constant state, to measure the scheduler alone.

use std::collections::VecDeque;

use pointsman::RouterConfig;
use pointsman::internals::load::{BoardLoad, PromptBlocks, RankLoad};
use pointsman::internals::protocol::{BookingId, Generation, SequenceHash, Slot};
use pointsman::internals::record::DecisionRing;
use pointsman::internals::schedule::{Effect, Input, LoadAnswer, LoadQuery, Recorder, Request};
use pointsman::protocol::{Timestamp, WorkerRank};
use pointsman::test_support::{RequestOutcome, SimulatedFleet, SimulatedRank, mix, rank};
use pointsman::{
    RankTraits,
    internals::select::{RankOverlap, TierOverlap},
};

const NOW: Timestamp = Timestamp(0);
const BLOCKS: u64 = 190;
/// Blocks of a prompt that the turns of its conversation share, including the system prompt.
const CONVERSATION_BLOCKS: u64 = 100;
const SYSTEM_BLOCKS: u64 = 16;
const REQUESTS_PER_RANK: u64 = 8;
/// Number of prompts that the measured requests use in rotation.
const PROMPTS: u64 = 64;

/// Input of the scheduler: a prompt with its overlaps from the index.
#[derive(Clone)]
struct PreparedRequest {
    prompt: PromptBlocks,
    overlaps: Vec<RankOverlap>,
}

impl PreparedRequest {
    fn request(&self, request_number: u64) -> Request<u64> {
        let Self { prompt, overlaps } = self.clone();
        Request { overlaps, ..Request::new(request_number, prompt, 64 * BLOCKS as u32) }
    }
}

/// Turn number `turn` of a conversation, in a fleet of `ranks`.
fn prepared(conversation: u64, turn: u64, ranks: usize, assume_kv_reuse: bool) -> PreparedRequest {
    let system = conversation % 12;
    let hash = |block| {
        let of = match block {
            0..SYSTEM_BLOCKS => system,
            SYSTEM_BLOCKS..CONVERSATION_BLOCKS => 1_000 + conversation,
            _ => mix(conversation) ^ turn,
        };
        SequenceHash(mix(mix(of) ^ block))
    };
    let home = mix(conversation) as usize;
    let held = |slot: usize| {
        let at_home = slot == home % ranks || slot == (home >> 32) % ranks;
        let has_system = mix(slot as u64 ^ system << 32).is_multiple_of(4);
        let device_blocks = if at_home { CONVERSATION_BLOCKS as u32 } else { SYSTEM_BLOCKS as u32 };
        let overlap = TierOverlap { device_blocks, ..TierOverlap::default() };
        let (slot, generation) = (Slot(slot as u32), Generation(1));
        (at_home || has_system).then_some(RankOverlap { slot, generation, overlap })
    };
    let prompt = if assume_kv_reuse {
        PromptBlocks::Hashed((0..BLOCKS).map(hash).collect())
    } else {
        PromptBlocks::Counted(BLOCKS as u32)
    };
    PreparedRequest { prompt, overlaps: (0..ranks).filter_map(held).collect() }
}

/// Creates `ranks` ranks with [`REQUESTS_PER_RANK`] requests each on average, an eighth of them in prefill.
fn busy(config: RouterConfig, ranks: usize) -> SimulatedFleet {
    let assume_kv_reuse = config.load.assume_kv_reuse;
    let mut fleet = SimulatedFleet::new(config, 0);
    fleet.now = NOW;
    for slot in 0..ranks {
        fleet.admit(rank(slot as u64), RankTraits::default());
    }
    let (requests, conversations) = (REQUESTS_PER_RANK * ranks as u64, 2 * ranks as u64);
    for request_number in 0..requests {
        let prepared = prepared(mix(request_number) % conversations, request_number, ranks, assume_kv_reuse);
        fleet.submit(prepared.request(request_number));
        let Some((_, RequestOutcome::Booked(decision, _))) = fleet.outcomes.pop() else { unreachable!("not booked") };
        if request_number < requests / 8 * 7 {
            let rank = &mut fleet.ranks[decision.slot().index()];
            rank.active.complete_prefill(BookingId(request_number), NOW);
            rank.publish(NOW);
        }
    }
    fleet
}

/// A busy fleet with constant state: all responses are prepared, and bookings end immediately.
pub(crate) struct Still {
    fleet: SimulatedFleet,
    effects: VecDeque<Effect<u64>>,
    prepared: Vec<PreparedRequest>,
    loads: Vec<RankLoad>,
    /// By prompt, then by slot.
    shared_blocks: Vec<Vec<u32>>,
    boards: Vec<BoardLoad>,
    pub(crate) requests: u64,
    record: Option<(Recorder<u64>, DecisionRing)>,
    recorded_bytes: usize,
}

impl Still {
    pub(crate) fn new(config: RouterConfig, ranks: usize) -> Self {
        let assume_kv_reuse = config.load.assume_kv_reuse;
        let fleet = busy(config, ranks);
        let prepared: Vec<PreparedRequest> =
            (0..PROMPTS).map(|n| prepared(n % (2 * ranks as u64), u64::MAX - n, ranks, assume_kv_reuse)).collect();
        let shared = |prepared: &PreparedRequest| {
            fleet.ranks.iter().map(|rank| rank.active.project(&prepared.prompt).shared_blocks).collect()
        };
        let board = |rank: &SimulatedRank| rank.cells.board.read().expect("there are no concurrent writes");
        Self {
            shared_blocks: prepared.iter().map(shared).collect(),
            prepared,
            loads: fleet.ranks.iter().map(|rank| rank.active.load(NOW)).collect(),
            boards: fleet.ranks.iter().map(board).collect(),
            fleet,
            effects: VecDeque::new(),
            requests: 0,
            record: None,
            recorded_bytes: 0,
        }
    }

    /// Records the decisions from here on.
    pub(crate) fn record(&mut self, config: &RouterConfig) {
        let settings = serde_json::to_vec(config).expect("settings are plain data");
        self.record = Some((Recorder::new(settings.into(), |_| ""), DecisionRing::new(&config.recorder)));
    }

    /// Bytes recorded so far.
    pub(crate) fn recorded_bytes(&self) -> usize {
        self.recorded_bytes
    }

    fn step(&mut self, input: Input<u64>) {
        let SimulatedFleet { schedule, loads, .. } = &mut self.fleet;
        let Some((recorder, ring)) = &mut self.record else {
            return schedule.step(input, loads, NOW, &mut self.effects);
        };
        recorder.step(schedule, input, loads, NOW, &mut self.effects);
        let (mut is_full, recorded_bytes) = (false, &mut self.recorded_bytes);
        recorder.drain(|bytes, keyframe_at| {
            is_full = ring.push(bytes, keyframe_at, NOW);
            *recorded_bytes += bytes.len();
        });
        if is_full {
            recorder.begin_segment();
        }
    }

    /// Runs a request from `Request` to `Book`, then publishes the board that contains the end of the booking.
    pub(crate) fn decide(&mut self) -> WorkerRank {
        let request_number = self.requests;
        self.requests += 1;
        let prompt = (request_number % PROMPTS) as usize;
        self.step(Input::Request(self.prepared[prompt].request(request_number)));
        loop {
            match self.effects.pop_front() {
                Some(Effect::Query(LoadQuery { batch, slots, .. })) => {
                    let answers = slots.iter().map(|&slot| LoadAnswer {
                        slot,
                        generation: Generation(1),
                        load: self.loads[slot.index()],
                        shared_blocks: [self.shared_blocks[prompt][slot.index()]].into_iter().collect(),
                    });
                    let answers = answers.collect();
                    self.step(Input::Loads { batch, answers });
                }
                Some(Effect::Book { decision, number, .. }) => {
                    let slot = decision.slot().index();
                    self.boards[slot].applied = number.number;
                    self.fleet.ranks[slot].cells.board.publish(&self.boards[slot]);
                    return decision.rank();
                }
                Some(Effect::PublishTypical { speed, rate }) => {
                    self.fleet.loads.publish_typical(&speed, rate, self.fleet.now);
                }
                other => unreachable!("unexpected effect {other:?}"),
            }
        }
    }
}
