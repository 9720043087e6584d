//! Shell of the scheduler: performs the effects of `Schedule`.

use std::collections::{BTreeMap, VecDeque};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use pointsman::config::LoadConfig;
use pointsman::directory::LeaseState;
use pointsman::health::Exclusions;
use pointsman::protocol::{Generation, Slot, Timestamp, WorkerRank};
use pointsman::schedule::{Admission, Decision, Effect, Extensions, Input, LiveLoads, RankCells, Schedule};
use pointsman::select::RankConditions;
use pointsman::shell::sequence::{Book, SequenceMsg};
use pointsman::shell::shard::ShardMsg;

use super::{Gateway, LoadQuery, OverlapQuery, Surroundings};
use crate::letter::{Answer, Context, Letter, LoadJoin, OverlapGoal, OverlapJoin};
use crate::net::Actor;

pub(super) struct Scheduler {
    pub(super) schedule: Schedule<Context>,
    loads: LiveLoads,
    effects: VecDeque<Effect<Context>>,
    in_flight: Option<(Timestamp, Weak<LoadJoin>)>,
    timer_armed: bool,
    wake_at: Option<Timestamp>,
    /// Content of the messages so far, for the oracle.
    known: Known,
}

/// Ranks and their restrictions as the scheduler has received them.
#[derive(Default)]
struct Known {
    ranks: BTreeMap<Slot, (WorkerRank, Generation, bool)>,
    conditions: Arc<RankConditions>,
    exclusions: Arc<Exclusions>,
}

impl Known {
    /// Checks that a decision is permitted.
    fn check(&self, decision: &Decision) {
        let (rank, slot) = (decision.rank(), decision.slot());
        let known = self.ranks.get(&slot);
        let is_registered =
            known.is_some_and(|(name, generation, _)| (*name, *generation) == (rank, decision.generation()));
        assert!(is_registered, "decision for {rank} in slot {slot}, which is removed: {known:?}");
        assert!(known.is_some_and(|(.., drains)| !drains), "decision for {rank}, which drains");
        assert!(!self.conditions.unavailable.contains(&rank), "decision for {rank}, which is unavailable");
        let serves = |(name, _, drains): &(WorkerRank, Generation, bool)| {
            !drains && !self.conditions.unavailable.contains(name) && !self.exclusions.has_ejected(*name)
        };
        let is_out = self.exclusions.has_ejected(rank);
        assert!(
            !is_out || !self.ranks.values().any(serves),
            "decision for {rank}, which is ejected; another rank serves"
        );
    }
}

impl Gateway {
    /// Starts the scheduler with the registered ranks.
    pub(super) fn start_scheduler(&mut self, incarnation: u32, around: &mut Surroundings<'_>) {
        self.scheduler_incarnation.set(incarnation);
        let loads =
            LiveLoads::new(Arc::clone(&self.board_changes), Arc::clone(&self.arrivals), Arc::clone(&self.queue_heads));
        let schedule = Schedule::new(self.settings.config.clone(), incarnation, Extensions::default());
        let mut scheduler = Scheduler {
            schedule,
            loads,
            effects: VecDeque::new(),
            in_flight: None,
            timer_armed: false,
            wake_at: None,
            known: Known::default(),
        };
        for entry in self.table.values() {
            if let Some(worker) = self.membership.worker_at(entry.slot) {
                let admission = Admission {
                    traits: Arc::clone(&worker.traits),
                    since: entry.since,
                    draining: worker.draining || worker.cordoned,
                    ..Admission::new(entry.rank, entry.slot, entry.generation)
                };
                scheduler.admit(admission, entry.cells.clone(), around.net.now);
            }
        }
        scheduler.set_conditions(&self.conditions, around.net.now);
        scheduler.set_exclusions(&self.exclusions, around.net.now);
        self.scheduler = Some(scheduler);
    }

