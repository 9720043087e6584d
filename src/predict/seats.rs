//! Which rank sits where, and what is counted for it.
//!
//! Owns each rank's order of remembered prompts and, for ranks with a capacity, the private blocks in their modelled
//! cache. Promises the same seats as the index gives. Leaves prompts' blocks to [`super::trie`].

use std::collections::{BTreeMap, VecDeque};
use std::mem::size_of;

use crate::protocol::{Generation, Slot, WorkerRank};

/// Every rank of a shard.
#[derive(Debug, Default)]
pub(super) struct Seats {
    registry: BTreeMap<WorkerRank, Slot>,
    /// By slot.
    seats: Vec<Option<Box<Seat>>>,
}

/// One rank.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) rank: WorkerRank,
    pub(super) generation: Generation,
    /// Blocks that its cache has room for, where it is modelled.
    pub(super) capacity: Option<u64>,
    /// Whether its events are known, so that nothing is guessed.
    pub(super) publishes: bool,
    /// Its trie.
    pub(super) root: u32,
    /// Where its remembered prompts end, oldest first.
    pub(super) ends: BTreeMap<u64, u32>,
    /// Distinct blocks in its trie.
    pub(super) blocks: u64,
    /// Private blocks of bookings.
    pub(super) private_active: u64,
    /// Private blocks of released bookings, by their release's stamp, oldest first.
    private: VecDeque<(u64, u32)>,
    private_released: u64,
}

impl Seats {
    pub(super) fn slot_of(&self, rank: WorkerRank) -> Option<Slot> {
        self.registry.get(&rank).copied()
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&Seat> {
        self.seats.get(slot.index())?.as_deref()
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut Seat> {
        self.seats.get_mut(slot.index())?.as_deref_mut()
    }

    /// The seat of something that the rank holds.
    pub(super) fn expect_mut(&mut self, slot: Slot) -> &mut Seat {
        self.get_mut(slot).expect("what a rank held is forgotten before the rank")
    }

    /// Seats a rank in a slot that is free.
    pub(super) fn insert(&mut self, slot: Slot, seat: Seat) {
        if self.seats.len() <= slot.index() {
            self.seats.resize_with(slot.index() + 1, || None);
        }
        self.registry.insert(seat.rank, slot);
        self.seats[slot.index()] = Some(Box::new(seat));
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Box<Seat>> {
        let seat = self.seats.get_mut(slot.index())?.take()?;
        self.registry.remove(&seat.rank);
        Some(seat)
    }

    /// Every seat that is taken, by rank.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Seat)> {
        self.registry.values().filter_map(|&slot| Some((slot, self.get(slot)?)))
    }

    /// Heap bytes owned.
    pub(super) fn bytes(&self) -> usize {
        let seat = |seat: &Seat| size_of::<Seat>() + seat.private.capacity() * size_of::<(u64, u32)>();
        self.seats.capacity() * size_of::<Option<Box<Seat>>>()
            + self.registry.len() * size_of::<(WorkerRank, Slot)>() * 3 / 2
            + self.seats.iter().flatten().map(|taken| seat(taken)).sum::<usize>()
    }
}

impl Seat {
    pub(super) fn new(rank: WorkerRank, generation: Generation, capacity: Option<u64>, root: u32) -> Self {
        Self {
            rank,
            generation,
            capacity,
            publishes: false,
            root,
            ends: BTreeMap::new(),
            blocks: 0,
            private_active: 0,
            private: VecDeque::new(),
            private_released: 0,
        }
    }

    /// How many blocks too many its modelled cache holds.
    pub(super) fn blocks_over_capacity(&self) -> u64 {
        let resident = self.blocks + self.private_active + self.private_released;
        self.capacity.map_or(0, |capacity| resident.saturating_sub(capacity))
    }

    /// A booking's private blocks are not in use any more.
    pub(super) fn release_private(&mut self, stamp: u64, blocks: u32) {
        self.private_active -= u64::from(blocks);
        if blocks > 0 {
            self.private.push_back((stamp, blocks));
            self.private_released += u64::from(blocks);
        }
    }

    /// Takes up to `blocks_max` private blocks of the oldest release, unless its stamp is above `stamp_max`. Returns
    /// whether there was such a release.
    pub(super) fn evict_private(&mut self, stamp_max: Option<u64>, blocks_max: u32) -> bool {
        let Some((_, blocks)) = self.private.front_mut().filter(|(stamp, _)| stamp_max.is_none_or(|max| *stamp <= max))
        else {
            return false;
        };
        let taken = blocks_max.min(*blocks);
        *blocks -= taken;
        self.private_released -= u64::from(taken);
        if *blocks == 0 {
            self.private.pop_front();
        }
        true
    }

    /// Checks what the type promises.
    pub(super) fn check_invariants(&self) {
        let released = self.private.iter().map(|(_, blocks)| u64::from(*blocks)).sum::<u64>();
        assert_eq!(self.private_released, released, "private blocks not in use are counted");
        assert!(self.private.iter().is_sorted_by(|a, b| a.0 < b.0), "oldest first");
        let in_use = !self.ends.is_empty() || !self.private.is_empty();
        assert!(self.blocks_over_capacity() == 0 || !in_use, "over capacity only by what is in use");
    }
}
