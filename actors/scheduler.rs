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

use crate::actors::delivery::ack::Acknowledgement;
use crate::actors::delivery::join::{Continuation, JoinObserver, ReplyToken};
use crate::actors::delivery::reply::Reply;
use crate::actors::delivery::strand::{ActorState, DeferredReplies, DeferredReply, Strand};
use crate::actors::io::clock::Clock;
use crate::actors::radix::claim::SpeculationSender;
use crate::actors::radix::shards::Shards;
use crate::actors::radix::{OverlapQuery, RadixMsg, RadixReply, overlap_token};
use crate::actors::sequence::{
    Book, LoadFallListener, LoadQueryContinuation, Sequence, SequenceMsg, SequenceReply, load_token,
};
use crate::actors::telemetry::{PhaseTimestamps, QueueMeters};
use crate::actors::views::published::Published;
use crate::actors::views::wake_flag::WakeFlag;
use crate::config::{LoadConfig, RouterConfig};
use crate::directory::{Lease, LeaseState};
use crate::health::Exclusions;
use crate::load::PromptBlocks;
use crate::predict::SpeculativePrompt;
use crate::protocol::{BlockHash, BookingId, Generation, Slot, Timestamp};
use crate::queue::Depth;
use crate::schedule::{
    Admission, Effect, Explanation, Extensions, Input, LiveLoads, LoadAnswer, LoadQuery, RankCells, Request, Schedule,
};
use crate::select::{RankConditions, RankOverlap, RankTraits};

/// What the scheduler can be told.
pub(crate) enum SchedulerMsg {
    /// A request wants a decision.
    Decide(Request<RequestContext>),
    /// Answers to a load query.
    Loads { batch: u64, answers: Vec<LoadAnswer> },
    /// The timer of load queries has fired.
    Timeout,
    /// A waiting request's caller has gone.
    Cancel(BookingId),
    /// A waiting request's overlap, asked for again.
    Refreshed { booking: BookingId, overlaps: Vec<RankOverlap> },
    /// Some rank's load has fallen, or it is `at`: see who need not wait any longer.
    Wake { at: Option<Timestamp> },
    /// What waits, class by class?
    Pending(oneshot::Sender<Vec<PendingClass>>),
    /// Show in metrics what waits. Dropped when that is done or lost.
    ShowQueue(Arc<()>),
    /// A rank joins.
    Admit(SequenceHandle),
    /// A rank's worker says otherwise of itself.
    Describe { slot: Slot, generation: Generation, traits: Arc<RankTraits> },
    /// A rank gets no new work, and its sequence actor hears so behind the last Book.
    Drain { slot: Slot, generation: Generation, ack: Acknowledgement },
    /// A rank gets new work, or none. Its bookings stay.
    Cordon { slot: Slot, generation: Generation, cordoned: bool },
    /// A rank leaves: nothing is booked on it from here on, and its sequence actor hears so behind the last Book.
    Retire { slot: Slot, generation: Generation, ack: Acknowledgement },
    /// What the embedder knows of the ranks has changed. The answer says that it holds from here on.
    Conditions { done: Option<oneshot::Sender<()>> },
    /// The ranks excluded for their health have changed.
    Exclusions,
    /// A drill: panic, or hold the turn until told to go on.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
}

/// Context of one request at the scheduler: its lease and its reply channel.
pub(crate) struct RequestContext {
    /// Present when a booking is wanted.
    pub(crate) lease: Option<Arc<Lease>>,
    pub(crate) answer: oneshot::Sender<Reply>,
    /// Its place in the waiting room, given back when it is answered or lost.
    pub(crate) permit: OwnedSemaphorePermit,
    /// What its booking will leave in a cache, where that is guessed.
    pub(crate) guess: Option<Box<SpeculativePrompt>>,
    /// Present when its time is measured.
    pub(crate) timestamps: Option<Arc<PhaseTimestamps>>,
}

/// What waits in one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingClass {
    /// The class.
    pub class: String,
    /// Its requests and their tokens.
    pub depth: Depth,
    /// How long the oldest of them has waited.
    pub oldest_age: Option<Duration>,
}

/// A rank's sequence actor, as the scheduler knows it.
pub(crate) struct SequenceHandle {
    pub(crate) admission: Admission,
    pub(crate) cells: RankCells,
    pub(crate) strand: Arc<Strand<Sequence>>,
}

