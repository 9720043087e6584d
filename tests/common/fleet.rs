//! The pure scheduler with a simulated fleet: plain [`ActiveSequences`] respond to its queries, immediately or late.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pointsman::RouterConfig;
use pointsman::hashing::sequence_hashes;
use pointsman::index::Holdings;
use pointsman::load::{ActiveSequences, BoardLoad, BoardSlot, PromptBlocks, RankLoad};
use pointsman::policy::Policy;
use pointsman::protocol::{BlockHash, BookingId, Generation, Slot, Timestamp, WorkerId, WorkerRank};
use pointsman::schedule::{
    Admission, Decision, Effect, Explanation, Extensions, Input, LiveLoads, LoadAnswer, LoadQuery, Purpose, RankCells,
    Rejection, Request, ResolvedOptions, Schedule, Target, Waits,
};
use pointsman::select::{RankConditions, RankOverlap, RankTraits, SharedHits, TierOverlap};

pub(crate) const BLOCK_SIZE: u32 = 16;

pub(crate) fn config() -> RouterConfig {
    RouterConfig { block_size: BLOCK_SIZE, seed: 11, policy: Policy::Kv.into(), ..RouterConfig::default() }
}

pub(crate) fn rank(worker: u64) -> WorkerRank {
    WorkerRank::new(WorkerId(worker), 0)
}

/// One rank with the state of its sequence actor and its worker.
pub(crate) struct Node {
    pub(crate) rank: WorkerRank,
    pub(crate) slot: Slot,
    pub(crate) generation: Generation,
    pub(crate) active: ActiveSequences,
    pub(crate) board: Arc<BoardSlot>,
    pub(crate) holdings: Arc<Holdings>,
    pub(crate) traits: RankTraits,
    pub(crate) draining: bool,
    pub(crate) retired: bool,
    pub(crate) applied: u32,
    pub(crate) incarnation: u32,
}

impl Node {
    pub(crate) fn publish(&self, now: Timestamp) {
        self.board.publish(&BoardLoad::of(&self.active, self.incarnation, self.applied, now));
    }
}

/// Final result of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    Booked(Decision, Option<Box<Explanation>>),
    Reported(Decision),
    LoadSnapshot,
    Explained(Box<Explanation>),
    Rejected(Rejection),
    Cancelled,
}

/// Builder of a request.
#[derive(Clone)]
pub(crate) struct Ask {
    pub(crate) blocks: u32,
    /// Prompts with equal seeds share a prefix.
    pub(crate) prompt: u64,
    /// Device blocks by node.
    pub(crate) cached: Vec<(usize, u32)>,
    pub(crate) shared_cache: SharedHits,
    pub(crate) options: ResolvedOptions,
    pub(crate) purpose: Purpose,
    pub(crate) target: Target,
    pub(crate) waits: bool,
    pub(crate) refreshes: bool,
}

impl Default for Ask {
    fn default() -> Self {
        Self {
            blocks: 4,
            prompt: 1,
            cached: Vec::new(),
            shared_cache: SharedHits::default(),
            options: ResolvedOptions::default(),
            purpose: Purpose::Book,
            target: Target::Any,
            waits: true,
            refreshes: false,
        }
    }
}

pub(crate) fn asks(options: ResolvedOptions) -> Ask {
    Ask { options, ..Ask::default() }
}

pub(crate) struct Fleet {
    pub(crate) config: RouterConfig,
    pub(crate) schedule: Schedule<u64>,
    loads: LiveLoads,
    pub(crate) nodes: Vec<Node>,
    pub(crate) now: Timestamp,
    /// Queries without a response.
    pub(crate) asked: VecDeque<LoadQuery>,
    pub(crate) asked_ranks: usize,
    /// Whether queries are answered immediately.
    pub(crate) prompt_answers: bool,
    /// Completed requests, in order.
    pub(crate) left: Vec<(u64, Outcome)>,
    pub(crate) refreshes: Vec<(BookingId, usize)>,
    /// Load of the rank before each Book.
    pub(crate) before: BTreeMap<u64, RankLoad>,
    prompts: BTreeMap<u64, PromptBlocks>,
    effects: VecDeque<Effect<u64>>,
}

impl Fleet {
    pub(crate) fn new(config: RouterConfig, ranks: usize) -> Self {
        Self::with(config, ranks, Extensions::default())
    }

    pub(crate) fn with(config: RouterConfig, ranks: usize, extensions: Extensions) -> Self {
        config.validate().expect("valid test settings");
        let mut fleet = Self {
            schedule: Schedule::new(config.clone(), 0, extensions),
            loads: LiveLoads::default(),
            config,
            nodes: Vec::new(),
            now: Timestamp(1_000_000_000),
            asked: VecDeque::new(),
            asked_ranks: 0,
            prompt_answers: true,
            left: Vec::new(),
            refreshes: Vec::new(),
            before: BTreeMap::new(),
            prompts: BTreeMap::new(),
            effects: VecDeque::new(),
        };
        for worker in 0..ranks {
            fleet.admit(rank(worker as u64), RankTraits::default());
        }
        fleet
    }

