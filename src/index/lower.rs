//! What lower tiers need beyond the device tier: parents in other tiers, and parents that come later.
//!
//! Owns nothing. Promises that no block waits for a name that the rank knows in any tier, and that storing a
//! list behind a waiting block comes to the same as storing its blocks one by one.

use std::collections::VecDeque;

use super::hold::Again;
use super::tree::Point;
use super::waiting::Block;
use super::{Applied, Index, hold};
use crate::protocol::{EngineHash, Slot, StorageTier, StoredBlock};

impl Index {
    /// Where blocks behind `parent` belong in a tier's tree; `None` when the rank does not know the parent. A
    /// parent that only another tier holds is looked for in all of them, nearest first, and the way to it is
    /// laid in this tier's tree: the caller holds something at its end.
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
        let (mut at, mut rest) = (Point::START, path.as_slice());
        while !rest.is_empty() {
            let (start, len) = tree.grow(at, rest.iter().copied());
            at = Point { node: start.node, offset: start.offset + len };
            rest = &rest[len as usize..];
        }
        Some(at)
    }

    /// Stores blocks one by one, letting wait those whose parent is not known, and adopting those that waited
    /// for one of them.
    pub(super) fn store_each(
        &mut self,
        slot: Slot,
        tier: StorageTier,
        mut parent: Option<EngineHash>,
        blocks: &[StoredBlock],
    ) -> Applied {
        let again = Again::of(tier, parent);
        let mut applied = Applied::default();
        for block in blocks {
            applied += match (self.point_behind(slot, tier, parent), parent) {
                (None, Some(parent)) => self.wait(slot, tier, parent, block),
                (at, _) => {
                    self.waiting_mut(slot).remove((tier, block.engine_hash));
                    let (tree, residence) = self.parts(slot, tier);
                    let at = at.unwrap_or(Point::START);
                    let mut applied = hold::store(tree, residence, slot, at, std::slice::from_ref(block), again);
                    applied.adopted = self.adopt(slot, block.engine_hash);
                    applied
                }
            };
            parent = Some(block.engine_hash);
        }
        applied
    }

    /// Forgets those of `names` that wait. Returns the others, or nothing when that is all of them anyway.
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

    /// Lets a block wait for its parent, unless the block is held already: then it keeps its place, for the new
    /// one cannot be told.
    fn wait(&mut self, slot: Slot, tier: StorageTier, parent: EngineHash, block: &StoredBlock) -> Applied {
        debug_assert_ne!(tier, StorageTier::Device, "device blocks do not wait");
        let held = self.find(slot, tier, block.engine_hash).is_some();
        let waits = Block { parent, block_hash: block.block_hash };
        if !held && self.waiting_mut(slot).insert((tier, block.engine_hash), waits) {
            Applied { waiting: 1, ..Applied::default() }
        } else {
            Applied { duplicates: 1, ..Applied::default() }
        }
    }

    /// Holds every block that waited for `name`, and those that waited for these. Returns how many that were.
    fn adopt(&mut self, slot: Slot, name: EngineHash) -> u64 {
        let mut adopted = 0;
        let mut known = VecDeque::from([name]);
        while let Some(parent) = known.pop_front() {
            for ((tier, name), block) in self.waiting_mut(slot).take_children(parent) {
                let at = self.point_behind(slot, tier, Some(parent)).expect("a block that was just stored is known");
                let stored = StoredBlock { engine_hash: name, block_hash: block.block_hash };
                let (tree, residence) = self.parts(slot, tier);
                hold::store(tree, residence, slot, at, &[stored], Again::Reported);
                known.push_back(name);
                adopted += 1;
            }
        }
        adopted
    }

    fn waiting_mut(&mut self, slot: Slot) -> &mut super::waiting::Waiting {
        self.ranks[slot.index()].as_mut().expect("every registered slot has a rank").waiting_mut(&self.hasher)
    }
}
