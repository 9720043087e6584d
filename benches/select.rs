//! Cost of a decision without actors: one cost, one selection, and the scheduler's share of one request.
//!
//! The scheduler's share is all work of [`Schedule`] for a request, from `Request` to `Book`. The fleet was filled by
//! the scheduler itself: eight requests of 190 blocks per rank, conversations whose turns share 100 blocks, and an
//! index with each conversation on two ranks and its system prompt on a quarter of them. The work of ranks is excluded:
//! their responses are prepared, and a booking ends immediately, by a board with the previous load. The remaining work
//! is a copy of a response for each queried rank, and one write to a board.
//!
//! The number of queried ranks is printed on stderr.

use pointsman::policy::{KvConfig, PolicyConfig};
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman::config::{LoadConfig, RouterConfig};
use pointsman::load::{ActiveSequences, BoardLoad, BoardSlot, PromptBlocks, RankLoad};
use pointsman::policy::CostFacts;
use pointsman::protocol::{BookingId, Generation, SequenceHash, Slot, Timestamp, WorkerId, WorkerRank};
use pointsman::schedule::{
    Admission, Effect, Extensions, Input, LiveLoads, LoadAnswer, LoadQuery, RankCells, Request, Schedule,
};
use pointsman::select::{Draw, RankOverlap, TierOverlap};

const NOW: Timestamp = Timestamp(0);
const BLOCKS: u64 = 190;
/// Blocks of a prompt that the turns of its conversation share, including the system prompt.
const CONVERSATION_BLOCKS: u64 = 100;
const SYSTEM_BLOCKS: u64 = 16;
const REQUESTS_PER_RANK: u64 = 8;
/// Number of prompts that the measured requests use in rotation.
const PROMPTS: u64 = 64;