    /// Adds a rank in a new slot. Returns its position.
    pub(crate) fn admit(&mut self, rank: WorkerRank, traits: RankTraits) -> usize {
        let slot = Slot(self.nodes.len() as u32);
        self.admit_in(slot, Generation(1), rank, traits)
    }

    pub(crate) fn admit_in(
        &mut self,
        slot: Slot,
        generation: Generation,
        rank: WorkerRank,
        traits: RankTraits,
    ) -> usize {
        let (board, holdings) = (Arc::new(BoardSlot::default()), Arc::new(Holdings::default()));
        let node = Node {
            rank,
            slot,
            generation,
            active: ActiveSequences::new(self.config.load.assume_kv_reuse),
            board: Arc::clone(&board),
            holdings: Arc::clone(&holdings),
            traits: traits.clone(),
            draining: false,
            retired: false,
            applied: 0,
            incarnation: 0,
        };
        let position = slot.index();
        if position < self.nodes.len() {
            self.nodes[position] = node;
        } else {
            self.nodes.push(node);
        }
        self.loads.insert(slot, RankCells { board, holdings, ..RankCells::default() });
        let admission =
            Admission { since: self.now, traits: Arc::new(traits), ..Admission::new(rank, slot, generation) };
        self.step(Input::Admit(admission));
        position
    }

    pub(crate) fn describe(&mut self, node: usize, traits: RankTraits) {
        self.nodes[node].traits = traits.clone();
        let Node { slot, generation, .. } = self.nodes[node];
        self.step(Input::Describe { slot, generation, traits: Arc::new(traits) });
    }

    pub(crate) fn drain(&mut self, node: usize) {
        self.nodes[node].draining = true;
        let Node { slot, generation, .. } = self.nodes[node];
        self.step(Input::Drain { slot, generation });
    }

    pub(crate) fn retire(&mut self, node: usize) {
        self.nodes[node].retired = true;
        let Node { slot, generation, .. } = self.nodes[node];
        self.step(Input::Retire { slot, generation });
    }

    pub(crate) fn set_conditions(&mut self, overloaded: &[u64], unavailable: &[u64]) {
        let ranks = |workers: &[u64]| workers.iter().copied().map(rank).collect::<BTreeSet<_>>();
        let conditions = RankConditions { overloaded: ranks(overloaded), unavailable: ranks(unavailable) };
        self.step(Input::Conditions(Arc::new(conditions)));
    }

    pub(crate) fn overlaps(&self, cached: &[(usize, u32)]) -> Vec<RankOverlap> {
        let overlap = |&(node, device_blocks): &(usize, u32)| RankOverlap {
            slot: self.nodes[node].slot,
            generation: self.nodes[node].generation,
            overlap: TierOverlap { device_blocks, ..TierOverlap::default() },
        };
        cached.iter().map(overlap).collect()
    }

    pub(crate) fn ask(&mut self, id: u64, ask: &Ask) {
        let blocks: Vec<BlockHash> =
            (0..u64::from(ask.blocks)).map(|n| BlockHash((ask.prompt << 32) ^ n ^ 0x5eed)).collect();
        let prompt = if self.config.load.assume_kv_reuse {
            PromptBlocks::Hashed(sequence_hashes(&blocks))
        } else {
            PromptBlocks::Counted(ask.blocks)
        };
        self.prompts.insert(id, prompt.clone());
        let waits = ask.waits.then(|| {
            Box::new(Waits {
                booking: BookingId(id),
                arrival: self.now,
                block_hashes: ask.refreshes.then(|| blocks.into()),
            })
        });
        let options = (ask.options != ResolvedOptions::default()).then(|| Box::new(ask.options.clone()));
        let request = Request {
            overlaps: self.overlaps(&ask.cached),
            shared_cache: ask.shared_cache.clone(),
            target: ask.target,
            purpose: ask.purpose,
            options,
            waits,
            ..Request::new(id, prompt, ask.blocks * self.config.block_size)
        };
        self.step(Input::Request(request));
    }

    pub(crate) fn step(&mut self, input: Input<u64>) {
        self.schedule.step(input, &self.loads, self.now, &mut self.effects);
        self.perform();
    }

    pub(crate) fn wake(&mut self) {
        self.step(Input::Wake);
    }

    pub(crate) fn cancel(&mut self, id: u64) {
        self.step(Input::Cancel(BookingId(id)));
    }

