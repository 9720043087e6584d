//! The simulated fleet's shape: equal workers of equal ranks, and a dense number for each rank.

use pointsman::protocol::{WorkerId, WorkerRank};

/// `workers` workers, numbered from 1, of `dp_size` ranks each, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// Number of workers.
    pub workers: u32,
    /// Ranks of each.
    pub dp_size: u32,
}

impl Fleet {
    /// Number of ranks.
    #[must_use]
    pub fn ranks(self) -> usize {
        self.workers as usize * self.dp_size as usize
    }

    /// The workers' names.
    pub fn worker_ids(self) -> impl Iterator<Item = WorkerId> {
        (1..=u64::from(self.workers)).map(WorkerId)
    }

    /// The dense number of `rank`, if it is one of the fleet's.
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
