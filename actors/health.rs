//! The health actor: who is out of service because probes of its engine or requests on it fail.
//!
//! Owns the [`Monitor`] and performs what follows from it: shows the scheduler who is ejected, has itself woken when an
//! ejection ends. Promises that a request that went well, on a rank that nothing is held against, sends no message, and
//! that nothing is computed while nothing fails. Leaves judgement to the monitor, probing to a task for each worker
//! (feature `discovery`), and what the embedder says of ranks to the embedder: the scheduler combines the two. Restarted,
//! it knows of no failures, and all ranks are in service.

#[cfg(feature = "discovery")]
mod probe;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::scheduler::{SchedulerAfter, SchedulerMsg};
use super::shared::{Seat, Shared};
use super::telemetry::Ejections;
use super::turn::{After, Afters, Step};
use crate::health::{Cause, Change, Input, Member, Monitor, Outcome, RankHealth, Rules};
use crate::protocol::{Timestamp, WorkerId, WorkerRank};

/// What the health actor can be told.
pub(crate) enum HealthMsg {
    /// The ranks have changed, or what the embedder says of them.
    Look,
    /// A probe has ended.
    #[cfg_attr(not(feature = "discovery"), expect(dead_code, reason = "nobody probes"))]
    Probed { worker: WorkerId, prober: u64, answer: Result<(), String> },
    /// A request has ended.
    Outcome { seat: Arc<Seat>, outcome: Outcome, began: Option<Timestamp>, permit: OwnedSemaphorePermit },
    /// It is `at`.
    Wake { at: Timestamp },
    /// How is everybody?
    Report(oneshot::Sender<Vec<RankHealth>>),
    /// A drill: panic, or hold the turn until told to go on.
    #[cfg(feature = "faults")]
    Fault(super::faults::Trip),
}

/// The actor's state.
pub(crate) struct Health {
    monitor: Monitor,
    /// Its holder, by way of the turn.
    shared: Weak<Shared>,
    meters: Ejections,
    runtime: Handle,
    /// Whether the monitor has not been told of the ranks as they are: while nothing fails it need not know them.
    behind: bool,
    /// When the earliest timer fires.
    wake_at: Option<Timestamp>,
}

/// What others hear once the turn is given back.
#[derive(Default)]
pub(crate) struct HealthAfter {
    scheduler: Vec<Afters<SchedulerAfter>>,
    report: Option<(oneshot::Sender<Vec<RankHealth>>, Vec<RankHealth>)>,
}

/// Starts to probe the workers, where that is wanted. It ends with the router.
pub(crate) fn watch(shared: &Arc<Shared>) {
    #[cfg(feature = "discovery")]
    probe::watch(shared);
    #[cfg(not(feature = "discovery"))]
    let _ = shared;
}

impl Health {
    pub(crate) fn new(shared: &Arc<Shared>, runtime: Handle) -> Self {
        Self {
            monitor: Monitor::new(Rules::of(&shared.config)),
            meters: Ejections::new(&shared.meters.pool),
            shared: Arc::downgrade(shared),
            runtime,
            behind: true,
            wake_at: None,
        }
    }

    /// Tells the monitor, bringing it up to date on who there is before, where it matters.
    fn step_monitor(&mut self, shared: &Shared, input: Input, after: &mut HealthAfter) {
        let (now, mut changes) = (shared.clock.now(), Vec::new());
        let matters =
            input != Input::Wake || self.monitor.next_wake().is_some() || !self.monitor.exclusions().is_empty();
        if matters && std::mem::take(&mut self.behind) {
            self.monitor.step(Input::Members(members(shared)), now, &mut changes);
        }
        self.monitor.step(input, now, &mut changes);
        for change in changes {
            self.tell_of(shared, change);
        }
        self.publish(shared, after);
        self.arm_wake(shared, now);
    }

    fn tell_of(&self, shared: &Shared, change: Change) {
        let pool = shared.config.pool.as_str();
        let url = |rank: WorkerRank| {
            let workers = shared.workers.borrow();
            workers.iter().find(|known| known.worker == rank.worker).map(|known| known.config.endpoint.clone())
        };
        match change {
            Change::Ejected { rank, cause } => {
                match cause {
                    Cause::Probe => self.meters.probe.increment(1),
                    Cause::Outcomes => self.meters.outcomes.increment(1),
                }
                let (cause, worker) = (cause.name(), url(rank));
                tracing::warn!(pool, worker, worker_id = %rank.worker, rank = rank.rank, cause, "rank ejected");
            }
            Change::Returned { rank } => {
                tracing::info!(pool, worker = url(rank), worker_id = %rank.worker, rank = rank.rank, "rank recovered");
            }
        }
    }

