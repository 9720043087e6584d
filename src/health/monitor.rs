//! Health state machine: probe results and request outcomes in, ejections out.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use super::record::{Member, ProbeRecord, RankRecord};
use super::{Cause, Exclusions, HealthRules, HealthState, Outcome, RankHealth};
use crate::protocol::{Timestamp, WorkerId, WorkerRank};

/// Input of the monitor.
#[derive(Clone, Debug, PartialEq)]
pub enum HealthInput {
    /// The complete set of ranks.
    Members(BTreeMap<WorkerRank, Member>),
    /// A finished probe of a worker's engine.
    Probed {
        /// The worker.
        worker: WorkerId,
        /// Number of the prober. A later prober probes another engine under the same name; results of earlier ones are
        /// ignored.
        prober: u64,
        /// The result, with an error message for a failure.
        answer: Result<(), String>,
    },
    /// A finished request.
    Outcome {
        /// Its rank.
        rank: WorkerRank,
        /// Incarnation of the rank; outcomes of an earlier one are ignored.
        incarnation: u64,
        /// Its outcome.
        outcome: Outcome,
        /// Time at which it was sent to the rank, if known.
        began: Option<Timestamp>,
    },
    /// Ranks, by incarnation, that owe first tokens without progress, and ranks that made progress after that.
    Stalls {
        /// The ranks without progress.
        overdue: BTreeMap<WorkerRank, u64>,
        /// Those with progress.
        progressed: BTreeSet<WorkerRank>,
    },
    /// Time has passed.
    Wake,
}

/// Change of a rank's service state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// The rank is out of service.
    Ejected {
        /// The rank.
        rank: WorkerRank,
        /// The cause.
        cause: Cause,
    },
    /// The rank is stalled.
    Stalled(WorkerRank),
    /// The rank is in service again.
    Returned(WorkerRank),
}

/// health monitor of all ranks. Input: [`Monitor::step`].
///
/// ```
/// use pointsman::RouterConfig;
/// use pointsman::{internals::health::{HealthInput, HealthRules, Member, Monitor}, Outcome};
/// use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
///
/// let mut monitor = Monitor::new(HealthRules::of(&RouterConfig::default()));
/// let ranks = [1, 2].map(|worker| WorkerRank::new(WorkerId(worker), 0));
/// let member = Member { incarnation: 0, available: true, asleep: false };
/// monitor.step(HealthInput::Members(ranks.map(|rank| (rank, member)).into()), Timestamp(0), &mut Vec::new());
/// for _ in 0..5 {
///     let failed = HealthInput::Outcome { rank: ranks[0], incarnation: 0, outcome: Outcome::Timeout, began: None };
///     monitor.step(failed, Timestamp(1), &mut Vec::new());
/// }
/// assert!(monitor.exclusions().ejected.contains(&ranks[0]));
/// monitor.step(HealthInput::Wake, Timestamp(30_000_000_001), &mut Vec::new());
/// assert!(monitor.exclusions().is_empty());
/// ```
#[derive(Debug)]
pub struct Monitor {
    rules: HealthRules,
    ranks: BTreeMap<WorkerRank, RankRecord>,
    /// Recently probed workers.
    probes: BTreeMap<WorkerId, ProbeRecord>,
    exclusions: Exclusions,
    /// Earliest time at which a state ends.
    next_wake: Option<Timestamp>,
}

impl Monitor {
    /// Creates a monitor without ranks.
    #[must_use]
    pub fn new(rules: HealthRules) -> Self {
        let (ranks, probes, exclusions) = (BTreeMap::new(), BTreeMap::new(), Exclusions::default());
        Self { rules, ranks, probes, exclusions, next_wake: None }
    }

    /// Processes one input and appends the resulting changes. Visits every rank if the exclusions may change, otherwise
    /// those of one worker.
    pub fn step(&mut self, input: HealthInput, now: Timestamp, changes: &mut Vec<HealthChange>) {
        let changed = match input {
            HealthInput::Members(members) => self.on_members(members, now),
            HealthInput::Probed { worker, prober, answer } => self.on_probed(worker, prober, answer, now),
            HealthInput::Outcome { rank, incarnation, outcome, began } => {
                self.on_outcome(rank, incarnation, outcome, began, now)
            }
            HealthInput::Stalls { overdue, progressed } => self.on_stalls(&overdue, &progressed, now, changes),
            HealthInput::Wake => None,
        };
        let due = self.next_wake.is_some_and(|at| at <= now).then_some(EVERY_RANK);
        if let Some(changed) = due.or(changed) {
            self.settle(changed, now, changes);
        }
        debug_assert_eq!(self.check_invariants(), Ok(()));
    }

