//! Health actor: ejects ranks whose probes or requests fail.
//!
//! Owns the [`Monitor`] and performs its effects: publishes the ejections to the scheduler, and arms a timer for the
//! end of an ejection. A successful request on a rank without failures sends no message, and nothing is computed while
//! nothing fails. The monitor makes the decisions, and one task per worker (feature `discovery`) sends the probes. The
//! scheduler combines ejections with the embedder's rank conditions. After a restart the actor has no records, and all
//! ranks are in service.

#[cfg(feature = "discovery")]
pub(crate) mod probe;
pub(crate) mod stalls;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use crate::actors::delivery::strand::{ActorState, DeferredReplies, DeferredReply, Strand};
use crate::actors::io::clock::Clock;
use crate::actors::scheduler::{Scheduler, SchedulerMsg, SchedulerReplies};
use crate::actors::telemetry::{Counters, Pool};
use crate::actors::views::fleet::Fleet;
use crate::actors::views::published::Published;
use crate::actors::views::rank::{RankEntries, RankEntry};
use crate::config::RouterConfig;
use crate::engine_load::EngineSleep;
use crate::health::{Cause, Exclusions, HealthChange, HealthInput, HealthRules, Member, Monitor, Outcome, RankHealth};
use crate::protocol::{Timestamp, WorkerRank};
use crate::select::RankConditions;

/// Messages to the health actor.
pub(crate) enum HealthMsg {
    /// The ranks, the embedder's rank conditions, or the sleep of an engine have changed.
    MembersChanged,
    /// An input of the monitor as it is: the result of a probe, or stalls.
    Input(HealthInput),
    /// Outcome of a request.
    Outcome { entry: Arc<RankEntry>, outcome: Outcome, began: Option<Timestamp>, permit: OwnedSemaphorePermit },
    /// The timer for `at` has fired.
    Wake { at: Timestamp },
    /// Query for the health of all ranks.
    Report(oneshot::Sender<Vec<RankHealth>>),
}

/// State of the health actor.
pub(crate) struct HealthActor {
    monitor: Monitor,
    dependencies: HealthDependencies,
    ejections: Counters,
    /// Name of the pool, for log lines.
    pool: String,
    myself: Weak<Strand<HealthActor>>,
    /// Whether the monitor's list of ranks is outdated. It needs no list while nothing fails.
    behind: bool,
    /// Time of the earliest armed timer.
    wake_at: Option<Timestamp>,
}

/// Dependencies of the health actor.
pub(crate) struct HealthDependencies {
    pub(crate) clock: Clock,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) ranks: Arc<RankEntries>,
    pub(crate) conditions: Arc<Published<RankConditions>>,
    /// Written by this actor.
    pub(crate) exclusions: Arc<Published<Exclusions>>,
    pub(crate) scheduler: Arc<Strand<Scheduler>>,
    pub(crate) runtime: Handle,
}

/// Replies and messages delivered after the strand is released.
#[derive(Default)]
pub(crate) struct HealthReplies {
    scheduler: Vec<DeferredReplies<SchedulerReplies>>,
    report: Option<(oneshot::Sender<Vec<RankHealth>>, Vec<RankHealth>)>,
}

impl HealthActor {
    pub(crate) fn new(
        config: &RouterConfig,
        pool: &Pool,
        dependencies: HealthDependencies,
        myself: &Arc<Strand<Self>>,
    ) -> Self {
        Self {
            monitor: Monitor::new(HealthRules::of(config)),
            ejections: pool.counters("pointsman_ejections_total", "cause", &Cause::ALL.map(Cause::name)),
            pool: config.pool.clone(),
            myself: Arc::downgrade(myself),
            dependencies,
            behind: true,
            wake_at: None,
        }
    }

    /// Steps the monitor, after an update of its list of ranks if that matters.
    fn step_monitor(&mut self, input: HealthInput, replies: &mut HealthReplies) {
        let (now, mut changes) = (self.dependencies.clock.now(), Vec::new());
        let matters =
            input != HealthInput::Wake || self.monitor.next_wake().is_some() || !self.monitor.exclusions().is_empty();
        if matters && std::mem::take(&mut self.behind) {
            self.monitor.step(HealthInput::Members(self.members()), now, &mut changes);
        }
        self.monitor.step(input, now, &mut changes);
        for change in changes {
            self.report(change);
        }
        self.publish(replies);
        self.arm_wake(now);
    }

    fn report(&self, change: HealthChange) {
        let pool = self.pool.as_str();
        let url = |rank: WorkerRank| {
            let workers = self.dependencies.fleet.workers();
            workers.iter().find(|known| known.worker == rank.worker).map(|known| known.config.endpoint.clone())
        };
        match change {
            HealthChange::Ejected { rank, cause } => {
                let (cause, worker) = (cause.name(), url(rank));
                self.ejections.add(cause, 1);
                tracing::warn!(pool, worker, worker_id = %rank.worker, rank = rank.rank, cause, "rank ejected");
            }
            HealthChange::Stalled(rank) => {
                tracing::warn!(pool, worker = url(rank), worker_id = %rank.worker, rank = rank.rank, "rank stalled");
            }
            HealthChange::Returned(rank) => {
                tracing::info!(pool, worker = url(rank), worker_id = %rank.worker, rank = rank.rank, "rank recovered");
            }
        }
    }

