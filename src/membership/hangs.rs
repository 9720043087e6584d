//! Detection of hung actors from samples of their work.
//!
//! A watchdog samples each actor at equal intervals. An actor that has work and makes no progress over
//! [`HangDetector::SAMPLES`] intervals hangs. An interval counts by the share of the CPU time that the process wanted
//! and got: on a machine without free CPU, a lack of progress is no evidence.

use std::collections::BTreeMap;
use std::fmt;

use crate::protocol::WorkerRank;

/// Actor that is watched for hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchedActor {
    /// Supervisor actor.
    Supervisor,
    /// Scheduler actor.
    Scheduler,
    /// Index shard with this number.
    IndexShard(usize),
    /// Sequence actor of a rank.
    Sequence(WorkerRank),
    /// Health actor.
    Health,
    /// Actor that records engine loads.
    EngineLoads,
}

impl WatchedActor {
    /// All roles.
    pub const ROLES: &[&str] = &["supervisor", "scheduler", "radix", "sequence", "health", "engine_loads"];

    /// Value of the metric label `role`.
    #[must_use]
    pub fn role(self) -> &'static str {
        match self {
            Self::Supervisor => "supervisor",
            Self::Scheduler => "scheduler",
            Self::IndexShard(_) => "radix",
            Self::Sequence(_) => "sequence",
            Self::Health => "health",
            Self::EngineLoads => "engine_loads",
        }
    }

    /// Whether the router is not ready while the actor hangs. Other actors affect one rank, or the age of facts.
    #[must_use]
    pub fn is_essential(self) -> bool {
        match self {
            Self::Supervisor | Self::Scheduler | Self::IndexShard(_) => true,
            Self::Sequence(_) | Self::Health | Self::EngineLoads => false,
        }
    }
}

impl fmt::Display for WatchedActor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Supervisor => f.write_str("supervisor"),
            Self::Scheduler => f.write_str("scheduler"),
            Self::IndexShard(shard) => write!(f, "index shard {shard}"),
            Self::Sequence(rank) => write!(f, "sequence actor of rank {rank}"),
            Self::Health => f.write_str("health actor"),
            Self::EngineLoads => f.write_str("engine load actor"),
        }
    }
}

/// Sample of an actor's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActorSample {
    /// Differs after each begun or ended step.
    pub progress: u64,
    /// Whether a step runs, or a message waits for the supervisor.
    pub has_work: bool,
}

/// Change of an actor between two samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HangChange {
    /// The actor hangs.
    Began,
    /// The actor has hung for a further [`HangDetector::SAMPLES`] intervals.
    Lasts,
    /// The actor makes progress again, or has been replaced.
    Ended,
}

/// Compares the samples of all actors.
///
/// ```
/// use pointsman::internals::membership::{ActorSample, HangChange, HangDetector, WatchedActor};
///
/// let mut detector = HangDetector::default();
/// let stuck = ActorSample { progress: 7, has_work: true };
/// let changes: Vec<_> = (0..=HangDetector::SAMPLES).map(|_| detector.sample(WatchedActor::Scheduler, stuck, 1.0)).collect();
/// assert_eq!(changes.last(), Some(&Some(HangChange::Began)));
/// assert!(changes[..changes.len() - 1].iter().all(Option::is_none));
/// let moved = ActorSample { progress: 8, has_work: true };
/// assert_eq!(detector.sample(WatchedActor::Scheduler, moved, 1.0), Some(HangChange::Ended));
/// ```
#[derive(Clone, Debug, Default)]
pub struct HangDetector {
    actors: BTreeMap<WatchedActor, Watched>,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    progress: u64,
    /// Intervals with work and without progress since the last change, each by its share of CPU.
    stuck: f64,
    hangs: bool,
}

impl HangDetector {
    /// Intervals without progress until an actor counts as hung.
    pub const SAMPLES: u32 = 4;

    /// Adds a sample of one actor. Without progress the interval before it counts by `cpu_share`, from 0 for an
    /// interval without CPU to 1 for one in which no thread of the process waited for a CPU.
    pub fn sample(&mut self, actor: WatchedActor, sample: ActorSample, cpu_share: f64) -> Option<HangChange> {
        let fresh = Watched { progress: sample.progress, stuck: 0.0, hangs: false };
        let Some(watched) = self.actors.get_mut(&actor) else {
            self.actors.insert(actor, fresh);
            return None;
        };
        if watched.progress != sample.progress || !sample.has_work {
            let hung = watched.hangs;
            *watched = fresh;
            return hung.then_some(HangChange::Ended);
        }
        watched.stuck += cpu_share;
        if watched.stuck < f64::from(Self::SAMPLES) {
            return None;
        }
        watched.stuck = 0.0;
        Some(if std::mem::replace(&mut watched.hangs, true) { HangChange::Lasts } else { HangChange::Began })
    }

    /// Forgets actors that are not in `present`, which is sorted.
    pub fn retain(&mut self, present: &[WatchedActor]) {
        self.actors.retain(|actor, _| present.binary_search(actor).is_ok());
    }

    /// Actors that hang.
    pub fn hung(&self) -> impl Iterator<Item = WatchedActor> {
        self.actors.iter().filter(|(_, watched)| watched.hangs).map(|(actor, _)| *actor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACTOR: WatchedActor = WatchedActor::IndexShard(1);

    fn sampled(detector: &mut HangDetector, progress: u64, has_work: bool) -> Option<HangChange> {
        detector.sample(ACTOR, ActorSample { progress, has_work }, 1.0)
    }

    #[test]
    fn any_progress_restarts_the_count() {
        let mut detector = HangDetector::default();
        for progress in 0..50 {
            assert!((0..HangDetector::SAMPLES).all(|_| sampled(&mut detector, progress, true).is_none()));
        }
    }

    #[test]
    fn intervals_count_by_their_share_of_cpu() {
        let stuck = ActorSample { progress: 3, has_work: true };
        for (share, intervals) in [(1.0, 4), (0.5, 8), (0.0625, 64)] {
            let mut detector = HangDetector::default();
            assert!((0..intervals).all(|_| detector.sample(ACTOR, stuck, share).is_none()), "share {share}");
            assert!((0..50).all(|_| detector.sample(ACTOR, stuck, 0.0).is_none()), "no CPU at all");
            assert_eq!(detector.sample(ACTOR, stuck, share), Some(HangChange::Began), "share {share}");
            let moved = ActorSample { progress: 4, has_work: true };
            assert_eq!(detector.sample(ACTOR, moved, 0.0), Some(HangChange::Ended), "progress always counts");
        }
    }

    #[test]
    fn lasting_hang_is_repeated_and_ends_once() {
        let mut detector = HangDetector::default();
        let mut changes = Vec::new();
        (0..=3 * HangDetector::SAMPLES).for_each(|_| changes.extend(sampled(&mut detector, 9, true)));
        assert_eq!(changes, [HangChange::Began, HangChange::Lasts, HangChange::Lasts]);
        assert_eq!(detector.hung().collect::<Vec<_>>(), [ACTOR]);
        assert_eq!(sampled(&mut detector, 9, false), Some(HangChange::Ended));
        assert_eq!(sampled(&mut detector, 10, false), None);
        assert_eq!(detector.hung().count(), 0);
    }
}
