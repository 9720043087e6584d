//! Scheduler: start of the shipped shell, its effects, and a check that each decision is permitted.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use pointsman::internals::directory::{Lease, LeaseState};
use pointsman::internals::health::Exclusions;
use pointsman::internals::protocol::{Generation, Slot, TimeSource};
use pointsman::internals::shell::scheduler::{
    OpenLoadQuery, RequestLease, SchedulerCells, SchedulerMsg, SchedulerShell, SequenceHandle,
};
use pointsman::internals::shell::sequence::{Book, SequenceMsg};
use pointsman::internals::shell::shard::ShardMsg;
use pointsman::protocol::{Timestamp, WorkerRank};
use pointsman::{
    Decision, RankConditions,
    internals::schedule::{Admission, Effect, Extensions, LiveLoads, LoadAnswer, Request, Schedule},
};

use super::{Entry, Gateway, LoadQuery, OverlapQuery, Surroundings};
use crate::letter::{Ack, Answer, Context, Letter, LoadJoin, OverlapGoal, OverlapJoin};
use crate::net::Actor;

pub(crate) type ToScheduler = SchedulerMsg<Context, Actor, Ack>;

pub(super) struct Scheduler {
    pub(super) shell: SchedulerShell<Context, Schedule<Context>, Actor, JoinInFlight>,
    /// Content of the messages so far, for the oracle.
    known: Known,
    /// Armed timers for waiting requests.
    timers: BTreeSet<Timestamp>,
}

impl RequestLease for Context {
    fn lease(&self) -> Option<&Arc<Lease>> {
        Some(&self.lease)
    }
}

/// A load query in flight.
pub(super) struct JoinInFlight(Weak<LoadJoin>);

impl OpenLoadQuery for JoinInFlight {
    fn take(&self) -> Option<Vec<LoadAnswer>> {
        let join = self.0.upgrade()?;
        join.is_closed.set(true);
        Some(std::mem::take(&mut *join.found.borrow_mut()))
    }
}

/// Shared state of a gateway at an instant.
struct Cells<'a>(&'a Gateway, Timestamp);

impl TimeSource for Cells<'_> {
    fn now(&self) -> Timestamp {
        self.1
    }
}

impl SchedulerCells for Cells<'_> {
    fn conditions(&self) -> Arc<RankConditions> {
        Arc::clone(&self.0.conditions)
    }

    fn exclusions(&self) -> Arc<Exclusions> {
        Arc::clone(&self.0.exclusions)
    }

    fn raise_wake(&self) -> bool {
        !self.0.wake.replace(true)
    }

    fn is_replaced(&self) -> bool {
        false
    }
}

/// Ranks and their restrictions as the scheduler has received them.
#[derive(Default)]
struct Known {
    ranks: BTreeMap<Slot, (WorkerRank, Generation, bool)>,
    conditions: Arc<RankConditions>,
    exclusions: Arc<Exclusions>,
}

impl Known {
    /// Follows the messages that reach the scheduler.
    fn follow(&mut self, msg: &ToScheduler, gateway: &Gateway) {
        let mut set_draining = |slot: &Slot, generation: &Generation, drains| {
            if let Some(known) = self.ranks.get_mut(slot).filter(|known| known.1 == *generation) {
                known.2 = drains;
            }
        };
        match msg {
            SchedulerMsg::Admit(SequenceHandle { admission, .. }) => {
                let Admission { rank, slot, generation, draining, .. } = *admission;
                self.ranks.insert(slot, (rank, generation, draining));
            }
            SchedulerMsg::Drain { slot, generation, .. } => set_draining(slot, generation, true),
            SchedulerMsg::Cordon { slot, generation, cordoned } => set_draining(slot, generation, *cordoned),
            SchedulerMsg::Retire { slot, generation, .. } => {
                self.ranks.retain(|known, (_, current, _)| known != slot || current != generation);
            }
            SchedulerMsg::Conditions => self.conditions = Arc::clone(&gateway.conditions),
            SchedulerMsg::Exclusions => self.exclusions = Arc::clone(&gateway.exclusions),
            _ => {}
        }
    }

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

/// A rank for the scheduler.
pub(super) fn sequence_handle(entry: &Entry, admission: Admission) -> SequenceHandle<Actor> {
    let handle = Actor::Sequence(entry.slot.0, entry.generation.0);
    SequenceHandle { admission, cells: entry.cells.clone(), handle }
}

impl Gateway {
    /// Starts the scheduler with the registered ranks.
    pub(super) fn start_scheduler(&mut self, incarnation: u32, around: &mut Surroundings<'_>) {
        self.scheduler_incarnation.set(incarnation);
        let heads = &self.queue_heads;
        let loads = LiveLoads::new(Arc::clone(&self.board_changes), Arc::clone(&self.arrivals), Arc::clone(heads));
        let schedule = Schedule::new(self.settings.config.clone(), incarnation, Extensions::default());
        let shell = SchedulerShell::new(schedule, loads, Arc::clone(heads), self.is_queueing());
        let (mut scheduler, cells) =
            (Scheduler { shell, known: Known::default(), timers: BTreeSet::new() }, Cells(self, around.net.now));
        for entry in self.table() {
            if let Some(worker) = self.membership().worker_at(entry.slot) {
                let admission = Admission {
                    traits: Arc::clone(&worker.traits),
                    since: entry.since,
                    draining: worker.draining || worker.cordoned,
                    ..Admission::new(entry.rank, entry.slot, entry.generation)
                };
                let handle = sequence_handle(entry, admission);
                scheduler.known.ranks.insert(entry.slot, (entry.rank, entry.generation, handle.admission.draining));
                scheduler.shell.admit(handle, cells.now());
            }
        }
        scheduler.known.follow(&SchedulerMsg::Conditions, self);
        scheduler.known.follow(&SchedulerMsg::Exclusions, self);
        scheduler.shell.load_conditions(&cells);
        scheduler.shell.load_exclusions(&cells);
        self.scheduler = Some(scheduler);
    }

