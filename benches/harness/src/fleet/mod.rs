//! The simulated fleet with its router: shape and dense numbers of ranks, engines, and router settings.

mod rules;
mod setup;

use pointsman::protocol::{WorkerId, WorkerRank};

pub use rules::Rule;
pub use setup::{DisaggregationSetup, Knowledge, ReplicaSetup, ReplicaSharing, RouterSetup, Setup};
pub(crate) use setup::{policy_named, setting};

/// `workers` workers, numbered from 1, with `dp_size` ranks each, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// Number of workers.
    pub workers: u32,
    /// Number of ranks per worker.
    pub dp_size: u32,
}

impl Fleet {
    /// Total number of ranks.
    #[must_use]
    pub fn ranks(self) -> usize {
        self.workers as usize * self.dp_size as usize
    }

    /// Ids of the workers.
    pub fn worker_ids(self) -> impl Iterator<Item = WorkerId> {
        (1..=u64::from(self.workers)).map(WorkerId)
    }

    /// Dense number of `rank`; none if the rank is not in the fleet.
    ///
    /// ```
    /// use pointsman::protocol::{WorkerId, WorkerRank};
    /// use pointsman_bench::fleet::Fleet;
    ///
    /// let fleet = Fleet { workers: 3, dp_size: 2 };
    /// assert_eq!(fleet.index(WorkerRank::new(WorkerId(3), 1)), Some(5));
    /// assert_eq!(fleet.index(WorkerRank::new(WorkerId(0), 0)), None);
    /// assert_eq!(fleet.index(WorkerRank::new(WorkerId(1), 2)), None);
    /// ```
    #[must_use]
    pub fn index(self, rank: WorkerRank) -> Option<usize> {
        let worker = rank.worker.0.checked_sub(1)?;
        (worker < u64::from(self.workers) && rank.rank < self.dp_size)
            .then(|| worker as usize * self.dp_size as usize + rank.rank as usize)
    }
}
