//! The state machine: what was seen in, who is ejected out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Cause, EJECTION_MAX, HealthState, Outcome, RankHealth, Rules};
use crate::protocol::{Timestamp, WorkerId, WorkerRank};

/// What the monitor is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// These are the ranks, all of them.
    Members(BTreeMap<WorkerRank, Member>),
    /// A probe of a worker's engine has ended.
    Probed {
        /// The worker.
        worker: WorkerId,
        /// Which prober speaks: a later one probes another engine of that name, and what earlier ones say is ignored.
        prober: u64,
        /// How it went; what went wrong, in words.
        answer: Result<(), String>,
    },
    /// A request has ended.
    Outcome {
        /// Where it was.
        rank: WorkerRank,
        /// Which incarnation of the rank; what befell an earlier one is ignored.
        incarnation: u64,
        /// How it went.
        outcome: Outcome,
    },
    /// Time has passed.
    Wake,
}

/// A rank as the monitor must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Another number is another engine, of which nothing is known yet.
    pub incarnation: u64,
    /// Whether it could serve if it were well: it is not drained, and nobody else keeps it out of service.
    pub available: bool,
}

/// What has changed for a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is out of service from now on.
    Ejected {
        /// The rank.
        rank: WorkerRank,
        /// What spoke against it.
        cause: Cause,
    },
    /// It is back.
    Returned {
        /// The rank.
        rank: WorkerRank,
    },
}

/// Who is ejected, and who should be. Tell it with [`Monitor::step`].
///
/// ```
/// use pointsman::RouterConfig;
/// use pointsman::health::{Input, Member, Monitor, Outcome, Rules};
/// use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
///
/// let mut monitor = Monitor::new(Rules::of(&RouterConfig::default()));
/// let ranks = [1, 2].map(|worker| WorkerRank::new(WorkerId(worker), 0));
/// let member = Member { incarnation: 0, available: true };
/// monitor.step(Input::Members(ranks.map(|rank| (rank, member)).into()), Timestamp(0), &mut Vec::new());
/// for _ in 0..5 {
///     let failed = Input::Outcome { rank: ranks[0], incarnation: 0, outcome: Outcome::Timeout };
///     monitor.step(failed, Timestamp(1), &mut Vec::new());
/// }
/// assert!(monitor.ejected().contains(&ranks[0]));
/// monitor.step(Input::Wake, Timestamp(30_000_000_001), &mut Vec::new());
/// assert!(monitor.ejected().is_empty());
/// ```
#[derive(Debug)]
pub struct Monitor {
    rules: Rules,
    ranks: BTreeMap<WorkerRank, Rank>,
    /// Workers that have been probed, and not too long ago.
    probes: BTreeMap<WorkerId, Probe>,
    ejected: BTreeSet<WorkerRank>,
    /// When something ends by itself.
    next_wake: Option<Timestamp>,
}

#[derive(Debug)]
struct Rank {
    member: Member,
    /// Failed requests in a row.
    failures: u32,
    last_failure: Outcome,
    /// Its failed requests want it out until then. Whether it is, is for the floor to say.
    sentence: Option<Timestamp>,
    /// Sentences so far; one fewer for each time that it could have served one more and was not sentenced.
    sentences: u32,
    /// When the last one was over.
    free_since: Timestamp,
    /// Since when it should be out.
    wanted_since: Option<Timestamp>,
}

#[derive(Debug)]
struct Probe {
    prober: u64,
    heard_at: Timestamp,
    failures: u32,
    successes: u32,
    /// Enough probes in a row have failed, and not enough have succeeded since.
    down: bool,
    why: String,
}

impl Probe {
    fn new(prober: u64, now: Timestamp) -> Self {
        Self { prober, heard_at: now, failures: 0, successes: 0, down: false, why: String::new() }
    }
}

impl Rank {
    fn new(member: Member, now: Timestamp) -> Self {
        Self {
            member,
            failures: 0,
            last_failure: Outcome::Ok,
            sentence: None,
            sentences: 0,
            free_since: now,
            wanted_since: None,
        }
    }

    fn sentence(&mut self, ejection: Duration, now: Timestamp) {
        let forgiven = now.since(self.free_since).as_nanos() / ejection.as_nanos().max(1);
        self.sentences = self.sentences.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX)).saturating_add(1);
        self.sentence = Some(now + ejection.saturating_mul(self.sentences).min(EJECTION_MAX));
    }
}