    pub(super) fn on_scheduler(&mut self, msg: ToScheduler, around: &mut Surroundings<'_>) {
        let Some(mut scheduler) = self.scheduler.take() else { return }; // the message is lost
        let now = around.net.now;
        scheduler.known.follow(&msg, self);
        let has_left = |request: &Request<Context>| request.context.lease.state() == LeaseState::Ended;
        let left = match &msg {
            SchedulerMsg::Decide(request) if self.is_queueing() && has_left(request) => {
                Some((request.context.reply.call, scheduler.shell.decider().pending()))
            }
            _ => None,
        };
        if let SchedulerMsg::Wake { at: Some(at) } = &msg {
            scheduler.timers.remove(at);
        }
        if let Some((to, msg)) = scheduler.shell.step(msg, &Cells(self, now)) {
            self.send(Actor::Scheduler, to, Letter::sequence(msg), around);
        }
        while let Some(effect) = scheduler.shell.next_effect(&Cells(self, now), now) {
            if let Effect::Book { context, .. } = &effect {
                assert!(left.is_none_or(|(call, _)| call != context.reply.call), "a caller that has left is booked");
            }
            self.perform(&mut scheduler, effect, around);
        }
        let [timeout, wake] = scheduler.shell.end_step();
        let me = self.place(Actor::Scheduler);
        if let Some(due) = timeout {
            around.net.after(due.since(now), me, Letter::scheduler(SchedulerMsg::Timeout));
        }
        let schedule = scheduler.shell.decider();
        assert!(left.is_none_or(|(_, max)| schedule.pending() <= max), "a request is queued whose caller has left");
        assert!(!self.is_queueing() || !schedule.waits_for_load() || self.wake.get(), "no wake-up is requested");
        scheduler.timers.extend(wake);
        let is_armed = |at: Timestamp| scheduler.timers.first().is_some_and(|armed| *armed <= at);
        assert!(!self.is_queueing() || schedule.next_wake().is_none_or(is_armed), "no timer for waiting requests");
        if let Some(at) = wake {
            around.net.after(at.since(now), me, Letter::scheduler(SchedulerMsg::Wake { at: Some(at) }));
        }
        self.scheduler = Some(scheduler);
    }

    fn perform(&mut self, scheduler: &mut Scheduler, effect: Effect<Context>, around: &mut Surroundings<'_>) {
        let now = around.net.now;
        match effect {
            Effect::Query(query) => {
                let join = Rc::new(LoadJoin {
                    batch: query.batch,
                    prompts: query.prompts,
                    found: Vec::new().into(),
                    is_closed: false.into(),
                    outbox: self.outbox.clone(),
                });
                scheduler.shell.await_loads(JoinInFlight(Rc::downgrade(&join)), now);
                for to in query.slots.iter().filter_map(|slot| scheduler.shell.sequence(*slot)) {
                    let msg = SequenceMsg::Load { query: LoadQuery(Rc::clone(&join)), now };
                    self.send(Actor::Scheduler, *to, Letter::sequence(msg), around);
                }
            }
            Effect::Refresh { booking, block_hashes, .. } => {
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
            Effect::Book { context, decision, number, .. } => {
                scheduler.known.check(&decision);
                around.net.record((context.reply.call, decision.slot().0, decision.generation().0));
                let Some(to) = scheduler.shell.sequence(decision.slot()) else { return };
                let (lease, incarnation) = (Arc::clone(&context.lease), self.scheduler_incarnation.get());
                let book = Book { lease, decision, number, scheduler: incarnation, caller: context, now };
                self.send(Actor::Scheduler, *to, Letter::sequence(SequenceMsg::Book(book)), around);
            }
            Effect::Reject { mut context, .. } => {
                context.reply.is_used = true;
                let letter = Letter::Answered(context.reply.attempt, Answer::Rejected);
                self.send(Actor::Scheduler, Actor::Caller(context.reply.call), letter, around);
            }
            Effect::Cancelled { context } => drop(context),
            Effect::PublishTypical { .. } => unreachable!("performed by the shell"),
            Effect::Report { .. } | Effect::LoadSnapshot { .. } | Effect::Explain { .. } => {
                unreachable!("every request books")
            }
        }
    }
}
