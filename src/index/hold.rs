//! Storing and removing blocks: keeps one rank's blocks and the tree of the tier consistent.
//!
//! After each function the tree's holder of the rank matches the rank's spans. Contiguous stretches of a run are
//! processed together, so each stretch updates the tree once.

use super::Applied;
use super::residence::{CHUNK, Named, Residence, Taken};
use super::span::Span;
use super::steps;
use super::table::Spot;
use super::tree::{Holder, Point, Tree};
use crate::protocol::{EngineHash, RepeatedStore, Slot, StoredBlock};

/// Removes all blocks of a rank from a tree. The caller must discard `residence`.
pub(super) fn clear(tree: &mut Tree, residence: &Residence, slot: Slot) {
    for (id, span) in residence.spans() {
        tree.publish(span.node, Holder { slot, span: id, cut: 0, extent: 0 });
    }
}

/// The blocks of a rank in one tier.
pub(super) struct HeldBlocks<'i> {
    pub(super) tree: &'i mut Tree,
    pub(super) residence: &'i mut Residence,
    pub(super) slot: Slot,
}

impl HeldBlocks<'_> {
    /// Stores consecutive `blocks` behind `at`. With [`RepeatedStore::Copy`], a block that is already held there under the
    /// same name counts as a further copy.
    pub(super) fn store(&mut self, mut at: Point, mut blocks: &[StoredBlock], repeated: RepeatedStore) -> Applied {
        let mut applied = Applied::default();
        // A stretch can end early. It is at most twice as long as the previous one in that case, so that the work is
        // proportional to the number of blocks.
        let mut len_max = blocks.len();
        while !blocks.is_empty() {
            let next = &blocks[..blocks.len().min(len_max)];
            let (start, len) = self.tree.grow(at, next.iter().map(|block| block.block_hash));
            let done = self.store_span(start, &next[..len as usize], repeated, &mut applied);
            steps::add(len as usize);
            len_max = if done < len as usize { 2 * done } else { len_max.saturating_mul(2) };
            at = Point { node: start.node, offset: start.offset + done as u32 };
            blocks = &blocks[done..];
        }
        applied
    }

    /// Removes the blocks of `names` with all their copies. Returns the number of known names.
    pub(super) fn forget(&mut self, names: &[EngineHash]) -> usize {
        names.iter().for_each(|name| self.residence.drop_copies(*name));
        self.remove(names)
    }

    /// Removes names, or one copy of their blocks, and releases the blocks without a remaining name. Returns the number of
    /// known names.
    pub(super) fn remove(&mut self, names: &[EngineHash]) -> usize {
        let mut known = names.len();
        // Neighbouring blocks are usually removed together. The tree is updated once per span, when the next block is in
        // another span.
        let mut open = None;
        for chunk in names.chunks(CHUNK) {
            let located = self.residence.locate(chunk);
            for (&name, located) in chunk.iter().zip(&located) {
                match self.residence.take_located(name, located) {
                    Taken::Unknown => known -= 1,
                    Taken::StillHeld => {}
                    Taken::LastName(spot) => {
                        self.residence.release(spot);
                        if let Some(left) = open.replace(spot.span).filter(|left| *left != spot.span) {
                            self.publish(left);
                        }
                    }
                }
            }
        }
        if let Some(left) = open {
            self.publish(left);
        }
        self.residence.shrink();
        known
    }

    /// Stores blocks of one stretch of a run. Returns the number of processed blocks: if a name referred to a block
    /// elsewhere, that block is released, which can shorten this run.
    fn store_span(
        &mut self,
        at: Point,
        blocks: &[StoredBlock],
        repeated: RepeatedStore,
        applied: &mut Applied,
    ) -> usize {
        let span = self.tree.span_of(at.node, self.slot).unwrap_or_else(|| self.residence.open(at.node, blocks.len()));
        let mut released = None;
        let mut done = 0;
        while done < blocks.len() && released.is_none() {
            let offset = at.offset + done as u32;
            let appended = self.residence.append(span, offset, &blocks[done..]);
            applied.stored += appended as u64;
            done += appended;
            let Some(block) = blocks.get(done) else { break };
            match self.residence.name(Spot { span, offset: offset + appended as u32 }, block.engine_hash) {
                Named::Already if repeated == RepeatedStore::Copy && self.residence.add_copy(block.engine_hash) => {
                    applied.copies += 1
                }
                Named::Already => applied.duplicates += 1,
                Named::New | Named::Moved => applied.stored += 1,
                Named::MovedFrom(spot) => {
                    applied.stored += 1;
                    released = Some(spot);
                }
            }
            done += 1;
        }
        self.publish(span);
        if let Some(spot) = released {
            self.residence.release(spot);
            self.publish(spot.span);
        }
        done
    }

    /// Updates the tree's holder of a span, and frees an empty span.
    fn publish(&mut self, id: u32) {
        let span = self.residence.span(id);
        let holder = Holder { slot: self.slot, span: id, cut: span.cut(), extent: span.extent() };
        self.tree.publish(span.node, holder);
        if holder.extent == 0 {
            self.residence.close(id);
        } else {
            self.residence.change(id, Span::shrink);
        }
    }
}
