//! State machine of the scheduler: inputs in, effects out.
//!
//! Holds the order of requests, the queue, the one batch in flight, the overlay (bookings since each rank last
//! published), the sessions, and every choice of a rank. A batch books exactly what a serial run in the same order
//! would; under `latency`, up to ranks whose costs differ insignificantly. Every request leaves in exactly one effect.
//! No rank receives work beyond a class's threshold. Equal seed and inputs give equal effects. The actor performs the
//! effects; the sequence actors hold the bookings.
//!
//! ```text
//! Request ─► arrivals ─► batch ─(shortlist)─► Query ─► Loads ─► Book | Report | LoadSnapshot | Explain | Reject
//!               └► queue ─┘
//! ```

mod admission;
mod appraisal;
mod case;
mod choice;
mod decide;
mod deciding_policy;
mod decision;
mod decision_facts;
mod eligible;
mod explain;
mod explanation;
mod extensions;
mod held_calls;
mod latency;
mod line;
mod load_view;
mod options;
mod pending;
mod pool;
mod program_holds;
mod progress;
mod projected;
mod rank;
mod rank_status;
mod ranks;
mod search;
mod settings;
mod shadow;
mod state;
mod tape;
mod targets;
#[cfg(test)]
mod tests;
mod turn;
mod types;
mod view;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

pub use appraisal::{AppraisedRank, ShadowReport};
pub use decision::Decision;
pub use explanation::{ExplainedRank, Explanation};
pub use extensions::Extensions;
pub use latency::formula::LatencyTerms;
pub use latency::prediction::{LatencyPrediction, MissedTarget, TargetsMissed};
pub use load_view::{LiveLoads, LoadView, RankCells};
pub use options::{ResolvedOptions, ResolvedTargets};
pub use tape::{RecordedChoice, Recorder, Replay, ReplayError, ReplayedDecision};
pub use types::{
    Admission, BookNumber, Effect, Input, LoadAnswer, LoadQuery, PotentialLoad, Purpose, Rejection, Request, Target,
    Waits,
};

use crate::config::RouterConfig;
use crate::load::{EngineSpeed, PlacementRate};
use crate::protocol::{BookingId, Timestamp, WorkerRank};
use crate::queue::Queue;
use crate::session::Sessions;

use deciding_policy::DecidingPolicy;
use eligible::Eligibility;
use latency::typical::Typical;
use line::Line;
use pending::PendingRequest;
use pool::Arrivals;
use program_holds::ProgramHolds;
use progress::Progress;
use ranks::Ranks;
use search::Search;
use state::Pool;
use turn::Turn;

