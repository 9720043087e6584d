//! Shell of the health actor.

use std::collections::BTreeMap;
use std::sync::Arc;

use pointsman::RankConditions;
use pointsman::internals::health::{HealthInput, HealthRules, Member, Monitor};
use pointsman::internals::shell::scheduler::SchedulerMsg;
use pointsman::protocol::WorkerRank;

use super::{Gateway, Surroundings};
use crate::letter::Letter;
use crate::net::Actor;

impl Gateway {
    /// Starts without records: all ranks return to service.
    pub(super) fn start_health(&mut self, around: &mut Surroundings<'_>) {
        self.health = Some(Monitor::new(HealthRules::of(&self.settings.config)));
        self.health_wake = None;
        self.send(Actor::Supervisor, Actor::Health, Letter::MembersChanged, around);
    }

    pub(super) fn on_health(&mut self, letter: Letter, around: &mut Surroundings<'_>) {
        if self.health.is_none() {
            return; // the message is lost
        }
        let input = match letter {
            Letter::MembersChanged => HealthInput::Members(self.members()),
            Letter::Outcome(entry, outcome, began) => {
                self.step_health(HealthInput::Members(self.members()), around);
                let (rank, incarnation, began) = (entry.rank, entry.incarnation(), Some(began));
                HealthInput::Outcome { rank, incarnation, outcome, began }
            }
            Letter::Probed { worker, prober, is_ok } => {
                let answer = if is_ok { Ok(()) } else { Err("no connection".to_owned()) };
                HealthInput::Probed { worker, prober, answer }
            }
            Letter::HealthWake => {
                self.health_wake = None;
                HealthInput::Wake
            }
            _ => unreachable!("no message of the health actor"),
        };
        self.step_health(input, around);
    }

    fn step_health(&mut self, input: HealthInput, around: &mut Surroundings<'_>) {
        let now = around.net.now;
        let Some(monitor) = &mut self.health else { return };
        monitor.step(input, now, &mut Vec::new());
        assert_eq!(monitor.check_invariants(), Ok(()));
        let (exclusions, wake) = (monitor.exclusions().clone(), monitor.next_wake());
        if *self.exclusions != exclusions {
            self.exclusions = Arc::new(exclusions);
            self.send(Actor::Health, Actor::Scheduler, Letter::scheduler(SchedulerMsg::Exclusions), around);
        }
        if let Some(at) = wake
            && self.health_wake.is_none_or(|armed| at < armed)
        {
            self.health_wake = Some(at);
            around.net.after(at.since(now), self.place(Actor::Health), Letter::HealthWake);
        }
    }

    /// The ranks, and whether each could serve if it were healthy.
    fn members(&self) -> BTreeMap<WorkerRank, Member> {
        let mut members = BTreeMap::new();
        for (worker, known) in self.membership().workers() {
            for (rank, slot) in &known.slots {
                let Some(entry) = self.entry(*slot) else { continue };
                let takes = !known.draining && !known.cordoned;
                let available = takes && !self.conditions.unavailable.contains(rank);
                debug_assert_eq!(rank.worker, *worker);
                members.insert(*rank, Member { incarnation: entry.incarnation(), available, asleep: false });
            }
        }
        members
    }

    /// The embedder replaces its conditions.
    pub(crate) fn set_unavailable(&mut self, worker: Option<u64>, around: &mut Surroundings<'_>) {
        let ranks = (0..8).filter_map(|rank| Some(WorkerRank::new(pointsman::protocol::WorkerId(worker?), rank)));
        self.conditions = Arc::new(RankConditions { unavailable: ranks.collect(), ..RankConditions::default() });
        self.send(Actor::Caller(u64::MAX), Actor::Scheduler, Letter::scheduler(SchedulerMsg::Conditions), around);
        self.send(Actor::Caller(u64::MAX), Actor::Health, Letter::MembersChanged, around);
    }

    pub(crate) fn has_exclusions(&self) -> bool {
        !self.exclusions.is_empty()
    }
}