/// Dependencies of the scheduler.
pub(crate) struct SchedulerDependencies {
    pub(crate) shards: Arc<Shards>,
    pub(crate) speculation: SpeculationSender,
    pub(crate) wake: Arc<WakeFlag>,
    /// What the embedder knows of the ranks: looked at when told to, so that what was said last holds.
    pub(crate) conditions: Arc<Published<RankConditions>>,
    /// The ranks excluded for their health: likewise.
    pub(crate) exclusions: Arc<Published<Exclusions>>,
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

/// The scheduler's state.
pub(crate) struct Scheduler {
    schedule: Schedule<RequestContext>,
    /// The shared cells that the schedule reads.
    loads: LiveLoads,
    /// By slot: whose turn it is, and of which incarnation.
    sequences: Vec<Option<(Generation, Arc<Strand<Sequence>>)>>,
    effects: VecDeque<Effect<RequestContext>>,
    replies: SchedulerReplies,
    /// The batch in flight: since when, and its answers so far.
    in_flight: Option<(Instant, JoinObserver<LoadAnswer, LoadContinuation>)>,
    /// One timer at a time; when it fires it goes on for the batch then in flight.
    timer_armed: bool,
    load_query_timeout: Duration,
    /// Whether requests may have to wait.
    queueing: bool,
    queue_meters: Option<QueueMeters>,
    /// When the earliest timer for waiting requests fires.
    wake_at: Option<Timestamp>,
    dependencies: SchedulerDependencies,
    myself: Weak<Strand<Scheduler>>,
}

/// What callers hear once the scheduler's turn is given back.
#[derive(Default)]
pub(crate) struct SchedulerReplies {
    sequences: Vec<DeferredReplies<SequenceReply>>,
    shards: Vec<DeferredReplies<RadixReply>>,
    /// Askers' own tokens: the last to go tells the scheduler, so none may go in its strand.
    tokens: Vec<ReplyToken<RankOverlap, RefreshContinuation>>,
    answers: Vec<(RequestContext, Reply)>,
    cancelled: Vec<RequestContext>,
    pending: Vec<(oneshot::Sender<Vec<PendingClass>>, Vec<PendingClass>)>,
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
        Self {
            load_query_timeout: LoadConfig::QUERY_TIMEOUT,
            queueing: config.queue.is_enabled(),
            queue_meters: config.queue.is_enabled().then(|| QueueMeters::new(&config)),
            schedule: Schedule::new(config, incarnation, extensions),
            loads: LiveLoads::default(),
            sequences: Vec::new(),
            effects: VecDeque::new(),
            replies: SchedulerReplies::default(),
            in_flight: None,
            timer_armed: false,
            wake_at: None,
            dependencies,
            myself: Arc::downgrade(myself),
        }
    }

    /// Makes a rank known. Also used to fill a fresh scheduler before it opens.
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

    /// Takes over what the embedder knows. Also used to fill a fresh scheduler before it opens.
    pub(crate) fn load_conditions(&mut self) {
        let conditions = self.dependencies.conditions.get();
        self.step_schedule(Input::Conditions(conditions));
    }

    /// Takes over which ranks are excluded for their health. Also used to fill a fresh scheduler before it opens.
    pub(crate) fn load_exclusions(&mut self) {
        let exclusions = self.dependencies.exclusions.get();
        self.step_schedule(Input::Exclusions(exclusions));
    }

