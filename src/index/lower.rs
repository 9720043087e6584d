//! Parents in other tiers, parents that arrive later, and copies in lower tiers.
//!
//! A block is pending only while no tier of the rank holds its parent. Storing a list behind a pending block has the
//! same result as storing its blocks one by one.

use std::collections::VecDeque;

use super::residence::Residence;
use super::tree::Point;
use super::waiting::{PendingBlock, PendingBlocks};
use super::{Applied, Index};
use crate::protocol::{BlockHash, EngineHash, RepeatedStore, Slot, StorageTier, StoredBlock};

/// Number of pending blocks, and of blocks in a lower tier without any removal, that a rank may have. Some connectors
/// publish no removals, and stores behind parents that never come are never removed either. Above, they are dropped.
const UNREMOVED_MAX: usize = if cfg!(test) { 1 << 8 } else { 1 << 20 };

impl Index {
    /// The position behind `parent` in a tier's tree; `None` if the rank does not hold the parent. If only another tier
    /// holds the parent, all tiers are searched, nearest first, and the path to the parent is added to this tier's
    /// tree. The caller must then hold a block at the end of that path. In this case the cost is proportional to the depth
    /// of the parent.
    pub(super) fn point_behind(&mut self, slot: Slot, tier: StorageTier, parent: Option<EngineHash>) -> Option<Point> {
        let Some(parent) = parent else { return Some(Point::START) };
        if let Some(point) = self.find(slot, tier, parent) {
            return Some(point);
        }
        let (other, point) =
            StorageTier::ALL.into_iter().find_map(|other| Some((other, self.find(slot, other, parent)?)))?;
        let path = self.tree(other).expect("a block was found in this tree").path(point);
        Some(self.blocks(slot, tier).tree.grow_path(&path))
    }

    /// Stores one block. It becomes pending if its parent is unknown; pending blocks behind it become held.
    pub(super) fn store_one(
        &mut self,
        slot: Slot,
        tier: StorageTier,
        parent: Option<EngineHash>,
        block: &StoredBlock,
        repeated: RepeatedStore,
    ) -> Applied {
        match (self.point_behind(slot, tier, parent), parent) {
            (None, Some(_)) if repeated == RepeatedStore::Copy && self.add_copy(slot, tier, block) => {
                Applied { copies: 1, ..Applied::default() }
            }
            (None, Some(parent)) => self.wait(slot, tier, parent, block),
            (at, _) => {
                self.waiting_mut(slot).remove((tier, block.engine_hash));
                let mut applied = self.blocks(slot, tier).store(at.unwrap_or(Point::START), &[*block], repeated);
                applied.adopted = self.adopt(slot, block.engine_hash);
                applied
            }
        }
    }

    /// Adds copies of blocks to a tier. A list whose blocks follow each other in another tier searches the path to the
    /// first one only.
    pub(super) fn offload(
        &mut self,
        slot: Slot,
        tier: StorageTier,
        mut parent: Option<EngineHash>,
        blocks: &[(EngineHash, Option<BlockHash>)],
    ) -> Applied {
        let mut applied = Applied::default();
        let is_full = |residence: &Residence| residence.is_unremoved() && residence.held_blocks() >= UNREMOVED_MAX;
        if tier != StorageTier::Device && self.rank(slot).residence(tier).is_some_and(is_full) {
            applied.removed = self.clear_tier(slot, tier) as u64;
        }
        let mut last = None;
        for &(name, block_hash) in blocks {
            let others = StorageTier::ALL.into_iter().filter(|other| *other != tier);
            applied += if self.find(slot, tier, name).is_some() {
                let is_counted = self.blocks(slot, tier).residence.add_copy(name);
                Applied { copies: is_counted.into(), duplicates: (!is_counted).into(), ..Applied::default() }
            } else if let Some(found) = { others }.find_map(|other| Some((other, self.find(slot, other, name)?))) {
                self.copy_from(slot, tier, name, found, &mut last)
            } else if let Some(block_hash) = block_hash {
                let stored = StoredBlock { engine_hash: name, block_hash };
                self.store_one(slot, tier, parent, &stored, RepeatedStore::Copy)
            } else {
                self.wait_like(slot, tier, name)
            };
            parent = Some(name);
        }
        applied
    }

    /// Stores a block of another tier, at the position `found` behind it there. `last` is the previous block of the list
    /// as its tier, the position behind it there, and the position behind it in this tier.
    fn copy_from(
        &mut self,
        slot: Slot,
        tier: StorageTier,
        name: EngineHash,
        found: (StorageTier, Point),
        last: &mut Option<((StorageTier, Point), Point)>,
    ) -> Applied {
        let (other, behind) = found;
        let of = self.tree(other).expect("a block was found in this tree");
        let (before, block_hash) = of.step_back(behind);
        let continued = last.filter(|(previous, _)| *previous == (other, before)).map(|(_, at)| at);
        let path = if continued.is_none() { of.path(before) } else { Vec::new() };
        self.waiting_mut(slot).remove((tier, name));
        let mut blocks = self.blocks(slot, tier);
        let at = continued.unwrap_or_else(|| blocks.tree.grow_path(&path));
        let stored = StoredBlock { engine_hash: name, block_hash };
        let applied = blocks.store(at, &[stored], RepeatedStore::Copy);
        *last = self.find(slot, tier, name).map(|at| (found, at));
        applied
    }

