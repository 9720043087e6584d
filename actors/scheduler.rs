//! The scheduler actor: the only one that books.
//!
//! Owns the [`Schedule`] and performs its effects: fans load queries out, sends Books in decision order, answers
//! queries. Promises that a batch whose answers do not all come is closed after `load_query_timeout`. Leaves what is
//! decided to the state machine. Restarted, it starts with the ranks and their boards; what was waiting is answered
//! as lost, and its callers try again.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::clock::Clock;
use super::gather::{Leg, Onward, Watch};
use super::sequence::{Book, Sequence, SequenceAfter, SequenceMsg};
use super::supervisor::RetireAck;
use super::turn::{After, Afters, Step, Turn};
use crate::config::RouterConfig;
use crate::directory::Lease;
use crate::load::{BoardSlot, PromptBlocks, RateCell};
use crate::protocol::{Generation, Slot, WorkerRank};
use crate::schedule::{Decision, Effect, Input, LoadAnswer, LoadQuery, PotentialLoad, Rejection, Request, Schedule};

/// What the scheduler can be told.
pub(crate) enum SchedulerMsg {
    /// A request wants a decision.
    Decide(Request<Ticket>),
    /// Answers to a load query.
    Loads { batch: u64, answers: Vec<LoadAnswer> },
    /// The timer has fired.
    Timeout,
    /// A rank joins.
    Admit(Peer),
    /// A rank leaves: nothing is booked on it from here on, and its sequence actor hears so behind the last Book.
    Retire { slot: Slot, generation: Generation, ack: RetireAck },
    /// A drill: panic, or hold the turn until told to go on.
    #[cfg(feature = "faults")]
    Fault(super::faults::Trip),
}

/// What a caller waits for, and how it is told.
pub(crate) struct Ticket {
    /// Present when a booking is wanted.
    pub(crate) lease: Option<Arc<Lease>>,
    pub(crate) answer: oneshot::Sender<Answered>,
    /// Its place in the waiting room, given back when it is answered or lost.
    pub(crate) permit: OwnedSemaphorePermit,
}

/// What a caller is told.
pub(crate) enum Answered {
    Placed(Decision),
    Surveyed(Vec<PotentialLoad>),
    Rejected(Rejection),
}

/// A rank's sequence actor, as the scheduler knows it.
pub(crate) struct Peer {
    pub(crate) rank: WorkerRank,
    pub(crate) slot: Slot,
    pub(crate) generation: Generation,
    pub(crate) board: Arc<BoardSlot>,
    #[expect(dead_code, reason = "for a schedule that expects durations of its prefills")]
    pub(crate) rate: Arc<RateCell>,
    pub(crate) turn: Arc<Turn<Sequence>>,
}

/// Where load answers go on to.
pub(crate) struct LoadNext {
    batch: u64,
    prompts: Arc<[PromptBlocks]>,
    scheduler: Weak<Turn<Scheduler>>,
}

impl LoadNext {
    pub(crate) fn prompts(&self) -> &[PromptBlocks] {
        &self.prompts
    }
}

impl Onward<LoadAnswer> for LoadNext {
    fn onward(&self, answers: Vec<LoadAnswer>) {
        if let Some(scheduler) = self.scheduler.upgrade() {
            scheduler.tell(SchedulerMsg::Loads { batch: self.batch, answers });
        }
    }
}

/// The scheduler's state.
pub(crate) struct Scheduler {
    schedule: Schedule<Ticket>,
    /// By slot.
    peers: Vec<Option<Peer>>,
    effects: VecDeque<Effect<Ticket>>,
    after: SchedulerAfter,
    /// The batch in flight: since when, and its answers so far.
    in_flight: Option<(Instant, Watch<LoadAnswer, LoadNext>)>,
    /// One timer at a time; when it fires it goes on for the batch then in flight.
    timer_armed: bool,
    load_query_timeout: Duration,
    clock: Clock,
    runtime: Handle,
    myself: Weak<Turn<Scheduler>>,
}

/// What callers hear once the scheduler's turn is given back.
#[derive(Default)]
pub(crate) struct SchedulerAfter {
    sequences: Vec<Afters<SequenceAfter>>,
    answers: Vec<(Ticket, Answered)>,
}

impl Scheduler {
    pub(crate) fn new(
        config: RouterConfig,
        incarnation: u32,
        clock: Clock,
        runtime: Handle,
        myself: &Arc<Turn<Self>>,
    ) -> Self {
        Self {
            load_query_timeout: config.load_query_timeout(),
            schedule: Schedule::new(config, incarnation),
            peers: Vec::new(),
            effects: VecDeque::new(),
            after: SchedulerAfter::default(),
            in_flight: None,
            timer_armed: false,
            clock,
            runtime,
            myself: Arc::downgrade(myself),
        }
    }

    /// Makes a rank known. Also used to fill a fresh scheduler before it opens.
    pub(crate) fn admit(&mut self, peer: Peer) {
        let Peer { rank, slot, generation, .. } = peer;
        let board = Arc::clone(&peer.board);
        if self.peers.len() <= slot.index() {
            self.peers.resize_with(slot.index() + 1, || None);
        }
        self.peers[slot.index()] = Some(peer);
        self.step_schedule(Input::Admit { rank, slot, generation, board });
    }