    pub(super) fn on_scheduler(&mut self, letter: Letter, around: &mut Surroundings<'_>) {
        let (now, queueing) = (around.net.now, self.is_queueing());
        let Some(mut scheduler) = self.scheduler.take() else { return }; // the message is lost
        match letter {
            Letter::Decide(request) => {
                let is_over = request.context.lease.state() == LeaseState::Ended;
                if queueing && is_over {
                    drop(request);
                } else {
                    scheduler.step(Input::Request(*request), now);
                }
            }
            Letter::Loads(batch, answers) => scheduler.step(Input::Loads { batch, answers }, now),
            Letter::QueryTimeout => self.on_query_timeout(&mut scheduler, around),
            Letter::Cancel(booking) => scheduler.step(Input::Cancel(booking), now),
            Letter::Refreshed(booking, overlaps) => scheduler.step(Input::Overlaps { booking, overlaps }, now),
            Letter::Wake(at) => {
                if at.is_some() && at == scheduler.wake_at {
                    scheduler.wake_at = None;
                }
                scheduler.step(Input::Wake, now);
            }
            Letter::Admit(admitted) => scheduler.admit(admitted.0, admitted.1, now),
            Letter::Describe(slot, generation, traits) => {
                scheduler.step(Input::Describe { slot, generation, traits }, now);
            }
            Letter::Drain(slot, generation, ack) => {
                scheduler.set_draining(slot, generation, true, now);
                let to = Actor::Sequence(slot.0, generation.0);
                self.send(Actor::Scheduler, to, Letter::sequence(SequenceMsg::Drain(ack)), around);
            }
            Letter::Cordon(slot, generation, is_cordoned) => {
                scheduler.set_draining(slot, generation, is_cordoned, now);
                if !is_cordoned {
                    let to = Actor::Sequence(slot.0, generation.0);
                    self.send(Actor::Scheduler, to, Letter::sequence(SequenceMsg::Undrain), around);
                }
            }
            Letter::Retire(slot, generation, ack) => {
                scheduler.step(Input::Retire { slot, generation }, now);
                let is_there = |known: &&(WorkerRank, Generation, bool)| known.1 == generation;
                if scheduler.known.ranks.get(&slot).filter(is_there).is_some() {
                    scheduler.known.ranks.remove(&slot);
                    scheduler.loads.remove(slot);
                    let to = Actor::Sequence(slot.0, generation.0);
                    self.send(Actor::Scheduler, to, Letter::sequence(SequenceMsg::Retire(ack)), around);
                }
            }
            Letter::Conditions => scheduler.set_conditions(&self.conditions, now),
            Letter::Exclusions => scheduler.set_exclusions(&self.exclusions, now),
            _ => unreachable!("no message of a scheduler"),
        }
        self.perform(&mut scheduler, around);
        self.scheduler = Some(scheduler);
    }

    /// Closes a timed-out batch with the replies so far. A complete query is not late.
    fn on_query_timeout(&mut self, scheduler: &mut Scheduler, around: &mut Surroundings<'_>) {
        scheduler.timer_armed = false;
        let (Some(batch), Some((since, join))) = (scheduler.schedule.batch_in_flight(), &scheduler.in_flight) else {
            return;
        };
        let (now, elapsed) = (around.net.now, around.net.now.since(*since));
        if elapsed < LoadConfig::QUERY_TIMEOUT {
            let left = LoadConfig::QUERY_TIMEOUT - elapsed;
            scheduler.timer_armed = true;
            return around.net.after(left, self.place(Actor::Scheduler), Letter::QueryTimeout);
        }
        if let Some(join) = join.upgrade() {
            join.is_closed.set(true);
            let answers = std::mem::take(&mut *join.found.borrow_mut());
            scheduler.step(Input::Loads { batch, answers }, now);
        }
    }

