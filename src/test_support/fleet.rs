//! The pure scheduler with a simulated fleet: plain [`ActiveSequences`] respond to its queries, immediately or late.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::config::RouterConfig;
use crate::hashing::sequence_hashes;
use crate::load::{ActiveSequences, BoardLoad, PromptBlocks, RankLoad};
use crate::protocol::{BlockHash, BookingId, Generation, Slot, Timestamp, WorkerRank};
use crate::queue::QueueHeads;
use crate::schedule::{
    Admission, Decision, Effect, Explanation, Extensions, Input, LiveLoads, LoadAnswer, LoadQuery, Purpose, RankCells,
    Rejection, Request, ResolvedOptions, Schedule, Target, Waits,
};
use crate::select::{RankConditions, RankOverlap, RankTraits, SharedHits, TierOverlap};
use crate::test_support::rank;

/// One rank with the state of its sequence actor and its worker.
#[derive(Debug)]
pub struct SimulatedRank {
    /// Name of the rank.
    pub rank: WorkerRank,
    /// Slot of the rank, equal to its position in [`SimulatedFleet::ranks`].
    pub slot: Slot,
    /// Generation of the slot.
    pub generation: Generation,
    /// Bookings.
    pub active: ActiveSequences,
    /// Published loads.
    pub cells: RankCells,
    /// Properties of the worker.
    pub traits: RankTraits,
    /// Whether the rank is draining.
    pub is_draining: bool,
    /// Whether the rank was removed. It responds to no query.
    pub is_retired: bool,
    /// Number of the last applied Book.
    pub applied: u32,
    /// Incarnation of the sequence actor.
    pub incarnation: u32,
}

impl SimulatedRank {
    /// Publishes the load to the board of the rank.
    pub fn publish(&self, now: Timestamp) {
        self.cells.board.publish(&BoardLoad::of(&self.active, self.incarnation, self.applied, now));
    }
}

/// Final result of a request.
#[derive(Debug)]
pub enum RequestOutcome {
    /// Booked on a rank, with the explanation of a traced decision.
    Booked(Decision, Option<Box<Explanation>>),
    /// Decided without a booking.
    Reported(Decision),
    /// The loads of all ranks.
    LoadSnapshot,
    /// Explained without a booking.
    Explained(Box<Explanation>),
    /// Rejected.
    Rejected(Rejection),
    /// Cancelled while it waited.
    Cancelled,
}

/// A request with defaults for everything that a test does not set.
#[derive(Clone, Debug)]
pub struct SampleRequest {
    /// Length of the prompt.
    pub blocks: u32,
    /// Seed of the prompt. Prompts with equal seeds share a prefix.
    pub prompt: u64,
    /// Matched device blocks, by position of the rank.
    pub cached: Vec<(usize, u32)>,
    /// Matched blocks of the shared cache.
    pub shared_cache: SharedHits,
    /// Options.
    pub options: ResolvedOptions,
    /// Purpose.
    pub purpose: Purpose,
    /// Eligible ranks.
    pub target: Target,
    /// Whether the request may wait in the queue.
    pub waits: bool,
    /// Whether its overlap may be refreshed while it waits.
    pub refreshes: bool,
}

impl Default for SampleRequest {
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

impl From<ResolvedOptions> for SampleRequest {
    fn from(options: ResolvedOptions) -> Self {
        Self { options, ..Self::default() }
    }
}

/// The pure scheduler, the ranks that perform its effects, and the clock.
///
/// ```
/// use pointsman::RouterConfig;
/// use pointsman::test_support::{SampleRequest, SimulatedFleet};
///
/// let mut fleet = SimulatedFleet::new(RouterConfig::default(), 2);
/// fleet.request(0, &SampleRequest { cached: vec![(1, 4)], ..SampleRequest::default() });
/// assert_eq!(fleet.worker(0), 1);
/// ```
#[derive(Debug)]
pub struct SimulatedFleet {
    /// Configuration of the scheduler.
    pub config: RouterConfig,
    /// The scheduler.
    pub schedule: Schedule<u64>,
    /// Loads that the scheduler reads.
    pub loads: LiveLoads,
    /// Longest-waiting requests of other replicas, part of the loads.
    pub queue_heads: Arc<QueueHeads>,
    /// All ranks ever admitted, by slot.
    pub ranks: Vec<SimulatedRank>,
    /// Current time.
    pub now: Timestamp,
    /// Queries without a response, oldest first.
    pub open_queries: VecDeque<LoadQuery>,
    /// Number of ranks in all queries.
    pub queried_ranks: usize,
    /// Whether ranks respond to a query immediately.
    pub responds_at_once: bool,
    /// Completed requests, in order.
    pub outcomes: Vec<(u64, RequestOutcome)>,
    /// Requested refreshes of overlaps, with the number of blocks.
    pub refreshes: Vec<(BookingId, usize)>,
    /// Load of the rank before each Book.
    pub loads_before: BTreeMap<u64, RankLoad>,
    prompts: BTreeMap<u64, PromptBlocks>,
    effects: VecDeque<Effect<u64>>,
}

impl SimulatedFleet {
    /// A fleet with rank 0 of the workers 0 to `ranks` − 1.
    ///
    /// # Panics
    /// If the configuration is invalid.
    #[must_use]
    pub fn new(config: RouterConfig, ranks: usize) -> Self {
        Self::with(config, ranks, Extensions::default())
    }

