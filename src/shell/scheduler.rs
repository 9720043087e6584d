//! Shell of the scheduler: order of inputs and effects of [`Schedule`], the batch in flight, timers and wake-ups.
//!
//! A step handles one message. Its effects follow one at a time with [`SchedulerShell::next_effect`], because a load query
//! may have its answers at once, and a decision then follows in the same step. The shell is generic over the decider,
//! [`Schedule`] or a decorator of it, and over the handles of the sequence actors.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Defect;
use super::sequence::SequenceMsg;
use crate::config::LoadConfig;
use crate::directory::{Lease, LeaseState};
use crate::health::Exclusions;
use crate::protocol::{Generation, Slot, TimeSource, Timestamp};
use crate::queue::QueueHeads;
use crate::schedule::{Admission, Effect, Input, LiveLoads, LoadAnswer, RankCells, Request, Schedule};
use crate::select::RankConditions;

/// Messages to the scheduler: `C` is the context of a request, `H` the handle of a sequence actor, `A` acknowledges.
pub enum SchedulerMsg<C, H, A> {
    /// A request that needs a decision.
    Decide(Request<C>),
    /// An input that concerns the schedule only: an answer, the end of a request or a call, new traits.
    Input(Input<C>),
    /// The timer of load queries has fired.
    Timeout,
    /// The load of a rank has fallen, or the timer for `at` has fired: re-evaluate waiting requests.
    Wake {
        /// Time of the timer.
        at: Option<Timestamp>,
    },
    /// Add a rank.
    Admit(SequenceHandle<H>),
    /// Stop new work for a rank, and send `Drain` to its sequence actor after the last Book.
    Drain {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Acknowledges the end of the bookings.
        ack: A,
    },
    /// Stop or resume new work for a rank. Its bookings stay.
    Cordon {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Whether work stops.
        cordoned: bool,
    },
    /// Remove a rank: book nothing more on it, and send `Retire` to its sequence actor after the last Book.
    Retire {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
        /// Acknowledges the removal.
        ack: A,
    },
    /// The embedder's rank conditions have changed.
    Conditions,
    /// The ranks excluded for their health have changed.
    Exclusions,
}

/// A rank's sequence actor, with the data to register the rank in the schedule.
pub struct SequenceHandle<H> {
    /// Registration of the rank.
    pub admission: Admission,
    /// Shared cells of the rank.
    pub cells: RankCells,
    /// Handle of the actor.
    pub handle: H,
}

/// Context of a request at the scheduler.
pub trait RequestLease {
    /// Lease of a request that books.
    fn lease(&self) -> Option<&Arc<Lease>>;
}

/// Shared state that a step reads when it needs it, so that the latest value applies.
pub trait SchedulerCells: TimeSource {
    /// The embedder's rank conditions.
    fn conditions(&self) -> Arc<RankConditions>;
    /// Ranks excluded for their health.
    fn exclusions(&self) -> Arc<Exclusions>;
    /// Requests a wake-up at the next fall of a load. Returns whether none was requested.
    fn raise_wake(&self) -> bool;
    /// Whether a step hung and a successor has replaced this scheduler. It has no further effects.
    fn is_replaced(&self) -> bool;
}

/// A load query without all of its answers.
pub trait OpenLoadQuery {
    /// Closes the query. Returns the answers so far; `None` if all have arrived, whose message is then under way.
    fn take(&self) -> Option<Vec<LoadAnswer>>;
}

/// A [`Schedule`], or a decorator of it.
pub trait Decider<C> {
    /// See [`Schedule::step`].
    fn step(&mut self, input: Input<C>, loads: &LiveLoads, now: Timestamp, effects: &mut VecDeque<Effect<C>>);
    /// The schedule.
    fn schedule(&self) -> &Schedule<C>;
}

impl<C> Decider<C> for Schedule<C> {
    fn step(&mut self, input: Input<C>, loads: &LiveLoads, now: Timestamp, effects: &mut VecDeque<Effect<C>>) {
        self.step(input, loads, now, effects);
    }

    fn schedule(&self) -> &Schedule<C> {
        self
    }
}