    fn perform(&mut self, scheduler: &mut Scheduler, around: &mut Surroundings<'_>) {
        let now = around.net.now;
        while let Some(effect) = self.next_effect(scheduler, now) {
            match effect {
                Effect::Query(query) => {
                    let join = Rc::new(LoadJoin {
                        batch: query.batch,
                        prompts: query.prompts,
                        found: Vec::new().into(),
                        is_closed: false.into(),
                        outbox: self.outbox.clone(),
                    });
                    scheduler.in_flight = Some((now, Rc::downgrade(&join)));
                    for slot in query.slots {
                        if let Some((_, generation, _)) = scheduler.known.ranks.get(&slot) {
                            let to = Actor::Sequence(slot.0, generation.0);
                            self.send(
                                Actor::Scheduler,
                                to,
                                Letter::sequence(SequenceMsg::Load { query: LoadQuery(Rc::clone(&join)), now }),
                                around,
                            );
                        }
                    }
                    if !std::mem::replace(&mut scheduler.timer_armed, true) {
                        let timeout = LoadConfig::QUERY_TIMEOUT;
                        around.net.after(timeout, self.place(Actor::Scheduler), Letter::QueryTimeout);
                    }
                }
                Effect::Refresh { booking, block_hashes } => {
                    let join = Rc::new(OverlapJoin {
                        hashes: block_hashes,
                        prompt: None,
                        found: Vec::new().into(),
                        goal: OverlapGoal::Refresh(booking),
                        outbox: self.outbox.clone(),
                    });
                    for shard in 0..self.shards.len() {
                        let letter = Letter::shard(ShardMsg::Overlap(OverlapQuery::new(&join)));
                        self.send(Actor::Scheduler, Actor::Shard(shard), letter, around);
                    }
                }
                Effect::PublishTypical { speed, rate } => scheduler.loads.publish_typical(&speed, rate, now),
                Effect::Book { context, decision, number, .. } => {
                    scheduler.known.check(&decision);
                    around.net.record((context.reply.call, decision.slot().0, decision.generation().0));
                    let to = Actor::Sequence(decision.slot().0, decision.generation().0);
                    let (lease, scheduler) = (Arc::clone(&context.lease), self.scheduler_incarnation.get());
                    let book = Book { lease, decision, number, scheduler, caller: context, now };
                    self.send(Actor::Scheduler, to, Letter::sequence(SequenceMsg::Book(book)), around);
                }
                Effect::Reject { mut context, .. } => {
                    context.reply.is_used = true;
                    let letter = Letter::Answered(context.reply.attempt, Answer::Rejected);
                    self.send(Actor::Scheduler, Actor::Caller(context.reply.call), letter, around);
                }
                Effect::Cancelled { context } => drop(context),
                Effect::Report { .. } | Effect::LoadSnapshot { .. } | Effect::Explain { .. } => {
                    unreachable!("every request books")
                }
            }
        }
        if scheduler.schedule.batch_in_flight().is_none() {
            scheduler.in_flight = None;
        }
        if self.is_queueing() {
            self.queue_heads.publish_own(scheduler.schedule.queue_head());
            self.arm_wake(scheduler, around);
        }
    }

    fn next_effect(&self, scheduler: &mut Scheduler, now: Timestamp) -> Option<Effect<Context>> {
        let waits = scheduler.effects.is_empty() && self.is_queueing() && scheduler.schedule.waits_for_load();
        if waits && !self.wake.replace(true) {
            scheduler.step(Input::Wake, now);
        }
        scheduler.effects.pop_front()
    }

    fn arm_wake(&self, scheduler: &mut Scheduler, around: &mut Surroundings<'_>) {
        let Some(at) = scheduler.schedule.next_wake() else { return };
        if scheduler.wake_at.is_some_and(|armed| armed <= at) {
            return;
        }
        scheduler.wake_at = Some(at);
        around.net.after(at.since(around.net.now), self.place(Actor::Scheduler), Letter::Wake(Some(at)));
    }
}

impl Scheduler {
    fn step(&mut self, input: Input<Context>, now: Timestamp) {
        self.schedule.step(input, &self.loads, now, &mut self.effects);
    }

    fn admit(&mut self, admission: Admission, cells: RankCells, now: Timestamp) {
        let Admission { rank, slot, generation, draining, .. } = admission;
        self.known.ranks.insert(slot, (rank, generation, draining));
        self.loads.insert(slot, cells);
        self.step(Input::Admit(admission), now);
    }

    fn set_draining(&mut self, slot: Slot, generation: Generation, drains: bool, now: Timestamp) {
        if let Some(known) = self.known.ranks.get_mut(&slot).filter(|known| known.1 == generation) {
            known.2 = drains;
        }
        let input = if drains { Input::Drain { slot, generation } } else { Input::Undrain { slot, generation } };
        self.step(input, now);
    }

    fn set_conditions(&mut self, conditions: &Arc<RankConditions>, now: Timestamp) {
        self.known.conditions = Arc::clone(conditions);
        self.step(Input::Conditions(Arc::clone(conditions)), now);
    }

    fn set_exclusions(&mut self, exclusions: &Arc<Exclusions>, now: Timestamp) {
        self.known.exclusions = Arc::clone(exclusions);
        self.step(Input::Exclusions(Arc::clone(exclusions)), now);
    }
}
