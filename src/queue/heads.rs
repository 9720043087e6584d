//! Arrival times of the longest-waiting requests of all replicas, readable without messages.
//!
//! Several replicas see the same free capacity at the same time. Their queues take turns: a request is dispatched if
//! more ranks are open to it than other replicas have an older waiting request.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::Timestamp;

/// Arrival of the longest-waiting request of this replica, written by the scheduler, and of the other replicas, written
/// by the replica actor.
///
/// ```
/// use pointsman::protocol::Timestamp;
/// use pointsman::internals::queue::QueueHeads;
///
/// let heads = QueueHeads::default();
/// heads.publish_own(Some(Timestamp(5)));
/// heads.publish_peers(&[Timestamp(3), Timestamp(9)]);
/// assert_eq!(heads.own(), Some(Timestamp(5)));
/// assert_eq!(heads.peers_between(None, Timestamp(5)), 1);
/// ```
#[derive(Debug)]
pub struct QueueHeads {
    own: AtomicU64,
    peers: [AtomicU64; Self::PEERS_MAX],
}

/// Value of a replica without waiting requests.
const NONE: u64 = u64::MAX;

impl QueueHeads {
    /// Maximum number of counted replicas. The oldest requests are kept.
    pub const PEERS_MAX: usize = 16;

    /// Publishes the own one. Only the scheduler may call this.
    pub fn publish_own(&self, arrival: Option<Timestamp>) {
        self.own.store(arrival.map_or(NONE, |arrival| arrival.0), Ordering::Relaxed);
    }

    /// The own one.
    #[must_use]
    pub fn own(&self) -> Option<Timestamp> {
        Some(self.own.load(Ordering::Relaxed)).filter(|arrival| *arrival != NONE).map(Timestamp)
    }

    /// Publishes those of all other replicas, oldest first. Only the replica actor may call this.
    pub fn publish_peers(&self, arrivals: &[Timestamp]) {
        let arrivals = arrivals.iter().map(|arrival| arrival.0).chain(std::iter::repeat(NONE));
        for (cell, arrival) in self.peers.iter().zip(arrivals) {
            cell.store(arrival, Ordering::Relaxed);
        }
    }

    /// Number of other replicas whose longest-waiting request arrived after `after` and before `before`.
    #[must_use]
    pub fn peers_between(&self, after: Option<Timestamp>, before: Timestamp) -> usize {
        let arrivals = self.peers.iter().map(|cell| Timestamp(cell.load(Ordering::Relaxed)));
        let older = arrivals.take_while(|arrival| *arrival < before);
        older.filter(|arrival| Some(*arrival) > after).count()
    }
}

impl Default for QueueHeads {
    fn default() -> Self {
        Self { own: AtomicU64::new(NONE), peers: [const { AtomicU64::new(NONE) }; Self::PEERS_MAX] }
    }
}
