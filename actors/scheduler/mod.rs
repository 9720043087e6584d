//! Scheduler actor: the only actor that books requests.
//!
//! Performs the effects of [`SchedulerShell`]: sends load queries, sends Books in decision order, replies to queries, and
//! arms timers. After a restart the scheduler starts with the registered ranks and their boards; the replies to waiting
//! requests are lost, and their callers retry.

mod context;

use std::sync::{Arc, Weak};
use std::time::Duration;

pub(crate) use context::RequestContext;
use tokio::runtime::Handle;

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
use crate::actors::views::decisions::{DecisionRecords, RecordedSchedule};
use crate::actors::views::published::Published;
use crate::actors::views::shadows::ShadowTotals;
use crate::actors::views::wake_flag::WakeFlag;
use crate::config::RouterConfig;
use crate::health::Exclusions;
use crate::load::{ArrivalsCell, BoardChanges, PromptBlocks};
use crate::protocol::{BlockHash, BookingId, TimeSource, Timestamp, WorkerRank};
use crate::queue::{Depth, QueueHeads};
#[cfg(feature = "replicas")]
use crate::replica::ReplicaLife;
use crate::schedule::{BookNumber, Decision, Effect, Extensions, Input, LiveLoads, LoadAnswer, LoadQuery, Schedule};
use crate::select::{RankConditions, RankOverlap};
use crate::session::{Returns, SessionId};
use crate::shell::CurrentIncarnation;
use crate::shell::scheduler::{OpenLoadQuery, SchedulerCells, SchedulerMsg as Msg, SchedulerShell, SequenceHandle};
use crate::shell::sequence::Book;

/// Messages to the scheduler.
pub(crate) type SchedulerMsg = Msg<RequestContext, Arc<Strand<Sequence>>, Acknowledgement>;

/// Waiting requests of one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingClass {
    /// Name of the class.
    pub class: String,
    /// Number of requests and their tokens.
    pub depth: Depth,
    /// Time since the arrival of the oldest request.
    pub oldest_age: Option<Duration>,
}

/// Programs of a pool.
pub(crate) struct ProgramReport {
    /// Known programs.
    pub(crate) programs: usize,
    pub(crate) returns: Returns,
    /// Working sets as multiples of a known cache size.
    pub(crate) working_sets: Vec<(WorkerRank, f64)>,
    /// Claims as such multiples.
    pub(crate) claims: Vec<(WorkerRank, f64)>,
    /// Held calls.
    pub(crate) held: usize,
}

/// Dependencies of the scheduler.
pub(crate) struct SchedulerDependencies {
    pub(crate) shards: Arc<Shards>,
    pub(crate) speculation: SpeculationSender,
    pub(crate) wake: Arc<WakeFlag>,
    /// Incarnation of the present scheduler, and of this one.
    pub(crate) incarnation: (Arc<CurrentIncarnation>, u32),
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
    reusable_blocks: u32,
    scheduler: Weak<Strand<Scheduler>>,
}

impl OverlapQuery for RefreshContinuation {
    fn hashes(&self) -> &Arc<[BlockHash]> {
        &self.hashes
    }

    fn reusable_blocks(&self) -> u32 {
        self.reusable_blocks
    }
}

impl Continuation<RankOverlap> for RefreshContinuation {
    fn run(&self, overlaps: Vec<RankOverlap>) {
        if let Some(scheduler) = self.scheduler.upgrade() {
            scheduler.tell(SchedulerMsg::Input(Input::Overlaps { booking: self.booking, overlaps }));
        }
    }
}

impl Continuation<LoadAnswer> for LoadContinuation {
    fn run(&self, answers: Vec<LoadAnswer>) {
        if let Some(scheduler) = self.scheduler.upgrade() {
            scheduler.tell(SchedulerMsg::Input(Input::Loads { batch: self.batch, answers }));
        }
    }
}

/// A load query in flight.
type LoadQueryInFlight = JoinObserver<LoadAnswer, LoadContinuation>;

impl OpenLoadQuery for LoadQueryInFlight {
    fn take(&self) -> Option<Vec<LoadAnswer>> {
        self.take()
    }
}

impl TimeSource for SchedulerDependencies {
    fn now(&self) -> Timestamp {
        self.clock.now()
    }
}

impl SchedulerCells for SchedulerDependencies {
    fn conditions(&self) -> Arc<RankConditions> {
        self.conditions.get()
    }

    fn exclusions(&self) -> Arc<Exclusions> {
        self.exclusions.get()
    }

    fn raise_wake(&self) -> bool {
        self.wake.raise()
    }

    fn is_replaced(&self) -> bool {
        let (current, own) = &self.incarnation;
        !current.is(*own)
    }
}