    /// The same with extensions.
    ///
    /// # Panics
    /// If the configuration is invalid.
    #[must_use]
    pub fn with(config: RouterConfig, ranks: usize, extensions: Extensions) -> Self {
        config.validate().expect("the configuration is valid");
        let schedule = Schedule::new(config.clone(), 0, extensions);
        Self::of(schedule, config, ranks)
    }

    /// A fleet with an existing scheduler, whose configuration may be invalid.
    #[must_use]
    pub fn of(schedule: Schedule<u64>, config: RouterConfig, ranks: usize) -> Self {
        let queue_heads = Arc::new(QueueHeads::default());
        let mut fleet = Self {
            config,
            schedule,
            loads: LiveLoads::new(Arc::default(), Arc::default(), Arc::clone(&queue_heads)),
            queue_heads,
            ranks: Vec::new(),
            now: Timestamp(1_000_000_000),
            open_queries: VecDeque::new(),
            queried_ranks: 0,
            responds_at_once: true,
            outcomes: Vec::new(),
            refreshes: Vec::new(),
            loads_before: BTreeMap::new(),
            prompts: BTreeMap::new(),
            effects: VecDeque::new(),
        };
        for worker in 0..ranks {
            fleet.admit(rank(worker as u64), RankTraits::default());
        }
        fleet
    }

    /// Adds a rank in a new slot. Returns its position.
    pub fn admit(&mut self, rank: WorkerRank, traits: RankTraits) -> usize {
        let slot = Slot(self.ranks.len() as u32);
        self.admit_in(slot, Generation(1), rank, traits)
    }

    /// Adds a rank in a new slot or in the slot of a retired rank. Returns its position.
    pub fn admit_in(&mut self, slot: Slot, generation: Generation, rank: WorkerRank, traits: RankTraits) -> usize {
        let cells = RankCells::default();
        self.loads.insert(slot, cells.clone());
        let added = SimulatedRank {
            rank,
            slot,
            generation,
            active: ActiveSequences::new(self.config.load.assume_kv_reuse),
            cells,
            traits: traits.clone(),
            is_draining: false,
            is_retired: false,
            applied: 0,
            incarnation: 0,
        };
        let position = slot.index();
        if position < self.ranks.len() {
            self.ranks[position] = added;
        } else {
            self.ranks.push(added);
        }
        let admission =
            Admission { since: self.now, traits: Arc::new(traits), ..Admission::new(rank, slot, generation) };
        self.step(Input::Admit(admission));
        position
    }

    /// Changes the properties of a rank.
    pub fn describe(&mut self, position: usize, traits: RankTraits) {
        self.ranks[position].traits = traits.clone();
        let SimulatedRank { slot, generation, .. } = self.ranks[position];
        self.step(Input::Describe { slot, generation, traits: Arc::new(traits) });
    }

    /// Drains a rank.
    pub fn drain(&mut self, position: usize) {
        self.ranks[position].is_draining = true;
        let SimulatedRank { slot, generation, .. } = self.ranks[position];
        self.step(Input::Drain { slot, generation });
    }

    /// Removes a rank.
    pub fn retire(&mut self, position: usize) {
        self.ranks[position].is_retired = true;
        let SimulatedRank { slot, generation, .. } = self.ranks[position];
        self.step(Input::Retire { slot, generation });
    }

    /// Replaces the sets of overloaded and unavailable workers.
    pub fn set_conditions(&mut self, overloaded: &[u64], unavailable: &[u64]) {
        let ranks = |workers: &[u64]| workers.iter().copied().map(rank).collect::<BTreeSet<_>>();
        let conditions = RankConditions { overloaded: ranks(overloaded), unavailable: ranks(unavailable) };
        self.step(Input::Conditions(Arc::new(conditions)));
    }

