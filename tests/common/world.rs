//! A fleet under random operations, and a literal model of the allowed results.
//!
//! Every operation is derived from the given numbers, so equal lists of numbers produce equal histories.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use pointsman::config::{RouterConfigOverride, SessionAffinity};
use pointsman::internals::load::PrefillEstimator;
use pointsman::internals::protocol::{BookingId, Generation};
use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
use pointsman::test_support::{RequestOutcome, SampleRequest, SimulatedFleet, SimulatedRank, mix, rank};
use pointsman::{
    Constraints, Decision, Filter, LimitKind, Pin, PinMode, RankTraits, Rejection, SessionId,
    internals::schedule::{Extensions, Input, LoadQuery, Purpose, ResolvedOptions, Target},
    internals::select::SharedHits,
};

use crate::fleet::BLOCK_SIZE;
use crate::world_config::some_config;

const WORKERS: u64 = 6;
pub(crate) const CLASSES: [&str; 3] = ["tokens", "share", "small"];

/// Pseudo-random numbers from a seed.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = mix(self.0);
        (self.0 >> 16) % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

struct Pending {
    sample: SampleRequest,
    /// Whether the request was observed in the queue.
    waited: bool,
    cancelled: bool,
    /// Lower bound of the time as of which its overlap is known.
    overlaps_at: Timestamp,
}

pub(crate) struct World {
    fleet: SimulatedFleet,
    pending: BTreeMap<u64, Pending>,
    running: Vec<u64>,
    ids: u64,
    /// By node: a load query timed out and no load has been received since.
    suspect: Vec<bool>,
    /// Queries closed with missing responses.
    late: VecDeque<LoadQuery>,
    overloaded: BTreeSet<WorkerRank>,
    unavailable: BTreeSet<WorkerRank>,
    seen: usize,
    /// Maximum number of ranks since no batch was in flight.
    ranks_before: u64,
    pub(crate) waited: u64,
    pub(crate) refreshed: u64,
}

