//! Scheduler actor: the only actor that books requests.
//!
//! Performs the effects of [`Schedule`]: sends load queries, sends Books in decision order, and replies to queries. An
//! incomplete load query closes after `load_query_timeout`. Decisions are made by the state machine. After a restart
//! the scheduler starts with the registered ranks and their boards; the replies to waiting requests are lost, and their
//! callers retry.

mod context;
mod messages;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(crate) use context::RequestContext;
pub use messages::PendingClass;
pub(crate) use messages::{SchedulerMsg, SequenceHandle};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::actors::delivery::ack::Acknowledgement;
use crate::actors::delivery::join::{Continuation, JoinObserver, ReplyToken};
use crate::actors::delivery::reply::Reply;
use crate::actors::delivery::strand::{ActorState, DeferredReplies, DeferredReply, Strand};
use crate::actors::io::clock::Clock;
use crate::actors::radix::claim::SpeculationSender;
use crate::actors::radix::shards::Shards;
use crate::actors::radix::{OverlapQuery, RadixMsg, RadixReply, overlap_token};
use crate::actors::sequence::{
    BookCaller, LoadFallListener, LoadQueryContinuation, Sequence, SequenceMsg, SequenceReply, load_token,
};
use crate::actors::telemetry::{Pool, QueueMeters, ShadowMeters, trace_decision};
use crate::actors::views::decisions::{DecisionRecords, DecisionTape};
use crate::actors::views::published::Published;
use crate::actors::views::shadows::ShadowTotals;
use crate::actors::views::wake_flag::WakeFlag;
use crate::config::{LoadConfig, RouterConfig};
use crate::directory::{Lease, LeaseState};
use crate::health::Exclusions;
use crate::load::{ArrivalsCell, BoardChanges, PromptBlocks};
use crate::protocol::{BlockHash, BookingId, Generation, Slot, Timestamp};
use crate::queue::QueueHeads;
#[cfg(feature = "replicas")]
use crate::replica::ReplicaLife;
use crate::schedule::{Effect, Extensions, Input, LiveLoads, LoadAnswer, LoadQuery, Request, Schedule};
use crate::select::{RankConditions, RankOverlap};
#[cfg(feature = "replicas")]
use crate::session::SessionBinding;
use crate::shell::CurrentIncarnation;
use crate::shell::sequence::Book;

/// Dependencies of the scheduler.
pub(crate) struct SchedulerDependencies {
    pub(crate) shards: Arc<Shards>,
    pub(crate) speculation: SpeculationSender,
    pub(crate) wake: Arc<WakeFlag>,
    /// Incarnation of the present scheduler.
    pub(crate) current: Arc<CurrentIncarnation>,
    /// The embedder's rank conditions. Read on notification, so the latest value applies.
    pub(crate) conditions: Arc<Published<RankConditions>>,
    /// Ranks excluded for their health. Read on notification.
    pub(crate) exclusions: Arc<Published<Exclusions>>,
    /// Slots whose boards have changed.
    pub(crate) board_changes: Arc<BoardChanges>,
    /// Arrivals of the pool, own ones and those of other replicas.
    pub(crate) arrivals: Arc<ArrivalsCell>,
    /// Longest-waiting requests of the replicas.
    pub(crate) queue_heads: Arc<QueueHeads>,
    /// Records of decisions.
    pub(crate) decisions: Arc<DecisionRecords>,
    /// Totals of shadow policies.
    pub(crate) shadows: Arc<Published<Vec<ShadowTotals>>>,
    pub(crate) clock: Clock,
    pub(crate) runtime: Handle,
}

/// Continuation of a load query: passes the responses to the scheduler.
struct LoadContinuation {
    batch: u64,
    prompts: Arc<[PromptBlocks]>,
    scheduler: Weak<Strand<Scheduler>>,
}

impl LoadQueryContinuation for LoadContinuation {
    fn prompts(&self) -> &[PromptBlocks] {
        &self.prompts
    }
}

impl LoadFallListener for Strand<Scheduler> {
    fn load_fell(&self) {
        self.tell(SchedulerMsg::Wake { at: None });
    }
}

/// Continuation of a repeated overlap query for a waiting request.
struct RefreshContinuation {
    booking: BookingId,
    hashes: Arc<[BlockHash]>,
    scheduler: Weak<Strand<Scheduler>>,
}

impl OverlapQuery for RefreshContinuation {
    fn hashes(&self) -> &Arc<[BlockHash]> {
        &self.hashes
    }
}