impl Monitor {
    /// A monitor that knows of nobody yet.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        let (ranks, probes, ejected) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { rules, ranks, probes, ejected, next_wake: None }
    }

    /// Takes one input and appends what follows from it. Visits every rank where something may follow, and one where
    /// nothing can.
    pub fn step(&mut self, input: Input, now: Timestamp, changes: &mut Vec<Change>) {
        let matters = match input {
            Input::Members(members) => self.on_members(members, now),
            Input::Probed { worker, prober, answer } => self.on_probed(worker, prober, answer, now),
            Input::Outcome { rank, incarnation, outcome } => self.on_outcome(rank, incarnation, outcome, now),
            Input::Wake => false,
        };
        if matters || self.next_wake.is_some_and(|at| at <= now) {
            self.settle(now, changes);
        }
        debug_assert_eq!(self.check_invariants(), Ok(()));
    }

    /// The ranks that are out of service.
    #[must_use]
    pub fn ejected(&self) -> &BTreeSet<WorkerRank> {
        &self.ejected
    }

    /// When [`Input::Wake`] will change something, if nothing comes before.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        self.next_wake
    }

    /// Whether a request that went well would change anything: failures are counted against the rank.
    #[must_use]
    pub fn counts_failures_of(&self, rank: WorkerRank) -> bool {
        self.ranks.get(&rank).is_some_and(|known| known.failures > 0)
    }

    /// How each rank is, in rank order.
    #[must_use]
    pub fn report(&self) -> Vec<RankHealth> {
        let state = |rank: WorkerRank, known: &Rank| match (self.ejected.contains(&rank), known.wanted_since) {
            (true, _) => HealthState::Ejected { until: known.sentence.filter(|_| !self.is_down(rank.worker)) },
            (false, Some(_)) => HealthState::Suspected,
            (false, None) => HealthState::Healthy,
        };
        let row = |(&rank, known): (&WorkerRank, &Rank)| {
            let state = state(rank, known);
            let why = if state == HealthState::Healthy { String::new() } else { self.reasons(rank, known) };
            RankHealth { rank, state, why }
        };
        self.ranks.iter().map(row).collect()
    }

    fn reasons(&self, rank: WorkerRank, known: &Rank) -> String {
        let probe = self.probes.get(&rank.worker).filter(|probe| probe.down);
        let probe = probe.map(|probe| match probe.failures {
            0 => format!("probes have only just begun to succeed, after {}", probe.why),
            failures => format!("{failures} probes in a row failed, the last: {}", probe.why),
        });
        let outcomes = known
            .sentence
            .map(|_| format!("{} requests in a row failed, the last: {}", known.failures, known.last_failure.name()));
        [probe, outcomes].into_iter().flatten().collect::<Vec<_>>().join("; ")
    }

    fn on_members(&mut self, members: BTreeMap<WorkerRank, Member>, now: Timestamp) -> bool {
        let reborn = |(rank, known): (&WorkerRank, &Rank)| {
            members.get(rank).is_none_or(|member| member.incarnation != known.member.incarnation).then_some(rank.worker)
        };
        // Another engine, or none: what the old one's prober found is not its own.
        let reborn: BTreeSet<WorkerId> = self.ranks.iter().filter_map(reborn).collect();
        let workers: BTreeSet<WorkerId> = members.keys().map(|rank| rank.worker).collect();
        self.probes.retain(|worker, _| workers.contains(worker) && !reborn.contains(worker));
        let mut earlier = std::mem::take(&mut self.ranks);
        for (rank, member) in members {
            let known = earlier.remove(&rank).filter(|known| known.member.incarnation == member.incarnation);
            if known.is_none() {
                self.ejected.remove(&rank); // whoever it was
            }
            let known = known.map_or_else(|| Rank::new(member, now), |known| Rank { member, ..known });
            self.ranks.insert(rank, known);
        }
        self.ejected.retain(|rank| self.ranks.contains_key(rank));
        true
    }

    fn on_probed(&mut self, worker: WorkerId, prober: u64, answer: Result<(), String>, now: Timestamp) -> bool {
        let ranks = WorkerRank::new(worker, 0)..=WorkerRank::new(worker, u32::MAX);
        if self.ranks.range(ranks).next().is_none() {
            return false;
        }
        let known = self.probes.entry(worker).or_insert_with(|| Probe::new(prober, now));
        if prober < known.prober {
            return false;
        }
        if prober > known.prober {
            *known = Probe::new(prober, now);
        }
        let was_down = known.down;
        known.heard_at = now;
        match answer {
            Ok(()) => {
                known.failures = 0;
                known.successes = known.successes.saturating_add(1);
                known.down &= known.successes < self.rules.probe_successes_min;
            }
            Err(why) => {
                known.successes = 0;
                known.failures = known.failures.saturating_add(1);
                known.down |= known.failures >= self.rules.probe_failures_max;
                known.why = why;
            }
        }
        known.down || was_down
    }

    fn on_outcome(&mut self, rank: WorkerRank, incarnation: u64, outcome: Outcome, now: Timestamp) -> bool {
        let Some(known) = self.ranks.get_mut(&rank).filter(|known| known.member.incarnation == incarnation) else {
            return false;
        };
        if outcome.is_ok() {
            if self.ejected.contains(&rank) {
                return false; // sent there before: what began before the ejection does not end it
            }
            known.failures = 0;
            if known.sentence.take().is_some() {
                known.sentences = known.sentences.saturating_sub(1);
                known.free_since = now;
                return true;
            }
            return false;
        }
        known.failures = known.failures.saturating_add(1);
        known.last_failure = outcome;
        let max = self.rules.outcome_failures_max;
        if max == 0 || known.failures < max || known.sentence.is_some() {
            return false;
        }
        known.sentence(self.rules.ejection, now);
        true
    }

    fn is_down(&self, worker: WorkerId) -> bool {
        self.probes.get(&worker).is_some_and(|probe| probe.down)
    }

    /// Ends what is over, lets back in who must come back, and ejects who should go while the floor lets it.
    fn settle(&mut self, now: Timestamp, changes: &mut Vec<Change>) {
        let stale = self.rules.probe_stale;
        self.probes.retain(|_, probe| !probe.down || now.since(probe.heard_at) < stale);
        for (rank, known) in &mut self.ranks {
            if known.sentence.is_some_and(|until| until <= now) {
                (known.sentence, known.failures, known.free_since) = (None, 0, now);
            }
            let is_down = self.probes.get(&rank.worker).is_some_and(|probe| probe.down);
            known.wanted_since = (known.sentence.is_some() || is_down).then(|| known.wanted_since.unwrap_or(now));
        }
        let over = self.ejected.iter().filter(|rank| self.wanted_since(**rank).is_none());
        for rank in over.copied().collect::<Vec<_>>() {
            self.readmit(rank, changes);
        }
        while let Some(rank) = self.one_too_many() {
            self.readmit(rank, changes);
        }
        let candidates = self.ranks.iter().filter(|(rank, _)| !self.ejected.contains(rank));
        let mut candidates: Vec<(Timestamp, WorkerRank)> =
            candidates.filter_map(|(rank, known)| Some((known.wanted_since?, *rank))).collect();
        candidates.sort_unstable();
        let (mut serving, ejected_max) = (self.serving(), self.ejected_max());
        for (_, rank) in candidates {
            let serves = self.is_available(rank);
            if self.ejected.len() >= ejected_max || serves && serving == 1 {
                continue; // beyond the floor: it stays in, suspected
            }
            serving -= usize::from(serves);
            self.ejected.insert(rank);
            let cause = if self.is_down(rank.worker) { Cause::Probe } else { Cause::Outcomes };
            changes.push(Change::Ejected { rank, cause });
        }
        let sentences = self.ranks.values().filter_map(|known| known.sentence);
        let silences = self.probes.values().filter(|probe| probe.down).map(|probe| probe.heard_at + stale);
        self.next_wake = sentences.chain(silences).min();
    }

    fn readmit(&mut self, rank: WorkerRank, changes: &mut Vec<Change>) {
        self.ejected.remove(&rank);
        changes.push(Change::Returned { rank });
    }

    fn wanted_since(&self, rank: WorkerRank) -> Option<Timestamp> {
        self.ranks.get(&rank).and_then(|known| known.wanted_since)
    }

    /// How many may be ejected at once.
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

    /// Ranks that can serve.
    fn serving(&self) -> usize {
        self.ranks.iter().filter(|(rank, known)| known.member.available && !self.ejected.contains(rank)).count()
    }

    fn is_available(&self, rank: WorkerRank) -> bool {
        self.ranks.get(&rank).is_some_and(|known| known.member.available)
    }

    /// Somebody ejected whom the floor, as it is now, wants back: whose engine answers probes first, then whoever has
    /// been out longest.
    fn one_too_many(&self) -> Option<WorkerRank> {
        let rank_of = |rank: &&WorkerRank| (self.is_down(rank.worker), self.wanted_since(**rank), **rank);
        let serves = |rank: &&WorkerRank| self.is_available(**rank);
        let spare = (self.serving() == 0).then(|| self.ejected.iter().filter(serves).min_by_key(rank_of)).flatten();
        let too_many = self.ejected.len() > self.ejected_max();
        spare.or_else(|| too_many.then(|| self.ejected.iter().min_by_key(rank_of)).flatten()).copied()
    }

    /// Whether the promises of the module's head hold.
    ///
    /// # Errors
    /// The promise that does not, in words.
    pub fn check_invariants(&self) -> Result<(), String> {
        if self.ejected.len() > self.ejected_max() {
            return Err(format!("{} are ejected, at most {} may be", self.ejected.len(), self.ejected_max()));
        }
        if self.serving() == 0 && self.ranks.values().any(|known| known.member.available) {
            return Err("nobody serves though somebody could".to_owned());
        }
        match self.ejected.iter().find(|rank| self.wanted_since(**rank).is_none()) {
            Some(rank) => Err(format!("{rank} is ejected and nothing is held against it")),
            None => Ok(()),
        }
    }
}