fn some_traits(dice: &mut Dice) -> RankTraits {
    let mut traits = RankTraits {
        max_num_batched_tokens: dice.one_in(2).then_some(256),
        total_kv_blocks: dice.one_in(2).then_some(40),
        ..RankTraits::default()
    };
    traits.taints.extend(dice.one_in(2).then(|| "gold".to_owned()));
    traits.lora_adapters.extend(dice.one_in(3).then(|| "sql".to_owned()));
    traits
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let (config, queries_every_rank) = some_config(&mut dice);
        let steady = |_, new_tokens: u32, _| Some(Duration::from_micros(u64::from(new_tokens) * 100));
        let estimator = dice.one_in(3).then(|| Arc::new(steady) as Arc<PrefillEstimator>);
        let mut fleet =
            SimulatedFleet::with(config, 0, Extensions { estimator, queries_every_rank, ..Extensions::default() });
        fleet.responds_at_once = false;
        let mut world = Self {
            fleet,
            pending: BTreeMap::new(),
            running: Vec::new(),
            ids: 0,
            suspect: Vec::new(),
            late: VecDeque::new(),
            overloaded: BTreeSet::new(),
            unavailable: BTreeSet::new(),
            seen: 0,
            ranks_before: 0,
            waited: 0,
            refreshed: 0,
        };
        (0..dice.below(WORKERS)).for_each(|_| world.admit(&mut dice));
        world
    }

    /// Executes one random operation.
    pub(crate) fn step(&mut self, noise: u64) {
        let dice = &mut Dice::new(noise);
        match dice.below(100) {
            0..32 => self.request(dice),
            32..44 => self.answer(0),
            44..49 => self.answer(dice.below(1 << WORKERS)),
            49..52 => self.answer_late(),
            52..62 => {
                if let Some(id) = self.some_running(dice) {
                    self.fleet.complete_prefill(id);
                }
            }
            62..75 => {
                if let Some(id) = self.some_running(dice) {
                    self.running.retain(|running| *running != id);
                    self.fleet.free(id);
                }
            }
            75..80 => {
                if let Some(id) = self.some_pending(dice) {
                    self.cancel(id);
                }
            }
            80..88 => self.pass_time(Duration::from_millis(dice.below(60))),
            88..90 => {
                if let Some(id) = self.some_pending(dice) {
                    self.tell_overlaps(id, dice);
                }
            }
            90..92 => {
                if let Some(node) = self.some_node(dice) {
                    self.fleet.describe(node, some_traits(dice));
                }
            }
            92 => {
                if let Some(node) = self.some_node(dice) {
                    self.fleet.drain(node);
                }
            }
            93..95 => {
                if let Some(node) = self.some_node(dice) {
                    self.fleet.retire(node);
                }
            }
            95..98 => self.admit(dice),
            98 => self.set_conditions(dice),
            _ => self.restart(dice),
        }
        self.check();
    }

    fn some_running(&self, dice: &mut Dice) -> Option<u64> {
        (!self.running.is_empty()).then(|| self.running[dice.below(self.running.len() as u64) as usize])
    }

    fn some_pending(&self, dice: &mut Dice) -> Option<u64> {
        let nth = dice.below(self.pending.len().max(1) as u64);
        self.pending.keys().nth(nth as usize).copied()
    }

    /// A registered node.
    fn some_node(&self, dice: &mut Dice) -> Option<usize> {
        let nodes: Vec<usize> =
            (0..self.fleet.ranks.len()).filter(|node| !self.fleet.ranks[*node].is_retired).collect();
        (!nodes.is_empty()).then(|| nodes[dice.below(nodes.len() as u64) as usize])
    }

    fn admit(&mut self, dice: &mut Dice) {
        let traits = some_traits(dice);
        let node = self.fleet.ranks.len();
        if node < WORKERS as usize {
            self.suspect.push(false);
            self.fleet.admit(rank(node as u64), traits);
            return;
        }
        // A load response identifies its rank by the slot, so a slot is reused only if no response is pending.
        let Some(node) = (0..node).find(|node| self.fleet.ranks[*node].is_retired) else { return };
        if self.fleet.open_queries.is_empty() {
            self.late.clear();
            self.suspect[node] = false;
            let SimulatedRank { slot, generation, rank, .. } = self.fleet.ranks[node];
            self.fleet.admit_in(slot, Generation(generation.0 + 1), rank, traits);
        }
    }

    fn set_conditions(&mut self, dice: &mut Dice) {
        let (overloaded, unavailable) = match dice.below(3) {
            0 => (vec![dice.below(WORKERS), dice.below(WORKERS)], vec![dice.below(WORKERS)]),
            1 => (vec![dice.below(WORKERS)], vec![]),
            _ => (vec![], vec![]),
        };
        self.overloaded = overloaded.iter().copied().map(rank).collect();
        self.unavailable = unavailable.iter().copied().map(rank).collect();
        self.fleet.set_conditions(&overloaded, &unavailable);
    }

    /// Restarts a sequence actor, which rebuilds its state from the leases.
    fn restart(&mut self, dice: &mut Dice) {
        if let Some(node) = self.some_node(dice).filter(|_| self.fleet.open_queries.is_empty()) {
            self.suspect[node] = false;
            let node = &mut self.fleet.ranks[node];
            (node.incarnation, node.applied) = (node.incarnation + 1, 0);
            node.publish(self.fleet.now);
        }
    }

    fn some_options(&mut self, dice: &mut Dice) -> ResolvedOptions {
        let mut constraints = Constraints::default();
        if dice.one_in(8) {
            constraints.allowed_workers = Some((0..3).map(|_| WorkerId(dice.below(WORKERS))).collect());
        }
        if dice.one_in(8) {
            let excluded = (0..2).map(|_| WorkerRank::new(WorkerId(dice.below(WORKERS)), 0));
            constraints.excluded_ranks = excluded.collect();
        }
        if dice.one_in(6) {
            let mode = if dice.one_in(2) { PinMode::Hard } else { PinMode::Soft };
            constraints.pin = Some(Pin { worker: WorkerId(dice.below(WORKERS)), rank: None, mode });
        }
        if dice.one_in(8) {
            constraints.required_taints.insert("gold".to_owned());
        }
        if dice.one_in(4) {
            constraints.preferred_taints.insert("gold".to_owned(), 1.0);
        }
        let class = if dice.one_in(40) { "unknown" } else { CLASSES[dice.below(3) as usize] };
        let classes = !self.fleet.config.queue.classes.is_empty();
        ResolvedOptions {
            strict_priority: dice.below(8).saturating_sub(6) as u32,
            priority_jump: if dice.one_in(4) { dice.below(5) as f64 } else { 0.0 },
            due: dice.one_in(4).then(|| self.fleet.now + Duration::from_millis(dice.below(80))),
            policy_class: (classes && !dice.one_in(4)).then(|| class.into()),
            do_not_queue: dice.one_in(12),
            constraints,
            lora_name: dice.one_in(6).then(|| "sql".into()),
            session_id: dice.one_in(4).then(|| SessionId::new(&format!("s{}", dice.below(5))).expect("a good id")),
            overrides: RouterConfigOverride {
                temperature: dice.one_in(8).then_some(0.5),
                overlap_score_credit: dice.one_in(8).then_some(0.0),
                track_prefill_tokens: dice.one_in(8).then_some(false),
                ..RouterConfigOverride::default()
            },
            ..ResolvedOptions::default()
        }
    }

    fn request(&mut self, dice: &mut Dice) {
        let (purpose, waits) = match dice.below(20) {
            0 => (Purpose::Report, false),
            1 => (Purpose::LoadSnapshot, false),
            2 => (Purpose::Explain, false),
            3 => (Purpose::Book, false),
            _ => (Purpose::Book, true),
        };
        let options = if dice.one_in(3) { ResolvedOptions::default() } else { self.some_options(dice) };
        let exactly = Target::Exactly { rank: rank(dice.below(WORKERS)), cached_tokens: None, expected_duration: None };
        let exact = dice.one_in(30);
        let sample = SampleRequest {
            blocks: 1 + dice.below(6) as u32,
            prompt: dice.below(5),
            cached: self.some_overlaps(dice),
            shared_cache: SharedHits::new(std::iter::once(0..dice.below(3) as u32).collect()),
            options,
            purpose,
            target: if exact { exactly } else { Target::Any },
            waits: waits && !exact,
            refreshes: dice.one_in(2),
        };
        let id = self.ids;
        self.ids += 1;
        let pending = Pending { sample: sample.clone(), waited: false, cancelled: false, overlaps_at: self.fleet.now };
        self.pending.insert(id, pending);
        self.fleet.request(id, &sample);
    }

    fn some_overlaps(&self, dice: &mut Dice) -> Vec<(usize, u32)> {
        let nodes = self.fleet.ranks.len();
        (0..nodes).map(|node| (node, dice.below(5) as u32)).filter(|(_, blocks)| *blocks > 1).collect()
    }

    fn tell_overlaps(&mut self, id: u64, dice: &mut Dice) {
        let overlaps = self.fleet.overlaps(&self.some_overlaps(dice));
        if let Some(known) = self.pending.get_mut(&id).filter(|_| self.fleet.open_queries.is_empty()) {
            known.overlaps_at = self.fleet.now;
        }
        self.fleet.step(Input::Overlaps { booking: BookingId(id), overlaps });
    }

    fn cancel(&mut self, id: u64) {
        if let Some(pending) = self.pending.get_mut(&id) {
            pending.cancelled = true;
        }
        self.fleet.cancel(id);
    }

    /// Responds to the open query, except for the nodes in `missing`.
    fn answer(&mut self, missing: u64) {
        let Some(query) = self.fleet.open_queries.front().cloned() else { return };
        let missing: Vec<usize> = (0..WORKERS as usize).filter(|node| missing >> node & 1 == 1).collect();
        for slot in &query.slots {
            self.suspect[slot.index()] = missing.contains(&slot.index());
        }
        self.late.push_back(query);
        self.fleet.respond(&missing);
    }

    fn answer_late(&mut self) {
        let Some(query) = self.late.pop_front() else { return };
        query.slots.iter().for_each(|slot| self.suspect[slot.index()] = false);
        let answers = self.fleet.responses_to(&query, &[]);
        self.fleet.step(Input::Loads { batch: query.batch, answers });
    }

    fn pass_time(&mut self, time: Duration) {
        let until = self.fleet.now + time;
        while let Some(wake) = self.fleet.schedule.next_wake().filter(|wake| *wake <= until) {
            self.fleet.now = self.fleet.now.max(wake);
            self.fleet.wake();
            self.check_who_left();
            if self.fleet.schedule.next_wake().is_some_and(|again| again <= self.fleet.now) {
                // Only a request behind a batch in flight may require another wake-up at the same time.
                assert!(self.fleet.schedule.batch_in_flight().is_some(), "wake-up without work");
                break;
            }
        }
        self.fleet.now = self.fleet.now.max(until);
        self.fleet.wake();
    }

    /// Whether this rank is eligible for the request, regardless of load.
    fn may_serve(&self, node: usize, sample: &SampleRequest) -> bool {
        let known = &self.fleet.ranks[node];
        !known.is_retired
            && !known.is_draining
            && !self.unavailable.contains(&known.rank)
            && sample.options.constraints.refused_by(known.rank, &known.traits).is_none()
    }

    fn is_bound(&self, sample: &SampleRequest) -> bool {
        self.fleet.config.session.affinity == SessionAffinity::Hard && sample.options.session_id.is_some()
    }

    /// Nodes that are eligible for the request, regardless of load.
    fn eligible(&self, sample: &SampleRequest) -> Vec<usize> {
        let mut nodes: Vec<usize> = (0..self.fleet.ranks.len()).filter(|node| self.may_serve(*node, sample)).collect();
        if self.is_bound(sample) {
            return nodes; // the session binding takes precedence over the filters below
        }
        if nodes.iter().any(|node| !self.suspect[*node]) {
            nodes.retain(|node| !self.suspect[*node]);
        }
        if let Some(adapter) = sample.options.lora_name.as_deref() {
            let has = |node: &usize| self.fleet.ranks[*node].traits.lora_adapters.contains(adapter);
            if nodes.iter().any(has) {
                nodes.retain(has);
            }
        }
        nodes
    }

    fn is_overloaded(&self, node: usize, prefill_tokens: u64, active_blocks: u32) -> bool {
        let (config, known) = (&self.fleet.config, &self.fleet.ranks[node]);
        let full = config.overload.blocks_frac.zip(known.traits.total_kv_blocks);
        self.overloaded.contains(&known.rank)
            || config.overload.prefill_tokens.is_some_and(|limit| prefill_tokens > limit)
            || full.is_some_and(|(frac, blocks)| f64::from(active_blocks) > frac * f64::from(blocks))
    }

    fn class(&self, sample: &SampleRequest) -> Option<usize> {
        let name = sample.options.policy_class.as_deref();
        name.map_or(Some(0), |name| CLASSES.iter().position(|class| *class == name))
    }

    fn is_busy(&self, node: usize, sample: &SampleRequest, prefill_tokens: u64) -> bool {
        let Some(class) = self.class(sample).and_then(|class| self.fleet.config.queue.classes.get(class)) else {
            return false;
        };
        let step = self.fleet.ranks[node]
            .traits
            .max_num_batched_tokens
            .unwrap_or(self.fleet.config.queue.unstated_batched_tokens());
        class.busy_prefill_tokens.is_some_and(|limit| prefill_tokens > limit)
            || class.busy_prefill_frac.is_some_and(|frac| prefill_tokens as f64 > frac * f64::from(step))
    }

    fn check(&mut self) {
        self.check_who_left();
        // The load may have fallen, or a Book may just have become visible. A Book wakes the scheduler again.
        let mut left = usize::MAX;
        while left != self.seen {
            left = self.seen;
            self.fleet.wake();
            self.check_who_left();
        }
        assert_eq!(self.fleet.schedule.pending(), self.pending.len(), "no request is lost");
        let in_flight = self.fleet.schedule.batch_in_flight().is_some();
        let now = self.fleet.now;
        let late = self.pending.values().filter(|known| (known.waited || !in_flight) && is_late(&known.sample, now));
        assert!(late.count() <= usize::from(in_flight), "expired requests are rejected unless a query is pending");
        if !in_flight {
            self.check_who_waits();
            self.ranks_before = 0;
        }
        self.ranks_before = self.ranks_before.max(self.ranks());
    }

    fn ranks(&self) -> u64 {
        self.fleet.ranks.iter().filter(|node| !node.is_retired).count() as u64
    }

    fn check_who_left(&mut self) {
        let left: Vec<(u64, RequestOutcome)> = self.fleet.outcomes.drain(..).collect();
        for (id, outcome) in left {
            let known = self.pending.remove(&id).expect("one reply per request");
            self.seen += 1;
            match (outcome, known.sample.purpose) {
                (RequestOutcome::Booked(decision, _), Purpose::Book) => {
                    self.check_book(id, &known, &decision);
                    self.running.push(id);
                }
                (RequestOutcome::Cancelled, Purpose::Book) => assert!(known.cancelled && known.sample.waits),
                (RequestOutcome::Rejected(reason), _) => self.check_rejection(&known, &reason),
                (RequestOutcome::Reported(_), Purpose::Report)
                | (RequestOutcome::LoadSnapshot, Purpose::LoadSnapshot)
                | (RequestOutcome::Explained(_), Purpose::Explain) => {}
                (outcome, purpose) => panic!("{outcome:?} does not match {purpose:?}"),
            }
        }
        self.check_refreshes();
    }

    fn check_book(&mut self, id: u64, known: &Pending, decision: &Decision) {
        let (node, sample) = (decision.slot().index(), &known.sample);
        let before = self.fleet.loads_before.remove(&id).expect("recorded at every Book");
        assert!(!(known.cancelled && sample.waits), "its caller is gone");
        assert!(!is_late(sample, self.fleet.now), "booked too late");
        assert!(!self.fleet.ranks[node].is_retired);
        if let Target::Exactly { rank, .. } = sample.target {
            return assert_eq!(rank, decision.rank());
        }
        assert!(self.eligible(sample).contains(&node), "booked on the ineligible rank {}", decision.rank());
        assert!(!self.is_overloaded(node, before.prefill_tokens, before.active_blocks), "overloaded");
        assert!(!sample.waits || !self.is_busy(node, sample, before.prefill_tokens), "booked on a busy rank");
    }

    fn check_rejection(&self, known: &Pending, reason: &Rejection) {
        let sample = &known.sample;
        let with_standing = (0..self.fleet.ranks.len()).any(|node| self.may_serve(node, sample));
        match reason {
            Rejection::NoRanks => assert!(self.fleet.ranks.iter().all(|node| node.is_retired)),
            Rejection::UnknownRank(_) => assert_ne!(sample.target, Target::Any),
            Rejection::NoneEligible { .. } => assert!(!with_standing, "an eligible rank exists"),
            Rejection::Pinned { refused_by, .. } => {
                let passing = refused_by.is_some_and(Filter::passes);
                assert!(sample.options.constraints.hard_pin().is_some() && passing == with_standing);
            }
            Rejection::AllOverloaded { removed } => assert!(with_standing && removed.by(Filter::Overloaded) > 0),
            Rejection::DeadlineExceeded { .. } => assert!(is_late(sample, self.fleet.now), "too early"),
            Rejection::Backpressure(refused) => {
                assert!(!known.waited, "queued and rejected");
                assert_eq!(sample.options.do_not_queue, refused.limit == LimitKind::DoNotQueue);
            }
            Rejection::TargetsMissed(_) => unreachable!("no request has targets"),
            Rejection::UnknownClass(_) => assert!(self.class(sample).is_none()),
            Rejection::Policy(_) => unreachable!("none left"),
        }
    }

    fn check_refreshes(&mut self) {
        let asked: Vec<u64> = self.fleet.refreshes.drain(..).map(|(booking, _)| booking.0).collect();
        for id in asked {
            self.refreshed += 1;
            let known = self.pending.get_mut(&id).expect("only waiting requests are queried");
            let after = Duration::from_millis(self.fleet.config.queue.overlap_refresh_after_ms);
            assert!(known.sample.refreshes && !after.is_zero() && known.overlaps_at + after <= self.fleet.now);
            known.overlaps_at = self.fleet.now;
        }
    }

    /// With no batch in flight, every incomplete request must be in the queue.
    fn check_who_waits(&mut self) {
        let depths: Vec<_> = self.fleet.schedule.depths().map(|(_, depth)| depth).collect();
        let ranks = self.ranks_before.max(self.ranks());
        for (class, depth) in depths.iter().enumerate() {
            let tokens = |known: &Pending| u64::from(known.sample.blocks * BLOCK_SIZE);
            let of_class = || self.pending.values().filter(|known| self.class(&known.sample) == Some(class));
            assert_eq!(depth.requests, of_class().count() as u64);
            assert_eq!(depth.raw_tokens, of_class().map(tokens).sum::<u64>());
            assert_eq!(depth.oldest.is_some(), depth.requests > 0);
            let Some(settings) = self.fleet.config.queue.classes.get(class) else { continue };
            let newly = || of_class().filter(|known| !known.waited);
            if let Some(smallest) = newly().map(tokens).min() {
                let within = |max: Option<u64>, before: u64| max.is_none_or(|max| before < max * ranks);
                assert!(within(settings.requests_max_per_rank.map(u64::from), depth.requests - 1));
                let most = newly().map(tokens).max().unwrap_or(smallest);
                assert!(within(settings.raw_tokens_max_per_rank, depth.raw_tokens - most));
            }
        }
        for known in self.pending.values() {
            let sample = &known.sample;
            assert!(
                sample.waits && sample.purpose == Purpose::Book && sample.target == Target::Any,
                "the waiting list is empty"
            );
            assert!(!known.cancelled && !sample.options.do_not_queue);
            assert!(self.may_open(sample), "no rank can ever serve the request");
            assert!(self.is_bound(sample) || !self.is_any_open(sample), "queued although an eligible rank exists");
            if let Some(due) = sample.options.due {
                assert!(
                    self.fleet.schedule.next_wake().is_some_and(|wake| wake <= due),
                    "no wake-up before the deadline"
                );
            }
        }
        for known in self.pending.values_mut().filter(|known| !known.waited) {
            known.waited = true;
            self.waited += 1;
        }
    }

    fn may_open(&self, sample: &SampleRequest) -> bool {
        (0..self.fleet.ranks.len()).any(|node| self.may_serve(node, sample))
    }

    fn is_any_open(&self, sample: &SampleRequest) -> bool {
        self.eligible(sample).into_iter().any(|node| {
            let known = &self.fleet.ranks[node].active;
            let (_, prefill_tokens) = known.prefill_curve().bounds(self.fleet.now);
            let active_blocks = known.load(self.fleet.now).active_blocks;
            !self.is_overloaded(node, prefill_tokens, active_blocks) && !self.is_busy(node, sample, prefill_tokens)
        })
    }

    /// Cancels all queued requests and frees all bookings: no state may remain.
    pub(crate) fn finish(&mut self) {
        while !self.fleet.open_queries.is_empty() {
            self.answer(0);
            self.check();
        }
        let waiting: Vec<u64> = self.pending.keys().copied().collect();
        for id in waiting {
            self.cancel(id);
            self.check();
        }
        for id in std::mem::take(&mut self.running) {
            self.fleet.free(id);
        }
        self.check();
        assert_eq!((self.fleet.schedule.pending(), self.seen as u64), (0, self.ids));
        for (class, depth) in self.fleet.schedule.depths() {
            assert_eq!((depth, class), (pointsman::internals::queue::Depth::default(), class));
        }
        assert_eq!(self.fleet.schedule.next_wake(), None);
        assert!(self.fleet.ranks.iter().all(|node| node.active.is_empty()));
    }
}

fn is_late(sample: &SampleRequest, now: Timestamp) -> bool {
    matches!(sample.purpose, Purpose::Book | Purpose::Report) && sample.options.due.is_some_and(|due| due <= now)
}