impl Continuation<RankOverlap> for RefreshContinuation {
    fn run(&self, overlaps: Vec<RankOverlap>) {
        if let Some(scheduler) = self.scheduler.upgrade() {
            scheduler.tell(SchedulerMsg::Refreshed { booking: self.booking, overlaps });
        }
    }
}

impl Continuation<LoadAnswer> for LoadContinuation {
    fn run(&self, answers: Vec<LoadAnswer>) {
        if let Some(scheduler) = self.scheduler.upgrade() {
            scheduler.tell(SchedulerMsg::Loads { batch: self.batch, answers });
        }
    }
}

/// State of the scheduler.
pub(crate) struct Scheduler {
    incarnation: u32,
    schedule: Schedule<RequestContext>,
    /// Shared cells that the schedule reads.
    loads: LiveLoads,
    tape: DecisionTape,
    shadow_meters: Option<ShadowMeters>,
    /// Generation and strand of each rank's sequence actor, by slot.
    sequences: Vec<Option<(Generation, Arc<Strand<Sequence>>)>>,
    effects: VecDeque<Effect<RequestContext>>,
    stepped_at: Timestamp,
    replies: SchedulerReplies,
    /// Start of the batch in flight, and its responses so far.
    in_flight: Option<(Instant, JoinObserver<LoadAnswer, LoadContinuation>)>,
    /// Whether the single timer is armed. When it fires, it is armed again for a later batch in flight.
    timer_armed: bool,
    load_query_timeout: Duration,
    /// Whether any class queues requests.
    queueing: bool,
    queue_meters: Option<QueueMeters>,
    /// Time of the earliest armed timer for waiting requests.
    wake_at: Option<Timestamp>,
    dependencies: SchedulerDependencies,
    myself: Weak<Strand<Scheduler>>,
}

/// Replies delivered after the scheduler's strand is released.
#[derive(Default)]
pub(crate) struct SchedulerReplies {
    sequences: Vec<DeferredReplies<SequenceReply>>,
    shards: Vec<DeferredReplies<RadixReply>>,
    /// The sender's own tokens. Dropping the last token sends a message to the scheduler, so tokens are dropped outside
    /// its strand.
    tokens: Vec<ReplyToken<RankOverlap, RefreshContinuation>>,
    answers: Vec<(RequestContext, Reply)>,
    cancelled: Vec<RequestContext>,
    conditions: Vec<oneshot::Sender<()>>,
}

impl Scheduler {
    pub(crate) fn new(
        config: RouterConfig,
        incarnation: u32,
        extensions: Extensions,
        dependencies: SchedulerDependencies,
        myself: &Arc<Strand<Self>>,
    ) -> Self {
        let tape = DecisionTape::new(&config, &dependencies.decisions);
        let shadow_meters = ShadowMeters::new(&Pool::new(&config.pool), &config, &dependencies.shadows);
        let mut schedule = Schedule::new(config.clone(), incarnation, extensions);
        schedule.name_requests(RequestContext::request_id);
        Self {
            incarnation,
            load_query_timeout: LoadConfig::QUERY_TIMEOUT,
            queueing: config.queue.is_enabled(),
            queue_meters: config.queue.is_enabled().then(|| QueueMeters::new(&config)),
            schedule,
            tape,
            shadow_meters,
            loads: LiveLoads::new(
                Arc::clone(&dependencies.board_changes),
                Arc::clone(&dependencies.arrivals),
                Arc::clone(&dependencies.queue_heads),
            ),
            sequences: Vec::new(),
            effects: VecDeque::new(),
            stepped_at: Timestamp::default(),
            replies: SchedulerReplies::default(),
            in_flight: None,
            timer_armed: false,
            wake_at: None,
            dependencies,
            myself: Arc::downgrade(myself),
        }
    }

    /// Registers a rank. Also used to fill a new scheduler before its strand opens.
    pub(crate) fn admit(&mut self, sequence_handle: SequenceHandle) {
        let SequenceHandle { admission, cells, strand } = sequence_handle;
        let slot = admission.slot;
        if self.sequences.len() <= slot.index() {
            self.sequences.resize_with(slot.index() + 1, || None);
        }
        self.sequences[slot.index()] = Some((admission.generation, strand));
        self.loads.insert(slot, cells);
        self.step_schedule(Input::Admit(admission));
    }

    /// Loads the embedder's rank conditions. Also used to fill a new scheduler before its strand opens.
    pub(crate) fn load_conditions(&mut self) {
        let conditions = self.dependencies.conditions.get();
        self.step_schedule(Input::Conditions(conditions));
    }

