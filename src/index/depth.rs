//! Prefix depths: number of leading prompt blocks per rank, for blocks that no KV event reported.
//!
//! Uses the same tree as the index tiers, but a rank holds only the leading blocks of a run and blocks have no engine
//! names. Overlaps are returned in slot order. Raising, lowering and querying cost one step per run, not per block,
//! apart from the comparison with the prompt. The caller decides why a rank has a depth. It must keep the blocks of a
//! rank contiguous from the start of the prompt, and lower only blocks that no other user needs.

use std::mem::take;

use ahash::RandomState;

pub(crate) use super::tree::common_blocks;
use super::tree::{Holder, Point, ROOT, RunNode, Tree};
use super::{Extension, Hit, Index, Overlaps};
use crate::protocol::{BlockHash, Generation, Slot};

impl Index {
    /// Number of leading blocks that the rank in `slot` holds in device memory.
    ///
    /// ```
    /// use pointsman::internals::index::Index;
    /// use pointsman::internals::protocol::Slot;
    /// use pointsman::protocol::BlockHash;
    ///
    /// assert_eq!(Index::new().device_depth(Slot(0), &[BlockHash(1)]), 0);
    /// ```
    #[must_use]
    pub fn device_depth(&self, slot: Slot, hashes: &[BlockHash]) -> u32 {
        let mut depth = 0;
        self.device.walk(hashes, |node, agree| {
            let held = node.holders.binary_search_by_key(&slot, |holder| holder.slot);
            let blocks = held.map_or(0, |at| node.holders[at].cut.min(agree));
            depth += blocks;
            blocks == agree
        });
        depth
    }
}

/// Depth of each rank in the prompts of one tree.
#[derive(Debug)]
pub(crate) struct Depths {
    tree: Tree,
}

/// End of a prompt in the tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DepthEnd(Point);

impl Depths {
    pub(crate) fn new() -> Self {
        Self { tree: Tree::new(RandomState::new()) }
    }

    /// Raises a rank's depth to the end of `hashes`, unless it is already deeper.
    pub(crate) fn raise(&mut self, slot: Slot, hashes: &[BlockHash]) {
        let (mut at, mut rest) = (Point::START, hashes);
        while !rest.is_empty() {
            let (start, len) = self.tree.grow(at, rest.iter().copied());
            at = Point { node: start.node, offset: start.offset + len };
            let held = &self.tree.node(at.node).holders;
            let held = held.binary_search_by_key(&slot, |holder| holder.slot).map_or(0, |found| held[found].cut);
            if held < at.offset {
                self.tree.publish(at.node, reach(slot, at.offset));
            }
            rest = &rest[len as usize..];
        }
    }

    /// The end of a prompt that a rank holds completely. It stays valid while the rank holds the prompt.
    pub(crate) fn end_of(&mut self, hashes: &[BlockHash]) -> DepthEnd {
        // Only looks up existing blocks: the rank holds all of them.
        DepthEnd(self.tree.grow_path(hashes))
    }

    /// Lowers the depth of a rank at the end of a prompt by `blocks`. No deeper block of the rank may depend on the removed
    /// blocks. Returns the new end. One step per run that loses blocks.
    pub(crate) fn lower(&mut self, slot: Slot, DepthEnd(mut end): DepthEnd, mut blocks: u32) -> DepthEnd {
        // Runs that lose no block stay unchanged: the rank may reach further along them than this prompt does.
        while blocks > 0 && end.node != ROOT {
            let RunNode { parent, attach, .. } = *self.tree.node(end.node);
            let keep = end.offset.saturating_sub(blocks);
            blocks -= end.offset - keep;
            self.tree.publish(end.node, reach(slot, keep));
            end = if keep > 0 { Point { offset: keep, ..end } } else { Point { node: parent, offset: attach } };
        }
        DepthEnd(end)
    }

    /// Raises each rank's hit to the depth recorded in this tree, and adds ranks that are only in this tree. Blocks
    /// that a lower tier already counted move to the device tier and are not counted twice.
    pub(crate) fn merge_into(
        &self,
        hashes: &[BlockHash],
        generation: impl Fn(Slot) -> Generation,
        overlaps: &mut Overlaps,
    ) {
        let Overlaps { hits, reached, extensions, .. } = overlaps;
        let known = hits.len();
        self.tree.walk(hashes, |node, agree| {
            let mut anyone_left = false;
            for &Holder { slot, cut, .. } in &node.holders {
                if reached.len() <= slot.index() {
                    reached.resize(slot.index() + 1, 0);
                }
                let reached = &mut reached[slot.index()];
                if *reached != node.depth {
                    continue;
                }
                let blocks = cut.min(agree);
                *reached += blocks;
                anyone_left |= blocks == agree;
                if node.depth == 0 && hits[..known].binary_search_by_key(&slot, |hit| hit.slot).is_err() {
                    hits.push(Hit { slot, generation: generation(slot), device_blocks: 0 });
                }
            }
            anyone_left
        });
        if hits.len() > known {
            hits.sort_unstable_by_key(|hit| hit.slot);
        }
        for hit in hits {
            let deeper = reached.get_mut(hit.slot.index()).map_or(0, take).saturating_sub(hit.device_blocks);
            hit.device_blocks += deeper;
            if let Ok(at) = extensions.binary_search_by_key(&hit.slot, |extension| extension.slot) {
                extensions[at].give_up_leading(deeper);
            }
        }
        extensions.retain(|extension| extension.blocks() > 0);
    }

    /// Heap bytes owned. Visits every run.
    pub(crate) fn bytes(&self) -> usize {
        self.tree.bytes()
    }

    /// Checks the invariants of the tree and of prefix depths.
    pub(crate) fn check_invariants(&self) {
        self.tree.check_invariants();
        for (_, node) in self.tree.iter() {
            assert!(node.holders.iter().all(|holder| holder.cut == holder.extent), "leading blocks have no hole");
        }
    }
}

fn reach(slot: Slot, blocks: u32) -> Holder {
    Holder { slot, span: 0, cut: blocks, extent: blocks }
}

impl Extension {
    /// Removes blocks that the device tier now counts, nearest tier first.
    fn give_up_leading(&mut self, mut blocks: u32) {
        for added in [&mut self.host_pinned_blocks, &mut self.disk_blocks, &mut self.external_blocks] {
            let covered = blocks.min(*added);
            *added -= covered;
            blocks -= covered;
        }
    }
}