/// Shell of the scheduler; `J` is a load query in flight. See the module documentation.
pub struct SchedulerShell<C, D, H, J> {
    decider: D,
    /// Shared cells that the schedule reads.
    loads: LiveLoads,
    queue_heads: Arc<QueueHeads>,
    /// Generation and sequence actor of each rank, by slot.
    sequences: Vec<Option<(Generation, H)>>,
    effects: VecDeque<Effect<C>>,
    stepped_at: Timestamp,
    /// Start of the batch in flight, and its query.
    in_flight: Option<(Timestamp, J)>,
    /// Whether the single timer is armed. When it fires, it is armed again for a later batch in flight.
    is_timer_armed: bool,
    /// Time of the earliest armed timer for waiting requests.
    wake_at: Option<Timestamp>,
    /// Whether any class queues requests.
    is_queueing: bool,
}

/// Message to forward to a sequence actor, before the effects of the step.
pub type Forwarded<H, B, A, Q> = Option<(H, SequenceMsg<B, A, Q>)>;

impl<C: RequestLease, D: Decider<C>, H: Clone, J: OpenLoadQuery> SchedulerShell<C, D, H, J> {
    /// A scheduler without ranks.
    pub fn new(decider: D, loads: LiveLoads, queue_heads: Arc<QueueHeads>, is_queueing: bool) -> Self {
        Self {
            decider,
            loads,
            queue_heads,
            sequences: Vec::new(),
            effects: VecDeque::new(),
            stepped_at: Timestamp::default(),
            in_flight: None,
            is_timer_armed: false,
            wake_at: None,
            is_queueing,
        }
    }

    /// Handles one message. Its effects follow from [`SchedulerShell::next_effect`].
    pub fn step<B, A, Q>(&mut self, msg: SchedulerMsg<C, H, A>, cells: &impl SchedulerCells) -> Forwarded<H, B, A, Q> {
        let now = cells.now();
        let mut forwarded = None;
        match msg {
            SchedulerMsg::Decide(request) => self.on_decide(request, now),
            SchedulerMsg::Input(input) => self.input(input, now),
            SchedulerMsg::Timeout => self.on_timeout(now),
            SchedulerMsg::Wake { at } => {
                if at.is_some() && at == self.wake_at && !Defect::WakeTimerForgotten.is_planted() {
                    self.wake_at = None;
                }
                self.input(Input::Wake, now);
            }
            SchedulerMsg::Admit(sequence) => self.admit(sequence, now),
            SchedulerMsg::Drain { slot, generation, ack } => {
                if !Defect::DrainServes.is_planted() {
                    self.input(Input::Drain { slot, generation }, now);
                }
                forwarded = self.there(slot, generation).map(|handle| (handle, SequenceMsg::Drain(ack)));
            }
            SchedulerMsg::Cordon { slot, generation, cordoned: true } => {
                self.input(Input::Drain { slot, generation }, now);
            }
            SchedulerMsg::Cordon { slot, generation, cordoned: false } => {
                self.input(Input::Undrain { slot, generation }, now);
                forwarded = self.there(slot, generation).map(|handle| (handle, SequenceMsg::Undrain));
            }
            SchedulerMsg::Retire { slot, generation, ack } => {
                if !Defect::RetiredRankServes.is_planted() {
                    self.input(Input::Retire { slot, generation }, now);
                }
                if let Some(handle) = self.there(slot, generation) {
                    self.sequences[slot.index()] = None;
                    self.loads.remove(slot);
                    // The message carries the acknowledgement: dropping it also notifies the supervisor.
                    forwarded = Some((handle, SequenceMsg::Retire(ack)));
                }
            }
            SchedulerMsg::Conditions => self.load_conditions(cells),
            SchedulerMsg::Exclusions => self.load_exclusions(cells),
        }
        // Before the bookings, after which other replicas are informed.
        if !cells.is_replaced() {
            self.publish_queue_head();
        }
        forwarded
    }

    /// Registers a rank. Also used to fill a new scheduler.
    pub fn admit(&mut self, SequenceHandle { admission, cells, handle }: SequenceHandle<H>, now: Timestamp) {
        let slot = admission.slot;
        if self.sequences.len() <= slot.index() {
            self.sequences.resize_with(slot.index() + 1, || None);
        }
        self.sequences[slot.index()] = Some((admission.generation, handle));
        self.loads.insert(slot, cells);
        self.input(Input::Admit(admission), now);
    }

    /// Loads the embedder's rank conditions. Also used to fill a new scheduler.
    pub fn load_conditions(&mut self, cells: &impl SchedulerCells) {
        if !Defect::ConditionsIgnored.is_planted() {
            self.input(Input::Conditions(cells.conditions()), cells.now());
        }
    }