    fn perform(&mut self) {
        while let Some(effect) = self.effects.pop_front() {
            match effect {
                Effect::Query(query) => {
                    self.asked_ranks += query.slots.len();
                    self.asked.push_back(query);
                    if self.prompt_answers {
                        self.answer(&[]);
                    }
                }
                Effect::Refresh { booking, block_hashes } => self.refreshes.push((booking, block_hashes.len())),
                Effect::PublishTypicalSpeed(speed) => self.loads.publish_typical_speed(&speed),
                Effect::Book { context: id, decision, number, trace } => {
                    let node = &mut self.nodes[decision.slot().index()];
                    assert_eq!((node.rank, node.generation), (decision.rank(), decision.generation()));
                    assert_eq!((number.incarnation, number.number), (node.incarnation, node.applied + 1));
                    node.applied = number.number;
                    self.before.insert(id, node.active.load(self.now));
                    let prompt = self.prompts.get(&id).expect("queried before").clone();
                    node.active.book(BookingId(id), prompt, decision.prefill_load(), self.now).expect("booked once");
                    node.publish(self.now);
                    self.left.push((id, Outcome::Booked(decision, trace)));
                }
                Effect::Report { context: id, decision } => self.left.push((id, Outcome::Reported(decision))),
                Effect::LoadSnapshot { context: id, .. } => self.left.push((id, Outcome::LoadSnapshot)),
                Effect::Explain { context: id, explanation } => self.left.push((id, Outcome::Explained(explanation))),
                Effect::Reject { context: id, reason } => self.left.push((id, Outcome::Rejected(reason))),
                Effect::Cancelled { context: id } => self.left.push((id, Outcome::Cancelled)),
            }
        }
    }

    /// Responds to the oldest open query, except for the nodes in `missing`.
    pub(crate) fn answer(&mut self, missing: &[usize]) {
        let Some(query) = self.asked.pop_front() else { return };
        let answers = self.answers_to(&query, missing);
        self.step(Input::Loads { batch: query.batch, answers });
    }

    pub(crate) fn answers_to(&self, query: &LoadQuery, missing: &[usize]) -> Vec<LoadAnswer> {
        let present = |slot: &&Slot| !missing.contains(&slot.index()) && !self.nodes[slot.index()].retired;
        let answers = query.slots.iter().filter(present).map(|&slot| {
            let Node { active, generation, .. } = &self.nodes[slot.index()];
            let shared_blocks = query.prompts.iter().map(|prompt| active.project(prompt).shared_blocks).collect();
            LoadAnswer { slot, generation: *generation, load: active.load(self.now), shared_blocks }
        });
        answers.collect()
    }

    /// Frees a request on any rank, without waking the scheduler.
    pub(crate) fn free(&mut self, id: u64) {
        for node in &mut self.nodes {
            node.active.free(BookingId(id), self.now);
            node.publish(self.now);
        }
    }

    pub(crate) fn complete_prefill(&mut self, id: u64) {
        for node in &mut self.nodes {
            node.active.complete_prefill(BookingId(id), self.now);
            node.publish(self.now);
        }
    }

    /// The result of a request that must be complete.
    pub(crate) fn outcome(&self, id: u64) -> &Outcome {
        let outcome = self.left.iter().find(|(left, _)| *left == id);
        &outcome.unwrap_or_else(|| panic!("{id} is still queued")).1
    }

    pub(crate) fn has_left(&self, id: u64) -> bool {
        self.left.iter().any(|(left, _)| *left == id)
    }

    pub(crate) fn decision(&self, id: u64) -> &Decision {
        match self.outcome(id) {
            Outcome::Booked(decision, _) | Outcome::Reported(decision) => decision,
            other => panic!("expected a placement of {id}, not {other:?}"),
        }
    }

    /// The worker that a request was placed on.
    pub(crate) fn worker(&self, id: u64) -> u64 {
        self.decision(id).rank().worker.0
    }

    pub(crate) fn rejection(&self, id: u64) -> &Rejection {
        match self.outcome(id) {
            Outcome::Rejected(reason) => reason,
            other => panic!("expected a rejection of {id}, not {other:?}"),
        }
    }

    pub(crate) fn explanation(&self, id: u64) -> &Explanation {
        match self.outcome(id) {
            Outcome::Explained(explanation) => explanation,
            other => panic!("expected an explanation of {id}, not {other:?}"),
        }
    }

    /// Ids of booked requests, in order.
    pub(crate) fn booked(&self) -> Vec<u64> {
        let booked = self.left.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Booked(..)));
        booked.map(|(id, _)| *id).collect()
    }

    /// Queued requests of all classes.
    pub(crate) fn waiting(&self) -> u64 {
        self.schedule.depths().map(|(_, depth)| depth.requests).sum()
    }
}

/// The `n`-th value of a fixed pseudo-random sequence.
pub(crate) fn scattered(n: u64) -> u64 {
    let mixed = (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^ (mixed >> 31)
}
