//! Slots and their generations.

use std::collections::BTreeSet;

use crate::protocol::{Generation, Slot, WorkerId, WorkerRank};

/// Rank in a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotOccupant {
    pub(super) rank: WorkerRank,
    pub(super) generation: Generation,
    /// Removed, and not yet acknowledged as retired.
    pub(super) retiring: bool,
}

/// Assigns the lowest free slot; each assignment has a new generation.
#[derive(Debug, Default)]
pub(super) struct SlotAssignments {
    occupants: Vec<Option<SlotOccupant>>,
    /// Last generation of each slot.
    generations: Vec<Generation>,
    free: BTreeSet<Slot>,
}

impl SlotAssignments {
    pub(super) fn assign(&mut self, rank: WorkerRank) -> (Slot, Generation) {
        let next = || Slot(u32::try_from(self.occupants.len()).unwrap_or(u32::MAX));
        let slot = self.free.pop_first().unwrap_or_else(next);
        if self.occupants.len() <= slot.index() {
            self.occupants.push(None);
            self.generations.push(Generation(0));
        }
        self.generations[slot.index()].0 += 1;
        let generation = self.generations[slot.index()];
        self.occupants[slot.index()] = Some(SlotOccupant { rank, generation, retiring: false });
        (slot, generation)
    }

    /// Frees a slot. Returns false for a generation that has ended before.
    pub(super) fn release(&mut self, slot: Slot, generation: Generation) -> bool {
        let is_current = self.get(slot).is_some_and(|occupant| occupant.generation == generation);
        if is_current {
            self.occupants[slot.index()] = None;
            self.free.insert(slot);
        }
        is_current
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&SlotOccupant> {
        self.occupants.get(slot.index())?.as_ref()
    }

    pub(super) fn set_retiring(&mut self, slot: Slot) -> Option<Generation> {
        let occupant = self.occupants.get_mut(slot.index())?.as_mut()?;
        occupant.retiring = true;
        Some(occupant.generation)
    }

    /// All occupied slots, lowest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &SlotOccupant)> {
        let slots = (0..).map(Slot).zip(&self.occupants);
        slots.filter_map(|(slot, occupant)| Some((slot, occupant.as_ref()?)))
    }

    /// Slots of a worker's ranks that do not retire.
    pub(super) fn running_of(&self, worker: WorkerId) -> impl Iterator<Item = (Slot, Generation)> {
        let of_worker = self.iter().filter(move |(_, occupant)| occupant.rank.worker == worker && !occupant.retiring);
        of_worker.map(|(slot, occupant)| (slot, occupant.generation))
    }

    /// Slots of a worker's ranks, retiring ranks included.
    pub(super) fn all_of(&self, worker: WorkerId) -> impl Iterator<Item = (Slot, Generation)> {
        let of_worker = self.iter().filter(move |(_, occupant)| occupant.rank.worker == worker);
        of_worker.map(|(slot, occupant)| (slot, occupant.generation))
    }

    pub(super) fn check_invariants(&self) -> Result<(), String> {
        let unoccupied: BTreeSet<Slot> = (0..)
            .map(Slot)
            .zip(&self.occupants)
            .filter(|(_, occupant)| occupant.is_none())
            .map(|(slot, _)| slot)
            .collect();
        if unoccupied != self.free {
            return Err(format!("free slots {:?}, unoccupied {unoccupied:?}", self.free));
        }
        match self.iter().find(|(slot, occupant)| self.generations[slot.index()] != occupant.generation) {
            Some((slot, _)) => Err(format!("slot {slot} has a stale generation")),
            None => Ok(()),
        }
    }
}