    fn on_retire(&mut self, slot: Slot, generation: Generation, ack: RetireAck) {
        self.step_schedule(Input::Retire { slot, generation });
        let here = |peer: &&mut Option<Peer>| peer.as_ref().is_some_and(|peer| peer.generation == generation);
        if let Some(peer) = self.peers.get_mut(slot.index()).filter(here).and_then(Option::take) {
            // The ack goes with the message: whatever becomes of it, the supervisor hears.
            peer.turn.send(SequenceMsg::Retire(ack)).keep_in(&mut self.after.sequences);
        }
    }

    /// Closes a batch whose time is up with the answers there are. Late ones only show that a rank lives.
    fn on_timeout(&mut self) {
        self.timer_armed = false;
        let (Some(batch), Some((since, answers))) = (self.schedule.batch_in_flight(), &self.in_flight) else { return };
        if since.elapsed() < self.load_query_timeout {
            return self.arm_timer(); // a later batch than the one the timer was set for
        }
        let answers = answers.take();
        self.step_schedule(Input::Loads { batch, answers });
    }

    fn step_schedule(&mut self, input: Input<Ticket>) {
        self.schedule.step(input, self.clock.now(), &mut self.effects);
    }

    /// Performs effects until none are left, those that follow from answers that came at once included.
    fn perform(&mut self) -> SchedulerAfter {
        let now = self.clock.now();
        while let Some(effect) = self.effects.pop_front() {
            match effect {
                Effect::Query(query) => {
                    let batch = query.batch;
                    if let Some(answers) = self.fan_out(query) {
                        self.schedule.step(Input::Loads { batch, answers }, now, &mut self.effects);
                    }
                }
                Effect::Book { ticket, decision, number } => {
                    let Ticket { lease: Some(lease), answer, permit } = ticket else { continue };
                    let Some(Some(peer)) = self.peers.get(decision.slot.index()) else { continue };
                    let book = Book { lease, decision, number, answer, permit, now };
                    peer.turn.send(SequenceMsg::Book(book)).keep_in(&mut self.after.sequences);
                }
                Effect::Report { ticket, decision } => self.after.answers.push((ticket, Answered::Placed(decision))),
                Effect::Survey { ticket, loads } => self.after.answers.push((ticket, Answered::Surveyed(loads))),
                Effect::Reject { ticket, reason } => self.after.answers.push((ticket, Answered::Rejected(reason))),
            }
        }
        if self.schedule.batch_in_flight().is_none() {
            self.in_flight = None;
        }
        std::mem::take(&mut self.after)
    }

    /// Asks the shortlisted ranks. The answers, if all of them came while asking.
    fn fan_out(&mut self, query: LoadQuery) -> Option<Vec<LoadAnswer>> {
        let now = self.clock.now();
        let next = LoadNext { batch: query.batch, prompts: query.prompts, scheduler: Weak::clone(&self.myself) };
        let first = Leg::first(query.slots.len(), next);
        for slot in query.slots {
            if let Some(Some(peer)) = self.peers.get(slot.index()) {
                peer.turn.send(SequenceMsg::Load { leg: first.fork(), now }).keep_in(&mut self.after.sequences);
            }
        }
        let answers = first.watch();
        let complete = first.finish();
        if complete.is_none() {
            self.in_flight = Some((Instant::now(), answers));
            self.arm_timer();
        }
        complete
    }

    fn arm_timer(&mut self) {
        let Some((since, _)) = &self.in_flight else { return };
        if std::mem::replace(&mut self.timer_armed, true) {
            return;
        }
        let (due, myself) = (*since + self.load_query_timeout, Weak::clone(&self.myself));
        self.runtime.spawn(async move {
            tokio::time::sleep_until(due).await;
            if let Some(scheduler) = myself.upgrade() {
                scheduler.tell(SchedulerMsg::Timeout);
            }
        });
    }
}

impl Step for Scheduler {
    type Msg = SchedulerMsg;
    type After = SchedulerAfter;

    fn step(&mut self, msg: SchedulerMsg) -> Option<SchedulerAfter> {
        match msg {
            SchedulerMsg::Decide(request) => self.step_schedule(Input::Request(request)),
            SchedulerMsg::Loads { batch, answers } => self.step_schedule(Input::Loads { batch, answers }),
            SchedulerMsg::Timeout => self.on_timeout(),
            SchedulerMsg::Admit(peer) => self.admit(peer),
            SchedulerMsg::Retire { slot, generation, ack } => self.on_retire(slot, generation, ack),
            #[cfg(feature = "faults")]
            SchedulerMsg::Fault(trip) => trip.happen(),
        }
        Some(self.perform())
    }
}

impl After for SchedulerAfter {
    fn deliver(self) {
        self.sequences.into_iter().for_each(Afters::deliver);
        for (ticket, answer) in self.answers {
            let Ticket { answer: caller, permit, .. } = ticket;
            drop(permit);
            drop(caller.send(answer)); // a caller that has gone wants no answer
        }
    }
}
