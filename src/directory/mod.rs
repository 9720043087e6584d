//! Request directory: the lease of every booking by its request id.
//!
//! A request id has at most one lease at a time, and a lease is removed once. A restarted sequence actor rebuilds its
//! bookings from the directory. [`Lease`] defines the state of one booking; sequence actors do the load accounting.

mod lease;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::HashTable;

use crate::load::PromptBlocks;
use crate::protocol::{BookingId, Generation, Slot, Timestamp};

pub use lease::{Ended, Lease, LeaseState, Progress};

/// Number of independent shards, which reduces lock contention between callers.
const PARTS: usize = 16;

/// The request id has a booking that has not ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request id {0:?} has a booking already")]
pub struct DuplicateRequest(pub String);

/// All leases, by request id.
///
/// ```
/// use pointsman::internals::directory::Directory;
/// use pointsman::internals::load::PromptBlocks;
/// use pointsman::protocol::Timestamp;
///
/// let directory = Directory::default();
/// let lease = directory.enter("req-1", PromptBlocks::Counted(0), Timestamp::default())?;
/// assert!(directory.enter("req-1", PromptBlocks::Counted(0), Timestamp::default()).is_err());
/// lease.end();
/// directory.leave(&lease);
/// assert!(directory.is_empty());
/// # Ok::<(), pointsman::internals::directory::DuplicateRequest>(())
/// ```
#[derive(Debug, Default)]
pub struct Directory {
    parts: [Mutex<HashTable<Arc<Lease>>>; PARTS],
    hasher: ahash::RandomState,
    bookings: AtomicU64,
    len: AtomicUsize,
}

impl Directory {
    /// Adds a pending lease for `request_id`.
    ///
    /// # Errors
    /// If the id is in use.
    pub fn enter(
        &self,
        request_id: &str,
        prompt: PromptBlocks,
        arrival: Timestamp,
    ) -> Result<Arc<Lease>, DuplicateRequest> {
        let hash = self.hasher.hash_one(request_id);
        let mut part = self.part(hash);
        if part.find(hash, |lease| lease.request_id() == request_id).is_some() {
            return Err(DuplicateRequest(request_id.to_owned()));
        }
        let booking = BookingId(self.bookings.fetch_add(1, Ordering::Relaxed));
        let lease = Arc::new(Lease::new(booking, request_id.into(), prompt, arrival));
        part.insert_unique(hash, Arc::clone(&lease), |known| self.hasher.hash_one(known.request_id()));
        self.len.fetch_add(1, Ordering::Relaxed);
        Ok(lease)
    }

    /// The lease of a request id.
    #[must_use]
    pub fn find(&self, request_id: &str) -> Option<Arc<Lease>> {
        let hash = self.hasher.hash_one(request_id);
        self.part(hash).find(hash, |lease| lease.request_id() == request_id).cloned()
    }

    /// Frees the lease's request id. No effect if it is already free, or if the id has a newer lease.
    pub fn leave(&self, lease: &Lease) {
        let hash = self.hasher.hash_one(lease.request_id());
        let mut part = self.part(hash);
        if let Ok(entry) = part.find_entry(hash, |known| known.booking() == lease.booking()) {
            let _ = entry.remove();
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Leases booked on one generation of a slot, in order of booking: the content of its sequence actor.
    ///
    /// Visits every lease.
    #[must_use]
    pub fn booked_on(&self, slot: Slot, generation: Generation) -> Vec<Arc<Lease>> {
        let here = LeaseState::Booked { slot, generation };
        self.collect(|lease| lease.state() == here)
    }

    /// Detached leases without activity for longer than `liveness`, oldest first.
    ///
    /// Visits every lease.
    #[must_use]
    pub fn silent(&self, liveness: Duration, now: Timestamp) -> Vec<Arc<Lease>> {
        self.collect(|lease| lease.is_silent(liveness, now))
    }

    /// Number of programs with a call. Visits every lease.
    #[must_use]
    pub fn programs(&self) -> usize {
        let mut programs = BTreeSet::new();
        for part in &self.parts {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            programs.extend(part.iter().filter_map(|lease| lease.request_keys.get()).map(|keys| keys.program));
        }
        programs.remove(&0);
        programs.len()
    }

    fn collect(&self, wanted: impl Fn(&Lease) -> bool) -> Vec<Arc<Lease>> {
        let mut leases = Vec::new();
        for part in &self.parts {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            leases.extend(part.iter().filter(|lease| wanted(lease)).cloned());
        }
        leases.sort_unstable_by_key(|lease| (lease.booked_at(), lease.booking()));
        leases
    }

    /// Number of leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether there is no lease.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A shard's table is consistent whenever its lock is free, so a panic elsewhere does not corrupt it.
    fn part(&self, hash: u64) -> MutexGuard<'_, HashTable<Arc<Lease>>> {
        let part = &self.parts[(hash >> 32) as usize % PARTS]; // middle bits, because the table uses both ends
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(directory: &Directory, id: &str) -> Arc<Lease> {
        directory.enter(id, PromptBlocks::Counted(0), Timestamp::default()).expect("a free id")
    }

    #[test]
    fn booked_on_returns_one_generation_oldest_first() {
        let directory = Directory::default();
        let (slot, generation) = (Slot(3), Generation(1));
        let leases: Vec<_> = (0..50).map(|n| enter(&directory, &n.to_string())).collect();
        for (n, lease) in leases.iter().enumerate() {
            let generation = if n % 2 == 0 { generation } else { Generation(0) };
            assert!(lease.book(slot, generation, None, Timestamp(0)));
        }
        leases[10].end();
        let booked: Vec<_> = directory.booked_on(slot, generation).iter().map(|lease| lease.booking().0).collect();
        let expected: Vec<u64> = (0..50).filter(|n| n % 2 == 0 && *n != 10).collect();
        assert_eq!(booked, expected);
    }
}
