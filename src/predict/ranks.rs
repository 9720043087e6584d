//! Registered ranks of the predictor, with per-rank counts.
//!
//! Holds each rank's order of remembered prompts and, for ranks with a capacity, the private blocks in the modelled
//! cache. Slots and generations are the same as in the index. [`super::trie`] holds the blocks of prompts.

use std::collections::{BTreeMap, VecDeque};
use std::mem::size_of;

use crate::protocol::{Generation, Slot, WorkerRank};

/// Every registered rank of a shard.
#[derive(Debug, Default)]
pub(super) struct PredictorRanks {
    registry: BTreeMap<WorkerRank, Slot>,
    /// By slot.
    entries: Vec<Option<Box<PredictorRank>>>,
}

/// Rank entry of the predictor.
#[derive(Debug, Default)]
pub(super) struct PredictorRank {
    pub(super) rank: WorkerRank,
    pub(super) generation: Generation,
    /// Capacity of its cache in blocks, if modelled.
    pub(super) capacity: Option<u64>,
    /// Whether the rank publishes events, so that it has no speculative entries.
    pub(super) publishes: bool,
    /// Root of its trie.
    pub(super) root: u32,
    /// Ends of its remembered prompts, oldest first.
    pub(super) ends: BTreeMap<u64, u32>,
    /// Distinct blocks in its trie.
    pub(super) blocks: u64,
    /// Private blocks of bookings.
    pub(super) private_active: u64,
    /// Private blocks of released bookings, by the stamp of the release, oldest first.
    private: VecDeque<(u64, u32)>,
    private_released: u64,
    /// Blocks in events since the entries were last compared with the index.
    pub(super) unseen_blocks: u64,
}

impl PredictorRanks {
    pub(super) fn slot_of(&self, rank: WorkerRank) -> Option<Slot> {
        self.registry.get(&rank).copied()
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&PredictorRank> {
        self.entries.get(slot.index())?.as_deref()
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut PredictorRank> {
        self.entries.get_mut(slot.index())?.as_deref_mut()
    }

    /// The entry of a rank that holds data.
    pub(super) fn expect_mut(&mut self, slot: Slot) -> &mut PredictorRank {
        self.get_mut(slot).expect("data of a rank is removed before the rank")
    }

    /// Registers a rank in a free slot.
    pub(super) fn insert(&mut self, slot: Slot, entry: PredictorRank) {
        if self.entries.len() <= slot.index() {
            self.entries.resize_with(slot.index() + 1, || None);
        }
        self.registry.insert(entry.rank, slot);
        self.entries[slot.index()] = Some(Box::new(entry));
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Box<PredictorRank>> {
        let entry = self.entries.get_mut(slot.index())?.take()?;
        self.registry.remove(&entry.rank);
        Some(entry)
    }

    /// Every registered rank, in rank order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &PredictorRank)> {
        self.registry.values().filter_map(|&slot| Some((slot, self.get(slot)?)))
    }

    /// Heap bytes owned.
    pub(super) fn bytes(&self) -> usize {
        let entry =
            |entry: &PredictorRank| size_of::<PredictorRank>() + entry.private.capacity() * size_of::<(u64, u32)>();
        self.entries.capacity() * size_of::<Option<Box<PredictorRank>>>()
            + self.registry.len() * size_of::<(WorkerRank, Slot)>() * 3 / 2
            + self.entries.iter().flatten().map(|taken| entry(taken)).sum::<usize>()
    }
}

impl PredictorRank {
    pub(super) fn new(rank: WorkerRank, generation: Generation, capacity: Option<u64>, root: u32) -> Self {
        Self { rank, generation, capacity, root, ..Self::default() }
    }

    /// Number of blocks above the modelled capacity.
    pub(super) fn blocks_over_capacity(&self) -> u64 {
        let resident = self.blocks + self.private_active + self.private_released;
        self.capacity.map_or(0, |capacity| resident.saturating_sub(capacity))
    }

    /// Releases a booking's private blocks.
    pub(super) fn release_private(&mut self, stamp: u64, blocks: u32) {
        self.private_active -= u64::from(blocks);
        if blocks > 0 {
            self.private.push_back((stamp, blocks));
            self.private_released += u64::from(blocks);
        }
    }

    /// Evicts up to `blocks_max` private blocks of the oldest release, unless its stamp exceeds `stamp_max`. Returns
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

    /// Checks the invariants of the type.
    pub(super) fn check_invariants(&self) {
        let released = self.private.iter().map(|(_, blocks)| u64::from(*blocks)).sum::<u64>();
        assert_eq!(self.private_released, released, "private blocks not in use are counted");
        assert!(self.private.iter().is_sorted_by(|a, b| a.0 < b.0), "oldest first");
        let in_use = !self.ends.is_empty() || !self.private.is_empty();
        assert!(self.blocks_over_capacity() == 0 || !in_use, "only blocks in use exceed the capacity");
    }
}