/// splitmix64: spreads numbers over all 64 bits.
fn mix(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

fn rank_of(slot: usize) -> WorkerRank {
    WorkerRank::new(WorkerId(slot as u64), 0)
}

struct Node {
    active: ActiveSequences,
    board: Arc<BoardSlot>,
    applied: u32,
}

impl Node {
    fn publish(&self) {
        self.board.publish(&BoardLoad::of(&self.active, 0, self.applied, NOW));
    }
}

/// Input of the scheduler: a prompt with its overlaps from the index.
#[derive(Clone)]
struct PreparedRequest {
    prompt: PromptBlocks,
    overlaps: Vec<RankOverlap>,
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

/// A scheduler with its ranks.
struct Fleet {
    schedule: Schedule<u64>,
    loads: LiveLoads,
    effects: VecDeque<Effect<u64>>,
    nodes: Vec<Node>,
}

impl Fleet {
    /// Creates `ranks` ranks with [`REQUESTS_PER_RANK`] requests each on average, an eighth of them in prefill.
    fn busy(config: RouterConfig, ranks: usize) -> Self {
        let assume_kv_reuse = config.load.assume_kv_reuse;
        let mut fleet = Self {
            schedule: Schedule::new(config, 0, Extensions::default()),
            loads: LiveLoads::default(),
            effects: VecDeque::new(),
            nodes: Vec::new(),
        };
        for slot in 0..ranks {
            let board = Arc::new(BoardSlot::default());
            fleet.nodes.push(Node { active: ActiveSequences::new(true), board: Arc::clone(&board), applied: 0 });
            let (rank, slot, generation) = (rank_of(slot), Slot(slot as u32), Generation(1));
            fleet.loads.insert(slot, RankCells { board, ..RankCells::default() });
            let admit = Input::Admit(Admission::new(rank, slot, generation));
            fleet.schedule.step(admit, &fleet.loads, NOW, &mut fleet.effects);
        }
        let (requests, conversations) = (REQUESTS_PER_RANK * ranks as u64, 2 * ranks as u64);
        for request_number in 0..requests {
            let prepared = prepared(mix(request_number) % conversations, request_number, ranks, assume_kv_reuse);
            fleet.request(request_number, &prepared);
            fleet.settle(request_number, &prepared.prompt, requests);
        }
        fleet
    }

    fn request(&mut self, request_number: u64, prepared: &PreparedRequest) {
        let PreparedRequest { prompt, overlaps } = prepared.clone();
        let request = Request { overlaps, ..Request::new(request_number, prompt, 64 * BLOCKS as u32) };
        self.schedule.step(Input::Request(request), &self.loads, NOW, &mut self.effects);
    }

    /// Performs the effects of a warm-up request, like the actors of the ranks.
    fn settle(&mut self, request_number: u64, prompt: &PromptBlocks, requests: u64) {
        while let Some(effect) = self.effects.pop_front() {
            match effect {
                Effect::Query(query) => {
                    let answer = |&slot: &Slot| self.answer(slot, &query.prompts);
                    let answers = query.slots.iter().map(answer).collect();
                    let input = Input::Loads { batch: query.batch, answers };
                    self.schedule.step(input, &self.loads, NOW, &mut self.effects);
                }
                Effect::Book { decision, number, .. } => {
                    let node = &mut self.nodes[decision.slot().index()];
                    node.applied = number.number;
                    let booking = BookingId(request_number);
                    node.active.book(booking, prompt.clone(), decision.prefill_load(), NOW).expect("no duplicates");
                    if request_number < requests / 8 * 7 {
                        node.active.complete_prefill(booking, NOW);
                    }
                    node.publish();
                }
                Effect::PublishTypicalSpeed(speed) => self.loads.publish_typical_speed(&speed),
                other => unreachable!("unexpected effect {other:?}"),
            }
        }
    }

    fn answer(&self, slot: Slot, prompts: &[PromptBlocks]) -> LoadAnswer {
        let active = &self.nodes[slot.index()].active;
        let shared_blocks = prompts.iter().map(|prompt| active.project(prompt).shared_blocks).collect();
        LoadAnswer { slot, generation: Generation(1), load: active.load(NOW), shared_blocks }
    }
}

/// A busy fleet with constant state: all responses are prepared, and bookings end immediately.
struct Still {
    fleet: Fleet,
    prepared: Vec<PreparedRequest>,
    loads: Vec<RankLoad>,
    /// By prompt, then by slot.
    shared_blocks: Vec<Vec<u32>>,
    boards: Vec<BoardLoad>,
    requests: u64,
    queried_ranks: u64,
}

impl Still {
    fn new(config: RouterConfig, ranks: usize) -> Self {
        let assume_kv_reuse = config.load.assume_kv_reuse;
        let fleet = Fleet::busy(config, ranks);
        let prepared: Vec<PreparedRequest> =
            (0..PROMPTS).map(|n| prepared(n % (2 * ranks as u64), u64::MAX - n, ranks, assume_kv_reuse)).collect();
        let shared = |prepared: &PreparedRequest| {
            fleet.nodes.iter().map(|node| node.active.project(&prepared.prompt).shared_blocks).collect()
        };
        Self {
            shared_blocks: prepared.iter().map(shared).collect(),
            prepared,
            loads: fleet.nodes.iter().map(|node| node.active.load(NOW)).collect(),
            boards: fleet.nodes.iter().map(|node| node.board.read().expect("no concurrent writes")).collect(),
            fleet,
            requests: 0,
            queried_ranks: 0,
        }
    }

    /// Runs a request from `Request` to `Book`, then publishes the board that contains the end of the booking.
    fn decide(&mut self) -> WorkerRank {
        let request_number = self.requests;
        self.requests += 1;
        let prompt = (request_number % PROMPTS) as usize;
        self.fleet.request(request_number, &self.prepared[prompt]);
        loop {
            match self.fleet.effects.pop_front() {
                Some(Effect::Query(LoadQuery { batch, slots, .. })) => {
                    self.queried_ranks += slots.len() as u64;
                    let answers = slots.iter().map(|&slot| LoadAnswer {
                        slot,
                        generation: Generation(1),
                        load: self.loads[slot.index()],
                        shared_blocks: [self.shared_blocks[prompt][slot.index()]].into_iter().collect(),
                    });
                    let answers = answers.collect();
                    let Fleet { schedule, loads, effects, .. } = &mut self.fleet;
                    schedule.step(Input::Loads { batch, answers }, loads, NOW, effects);
                }
                Some(Effect::Book { decision, number, .. }) => {
                    let slot = decision.slot().index();
                    self.boards[slot].applied = number.number;
                    self.fleet.nodes[slot].board.publish(&self.boards[slot]);
                    return decision.rank();
                }
                Some(Effect::PublishTypicalSpeed(speed)) => self.fleet.loads.publish_typical_speed(&speed),
                other => unreachable!("a Book was due, not {other:?}"),
            }
        }
    }
}

fn cost(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("select/cost");
    let facts = CostFacts {
        isl_tokens: 64 * BLOCKS,
        overlap: TierOverlap { device_blocks: 100, host_pinned_blocks: 8, disk_blocks: 4, external_blocks: 0 },
        prefill_tokens: 9_000,
        prefill_tokens_least: 1_000,
        potential_blocks: 1_200,
        active_requests: 9,
        shared_cache_blocks: 0,
    };
    for (name, overlap_score_credit_decay) in [("as it comes", 0.0), ("decaying credit", 0.5)] {
        let cost = RouterConfig {
            policy: PolicyConfig::Kv(KvConfig { overlap_score_credit_decay, ..KvConfig::default() }),
            ..RouterConfig::default()
        }
        .kv_cost();
        group.bench_function(name, |bencher| bencher.iter(|| black_box(&cost).cost(black_box(&facts))));
    }
    group.finish();
}

fn pick(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("select/cheapest");
    for ranks in [8, 64, 512] {
        let differing: Vec<_> = (0..ranks).map(|slot| (rank_of(slot), (mix(slot as u64) >> 40) as f64)).collect();
        let tied: Vec<_> = (0..ranks).map(|slot| (rank_of(slot), 128.0)).collect();
        for (name, candidates) in [("costs differ", differing), ("all tied", tied)] {
            let mut request = 0;
            group.bench_function(BenchmarkId::new(name, ranks), |bencher| {
                bencher.iter(|| {
                    request += 1;
                    Draw { seed: 7, request }
                        .cheapest(black_box(&candidates).iter().map(|&(rank, cost)| (rank, rank, cost)))
                });
            });
        }
    }
    group.finish();
}

fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("select/scheduler's share");
    let kv = RouterConfig::default();
    let board_only = RouterConfig { load: LoadConfig { assume_kv_reuse: false, ..kv.clone().load }, ..kv.clone() };
    for (name, config) in [("kv", kv), ("kv, no reuse assumed", board_only)] {
        for ranks in [8, 64, 512, 2_048] {
            let mut still = Still::new(config.clone(), ranks);
            group.bench_function(BenchmarkId::new(name, ranks), |bencher| bencher.iter(|| still.decide()));
            if let Some(tenths) = (10 * still.queried_ranks).checked_div(still.requests) {
                eprintln!("{name}, {ranks} ranks: {}.{} queried ranks per request", tenths / 10, tenths % 10);
            }
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = cost, pick, decide
}
criterion_main!(benches);