/// The state machine. See the module documentation.
#[derive(Debug)]
pub struct Schedule<T> {
    /// State of the pool.
    pool: Pool,
    /// The policy that places requests.
    active: DecidingPolicy,
    /// Other policies by name, which decide the same requests without booking.
    shadows: Vec<(&'static str, DecidingPolicy)>,
    /// Share of the decisions that the shadows also decide.
    shadow_share: f64,
    /// Whether the pool's typical values are learned: a policy or a shadow compares latencies.
    learns_typical: bool,
    /// Whether any request may ever wait.
    queueing: bool,
    /// Whether requests are decided one at a time, because ranks may be busy for them.
    is_serial: bool,
    program_holds: ProgramHolds,
    overlap_refresh_after: Option<Duration>,
    sessions: Sessions,
    arrivals: Line<T>,
    /// Queried but undecided requests; they precede all others.
    again: Line<T>,
    queue: Queue<PendingRequest<T>>,
    /// Whether a waiting request may be eligible: some rank may have gained capacity since the last reconciliation of
    /// the queue.
    look_again: bool,
    turn: Turn,
    /// Waiting requests by the age of their overlap, oldest first; departed ones are skipped.
    overlap_ages: BTreeSet<(Timestamp, BookingId)>,
    /// Eligibility of ranks for a request that is admitted, waits, or leaves.
    eligibility: Eligibility,
    in_flight: Option<Batch<T>>,
    /// The batch whose requests are decided in this step.
    deciding: Option<Batch<T>>,
    /// Whether the loads are those of the next batch.
    is_prepared: bool,
    /// Number of the last request.
    requests: u64,
    /// Number of the last batch.
    batches: u64,
}

/// Requests that are decided together.
#[derive(Debug)]
struct Batch<T> {
    number: u64,
    requests: VecDeque<PendingRequest<T>>,
    /// The search that has listed the queried ranks, while ranks and statuses are those that it has seen.
    listed: Option<Box<Search>>,
    /// Whether ranks were queried.
    queried: bool,
    /// Number of decided requests.
    in_batch: usize,
}

impl<T> Schedule<T> {
    /// An empty scheduler under a validated configuration.
    ///
    /// `incarnation` counts its restarts: each numbers requests and batches from its own base, so that replies to an
    /// earlier incarnation never match.
    #[must_use]
    pub fn new(config: RouterConfig, incarnation: u32, extensions: Extensions) -> Self {
        let base = u64::from(incarnation) << 32;
        let (is_custom, is_scored) = (extensions.policy.is_some(), !extensions.scorers.is_empty());
        let active = DecidingPolicy::new(&config, extensions);
        let follows_decay = !active.settings.is_in_seconds()
            || config.queue.has_threshold()
            || !active.settings.rules.lenient
            || is_custom
            || is_scored;
        let typical_speed = EngineSpeed::prior(config.block_size_or_assumed());
        let refresh_after = Duration::from_millis(config.queue.overlap_refresh_after_ms);
        let models_prefill = active.settings.pool.models_prefill;
        let pool = Pool {
            ranks: Ranks::new(follows_decay, models_prefill, active.reads_columns(), typical_speed),
            typical: Typical::new(typical_speed),
            arrival_rate: Arrivals::default(),
            peers: PlacementRate::default(),
            turns: 0,
            now: Timestamp::default(),
        };
        let mut new = Self {
            pool,
            shadows: Vec::new(),
            shadow_share: 0.0,
            learns_typical: active.settings.is_in_seconds(),
            active,
            queueing: config.queue.is_enabled(),
            is_serial: config.queue.has_threshold(),
            program_holds: ProgramHolds::new(&config),
            overlap_refresh_after: Some(refresh_after).filter(|after| !after.is_zero()),
            sessions: Sessions::new(Duration::from_millis(config.session.ttl_ms), config.session.sessions_max),
            arrivals: Line::new(),
            again: Line::new(),
            queue: Queue::new(&config),
            look_again: false,
            turn: Turn::new(admission::DECAY_RECHECK + 2 * Duration::from_millis(config.replicas.interval_ms)),
            overlap_ages: BTreeSet::new(),
            eligibility: Eligibility::default(),
            in_flight: None,
            deciding: None,
            is_prepared: false,
            requests: base,
            batches: base,
        };
        let shadows =
            config.shadow.policies.iter().map(|policy| RouterConfig { policy: policy.clone(), ..config.clone() });
        new.set_shadows(shadows, config.shadow.share);
        new
    }

    /// Applies one input and appends its effects to `effects`, in the order in which they must be performed.
    ///
    /// Depends on nothing else: the same sequence of inputs, reads of `loads` and times gives the same effects.
    pub fn step<V: LoadView>(&mut self, input: Input<T>, loads: &V, now: Timestamp, effects: &mut VecDeque<Effect<T>>) {
        self.begin(input, loads, now, effects);
        while self.advance(loads, effects).is_some() {}
    }

    /// Begins a step: applies the input.
    fn begin<V: LoadView>(&mut self, input: Input<T>, loads: &V, now: Timestamp, effects: &mut VecDeque<Effect<T>>) {
        self.pool.now = self.pool.now.max(now);
        match input {
            Input::Request(request) => self.arrive(request, effects),
            Input::Loads { batch, answers } => self.on_loads(batch, answers),
            Input::Cancel(booking) => self.on_cancel(booking, effects),
            Input::Overlaps { booking, overlaps } => self.on_overlaps(booking, overlaps),
            Input::Ended { booking, is_stop } => self.on_ended(booking, is_stop),
            Input::Wake => {}
            Input::Admit(_)
            | Input::Describe { .. }
            | Input::Drain { .. }
            | Input::Undrain { .. }
            | Input::Retire { .. }
            | Input::Conditions(_)
            | Input::Exclusions(_) => self.on_membership(input, loads, effects),
        }
    }

    /// Does the next part of the step; `None` at its end.
    fn advance<V: LoadView>(&mut self, loads: &V, effects: &mut VecDeque<Effect<T>>) -> Option<Progress> {
        if self.deciding.is_some() {
            return self.decide_next(loads, effects);
        }
        let progress = if std::mem::take(&mut self.is_prepared) {
            self.list_next(loads, effects)
        } else {
            self.prepare_next(loads, effects)
        };
        if progress.is_none() && self.queueing {
            self.refresh_overlaps(effects);
        }
        progress
    }

    /// The batch in flight, if any.
    #[must_use]
    pub fn batch_in_flight(&self) -> Option<u64> {
        self.in_flight.as_ref().map(|batch| batch.number)
    }

