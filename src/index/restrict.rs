//! Restriction of hits by cache groups: the part of [`super::groups`] that needs the whole index.

use std::num::NonZeroU32;

use smallvec::SmallVec;

use super::groups::HeldPath;
use super::tree::RunNode;
use super::{Applied, BlockHash, Index, Overlaps};
use crate::protocol::{EngineHash, RepeatedStore, Slot, StorageTier, StoredBlock};

impl Index {
    /// Meaning of repeated stores at the start of a prompt for a rank with groups: reported blocks are a hit, and an engine
    /// computes blocks that it holds only if its groups do not allow a hit. It never reuses the last block of a prompt of
    /// whole blocks. If the groups allow no shorter hit, such a prompt looks like a report, and is one only for an engine
    /// that has certainly reported.
    pub(super) fn repeated_at_start(&mut self, slot: Slot, blocks: &[StoredBlock]) -> RepeatedStore {
        let rank = self.rank(slot);
        let hashes: Vec<_> = blocks.iter().map(|block| block.block_hash).collect();
        let depth = self.device_depth(slot, &hashes);
        // A hit may not be known after evictions from the index, and a copy that does not exist is never removed.
        let (is_evicted, (is_possible, is_certain)) = (rank.evicted_blocks > 0, {
            let nodes = self.nodes(&hashes);
            let allowed = |blocks| self.allowed(slot, &nodes, blocks);
            let is_possible = depth as usize == blocks.len() && allowed(depth) == depth;
            (is_possible, is_possible && depth > 1 && allowed(depth - 1) > 0)
        });
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let groups = rank.groups.as_mut().expect("the rank has groups");
        groups.has_reported |= is_certain;
        let is_hit = is_evicted || is_possible && (groups.has_reported || depth == 1);
        groups.has_computed = !is_hit;
        if is_hit { RepeatedStore::Announcement } else { RepeatedStore::Copy }
    }

    /// Stores names in a group, given with its window, and makes the group known.
    pub(super) fn store_in_group(
        &mut self,
        slot: Slot,
        group: (u8, NonZeroU32),
        starts_prompt: bool,
        names: &[EngineHash],
    ) -> Applied {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        if rank.groups.is_none()
            && let Err(at) = self.grouped.binary_search(&slot)
        {
            self.grouped.insert(at, slot);
        }
        let groups = rank.groups.get_or_insert_default();
        groups.store(group, starts_prompt, names, &self.hasher);
        Applied { grouped: names.len() as u64, ..Applied::default() }
    }

    /// Removes one copy of each name from a group.
    pub(super) fn remove_from_group(&mut self, slot: Slot, number: u8, names: &[EngineHash]) -> Applied {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let removed = rank.groups.as_mut().map_or(0, |groups| groups.remove(number, names));
        Applied { grouped: removed as u64, ..Applied::default() }
    }

    /// Drops the groups of a rank whose device tier is cleared.
    pub(super) fn forget_groups(&mut self, slot: Slot) {
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        if rank.groups.take().is_some() {
            self.grouped.retain(|other| *other != slot);
        }
    }

    /// Shortens the hits in the device tier to the lengths that the groups allow within the reusable blocks, and removes
    /// those without a block.
    pub(super) fn restrict(&self, hashes: &[BlockHash], reusable_blocks: u32, overlaps: &mut Overlaps) {
        let Overlaps { hits, reached, .. } = overlaps;
        let deepest = self.grouped.iter().map(|slot| reached[slot.index()]).max().unwrap_or(0);
        let nodes = self.nodes(&hashes[..deepest as usize]);
        for &slot in &self.grouped {
            let reached = &mut reached[slot.index()];
            let allowed = self.allowed(slot, &nodes, reusable_blocks.min(*reached));
            if allowed == *reached {
                continue;
            }
            *reached = allowed;
            let at = hits.binary_search_by_key(&slot, |hit| hit.slot).expect("a rank with leading blocks has a hit");
            hits[at].device_blocks = allowed;
        }
        hits.retain(|hit| hit.device_blocks > 0);
    }

    /// The longest hit of a rank within its leading `blocks` blocks on the nodes of a path.
    fn allowed(&self, slot: Slot, nodes: &[&RunNode], blocks: u32) -> u32 {
        let rank = self.rank(slot);
        let device = rank.residence(StorageTier::Device).expect("every rank has a device residence");
        let path = HeldPath::new(device, slot, nodes, blocks);
        rank.groups.as_ref().map_or(blocks, |groups| groups.longest(&path, blocks))
    }

    /// The nodes of the device tier on the path of a prompt.
    fn nodes(&self, hashes: &[BlockHash]) -> SmallVec<[&RunNode; 8]> {
        let mut nodes = SmallVec::new();
        self.device.walk(hashes, |node, _| {
            nodes.push(node);
            true
        });
        nodes
    }

    /// Checks the invariants of the groups.
    pub(super) fn check_groups(&self) {
        let grouped = |slot: &&Slot| self.rank(**slot).groups.is_some();
        let mut slots: Vec<_> = self.registry.values().filter(grouped).copied().collect();
        slots.sort_unstable();
        assert_eq!(self.grouped, slots, "every rank with groups is listed");
        slots.iter().flat_map(|slot| &self.rank(*slot).groups).for_each(|groups| groups.check_invariants());
    }
}