    /// Publishes the exclusions, if they have changed.
    fn publish(&self, shared: &Shared, after: &mut HealthAfter) {
        if *shared.exclusions() == *self.monitor.exclusions() {
            return;
        }
        // Answers of excluded ranks matter now.
        for seat in shared.seats() {
            seat.failing.store(self.monitor.counts_failures_of(seat.rank), Ordering::Relaxed);
        }
        let exclusions = Arc::new(self.monitor.exclusions().clone());
        *shared.exclusions.lock().unwrap_or_else(PoisonError::into_inner) = exclusions;
        shared.scheduler.send(SchedulerMsg::Exclusions).keep_in(&mut after.scheduler);
    }

    fn arm_wake(&mut self, shared: &Shared, now: Timestamp) {
        let Some(at) = self.monitor.next_wake() else { return };
        if self.wake_at.is_some_and(|armed| armed <= at) {
            return;
        }
        self.wake_at = Some(at);
        let (due, turn) = (Instant::now() + at.since(now), Arc::downgrade(&shared.health));
        self.runtime.spawn(async move {
            tokio::time::sleep_until(due).await;
            if let Some(turn) = turn.upgrade() {
                turn.tell(HealthMsg::Wake { at });
            }
        });
    }

    fn on_wake(&mut self, shared: &Shared, at: Timestamp, after: &mut HealthAfter) {
        if self.wake_at == Some(at) {
            self.wake_at = None;
        }
        self.step_monitor(shared, Input::Wake, after);
    }

    fn on_look(&mut self, shared: &Shared, after: &mut HealthAfter) {
        self.behind = true;
        self.step_monitor(shared, Input::Wake, after);
    }

    fn on_outcome(
        &mut self,
        shared: &Shared,
        seat: &Seat,
        outcome: Outcome,
        began: Option<Timestamp>,
        after: &mut HealthAfter,
    ) {
        let (rank, incarnation) = (seat.rank, seat.incarnation());
        self.step_monitor(shared, Input::Outcome { rank, incarnation, outcome, began }, after);
        seat.failing.store(self.monitor.counts_failures_of(rank), Ordering::Relaxed);
    }

    fn on_report(&mut self, shared: &Shared, answer: oneshot::Sender<Vec<RankHealth>>, after: &mut HealthAfter) {
        self.behind = false;
        self.step_monitor(shared, Input::Members(members(shared)), after);
        after.report = Some((answer, self.monitor.report()));
    }
}

/// The ranks as they are, and whether each could serve if it were well.
fn members(shared: &Shared) -> BTreeMap<WorkerRank, Member> {
    let conditions = shared.conditions();
    let mut seats = shared.seats();
    seats.sort_by_key(|seat| seat.since); // where a rank has two, one is on its way out
    let incarnations: BTreeMap<WorkerRank, u64> = seats.iter().map(|seat| (seat.rank, seat.incarnation())).collect();
    let workers = shared.workers.borrow();
    let ranks = workers.iter().flat_map(|worker| worker.ranks.iter().map(|rank| (*rank, !worker.takes_requests())));
    let member = |(rank, is_closed): (WorkerRank, bool)| {
        let available = !is_closed && !conditions.unavailable.contains(&rank);
        Some((rank, Member { incarnation: *incarnations.get(&rank)?, available }))
    };
    ranks.filter_map(member).collect()
}

impl Step for Health {
    type Msg = HealthMsg;
    type After = HealthAfter;

    fn step(&mut self, msg: HealthMsg) -> Option<HealthAfter> {
        let shared = self.shared.upgrade()?;
        let mut after = HealthAfter::default();
        match msg {
            HealthMsg::Look => self.on_look(&shared, &mut after),
            HealthMsg::Probed { worker, prober, answer } => {
                self.step_monitor(&shared, Input::Probed { worker, prober, answer }, &mut after);
            }
            HealthMsg::Outcome { seat, outcome, began, permit } => {
                self.on_outcome(&shared, &seat, outcome, began, &mut after);
                drop(permit);
            }
            HealthMsg::Wake { at } => self.on_wake(&shared, at, &mut after),
            HealthMsg::Report(answer) => self.on_report(&shared, answer, &mut after),
            #[cfg(feature = "faults")]
            HealthMsg::Fault(trip) => trip.happen(),
        }
        Some(after)
    }
}

impl After for HealthAfter {
    fn deliver(self) {
        self.scheduler.into_iter().for_each(Afters::deliver);
        if let Some((answer, report)) = self.report {
            drop(answer.send(report)); // whoever asked may have gone
        }
    }
}