    /// Publishes the exclusions, if they have changed.
    fn publish(&self, replies: &mut HealthReplies) {
        if *self.dependencies.exclusions.get() == *self.monitor.exclusions() {
            return;
        }
        // Outcomes of excluded ranks matter from here on.
        for entry in self.dependencies.ranks.all() {
            entry.failing.store(self.monitor.counts_failures_of(entry.rank), Ordering::Relaxed);
        }
        self.dependencies.exclusions.set(self.monitor.exclusions().clone());
        self.dependencies.scheduler.send(SchedulerMsg::Exclusions).keep_in(&mut replies.scheduler);
    }

    fn arm_wake(&mut self, now: Timestamp) {
        let Some(at) = self.monitor.next_wake() else { return };
        if self.wake_at.is_some_and(|armed| armed <= at) {
            return;
        }
        self.wake_at = Some(at);
        let (due, strand) = (Instant::now() + at.since(now), Weak::clone(&self.myself));
        self.dependencies.runtime.spawn(async move {
            tokio::time::sleep_until(due).await;
            if let Some(strand) = strand.upgrade() {
                strand.tell(HealthMsg::Wake { at });
            }
        });
    }

    fn on_wake(&mut self, at: Timestamp, replies: &mut HealthReplies) {
        if self.wake_at == Some(at) {
            self.wake_at = None;
        }
        self.step_monitor(HealthInput::Wake, replies);
    }

    fn on_members_changed(&mut self, replies: &mut HealthReplies) {
        if self.dependencies.ranks.all().iter().any(|entry| is_asleep(entry)) {
            return self.read_members(replies);
        }
        self.behind = true;
        self.step_monitor(HealthInput::Wake, replies);
    }

    fn read_members(&mut self, replies: &mut HealthReplies) {
        self.behind = false;
        self.step_monitor(HealthInput::Members(self.members()), replies);
    }

    fn on_outcome(
        &mut self,
        entry: &RankEntry,
        outcome: Outcome,
        began: Option<Timestamp>,
        replies: &mut HealthReplies,
    ) {
        let (rank, incarnation) = (entry.rank, entry.incarnation());
        self.step_monitor(HealthInput::Outcome { rank, incarnation, outcome, began }, replies);
        entry.failing.store(self.monitor.counts_failures_of(rank), Ordering::Relaxed);
    }

    fn on_report(&mut self, answer: oneshot::Sender<Vec<RankHealth>>, replies: &mut HealthReplies) {
        self.read_members(replies);
        replies.report = Some((answer, self.monitor.report()));
    }

    /// The ranks, and whether each could serve if it were healthy.
    fn members(&self) -> BTreeMap<WorkerRank, Member> {
        let conditions = self.dependencies.conditions.get();
        let mut entries = self.dependencies.ranks.all();
        entries.sort_by_key(|entry| entry.since); // of two entries of a rank, the older one is retiring
        let entries: BTreeMap<WorkerRank, Arc<RankEntry>> =
            entries.into_iter().map(|entry| (entry.rank, entry)).collect();
        let workers = self.dependencies.fleet.workers();
        let ranks = workers.iter().flat_map(|worker| worker.ranks.iter().map(|rank| (*rank, !worker.takes_requests())));
        let member = |(rank, is_closed): (WorkerRank, bool)| {
            let available = !is_closed && !conditions.unavailable.contains(&rank);
            let entry = entries.get(&rank)?;
            let asleep = is_asleep(entry);
            Some((rank, Member { incarnation: entry.incarnation(), available, asleep }))
        };
        ranks.filter_map(member).collect()
    }
}

fn is_asleep(entry: &RankEntry) -> bool {
    entry.cells.engine_load.sleep() > Some(EngineSleep::Awake)
}

impl ActorState for HealthActor {
    type Msg = HealthMsg;
    type Deferred = HealthReplies;

    fn step(&mut self, msg: HealthMsg) -> Option<HealthReplies> {
        let mut replies = HealthReplies::default();
        match msg {
            HealthMsg::MembersChanged => self.on_members_changed(&mut replies),
            HealthMsg::Input(input) => self.step_monitor(input, &mut replies),
            HealthMsg::Outcome { entry, outcome, began, permit } => {
                self.on_outcome(&entry, outcome, began, &mut replies);
                drop(permit);
            }
            HealthMsg::Wake { at } => self.on_wake(at, &mut replies),
            HealthMsg::Report(answer) => self.on_report(answer, &mut replies),
        }
        Some(replies)
    }
}

impl DeferredReply for HealthReplies {
    fn deliver(self) {
        self.scheduler.into_iter().for_each(DeferredReplies::deliver);
        if let Some((answer, report)) = self.report {
            drop(answer.send(report)); // the receiver may be dropped
        }
    }
}