    /// Loads the ranks excluded for their health. Also used to fill a new scheduler before its strand opens.
    pub(crate) fn load_exclusions(&mut self) {
        let exclusions = self.dependencies.exclusions.get();
        self.step_schedule(Input::Exclusions(exclusions));
    }

    /// A request whose caller cancelled during the overlap query must not be queued, because its `Cancel` message has
    /// already been handled.
    fn on_decide(&mut self, request: Request<RequestContext>) {
        let over = |lease: &Arc<Lease>| lease.state() == LeaseState::Ended;
        if self.queueing && request.context.lease.as_ref().is_some_and(over) {
            return self.replies.cancelled.push(request.context);
        }
        self.step_schedule(Input::Request(request));
    }

    fn on_drain(&mut self, slot: Slot, generation: Generation, ack: Acknowledgement) {
        self.step_schedule(Input::Drain { slot, generation });
        if let Some(Some((current, strand))) = self.sequences.get(slot.index())
            && *current == generation
        {
            strand.send(SequenceMsg::Drain(ack)).keep_in(&mut self.replies.sequences);
        }
    }

    fn on_cordon(&mut self, slot: Slot, generation: Generation, cordoned: bool) {
        if cordoned {
            return self.step_schedule(Input::Drain { slot, generation });
        }
        self.step_schedule(Input::Undrain { slot, generation });
        if let Some(Some((current, strand))) = self.sequences.get(slot.index())
            && *current == generation
        {
            strand.send(SequenceMsg::Undrain).keep_in(&mut self.replies.sequences);
        }
    }

    fn on_retire(&mut self, slot: Slot, generation: Generation, ack: Acknowledgement) {
        self.step_schedule(Input::Retire { slot, generation });
        let here = |sequence_handle: &&mut Option<(Generation, _)>| {
            sequence_handle.as_ref().is_some_and(|(current, _)| *current == generation)
        };
        if let Some((_, strand)) = self.sequences.get_mut(slot.index()).filter(here).and_then(Option::take) {
            self.loads.remove(slot);
            // The message carries the acknowledgement: dropping it also notifies the supervisor.
            strand.send(SequenceMsg::Retire(ack)).keep_in(&mut self.replies.sequences);
        }
    }

    /// Closes a timed-out batch with the responses received so far. A late response only clears the timed-out state of
    /// its rank.
    fn on_timeout(&mut self) {
        self.timer_armed = false;
        let (Some(batch), Some((since, answers))) = (self.schedule.batch_in_flight(), &self.in_flight) else { return };
        if since.elapsed() < self.load_query_timeout {
            return self.arm_timer(); // the timer was armed for an earlier batch
        }
        // A complete load query is not late: its `Loads` message is already in the inbox or about to arrive.
        if let Some(answers) = answers.take() {
            self.step_schedule(Input::Loads { batch, answers });
        }
    }

    fn on_wake(&mut self, at: Option<Timestamp>) {
        if at.is_some() && at == self.wake_at {
            self.wake_at = None;
        }
        self.step_schedule(Input::Wake);
    }

    /// The waiting requests of each class.
    pub(crate) fn pending(&self) -> Vec<PendingClass> {
        let now = self.dependencies.clock.now();
        let pending = self.schedule.depths().map(|(class, depth)| PendingClass {
            class: class.to_owned(),
            depth,
            oldest_age: depth.oldest.map(|oldest| now.since(oldest)),
        });
        pending.collect()
    }

    /// Applies bindings of sessions from another replica.
    #[cfg(feature = "replicas")]
    pub(crate) fn receive_sessions(&mut self, bindings: &[SessionBinding]) {
        let now = self.dependencies.clock.now();
        bindings.iter().for_each(|binding| self.schedule.sessions_mut().receive(binding, now));
    }

    /// Bindings of sessions to send, as replica `life`. See [`crate::session::Sessions::outbound`].
    ///
    /// Numbers of bindings begin at the start time of the process, in units below a nanosecond: no replica binds as many
    /// sessions.
    #[cfg(feature = "replicas")]
    pub(crate) fn share_sessions(
        &mut self,
        life: ReplicaLife,
        period: Duration,
        bytes_max: usize,
    ) -> Vec<SessionBinding> {
        let now = self.dependencies.clock.now();
        let sessions = self.schedule.sessions_mut();
        sessions.share_as(life.replica.0, life.incarnation.min(u64::MAX >> 22) << 20);
        sessions.outbound(period, bytes_max, now)
    }

    /// Publishes the waiting requests as metrics.
    pub(crate) fn show_queue(&self) {
        if let Some(meters) = &self.queue_meters {
            meters.show(self.schedule.depths(), self.dependencies.clock.now());
        }
    }