    /// Loads the ranks excluded for their health. Also used to fill a new scheduler.
    pub fn load_exclusions(&mut self, cells: &impl SchedulerCells) {
        if !Defect::ExclusionsIgnored.is_planted() {
            self.input(Input::Exclusions(cells.exclusions()), cells.now());
        }
    }

    /// Passes an input to the schedule.
    pub fn input(&mut self, input: Input<C>, now: Timestamp) {
        self.stepped_at = now;
        self.decider.step(input, &self.loads, now, &mut self.effects);
    }

    /// A request whose caller cancelled during the overlap query must not be queued, because its `Cancel` message has
    /// already been handled.
    fn on_decide(&mut self, request: Request<C>, now: Timestamp) {
        let is_over = |lease: &Arc<Lease>| lease.state() == LeaseState::Ended;
        if self.is_queueing && request.context.lease().is_some_and(is_over) && !Defect::EndedIsQueued.is_planted() {
            return self.effects.push_back(Effect::Cancelled { context: request.context });
        }
        self.input(Input::Request(request), now);
    }

    /// Closes a timed-out batch with the responses received so far. A late response only clears the timed-out state of
    /// its rank.
    fn on_timeout(&mut self, now: Timestamp) {
        self.is_timer_armed = false;
        let (Some(batch), Some((since, query))) = (self.decider.schedule().batch_in_flight(), &self.in_flight) else {
            return;
        };
        if now.since(*since) < LoadConfig::QUERY_TIMEOUT {
            return; // the timer was armed for an earlier batch
        }
        match query.take() {
            Some(answers) => self.input(Input::Loads { batch, answers }, now),
            // A complete load query is not late: its `Loads` message is already in the inbox or about to arrive.
            None => self.in_flight = None,
        }
    }

    fn there(&self, slot: Slot, generation: Generation) -> Option<H> {
        let (current, handle) = self.sequences.get(slot.index())?.as_ref()?;
        (*current == generation).then(|| handle.clone())
    }

    /// The next effect to perform; none for a replaced scheduler. If there is none and requests wait for load, requests a
    /// wake-up and re-reads the boards.
    pub fn next_effect(&mut self, cells: &impl SchedulerCells, now: Timestamp) -> Option<Effect<C>> {
        while !cells.is_replaced() {
            let waits = self.effects.is_empty() && self.is_queueing && self.decider.schedule().waits_for_load();
            if waits && !Defect::FlagNotRaised.is_planted() && cells.raise_wake() {
                self.input(Input::Wake, now);
            }
            match self.effects.pop_front()? {
                Effect::PublishTypical { speed, rate } => self.loads.publish_typical(&speed, rate, now),
                effect => return Some(effect),
            }
        }
        None
    }

    /// A load query of the batch in flight has answers outstanding.
    pub fn await_loads(&mut self, query: J, now: Timestamp) {
        self.in_flight = Some((now, query));
    }

    /// Ends a step whose effects are performed. Returns the times of the timers to arm: for [`SchedulerMsg::Timeout`] and
    /// for [`SchedulerMsg::Wake`].
    pub fn end_step(&mut self) -> [Option<Timestamp>; 2] {
        if self.decider.schedule().batch_in_flight().is_none() {
            self.in_flight = None;
        }
        let timeout = self.in_flight.as_ref().filter(|_| !self.is_timer_armed).map(|(since, _)| *since);
        self.is_timer_armed |= timeout.is_some();
        let mut wake = None;
        if self.is_queueing {
            self.publish_queue_head();
            wake = self.decider.schedule().next_wake().filter(|at| self.wake_at.is_none_or(|armed| *at < armed));
            self.wake_at = wake.or(self.wake_at);
        }
        [timeout.map(|since| since + LoadConfig::QUERY_TIMEOUT), wake]
    }

    fn publish_queue_head(&self) {
        if self.is_queueing {
            self.queue_heads.publish_own(self.decider.schedule().queue_head());
        }
    }

    /// Sequence actor of a rank.
    pub fn sequence(&self, slot: Slot) -> Option<&H> {
        self.sequences.get(slot.index())?.as_ref().map(|(_, handle)| handle)
    }

    /// Time of the last input.
    pub fn stepped_at(&self) -> Timestamp {
        self.stepped_at
    }

    /// The decider.
    pub fn decider(&self) -> &D {
        &self.decider
    }

    /// The decider, for state that no decision depends on.
    pub fn decider_mut(&mut self) -> &mut D {
        &mut self.decider
    }

    /// Reports every board as changed to the successor, because the last step may have read changes after its start.
    pub fn hand_over(&self) {
        self.loads.report_all();
    }
}
