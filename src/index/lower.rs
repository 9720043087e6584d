//! Stores and removals in lower tiers: parents in other tiers and parents that arrive later.
//!
//! A block is pending only while no tier of the rank holds its parent. Storing a list behind a pending block has the
//! same result as storing its blocks one by one.

use std::collections::VecDeque;

use super::hold::RepeatedStore;
use super::tree::Point;
use super::waiting::PendingBlock;
use super::{Applied, Index, hold};
use crate::protocol::{EngineHash, Slot, StorageTier, StoredBlock};

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
        if tier == StorageTier::Device {
            return None;
        }
        let (other, point) =
            StorageTier::ALL.into_iter().find_map(|other| Some((other, self.find(slot, other, parent)?)))?;
        let path = self.tree(other).expect("a block was found in this tree").path(point);
        let (tree, _) = self.parts(slot, tier);
        Some(tree.grow_path(&path))
    }

    /// Stores blocks one by one. Blocks with an unknown parent become pending, and pending blocks whose parent is
    /// stored become held.
    pub(super) fn store_each(
        &mut self,
        slot: Slot,
        tier: StorageTier,
        mut parent: Option<EngineHash>,
        blocks: &[StoredBlock],
    ) -> Applied {
        let repeated = RepeatedStore::of(tier, parent);
        let mut applied = Applied::default();
        for block in blocks {
            applied += match (self.point_behind(slot, tier, parent), parent) {
                (None, Some(parent)) => self.wait(slot, tier, parent, block),
                (at, _) => {
                    self.waiting_mut(slot).remove((tier, block.engine_hash));
                    let (tree, residence) = self.parts(slot, tier);
                    let at = at.unwrap_or(Point::START);
                    let mut applied = hold::store(tree, residence, slot, at, std::slice::from_ref(block), repeated);
                    applied.adopted = self.adopt(slot, block.engine_hash);
                    applied
                }
            };
            parent = Some(block.engine_hash);
        }
        applied
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

    /// Records a block as pending, unless it is already held. A held block keeps its position, since the new position
    /// is unknown.
    fn wait(&mut self, slot: Slot, tier: StorageTier, parent: EngineHash, block: &StoredBlock) -> Applied {
        debug_assert_ne!(tier, StorageTier::Device, "device blocks are never pending");
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
                let (tree, residence) = self.parts(slot, tier);
                hold::store(tree, residence, slot, at, &[stored], RepeatedStore::Announcement);
                known.push_back(name);
                adopted += 1;
            }
        }
        adopted
    }

    fn waiting_mut(&mut self, slot: Slot) -> &mut super::waiting::PendingBlocks {
        self.ranks[slot.index()].as_mut().expect("every registered slot has a rank").waiting_mut(&self.hasher)
    }
}