    fn step_schedule(&mut self, input: Input<RequestContext>) {
        self.step_schedule_at(input, self.dependencies.clock.now());
    }

    fn step_schedule_at(&mut self, input: Input<RequestContext>, now: Timestamp) {
        self.stepped_at = now;
        self.tape.step(&mut self.schedule, input, (&self.loads, now), &mut self.effects);
    }

    /// Whether a step hung and a successor has replaced this scheduler.
    fn is_replaced(&self) -> bool {
        !self.dependencies.current.is(self.incarnation)
    }

    /// Performs effects until none are left, including those of responses that arrive inline.
    fn perform(&mut self) -> SchedulerReplies {
        let now = self.dependencies.clock.now();
        // Before the bookings, after which other replicas are informed.
        self.publish_queue_head();
        while let Some(effect) = self.next_effect(now) {
            if self.is_replaced() {
                return std::mem::take(&mut self.replies);
            }
            match effect {
                Effect::Query(query) => {
                    let batch = query.batch;
                    if let Some(answers) = self.fan_out(query) {
                        self.step_schedule_at(Input::Loads { batch, answers }, now);
                    }
                }
                Effect::Refresh { booking, block_hashes } => self.ask_shards(booking, block_hashes),
                Effect::PublishTypical { speed, rate } => self.loads.publish_typical(&speed, rate, now),
                Effect::Book { context, decision, number, trace, shadow } => {
                    trace.as_deref().into_iter().for_each(trace_decision);
                    if let Some((meters, report)) = self.shadow_meters.as_mut().zip(shadow) {
                        meters.count(&report);
                    }
                    let RequestContext { lease: Some(lease), answer, permit, speculative_prompt, timestamps } = context
                    else {
                        continue;
                    };
                    if let Some(timestamps) = timestamps {
                        timestamps.set_decided(self.stepped_at);
                    }
                    let Some(Some((_, strand))) = self.sequences.get(decision.slot.index()) else { continue };
                    // Sent before the Book, so a query after the booking finds the speculative entry.
                    let claim = speculative_prompt.and_then(|speculative_prompt| {
                        let speculation = &self.dependencies.speculation;
                        speculation.routed(&decision, lease.booking(), *speculative_prompt, &mut self.replies.shards)
                    });
                    let (scheduler, caller) = (self.incarnation, BookCaller { permit, answer, claim });
                    let book = Book { lease, decision, number, scheduler, caller, now };
                    strand.send(SequenceMsg::Book(book)).keep_in(&mut self.replies.sequences);
                }
                Effect::Report { context, decision } => self.replies.answers.push((context, Reply::Placed(decision))),
                Effect::LoadSnapshot { context, loads } => {
                    self.replies.answers.push((context, Reply::LoadSnapshot(loads)))
                }
                Effect::Explain { context, explanation } => {
                    self.replies.answers.push((context, Reply::Explained(explanation)));
                }
                Effect::Reject { context, reason } => self.replies.answers.push((context, Reply::Rejected(reason))),
                Effect::Cancelled { context } => self.replies.cancelled.push(context),
            }
        }
        self.tape.flush(now);
        if self.schedule.batch_in_flight().is_none() {
            self.in_flight = None;
        }
        if self.queueing {
            self.publish_queue_head();
            self.arm_wake();
        }
        std::mem::take(&mut self.replies)
    }

    fn publish_queue_head(&self) {
        if self.queueing {
            self.dependencies.queue_heads.publish_own(self.schedule.queue_head());
        }
    }

    /// The next effect. If there is none and requests wait for load, sets the wake flag and re-reads the boards.
    fn next_effect(&mut self, now: Timestamp) -> Option<Effect<RequestContext>> {
        if self.effects.is_empty() && self.queueing && self.schedule.waits_for_load() && self.dependencies.wake.raise()
        {
            self.step_schedule_at(Input::Wake, now);
        }
        self.effects.pop_front()
    }

    /// Queries the shortlisted ranks. Returns the responses if all of them arrived inline.
    fn fan_out(&mut self, query: LoadQuery) -> Option<Vec<LoadAnswer>> {
        let now = self.dependencies.clock.now();
        let next =
            LoadContinuation { batch: query.batch, prompts: query.prompts, scheduler: Weak::clone(&self.myself) };
        let first = ReplyToken::open(query.slots.len(), next);
        for slot in query.slots {
            if let Some(Some((_, strand))) = self.sequences.get(slot.index()) {
                strand.send(SequenceMsg::Load { query: load_token(&first), now }).keep_in(&mut self.replies.sequences);
            }
        }
        let answers = first.observe();
        let complete = first.finish();
        if complete.is_none() {
            self.in_flight = Some((Instant::now(), answers));
            self.arm_timer();
        }
        complete
    }