    /// The current exclusions.
    #[must_use]
    pub fn exclusions(&self) -> &Exclusions {
        &self.exclusions
    }

    /// Time at which [`HealthInput::Wake`] has an effect, without earlier inputs.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        self.next_wake
    }

    /// Whether a successful request would have an effect, because failures are counted for the rank.
    #[must_use]
    pub fn counts_failures_of(&self, rank: WorkerRank) -> bool {
        self.ranks.get(&rank).is_some_and(RankRecord::has_failures)
    }

    /// Health of each rank, in rank order.
    #[must_use]
    pub fn report(&self) -> Vec<RankHealth> {
        let row = |(&rank, known): (&WorkerRank, &RankRecord)| {
            let state = self.state_of(rank, known);
            let reason = if state == HealthState::Healthy { String::new() } else { self.reasons(rank, known) };
            RankHealth { rank, state, reason }
        };
        self.ranks.iter().map(row).collect()
    }

    fn state_of(&self, rank: WorkerRank, known: &RankRecord) -> HealthState {
        if self.exclusions.has_ejected(rank) {
            return HealthState::Ejected { until: known.sentence.filter(|_| !self.is_probed_down(rank.worker)) };
        }
        match (known.wanted_since, known.refusals.until) {
            _ if known.member.asleep => HealthState::Asleep,
            (Some(_), _) => HealthState::Suspected,
            (None, Some(until)) if known.refusals.is_stall => HealthState::Stalled { until },
            (None, Some(until)) => HealthState::Refusing { until },
            (None, None) => HealthState::Healthy,
        }
    }

    fn reasons(&self, rank: WorkerRank, known: &RankRecord) -> String {
        let probe = self.probes.get(&rank.worker).filter(|probe| probe.down);
        let probe = probe.map(|probe| match probe.failures {
            0 => format!("probes have only just begun to succeed, after {}", probe.why),
            failures => format!("{failures} probes in a row failed, the last: {}", probe.why),
        });
        let outcomes = known
            .sentence
            .map(|_| format!("{} requests in a row failed, the last: {}", known.failures, known.last_failure.name()));
        let refusals = known.refusals.until.filter(|_| known.sentence.is_none());
        let refusals = refusals.map(|_| match known.refusals.is_stall {
            true => "no progress, although first tokens are owed".to_owned(),
            false => format!("back-off {} in a row after refused requests", known.refusals.in_a_row),
        });
        let sleep = known.member.asleep.then(|| "its engine reports that it sleeps".to_owned());
        [sleep, probe, outcomes, refusals].into_iter().flatten().collect::<Vec<_>>().join("; ")
    }

    fn on_members(&mut self, members: BTreeMap<WorkerRank, Member>, now: Timestamp) -> Option<Ranks> {
        let reborn = |(rank, known): (&WorkerRank, &RankRecord)| {
            members.get(rank).is_none_or(|member| member.incarnation != known.member.incarnation).then_some(rank.worker)
        };
        // Removes probe results of replaced or removed engines.
        let reborn: BTreeSet<WorkerId> = self.ranks.iter().filter_map(reborn).collect();
        let workers: BTreeSet<WorkerId> = members.keys().map(|rank| rank.worker).collect();
        self.probes.retain(|worker, _| workers.contains(worker) && !reborn.contains(worker));
        let mut earlier = std::mem::take(&mut self.ranks);
        for (rank, member) in members {
            let known = earlier.remove(&rank).filter(|known| known.member.incarnation == member.incarnation);
            if known.is_none() {
                self.exclusions.forget(rank); // exclusions belong to an earlier incarnation
            }
            let known = known.map_or_else(|| RankRecord::new(member, now), |known| RankRecord { member, ..known });
            self.ranks.insert(rank, known);
        }
        let ranks = &self.ranks;
        self.exclusions.retain(|rank| ranks.contains_key(&rank));
        Some(EVERY_RANK)
    }

    fn on_probed(
        &mut self,
        worker: WorkerId,
        prober: u64,
        answer: Result<(), String>,
        now: Timestamp,
    ) -> Option<Ranks> {
        self.ranks.range(ranks_of(worker)).next()?;
        // If no rank serves, a single success is sufficient.
        let nobody_serves = answer.is_ok() && self.is_out(worker) && !self.any_serves();
        let known = self.probes.entry(worker).or_insert_with(|| ProbeRecord::new(prober, now));
        if prober < known.prober {
            return None;
        }
        let was_down = known.down;
        if prober > known.prober {
            *known = ProbeRecord::new(prober, now);
        }
        known.heard_at = now;
        let mut is_back = false;
        match answer {
            Ok(()) => {
                (known.failures, known.contradicted) = (0, false);
                known.successes = known.successes.saturating_add(1);
                is_back = known.successes >= self.rules.probe_successes_min || nobody_serves;
                known.down &= !is_back;
            }
            Err(why) if known.contradicted => known.why = why,
            Err(why) => {
                known.successes = 0;
                known.failures = known.failures.saturating_add(1);
                known.down |= known.failures >= self.rules.probe_failures_max;
                known.why = why;
            }
        }
        let has_turned = known.down != was_down;
        (is_back && self.lift_unreachable(worker, now) || has_turned).then(|| ranks_of(worker))
    }

    /// Whether a rank of the worker is out of service.
    fn is_out(&self, worker: WorkerId) -> bool {
        self.ranks.range(ranks_of(worker)).any(|(rank, _)| self.exclusions.has_ejected(*rank))
    }

    /// Ends the ejections caused by failed connections, after a connection succeeded.
    fn lift_unreachable(&mut self, worker: WorkerId, now: Timestamp) -> bool {
        let mut any = false;
        for (_, known) in self.ranks.range_mut(ranks_of(worker)).filter(|(_, known)| known.is_unreachable()) {
            any |= known.lift_sentence(now);
        }
        any
    }

    fn on_outcome(
        &mut self,
        rank: WorkerRank,
        incarnation: u64,
        outcome: Outcome,
        began: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<Ranks> {
        if outcome.is_ok() {
            return self.on_answered(rank, incarnation, began, now).then(|| ranks_of(rank.worker));
        }
        let others_accept = matches!(outcome, Outcome::Refused { .. }) && self.others_accept(rank);
        let known = self.ranks.get_mut(&rank).filter(|known| known.member.incarnation == incarnation)?;
        let was_unreachable = known.is_unreachable();
        let backs_off = known.failed(outcome, began, others_accept, now);
        let max = self.rules.outcome_failures_max;
        let is_sentenced = max > 0 && known.failures >= max && known.sentence.is_none();
        if is_sentenced {
            known.pass_sentence(self.rules.ejection, now);
        }
        let is_unreachable = known.is_unreachable();
        if let Some(probe) = self.probes.get_mut(&rank.worker) {
            probe.contradicted = false;
            if is_unreachable && !was_unreachable {
                probe.successes = 0; // earlier successes do not count after a failed connection
            }
        }
        (backs_off || is_sentenced || is_unreachable != was_unreachable).then(|| ranks_of(rank.worker))
    }

    fn on_answered(&mut self, rank: WorkerRank, incarnation: u64, began: Option<Timestamp>, now: Timestamp) -> bool {
        let Some(known) = self.ranks.get_mut(&rank).filter(|known| known.member.incarnation == incarnation) else {
            return false;
        };
        if let Some(down_since) = known.down_since {
            // A request sent before the rank went down is no sign of recovery; one sent later, because no other rank
            // was left, is.
            if began.is_none_or(|began| began < down_since) {
                return false;
            }
            known.succeeded(began, now);
            if let Some(probe) = self.probes.get_mut(&rank.worker).filter(|probe| probe.down) {
                probe.contradict();
            }
            self.lift_unreachable(rank.worker, now);
            return true;
        }
        if self.exclusions.ejected.contains(&rank) {
            return false; // sent before the ejection, which it therefore does not end
        }
        known.succeeded(began, now)
    }

    /// Starts the back-offs of stalled ranks, and ends those of ranks with progress. A rank that is still overdue when its
    /// back-off ends serves until the next input, so that a request can show its progress.
    fn on_stalls(
        &mut self,
        overdue: &BTreeMap<WorkerRank, u64>,
        progressed: &BTreeSet<WorkerRank>,
        now: Timestamp,
        changes: &mut Vec<HealthChange>,
    ) -> Option<Ranks> {
        let mut any = false;
        for (&rank, incarnation) in overdue {
            let known = self.ranks.get_mut(&rank).filter(|known| known.member.incarnation == *incarnation);
            let Some(known) = known else { continue };
            if known.refusals.until.is_some_and(|until| until <= now) {
                any = true; // ends now, and a request may try the rank
                continue;
            }
            let was_stalled = known.refusals.is_stall && known.refusals.in_a_row > 0;
            if known.refusals.stalled(now) {
                any = true;
                changes.extend((!was_stalled).then_some(HealthChange::Stalled(rank)));
            }
        }
        for rank in progressed {
            any |= self.ranks.get_mut(rank).is_some_and(|known| known.refusals.progressed());
        }
        any.then_some(EVERY_RANK)
    }

    /// Whether another rank serves and has refused no request since it last accepted one.
    fn others_accept(&self, rank: WorkerRank) -> bool {
        let mut others = self.ranks.iter().filter(|(other, _)| **other != rank);
        others.any(|(other, known)| self.serves(*other, known) && known.refusals.in_a_row == 0)
    }

    fn is_probed_down(&self, worker: WorkerId) -> bool {
        self.probes.get(&worker).is_some_and(|probe| probe.down)
    }

    /// Ends expired states of the changed ranks, returns ranks that the limits require, and ejects suspected ranks within
    /// the limits.
    fn settle(&mut self, changed: Ranks, now: Timestamp, changes: &mut Vec<HealthChange>) {
        let is_out = |(rank, _): (&WorkerRank, &RankRecord)| (*rank, self.exclusions.has_ejected(*rank));
        let mut was_out: BTreeMap<WorkerRank, bool> = self.ranks.range(changed.clone()).map(is_out).collect();
        was_out.extend(self.exclusions.ejected.iter().map(|rank| (*rank, true)));
        let stale = self.rules.probe_stale;
        self.probes.retain(|_, probe| !probe.down || now.since(probe.heard_at) < stale);
        let put = |ranks: &mut BTreeSet<WorkerRank>, rank: WorkerRank, is_in: bool| {
            if is_in { ranks.insert(rank) } else { ranks.remove(&rank) }
        };
        for (rank, known) in self.ranks.range_mut(changed) {
            known.expire(now);
            let is_probed_down = self.probes.get(&rank.worker).is_some_and(|probe| probe.down);
            let is_down = is_probed_down || known.is_unreachable();
            known.down_since = is_down.then(|| known.down_since.unwrap_or(now));
            let is_wanted = known.sentence.is_some() && !is_down;
            known.wanted_since = is_wanted.then(|| known.wanted_since.unwrap_or(now));
            put(&mut self.exclusions.down, *rank, is_down);
            put(&mut self.exclusions.refusing, *rank, known.refusals.until.is_some());
            put(&mut self.exclusions.asleep, *rank, known.member.asleep);
        }
        let ranks = &self.ranks;
        let is_wanted = |rank: &WorkerRank| ranks.get(rank).is_some_and(|known| known.wanted_since.is_some());
        self.exclusions.ejected.retain(is_wanted);
        while let Some(rank) = self.one_too_many() {
            self.exclusions.ejected.remove(&rank);
        }
        self.eject_while_allowed();
        for rank in &self.exclusions.ejected {
            was_out.entry(*rank).or_insert(false);
        }
        let (was_out, exclusions) = (&was_out, &self.exclusions);
        let turned = |was: bool| {
            let states = was_out.iter().map(|(rank, before)| (*rank, *before, exclusions.has_ejected(*rank)));
            states.filter(move |(_, before, now)| *before == was && *now != was).map(|(rank, ..)| rank)
        };
        changes.extend(turned(true).map(HealthChange::Returned));
        changes.extend(turned(false).map(|rank| {
            let cause = if self.is_probed_down(rank.worker) { Cause::Probe } else { Cause::Outcomes };
            HealthChange::Ejected { rank, cause }
        }));
        let of_ranks = self.ranks.values().flat_map(|known| [known.sentence, known.refusals.until]).flatten();
        let silences = self.probes.values().filter(|probe| probe.down).map(|probe| probe.heard_at + stale);
        self.next_wake = of_ranks.chain(silences).min();
    }

    /// Ejects suspected ranks, longest waiting first. Ranks beyond the limits stay in service.
    fn eject_while_allowed(&mut self) {
        let candidates = self.ranks.iter().filter_map(|(rank, known)| Some((known.wanted_since?, *rank)));
        let mut candidates: Vec<(Timestamp, WorkerRank)> =
            candidates.filter(|(_, rank)| !self.exclusions.ejected.contains(rank)).collect();
        if candidates.is_empty() {
            return;
        }
        candidates.sort_unstable();
        let (mut serving, ejected_max) = (self.serving(), self.ejected_max());
        for (_, rank) in candidates {
            let serves = self.is_available(rank);
            if self.exclusions.ejected.len() >= ejected_max || serves && serving == 1 {
                continue;
            }
            serving -= usize::from(serves);
            self.exclusions.ejected.insert(rank);
        }
    }

    fn wanted_since(&self, rank: WorkerRank) -> Option<Timestamp> {
        self.ranks.get(&rank).and_then(|known| known.wanted_since)
    }

    /// Maximum number of ranks ejected on suspicion.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of a count of ranks"
    )]
    fn ejected_max(&self) -> usize {
        let (ranks, share) = (self.ranks.len(), self.rules.ejected_share_max);
        if ranks < 2 || share <= 0.0 {
            return 0;
        }
        ((ranks as f64 * share) as usize).clamp(1, ranks - 1)
    }

    fn any_serves(&self) -> bool {
        self.ranks.iter().any(|(rank, known)| self.serves(*rank, known))
    }

    /// Number of serving ranks.
    fn serving(&self) -> usize {
        self.ranks.iter().filter(|(rank, known)| self.serves(**rank, known)).count()
    }

    fn serves(&self, rank: WorkerRank, known: &RankRecord) -> bool {
        known.could_serve() && !self.exclusions.has_ejected(rank)
    }

    fn is_available(&self, rank: WorkerRank) -> bool {
        self.ranks.get(&rank).is_some_and(RankRecord::could_serve)
    }

    /// The ejected rank to return because of the current limits: the one ejected longest.
    fn one_too_many(&self) -> Option<WorkerRank> {
        let ejected = &self.exclusions.ejected;
        let since = |rank: &&WorkerRank| (self.wanted_since(**rank), **rank);
        let serves = |rank: &&WorkerRank| self.is_available(**rank);
        let spare = (!self.any_serves()).then(|| ejected.iter().filter(serves).min_by_key(since)).flatten();
        let too_many = ejected.len() > self.ejected_max();
        spare.or_else(|| too_many.then(|| ejected.iter().min_by_key(since)).flatten()).copied()
    }

    /// Checks the guarantees of the module.
    ///
    /// # Errors
    /// A description of the violated guarantee.
    pub fn check_invariants(&self) -> Result<(), String> {
        let Exclusions { ejected, down, refusing, asleep: _ } = &self.exclusions;
        if ejected.len() > self.ejected_max() {
            return Err(format!("{} are ejected on suspicion, at most {} may be", ejected.len(), self.ejected_max()));
        }
        let could = |(rank, known): (&WorkerRank, &RankRecord)| known.could_serve() && !down.contains(rank);
        if !self.any_serves() && self.ranks.iter().any(could) {
            return Err("no rank in service although one is eligible".to_owned());
        }
        if let Some(rank) = ejected.intersection(down).next() {
            return Err(format!("{rank} is down, and counted as ejected on suspicion"));
        }
        let unfounded = |rank: &&WorkerRank| self.ranks.get(*rank).is_none_or(|known| !known.has_failures());
        match ejected.iter().chain(refusing).find(unfounded) {
            Some(rank) => Err(format!("{rank} is excluded without a counted failure")),
            None => Ok(()),
        }
    }
}

/// Ranks that an input concerns.
type Ranks = RangeInclusive<WorkerRank>;

const EVERY_RANK: Ranks = WorkerRank::new(WorkerId(0), 0)..=WorkerRank::new(WorkerId(u64::MAX), u32::MAX);

fn ranks_of(worker: WorkerId) -> Ranks {
    WorkerRank::new(worker, 0)..=WorkerRank::new(worker, u32::MAX)
}