    /// A request whose caller went while the index was asked must not wait: its cancellation has come and gone.
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
            // The message carries the ack: dropping it also notifies the supervisor.
            strand.send(SequenceMsg::Retire(ack)).keep_in(&mut self.replies.sequences);
        }
    }

    /// Closes a batch whose time is up with the answers there are. Late ones only show that a rank lives.
    fn on_timeout(&mut self) {
        self.timer_armed = false;
        let (Some(batch), Some((since, answers))) = (self.schedule.batch_in_flight(), &self.in_flight) else { return };
        if since.elapsed() < self.load_query_timeout {
            return self.arm_timer(); // a later batch than the one the timer was set for
        }
        // A complete gather is not late: its `Loads` is in the inbox behind this message, or about to be.
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

    fn on_pending(&mut self, answer: oneshot::Sender<Vec<PendingClass>>) {
        let now = self.dependencies.clock.now();
        let pending = self.schedule.depths().map(|(class, depth)| PendingClass {
            class: class.to_owned(),
            depth,
            oldest_age: depth.oldest.map(|oldest| now.since(oldest)),
        });
        self.replies.pending.push((answer, pending.collect()));
    }

    fn on_show_queue(&self) {
        if let Some(meters) = &self.queue_meters {
            meters.show(self.schedule.depths(), self.dependencies.clock.now());
        }
    }

    fn step_schedule(&mut self, input: Input<RequestContext>) {
        self.schedule.step(input, &self.loads, self.dependencies.clock.now(), &mut self.effects);
    }

    /// Performs effects until none are left, those that follow from answers that came at once included.
    fn perform(&mut self) -> SchedulerReplies {
        let now = self.dependencies.clock.now();
        while let Some(effect) = self.next_effect(now) {
            match effect {
                Effect::Query(query) => {
                    let batch = query.batch;
                    if let Some(answers) = self.fan_out(query) {
                        self.schedule.step(Input::Loads { batch, answers }, &self.loads, now, &mut self.effects);
                    }
                }
                Effect::Refresh { booking, block_hashes } => self.ask_shards(booking, block_hashes),
                Effect::PublishTypicalSpeed(speed) => self.loads.publish_typical_speed(&speed),
                Effect::Book { context, decision, number, trace } => {
                    if let Some(explanation) = trace {
                        trace_decision(&explanation);
                    }
                    let RequestContext { lease: Some(lease), answer, permit, guess, timestamps } = context else {
                        continue;
                    };
                    if let Some(timestamps) = timestamps {
                        timestamps.set_decided();
                    }
                    let Some(Some((_, strand))) = self.sequences.get(decision.slot.index()) else { continue };
                    // Before the Book, so that whoever hears of the booking and asks again finds the guess.
                    let claim = guess.and_then(|guess| {
                        let speculation = &self.dependencies.speculation;
                        speculation.routed(&decision, lease.booking(), *guess, &mut self.replies.shards)
                    });
                    let book = Book { lease, decision, number, answer, permit, claim, now };
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
        if self.schedule.batch_in_flight().is_none() {
            self.in_flight = None;
        }
        if self.queueing {
            self.arm_wake();
        }
        std::mem::take(&mut self.replies)
    }

    /// The next effect; when there is none and requests wait, looks at the boards once more behind the raised flag.
    fn next_effect(&mut self, now: Timestamp) -> Option<Effect<RequestContext>> {
        if self.effects.is_empty() && self.queueing && self.schedule.waits_for_load() && self.dependencies.wake.raise()
        {
            self.schedule.step(Input::Wake, &self.loads, now, &mut self.effects);
        }
        self.effects.pop_front()
    }

    /// Asks the shortlisted ranks. The answers, if all of them came while asking.
    fn fan_out(&mut self, query: LoadQuery) -> Option<Vec<LoadAnswer>> {
        let now = self.dependencies.clock.now();
        let next =
            LoadContinuation { batch: query.batch, prompts: query.prompts, scheduler: Weak::clone(&self.myself) };
        let first = ReplyToken::open(query.slots.len(), next);
        for slot in query.slots {
            if let Some(Some((_, strand))) = self.sequences.get(slot.index()) {
                strand.send(SequenceMsg::Load { token: load_token(&first), now }).keep_in(&mut self.replies.sequences);
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

    /// Asks the index again about a waiting request.
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

    /// Has itself woken when the schedule next wants it, unless it will be before.
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

/// One structured event for a decision that was drawn for the trace, with everything it was based on as JSON.
fn trace_decision(explanation: &Explanation) {
    if !tracing::enabled!(target: "pointsman::decision", tracing::Level::INFO) {
        return;
    }
    // Plain data with string keys is written without fail.
    let Ok(record) = serde_json::to_string(explanation) else { return };
    tracing::info!(target: "pointsman::decision", schema = Explanation::SCHEMA, record, "a sampled decision");
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
            SchedulerMsg::Pending(answer) => self.on_pending(answer),
            SchedulerMsg::ShowQueue(asked) => {
                self.on_show_queue();
                drop(asked);
            }
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
            #[cfg(feature = "faults")]
            SchedulerMsg::Fault(injected) => injected.apply(),
        }
        Some(self.perform())
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
            drop(caller.send(answer)); // a caller that has gone wants no answer
        }
        drop(self.cancelled); // whoever cancelled has stopped waiting
        for (answer, pending) in self.pending {
            drop(answer.send(pending));
        }
        for done in self.conditions {
            let _ = done.send(()); // whoever asked may have gone
        }
    }
}
