//! Shell of the supervisor: the ranks with their actors, and what acknowledgements, deaths and timers mean for
//! [`Membership`].
//!
//! The effects of the membership are performed by the supervisor itself: most of them start an actor, for which the
//! supervisor waits in a runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Defect;
use super::shard::shard_of;
use crate::directory::{Directory, Lease};
use crate::membership::{Child, Membership, MembershipEffect, MembershipInput, MembershipRules, RegisteredWorker};
use crate::protocol::{Generation, Slot, Timestamp, WorkerId, WorkerRank};

/// Input of the supervisor. `R` is the reply channel of a caller.
pub enum SupervisorInput<R> {
    /// Change of the membership by the embedder or a source.
    Membership(MembershipInput<R>),
    /// Acknowledgement of a drained rank, or the loss of its sequence actor.
    Drained {
        /// Slot of the rank.
        slot: Slot,
        /// Generation of the slot.
        generation: Generation,
    },
    /// Deadline of a drain.
    DrainTimedOut {
        /// Id of the worker.
        worker: WorkerId,
        /// Number of the drain.
        drain: u64,
    },
    /// The blocks of a cold rank were sent to this incarnation of its shard.
    Warmed {
        /// The rank.
        rank: WorkerRank,
        /// Incarnation of the shard.
        incarnation: u32,
    },
    /// An actor has died.
    Died {
        /// The actor.
        child: Child,
        /// Panic message or error.
        reason: String,
    },
}

/// A rank with its actors.
pub trait SupervisedRank {
    /// The rank.
    fn rank(&self) -> WorkerRank;
    /// Generation of its slot.
    fn generation(&self) -> Generation;
    /// Whether KV events of the rank have been applied.
    fn is_indexed(&self) -> bool;
}

/// Shell of the supervisor. See the module documentation.
pub struct SupervisorShell<R, E> {
    membership: Membership<R>,
    /// Ranks by slot, retiring ranks included.
    ranks: BTreeMap<Slot, E>,
    directory: Arc<Directory>,
    shards: usize,
}

impl<R, E: SupervisedRank> SupervisorShell<R, E> {
    /// A supervisor without workers.
    pub fn new(rules: MembershipRules, directory: Arc<Directory>, shards: usize) -> Self {
        Self { membership: Membership::new(rules), ranks: BTreeMap::new(), directory, shards }
    }

    /// Handles one input. The effects are performed in order.
    pub fn step(&mut self, input: SupervisorInput<R>, now: Timestamp) -> Vec<MembershipEffect<R>> {
        let input = match input {
            SupervisorInput::Membership(MembershipInput::RankRetired { .. })
                if Defect::RetirementIgnored.is_planted() =>
            {
                return Vec::new();
            }
            SupervisorInput::Membership(input) => input,
            SupervisorInput::Drained { slot, generation } => {
                let rank_bookings = self.directory.booked_on(slot, generation).len();
                let worker = self.ranks.get(&slot).map(|rank| rank.rank().worker);
                let worker_bookings = worker.map_or(0, |worker| self.bookings_of(worker));
                MembershipInput::RankDrained { slot, generation, rank_bookings, worker_bookings }
            }
            SupervisorInput::DrainTimedOut { worker, drain } => {
                MembershipInput::DrainTimedOut { worker, drain, worker_bookings: self.bookings_of(worker) }
            }
            SupervisorInput::Warmed { rank, incarnation } => {
                MembershipInput::RankWarmed { rank, shard: shard_of(rank, self.shards), incarnation }
            }
            SupervisorInput::Died { child, reason } => {
                let shard_ranks = match child {
                    Child::IndexShard(shard) if !Defect::LossUnnoticed.is_planted() => {
                        self.of_shard(shard).map(|(rank, _)| (rank.rank(), rank.is_indexed())).collect()
                    }
                    _ => BTreeMap::new(),
                };
                MembershipInput::ChildDied { child, reason, shard_ranks }
            }
        };
        self.membership.step(input, now)
    }

    /// Inputs in place of the acknowledgements that a hung scheduler may hold.
    pub fn lost_acknowledgements(&self) -> Vec<SupervisorInput<R>> {
        let (mut retired, mut drained) = (Vec::new(), Vec::new());
        for (slot, rank) in &self.ranks {
            let (slot, generation) = (*slot, rank.generation());
            match self.membership.worker_at(slot) {
                None => {
                    let input = MembershipInput::RankRetired { slot, generation };
                    retired.push(SupervisorInput::Membership(input));
                }
                Some(worker) if worker.draining => drained.push(SupervisorInput::Drained { slot, generation }),
                Some(_) => {}
            }
        }
        retired.append(&mut drained);
        retired
    }

    /// Adds a started rank.
    pub fn insert(&mut self, slot: Slot, rank: E) -> Option<E> {
        self.ranks.insert(slot, rank)
    }

    /// Removes a retired rank.
    pub fn release(&mut self, slot: Slot) -> Option<E> {
        self.ranks.remove(&slot)
    }

    /// Bookings of a released rank: a sequence actor that died first leaves its bookings behind. They have to end.
    pub fn left_behind(&self, slot: Slot, generation: Generation) -> Vec<Arc<Lease>> {
        if Defect::LeftBookingsStay.is_planted() {
            return Vec::new();
        }
        self.directory.booked_on(slot, generation)
    }

    /// The membership.
    pub fn membership(&self) -> &Membership<R> {
        &self.membership
    }

    /// A rank, retiring or not.
    pub fn rank(&self, slot: Slot) -> Option<&E> {
        self.ranks.get(&slot)
    }

    /// As [`SupervisorShell::rank`].
    pub fn rank_mut(&mut self, slot: Slot) -> Option<&mut E> {
        self.ranks.get_mut(&slot)
    }

    /// All ranks, retiring ranks included.
    pub fn ranks(&self) -> &BTreeMap<Slot, E> {
        &self.ranks
    }

    /// Ranks that do not retire, with their workers.
    pub fn running(&self) -> impl Iterator<Item = (&E, &RegisteredWorker)> {
        self.ranks.iter().filter_map(|(slot, rank)| Some((rank, self.membership.worker_at(*slot)?)))
    }

    /// Those of an index shard.
    pub fn of_shard(&self, shard: usize) -> impl Iterator<Item = (&E, &RegisteredWorker)> {
        self.running().filter(move |(rank, _)| shard_of(rank.rank(), self.shards) == shard)
    }

    /// Cold ranks of an index shard that is replaced.
    pub fn cold_of(&self, shard: usize) -> BTreeSet<WorkerRank> {
        let ranks = self.of_shard(shard).map(|(rank, _)| rank.rank());
        ranks.filter(|rank| self.membership.cold().contains(rank)).collect()
    }

    /// Bookings on all ranks of a worker, retiring ranks included.
    fn bookings_of(&self, worker: WorkerId) -> usize {
        let slots = self.membership.slots_of(worker);
        slots.map(|(slot, generation)| self.directory.booked_on(slot, generation).len()).sum()
    }
}