    /// Requests that have not left yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        let in_flight = self.in_flight.as_ref().map_or(0, |batch| batch.requests.len());
        self.arrivals.len() + self.again.len() + self.queue.len() + in_flight
    }

    /// Remembered sessions.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// The remembered sessions, to share them with other replicas.
    pub fn sessions_mut(&mut self) -> &mut Sessions {
        &mut self.sessions
    }

    /// Working sets of ranks with known capacity, as multiples of it.
    pub fn working_sets(&mut self, now: Timestamp) -> impl Iterator<Item = (WorkerRank, f64)> {
        self.sessions.expire(now);
        let (sessions, block_size) = (&self.sessions, self.active.settings.pool.block_size);
        self.pool.ranks.as_slice().iter().filter_map(move |rank| {
            let capacity = f64::from(rank.about.traits.total_kv_blocks?) * f64::from(block_size);
            Some((rank.rank, sessions.working_tokens(rank.rank) as f64 / capacity))
        })
    }

    fn on_membership<V: LoadView>(&mut self, input: Input<T>, loads: &V, effects: &mut VecDeque<Effect<T>>) {
        self.drop_shortlist();
        let (ranks, rules) = (&mut self.pool.ranks, &self.active.settings.rules);
        match input {
            Input::Admit(admission) => {
                self.program_holds.claims.forget(admission.slot);
                ranks.admit(admission, loads, rules.slow_start_factor());
            }
            Input::Describe { slot, generation, traits } => ranks.describe(slot, generation, traits),
            Input::Drain { slot, generation } => ranks.set_draining(slot, generation, true),
            Input::Undrain { slot, generation } => ranks.set_draining(slot, generation, false),
            Input::Conditions(conditions) => ranks.set_conditions(conditions),
            Input::Exclusions(exclusions) => {
                ranks.set_exclusions(exclusions, rules.slow_return_factor(), self.pool.now);
            }
            Input::Retire { slot, generation } => {
                if let Some(rank) = ranks.retire(slot, generation) {
                    self.program_holds.claims.forget(slot);
                    self.sessions.forget_rank(rank);
                }
            }
            Input::Request(_)
            | Input::Loads { .. }
            | Input::Cancel(_)
            | Input::Ended { .. }
            | Input::Overlaps { .. }
            | Input::Wake => {}
        }
        if !self.queue.is_empty() {
            self.reject_unservable(effects);
        }
    }

    fn on_loads(&mut self, batch: u64, answers: Vec<LoadAnswer>) {
        if self.batch_in_flight() != Some(batch) {
            for answer in &answers {
                self.pool.ranks.is_alive(answer.slot, answer.generation);
            }
            return self.drop_shortlist();
        }
        for answer in answers {
            self.pool.ranks.answered(answer);
        }
        self.pool.ranks.close();
        self.deciding = self.in_flight.take();
    }

    /// Reads the loads of the next batch, unless one is in flight or no request is present.
    fn prepare_next<V: LoadView>(&mut self, loads: &V, effects: &mut VecDeque<Effect<T>>) -> Option<Progress> {
        if self.queueing {
            self.expire(effects);
            self.look_again |= self.program_holds.advance(self.pool.now);
        }
        if self.in_flight.is_some() || !self.has_candidates() {
            return None;
        }
        self.prepare(loads, effects);
        self.is_prepared = true;
        Some(Progress::Prepared)
    }

    /// Lists the next batch: the board alone can decide it, or loads are queried for it, one batch at a time.
    fn list_next<V: LoadView>(&mut self, loads: &V, effects: &mut VecDeque<Effect<T>>) -> Option<Progress> {
        let requests = self.next_batch(loads, effects);
        if requests.is_empty() {
            return None;
        }
        self.batches += 1;
        let number = self.batches;
        let (slots, listed) = self.shortlist(&requests, loads);
        let queried = !slots.is_empty();
        let prompts = requests.iter().map(|pending| pending.request.prompt.clone());
        if queried {
            self.pool.ranks.queried(&slots);
            effects.push_back(Effect::Query(LoadQuery { batch: number, slots, prompts: prompts.collect() }));
        }
        let place = if queried { &mut self.in_flight } else { &mut self.deciding };
        *place = Some(Batch { number, requests, listed, queried, in_batch: 0 });
        Some(Progress::Listed)
    }

    /// Drops the shortlist of the batch in flight after a change of ranks or statuses.
    fn drop_shortlist(&mut self) {
        if let Some(batch) = &mut self.in_flight {
            batch.listed = None;
        }
    }

    fn has_candidates(&self) -> bool {
        !self.arrivals.is_empty() || self.queueing && !(self.again.is_empty() && self.queue.is_empty())
    }
}