    /// Repeats the overlap query of a waiting request.
    fn ask_shards(&mut self, booking: BookingId, block_hashes: Arc<[BlockHash]>) {
        let next = RefreshContinuation { booking, hashes: block_hashes, scheduler: Weak::clone(&self.myself) };
        let first = ReplyToken::open(0, next);
        for shard in self.dependencies.shards.iter() {
            shard.send(RadixMsg::Overlap(overlap_token(&first))).keep_in(&mut self.replies.shards);
        }
        self.replies.tokens.push(first);
    }

    fn arm_timer(&mut self) {
        let Some((since, _)) = &self.in_flight else { return };
        if std::mem::replace(&mut self.timer_armed, true) {
            return;
        }
        let (due, myself) = (*since + self.load_query_timeout, Weak::clone(&self.myself));
        self.dependencies.runtime.spawn(async move {
            tokio::time::sleep_until(due).await;
            if let Some(scheduler) = myself.upgrade() {
                scheduler.tell(SchedulerMsg::Timeout);
            }
        });
    }

    /// Arms a timer for the next wake of the schedule, unless an earlier one is armed.
    fn arm_wake(&mut self) {
        let Some(at) = self.schedule.next_wake() else { return };
        if self.wake_at.is_some_and(|armed| armed <= at) {
            return;
        }
        self.wake_at = Some(at);
        let (sleep, myself) = (at.since(self.dependencies.clock.now()), Weak::clone(&self.myself));
        self.dependencies.runtime.spawn(async move {
            tokio::time::sleep(sleep).await;
            if let Some(scheduler) = myself.upgrade() {
                scheduler.tell(SchedulerMsg::Wake { at: Some(at) });
            }
        });
    }
}

impl ActorState for Scheduler {
    type Msg = SchedulerMsg;
    type Deferred = SchedulerReplies;

    fn step(&mut self, msg: SchedulerMsg) -> Option<SchedulerReplies> {
        match msg {
            SchedulerMsg::Decide(request) => self.on_decide(request),
            SchedulerMsg::Loads { batch, answers } => self.step_schedule(Input::Loads { batch, answers }),
            SchedulerMsg::Timeout => self.on_timeout(),
            SchedulerMsg::Cancel(booking) => self.step_schedule(Input::Cancel(booking)),
            SchedulerMsg::Refreshed { booking, overlaps } => self.step_schedule(Input::Overlaps { booking, overlaps }),
            SchedulerMsg::Wake { at } => self.on_wake(at),
            SchedulerMsg::Admit(sequence_handle) => self.admit(sequence_handle),
            SchedulerMsg::Describe { slot, generation, traits } => {
                self.step_schedule(Input::Describe { slot, generation, traits });
            }
            SchedulerMsg::Drain { slot, generation, ack } => self.on_drain(slot, generation, ack),
            SchedulerMsg::Cordon { slot, generation, cordoned } => self.on_cordon(slot, generation, cordoned),
            SchedulerMsg::Retire { slot, generation, ack } => self.on_retire(slot, generation, ack),
            SchedulerMsg::Conditions { done } => {
                self.load_conditions();
                self.replies.conditions.extend(done);
            }
            SchedulerMsg::Exclusions => self.load_exclusions(),
        }
        // A replaced scheduler leaves effects and views to its successor.
        Some(if self.is_replaced() { std::mem::take(&mut self.replies) } else { self.perform() })
    }

    /// The last step may have read changes of boards, or set the wake flag, after the start of the successor.
    fn abandoned(self) {
        self.loads.report_all();
        if let Some(successor) = self.myself.upgrade() {
            successor.tell(SchedulerMsg::Wake { at: None });
        }
    }
}

impl DeferredReply for SchedulerReplies {
    fn deliver(self) {
        self.shards.into_iter().for_each(DeferredReplies::deliver);
        self.sequences.into_iter().for_each(DeferredReplies::deliver);
        drop(self.tokens);
        for (context, answer) in self.answers {
            let RequestContext { answer: caller, permit, .. } = context;
            drop(permit);
            drop(caller.send(answer)); // the caller may have cancelled
        }
        drop(self.cancelled); // callers that cancelled await no reply
        for done in self.conditions {
            let _ = done.send(()); // the receiver may be dropped
        }
    }

    fn deliver_late(self) {
        let Self { sequences, shards, .. } = self;
        Self { sequences, shards, ..Self::default() }.deliver();
    }
}