    /// Overlaps in device blocks, by position of the rank. These ranks have published events.
    #[must_use]
    pub fn overlaps(&self, cached: &[(usize, u32)]) -> Vec<RankOverlap> {
        let overlap = |&(position, device_blocks): &(usize, u32)| {
            let SimulatedRank { slot, generation, ref cells, .. } = self.ranks[position];
            if cells.holdings.changed_at().is_none() {
                cells.holdings.publish(device_blocks as usize, self.now);
            }
            RankOverlap { slot, generation, overlap: TierOverlap { device_blocks, ..TierOverlap::default() } }
        };
        cached.iter().map(overlap).collect()
    }

    /// Sends a request to the scheduler.
    pub fn request(&mut self, id: u64, sample: &SampleRequest) {
        let blocks: Vec<BlockHash> =
            (0..u64::from(sample.blocks)).map(|n| BlockHash((sample.prompt << 32) ^ n ^ 0x5eed)).collect();
        let prompt = if self.config.load.assume_kv_reuse {
            PromptBlocks::Hashed(sequence_hashes(&blocks))
        } else {
            PromptBlocks::Counted(sample.blocks)
        };
        let waits = sample.waits.then(|| {
            Box::new(Waits {
                booking: BookingId(id),
                arrival: self.now,
                block_hashes: sample.refreshes.then(|| blocks.into()),
            })
        });
        let options = (sample.options != ResolvedOptions::default()).then(|| Box::new(sample.options.clone()));
        self.submit(Request {
            overlaps: self.overlaps(&sample.cached),
            shared_cache: sample.shared_cache.clone(),
            target: sample.target,
            purpose: sample.purpose,
            options,
            waits,
            ..Request::new(id, prompt, sample.blocks * self.config.block_size_or_assumed())
        });
    }

    /// Books `blocks` on a worker, with their prefill pending and without a query. The seed of the prompt is 1,000 plus
    /// `id`.
    ///
    /// # Panics
    /// If the request was not booked there.
    pub fn occupy(&mut self, id: u64, worker: u64, blocks: u32) {
        let target = Target::Exactly { rank: rank(worker), cached_tokens: None, expected_duration: None };
        let sample = SampleRequest { blocks, prompt: 1_000 + id, target, waits: false, ..SampleRequest::default() };
        self.request(id, &sample);
        assert_eq!(self.worker(id), worker);
    }

    /// Sends a request to the scheduler. Its context is its booking id.
    pub fn submit(&mut self, request: Request<u64>) {
        self.prompts.insert(request.context, request.prompt.clone());
        self.step(Input::Request(request));
    }

    /// Executes one step of the scheduler and performs its effects.
    pub fn step(&mut self, input: Input<u64>) {
        self.schedule.step(input, &self.loads, self.now, &mut self.effects);
        while let Some(effect) = self.effects.pop_front() {
            self.perform(effect);
        }
    }

    /// Wakes the scheduler at the current time.
    pub fn wake(&mut self) {
        self.step(Input::Wake);
    }

    /// Cancels a request.
    pub fn cancel(&mut self, id: u64) {
        self.step(Input::Cancel(BookingId(id)));
    }

    fn perform(&mut self, effect: Effect<u64>) {
        let (id, outcome) = match effect {
            Effect::Query(query) => {
                self.queried_ranks += query.slots.len();
                self.open_queries.push_back(query);
                if self.responds_at_once {
                    self.respond(&[]);
                }
                return;
            }
            Effect::Refresh { booking, block_hashes, .. } => {
                return self.refreshes.push((booking, block_hashes.len()));
            }
            Effect::PublishTypical { speed, rate } => return self.loads.publish_typical(&speed, rate, self.now),
            Effect::Book { context: id, decision, number, trace, shadow: _ } => {
                let booked = &mut self.ranks[decision.slot().index()];
                assert_eq!((booked.rank, booked.generation), (decision.rank(), decision.generation()));
                let next = (booked.incarnation, booked.applied + 1);
                assert_eq!((number.incarnation, number.number), next, "Books are numbered without a gap");
                booked.applied = number.number;
                self.loads_before.insert(id, booked.active.load(self.now));
                let prompt = self.prompts.remove(&id).expect("a booked request was sent and is booked once");
                booked
                    .active
                    .book(BookingId(id), prompt, decision.prefill_load(), self.now)
                    .expect("a request is booked once");
                booked.publish(self.now);
                (id, RequestOutcome::Booked(decision, trace))
            }
            Effect::Report { context: id, decision } => (id, RequestOutcome::Reported(decision)),
            Effect::LoadSnapshot { context: id, .. } => (id, RequestOutcome::LoadSnapshot),
            Effect::Explain { context: id, explanation } => (id, RequestOutcome::Explained(explanation)),
            Effect::Reject { context: id, reason } => (id, RequestOutcome::Rejected(reason)),
            Effect::Cancelled { context: id } => (id, RequestOutcome::Cancelled),
        };
        self.outcomes.push((id, outcome));
    }