/// State of the scheduler.
pub(crate) struct Scheduler {
    shell: SchedulerShell<RequestContext, RecordedSchedule<RequestContext>, Arc<Strand<Sequence>>, LoadQueryInFlight>,
    shadow_meters: Option<ShadowMeters>,
    replies: SchedulerReplies,
    queue_meters: Option<QueueMeters>,
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
}

impl Scheduler {
    /// A scheduler with these ranks, the embedder's conditions and the exclusions.
    pub(crate) fn new(
        config: &RouterConfig,
        extensions: Extensions,
        dependencies: SchedulerDependencies,
        ranks: impl Iterator<Item = SequenceHandle<Arc<Strand<Sequence>>>>,
        myself: &Arc<Strand<Self>>,
    ) -> Self {
        let (is_queueing, incarnation) = (config.queue.is_enabled(), dependencies.incarnation.1);
        let schedule = Schedule::new(config.clone(), incarnation, extensions);
        let schedule = RecordedSchedule::new(schedule, config, &dependencies.decisions, RequestContext::request_id);
        let heads = &dependencies.queue_heads;
        let loads = LiveLoads::new(
            Arc::clone(&dependencies.board_changes),
            Arc::clone(&dependencies.arrivals),
            Arc::clone(heads),
        );
        let mut shell = SchedulerShell::new(schedule, loads, Arc::clone(heads), is_queueing);
        ranks.for_each(|rank| shell.admit(rank, dependencies.now()));
        shell.load_conditions(&dependencies);
        shell.load_exclusions(&dependencies);
        Self {
            shell,
            shadow_meters: ShadowMeters::new(&Pool::new(&config.pool), config, &dependencies.shadows),
            replies: SchedulerReplies::default(),
            queue_meters: is_queueing.then(|| QueueMeters::new(config)),
            dependencies,
            myself: Arc::downgrade(myself),
        }
    }

    /// The waiting requests of each class.
    pub(crate) fn pending(&self) -> Vec<PendingClass> {
        let now = self.dependencies.clock.now();
        let pending = self.shell.decider().schedule.depths().map(|(class, depth)| PendingClass {
            class: class.to_owned(),
            depth,
            oldest_age: depth.oldest.map(|oldest| now.since(oldest)),
        });
        pending.collect()
    }

    /// The programs and working sets.
    pub(crate) fn programs(&mut self) -> ProgramReport {
        let now = self.dependencies.clock.now();
        let schedule = &mut self.shell.decider_mut().schedule;
        let working_sets = schedule.working_sets(now).collect();
        let (claims, (held, holds, waited)) = (schedule.claims().collect(), schedule.holds());
        let sessions = schedule.sessions_mut();
        let returns = Returns { holds, hold_seconds: waited.as_secs(), ..sessions.returns() };
        ProgramReport { programs: sessions.programs(), returns, working_sets, claims, held }
    }

    /// The rank of a session, as a use of it.
    pub(crate) fn session_rank(&mut self, session: &SessionId) -> Option<WorkerRank> {
        let now = self.dependencies.clock.now();
        self.shell.decider_mut().schedule.sessions_mut().rank_of(session, now)
    }

    /// Binds a session without a placement.
    pub(crate) fn bind_session(&mut self, session: &SessionId, rank: WorkerRank) {
        let now = self.dependencies.clock.now();
        self.shell.decider_mut().schedule.sessions_mut().bind(session, rank, now);
    }

    /// Applies bindings of sessions from another replica.
    #[cfg(feature = "replicas")]
    pub(crate) fn receive_sessions(&mut self, bindings: &[crate::session::SessionBinding]) {
        let now = self.dependencies.clock.now();
        bindings.iter().for_each(|binding| self.shell.decider_mut().schedule.sessions_mut().receive(binding, now));
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
    ) -> Vec<crate::session::SessionBinding> {
        let now = self.dependencies.clock.now();
        let sessions = self.shell.decider_mut().schedule.sessions_mut();
        sessions.share_as(life.replica.0, life.incarnation.min(u64::MAX >> 22) << 20);
        sessions.outbound(period, bytes_max, now)
    }

    /// Publishes the waiting requests as metrics.
    pub(crate) fn show_queue(&self) {
        if let Some(meters) = &self.queue_meters {
            meters.show(self.shell.decider().schedule.depths(), self.dependencies.clock.now());
        }
    }

