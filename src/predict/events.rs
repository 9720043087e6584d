//! Comparison of speculative entries with the blocks that engines report, for the model beside events.

use smallvec::SmallVec;

use super::trie::LruEntry;
use super::{RemovalReason, SpeculationModel, SpeculativePrompts};
use crate::index::Index;
use crate::protocol::{KvEvent, RouterEvent, Slot, StorageTier};

/// Number of entries that are compared with the index per block of an event; 64 blocks of entries count as one more.
const COMPARED_PER_BLOCK: u64 = 64;

impl SpeculativePrompts {
    /// Updates the entries after an event was applied to `index`. Only for the model beside events.
    pub fn observe(&mut self, event: &RouterEvent, index: &Index) {
        if !matches!(self.kind, SpeculationModel::BesideEvents(_)) {
            return;
        }
        let Some(slot) = self.ranks.slot_of(event.rank) else { return };
        match &event.data {
            KvEvent::Cleared => self.forget(slot, RemovalReason::Retracted),
            KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => {}
            KvEvent::Stored { .. } | KvEvent::Removed { .. } | KvEvent::Offloaded { .. } | KvEvent::TierCleared
                if event.tier != StorageTier::Device => {}
            KvEvent::TierCleared => self.forget(slot, RemovalReason::Retracted),
            KvEvent::Offloaded { blocks, .. } => self.compare_after(slot, blocks.len(), index),
            KvEvent::Stored { blocks, .. } => self.compare_after(slot, blocks.len(), index),
            KvEvent::Removed { blocks } => self.compare_after(slot, blocks.len(), index),
        }
    }

    /// Compares the entries of a rank with the index after an event of so many blocks. With many entries or long ones it
    /// waits for further events, so that the cost per block is bounded.
    fn compare_after(&mut self, slot: Slot, blocks: usize, index: &Index) {
        let entry = self.ranks.expect_mut(slot);
        entry.unseen_blocks += blocks as u64;
        if entry.unseen_blocks * COMPARED_PER_BLOCK >= entry.ends.len() as u64 + entry.blocks / 64 {
            entry.unseen_blocks = 0;
            self.compare(slot, index);
        }
    }

    /// Compares each entry of a rank with the index.
    fn compare(&mut self, slot: Slot, index: &Index) {
        let ends = self.ranks.get(slot).map(|entry| &entry.ends).into_iter().flatten();
        let ends: SmallVec<[u32; 16]> = ends.map(|(_, end)| *end).collect();
        for end in ends {
            let (hashes, blocks) = self.tries.prompt(end);
            let real_blocks = index.device_depth(slot, &hashes[..blocks as usize]);
            let Some(lru) = self.tries.lru(end) else { continue };
            if real_blocks == blocks {
                self.take(end, u32::MAX, RemovalReason::Confirmed);
            } else if real_blocks < lru.real_blocks {
                self.take(end, u32::MAX, RemovalReason::Retracted);
            } else if real_blocks > lru.real_blocks {
                self.tries.set_lru(end, Some(LruEntry { real_blocks, ..lru }));
            }
        }
    }
}