    /// Responds to the oldest open query, if any, except for the ranks at the positions in `missing`.
    pub fn respond(&mut self, missing: &[usize]) {
        let Some(query) = self.open_queries.pop_front() else { return };
        let answers = self.responses_to(&query, missing);
        self.step(Input::Loads { batch: query.batch, answers });
    }

    /// Responds to all open queries, including those that a response causes.
    pub fn settle(&mut self) {
        while !self.open_queries.is_empty() {
            self.respond(&[]);
        }
    }

    /// Responses of all ranks, except for those at the positions in `missing` and retired ones.
    #[must_use]
    pub fn responses_to(&self, query: &LoadQuery, missing: &[usize]) -> Vec<LoadAnswer> {
        let queried = query.slots.iter().map(|slot| &self.ranks[slot.index()]);
        let present = queried.filter(|rank| !missing.contains(&rank.slot.index()) && !rank.is_retired);
        let response = |rank: &SimulatedRank| LoadAnswer {
            slot: rank.slot,
            generation: rank.generation,
            load: rank.active.load(self.now),
            shared_blocks: query.prompts.iter().map(|prompt| rank.active.project(prompt).shared_blocks).collect(),
        };
        present.map(response).collect()
    }

    /// Frees a request on any rank, without waking the scheduler.
    pub fn free(&mut self, id: u64) {
        for rank in &mut self.ranks {
            rank.active.free(BookingId(id), self.now);
            rank.publish(self.now);
        }
    }

    /// Completes the prefill of a request on any rank, without waking the scheduler.
    pub fn complete_prefill(&mut self, id: u64) {
        for rank in &mut self.ranks {
            rank.active.complete_prefill(BookingId(id), self.now);
            rank.publish(self.now);
        }
    }

    /// The result of a request.
    ///
    /// # Panics
    /// If the request is not complete.
    #[must_use]
    pub fn outcome(&self, id: u64) -> &RequestOutcome {
        let outcome = self.outcomes.iter().find(|(complete, _)| *complete == id);
        &outcome.unwrap_or_else(|| panic!("request {id} is not complete")).1
    }

    /// Whether a request is complete.
    #[must_use]
    pub fn is_complete(&self, id: u64) -> bool {
        self.outcomes.iter().any(|(complete, _)| *complete == id)
    }

    /// The decision on a request.
    ///
    /// # Panics
    /// If the request was not placed.
    #[must_use]
    pub fn decision(&self, id: u64) -> &Decision {
        match self.outcome(id) {
            RequestOutcome::Booked(decision, _) | RequestOutcome::Reported(decision) => decision,
            other => panic!("request {id} must be placed, not {other:?}"),
        }
    }

    /// The worker that a request was placed on.
    ///
    /// # Panics
    /// If the request was not placed.
    #[must_use]
    pub fn worker(&self, id: u64) -> u64 {
        self.decision(id).rank().worker.0
    }

    /// The reason for which a request was rejected.
    ///
    /// # Panics
    /// If the request was not rejected.
    #[must_use]
    pub fn rejection(&self, id: u64) -> &Rejection {
        match self.outcome(id) {
            RequestOutcome::Rejected(reason) => reason,
            other => panic!("request {id} must be rejected, not {other:?}"),
        }
    }

    /// The explanation of a request.
    ///
    /// # Panics
    /// If the request was not explained.
    #[must_use]
    pub fn explanation(&self, id: u64) -> &Explanation {
        match self.outcome(id) {
            RequestOutcome::Explained(explanation) => explanation,
            other => panic!("request {id} must be explained, not {other:?}"),
        }
    }

    /// Ids of booked requests, in order.
    #[must_use]
    pub fn booked(&self) -> Vec<u64> {
        let booked = self.outcomes.iter().filter(|(_, outcome)| matches!(outcome, RequestOutcome::Booked(..)));
        booked.map(|(id, _)| *id).collect()
    }

    /// Ids and ranks of booked and reported requests, in order.
    #[must_use]
    pub fn placed(&self) -> Vec<(u64, WorkerRank)> {
        let placed = self.outcomes.iter().filter_map(|(id, outcome)| match outcome {
            RequestOutcome::Booked(decision, _) | RequestOutcome::Reported(decision) => Some((*id, decision.rank())),
            _ => None,
        });
        placed.collect()
    }

    /// Number of queued requests of all classes.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.schedule.depths().map(|(_, depth)| depth.requests).sum()
    }
}