    /// Performs effects until none are left, including those of responses that arrive inline.
    fn perform(&mut self) {
        let now = self.dependencies.now();
        while let Some(effect) = self.shell.next_effect(&self.dependencies, now) {
            match effect {
                Effect::Query(query) => self.fan_out(query, now),
                Effect::Refresh { booking, block_hashes: hashes, reusable_blocks } => {
                    let scheduler = Weak::clone(&self.myself);
                    self.ask_shards(RefreshContinuation { booking, hashes, reusable_blocks, scheduler });
                }
                Effect::Book { context, decision, number, trace, shadow } => {
                    trace.as_deref().into_iter().for_each(trace_decision);
                    if let Some((meters, report)) = self.shadow_meters.as_mut().zip(shadow) {
                        meters.count(&report);
                    }
                    self.book(context, decision, number, now);
                }
                Effect::Report { context, decision } => self.replies.answers.push((context, Reply::Placed(decision))),
                Effect::LoadSnapshot { context, loads } => {
                    self.replies.answers.push((context, Reply::LoadSnapshot(loads)));
                }
                Effect::Explain { context, explanation } => {
                    self.replies.answers.push((context, Reply::Explained(explanation)));
                }
                Effect::Reject { context, reason } => self.replies.answers.push((context, Reply::Rejected(reason))),
                Effect::Cancelled { context } => self.replies.cancelled.push(context),
                Effect::PublishTypical { .. } => {} // performed by the shell
            }
        }
        // A replaced scheduler leaves effects and views to its successor.
        if self.dependencies.is_replaced() {
            return;
        }
        self.shell.decider().flush(now);
        let [timeout, wake] = self.shell.end_step();
        if let Some(due) = timeout {
            self.arm(due, SchedulerMsg::Timeout);
        }
        if let Some(at) = wake {
            self.arm(at, SchedulerMsg::Wake { at: Some(at) });
        }
    }

    fn book(&mut self, context: RequestContext, decision: Decision, number: BookNumber, now: Timestamp) {
        let RequestContext { lease: Some(lease), answer, permit, speculative_prompt, timestamps } = context else {
            return;
        };
        if let Some(timestamps) = timestamps {
            timestamps.set_decided(self.shell.stepped_at());
        }
        let Some(strand) = self.shell.sequence(decision.slot) else { return };
        // Sent before the Book, so a query after the booking finds the speculative entry.
        let claim = speculative_prompt.and_then(|speculative_prompt| {
            let speculation = &self.dependencies.speculation;
            speculation.routed(&decision, lease.booking(), *speculative_prompt, &mut self.replies.shards)
        });
        let (scheduler, caller) = (self.dependencies.incarnation.1, BookCaller { permit, answer, claim });
        let book = Book { lease, decision, number, scheduler, caller, now };
        strand.send(SequenceMsg::Book(book)).keep_in(&mut self.replies.sequences);
    }

    /// Queries the shortlisted ranks. If all responses arrive inline, they are the next input.
    fn fan_out(&mut self, query: LoadQuery, stepped_at: Timestamp) {
        let (now, batch) = (self.dependencies.now(), query.batch);
        let next = LoadContinuation { batch, prompts: query.prompts, scheduler: Weak::clone(&self.myself) };
        let first = ReplyToken::open(query.slots.len(), next);
        for slot in query.slots {
            if let Some(strand) = self.shell.sequence(slot) {
                strand.send(SequenceMsg::Load { query: load_token(&first), now }).keep_in(&mut self.replies.sequences);
            }
        }
        let in_flight = first.observe();
        match first.finish() {
            Some(answers) => self.shell.input(Input::Loads { batch, answers }, stepped_at),
            None => self.shell.await_loads(in_flight, self.dependencies.now()),
        }
    }

    /// Repeats the overlap query of a waiting request.
    fn ask_shards(&mut self, next: RefreshContinuation) {
        let first = ReplyToken::open(0, next);
        for shard in self.dependencies.shards.iter() {
            shard.send(RadixMsg::Overlap(overlap_token(&first))).keep_in(&mut self.replies.shards);
        }
        self.replies.tokens.push(first);
    }

    /// Sends a message to this scheduler at a time.
    fn arm(&self, at: Timestamp, msg: SchedulerMsg) {
        let (sleep, myself) = (at.since(self.dependencies.now()), Weak::clone(&self.myself));
        self.dependencies.runtime.spawn(async move {
            tokio::time::sleep(sleep).await;
            if let Some(scheduler) = myself.upgrade() {
                scheduler.tell(msg);
            }
        });
    }
}

impl ActorState for Scheduler {
    type Msg = SchedulerMsg;
    type Deferred = SchedulerReplies;

    fn step(&mut self, msg: SchedulerMsg) -> Option<SchedulerReplies> {
        if let Some((sequence, msg)) = self.shell.step(msg, &self.dependencies) {
            sequence.send(msg).keep_in(&mut self.replies.sequences);
        }
        self.perform();
        Some(std::mem::take(&mut self.replies))
    }

    /// The last step may have read changes of boards, or set the wake flag, after the start of the successor.
    fn abandoned(self) {
        self.shell.hand_over();
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
    }

    fn deliver_late(self) {
        let Self { sequences, shards, .. } = self;
        Self { sequences, shards, ..Self::default() }.deliver();
    }
}