    /// Records a copy of a pending block of another tier as pending. A copy of any other block is not known.
    fn wait_like(&mut self, slot: Slot, tier: StorageTier, name: EngineHash) -> Applied {
        let of_tier = |tier| self.rank(slot).waiting()?.get((tier, name));
        match std::iter::once(tier).chain(StorageTier::ALL).find_map(of_tier) {
            Some(PendingBlock { parent, block_hash }) => {
                self.wait(slot, tier, parent, &StoredBlock { engine_hash: name, block_hash })
            }
            None => Applied { unknown_contents: 1, ..Applied::default() },
        }
    }

    /// Removes the pending blocks among `names`. Returns the other names, or `None` if the rank has no pending block.
    pub(super) fn remove_waiting(
        &mut self,
        slot: Slot,
        tier: StorageTier,
        names: &[EngineHash],
    ) -> Option<Vec<EngineHash>> {
        if !self.rank(slot).has_waiting() {
            return None;
        }
        let waiting = self.waiting_mut(slot);
        Some(names.iter().copied().filter(|name| waiting.remove((tier, *name)).is_none()).collect())
    }

    pub(super) fn find(&self, slot: Slot, tier: StorageTier, name: EngineHash) -> Option<Point> {
        let residence = self.rank(slot).residence(tier)?;
        let spot = residence.find(name)?;
        Some(Point { node: residence.span(spot.span).node, offset: spot.offset + 1 })
    }

    /// Adds a copy of a held block, which keeps its position. Returns false if its content is another one.
    fn add_copy(&mut self, slot: Slot, tier: StorageTier, block: &StoredBlock) -> bool {
        let behind = self.find(slot, tier, block.engine_hash);
        let held = self.tree(tier).zip(behind).map(|(tree, behind)| tree.step_back(behind).1);
        held == Some(block.block_hash) && self.blocks(slot, tier).residence.add_copy(block.engine_hash)
    }

    /// Records a block as pending, unless it is already held. A held block keeps its position, since the new position
    /// is unknown.
    fn wait(&mut self, slot: Slot, tier: StorageTier, parent: EngineHash, block: &StoredBlock) -> Applied {
        if self.rank(slot).waiting().is_some_and(|waiting| waiting.len() >= UNREMOVED_MAX) {
            *self.waiting_mut(slot) = PendingBlocks::new(self.hasher.clone());
        }
        let held = self.find(slot, tier, block.engine_hash).is_some();
        let waits = PendingBlock { parent, block_hash: block.block_hash };
        if !held && self.waiting_mut(slot).insert((tier, block.engine_hash), waits) {
            Applied { waiting: 1, ..Applied::default() }
        } else {
            Applied { duplicates: 1, ..Applied::default() }
        }
    }

    /// Stores every block that is pending behind `name`, and recursively the blocks behind these. Returns the number of
    /// stored blocks.
    fn adopt(&mut self, slot: Slot, name: EngineHash) -> u64 {
        let mut adopted = 0;
        let mut known = VecDeque::from([name]);
        while let Some(parent) = known.pop_front() {
            // The path to the parent is searched once per tier: the first child keeps it in the tree.
            let mut behind = None;
            for ((tier, name), block) in self.waiting_mut(slot).take_children(parent) {
                let searched = behind.filter(|(of, _)| *of == tier).map(|(_, at)| at);
                let at = searched.or_else(|| self.point_behind(slot, tier, Some(parent)));
                let at = at.expect("a block that was just stored is known");
                // A child with the name of its parent is the parent of the next ones in its tier.
                behind = (name != parent).then_some((tier, at));
                let stored = StoredBlock { engine_hash: name, block_hash: block.block_hash };
                self.blocks(slot, tier).store(at, &[stored], RepeatedStore::Announcement);
                known.push_back(name);
                adopted += 1;
            }
        }
        adopted
    }

    fn waiting_mut(&mut self, slot: Slot) -> &mut PendingBlocks {
        self.ranks[slot.index()].as_mut().expect("every registered slot has a rank").waiting_mut(&self.hasher)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Generation, KvEvent, RouterEvent};
    use crate::test_support::rank;

    #[test]
    fn publishers_without_removals_use_bounded_memory() {
        let mut index = Index::new();
        index.register(rank(0), Slot(0), Generation(1));
        let apply = |index: &mut Index, tier, parent: Option<u64>, name| {
            let blocks = vec![(EngineHash(name), Some(BlockHash(name)))];
            let data = KvEvent::Offloaded { parent: parent.map(EngineHash), blocks };
            let applied = index.apply(&RouterEvent { rank: rank(0), tier, data });
            index.check_invariants();
            assert!(index.held_blocks() <= UNREMOVED_MAX);
            applied
        };
        let more = UNREMOVED_MAX as u64 + 10;
        (0..more).for_each(|name| _ = apply(&mut index, StorageTier::Disk, None, name));
        assert_eq!(index.held_blocks(), 10);
        let removed = KvEvent::Removed { blocks: vec![EngineHash(UNREMOVED_MAX as u64)] };
        index.apply(&RouterEvent { rank: rank(0), tier: StorageTier::Disk, data: removed });
        (more..2 * more).for_each(|name| {
            let data = vec![(EngineHash(name), Some(BlockHash(name)))];
            let data = KvEvent::Offloaded { parent: None, blocks: data };
            index.apply(&RouterEvent { rank: rank(0), tier: StorageTier::Disk, data });
        });
        assert_eq!(index.held_blocks() as u64, 9 + more, "a tier with removals is as large as its engine's");
        let mut pending = Index::new();
        pending.register(rank(0), Slot(0), Generation(1));
        (0..more).for_each(|name| _ = apply(&mut pending, StorageTier::HostPinned, Some(1 << 40), name));
        assert_eq!(pending.names_of(rank(0)).len(), 10);
    }
}
