//! Holding and giving up blocks: where one rank's blocks and the tree they lie in change together.
//!
//! Owns nothing. Promises that after each function the tree says of the rank what its spans say. Works on whole
//! stretches of a run: what is appended or taken off in one piece touches the tree once.

use super::Applied;
use super::residence::{CHUNK, Named, Residence, Taken};
use super::table::Spot;
use super::tree::{Holder, Point, Tree};
use crate::protocol::{EngineHash, Slot, StorageTier, StoredBlock};

/// What it means that a block is stored again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// Nothing: it is announced again.
    Reported,
    /// There is another copy of it.
    Copy,
}

impl Again {
    /// What engines mean by a store to `tier` behind `parent`. vLLM computes blocks anew that it holds already: the last
    /// one of a prompt that is cached whole, and those that running requests generate alike. It keeps each copy, and
    /// stores and removes each under one name. It also announces blocks again without a copy, if a request asks for that
    /// (`kv_cache_report_mode`): always a prompt's first blocks, so without a parent. A copy of these looks the same and
    /// is not counted: then too little is known until the engine removes its last copy or computes the block again,
    /// while a copy that does not exist would never be removed. Lower tiers keep blocks by name, once each.
    pub(super) fn of(tier: StorageTier, parent: Option<EngineHash>) -> Self {
        if tier == StorageTier::Device && parent.is_some() { Self::Copy } else { Self::Reported }
    }
}

/// Holds `blocks`, one after the other, behind `at`. Where `again` says so, those that are held there under the same
/// name count as further copies.
pub(super) fn store(
    tree: &mut Tree,
    residence: &mut Residence,
    slot: Slot,
    mut at: Point,
    mut blocks: &[StoredBlock],
    again: Again,
) -> Applied {
    let mut applied = Applied::default();
    while !blocks.is_empty() {
        let (start, len) = tree.grow(at, blocks.iter().map(|block| block.block_hash));
        let done = store_stretch(tree, residence, slot, start, &blocks[..len as usize], again, &mut applied);
        at = Point { node: start.node, offset: start.offset + done as u32 };
        blocks = &blocks[done..];
    }
    applied
}

/// Gives up the blocks of `names` with all their copies. Returns how many names were known.
pub(super) fn forget(tree: &mut Tree, residence: &mut Residence, slot: Slot, names: &[EngineHash]) -> usize {
    names.iter().for_each(|name| residence.drop_copies(*name));
    remove(tree, residence, slot, names)
}

/// Takes names away, or one copy each of their blocks, and gives up the blocks that have none left. Returns how many
/// names were known.
pub(super) fn remove(tree: &mut Tree, residence: &mut Residence, slot: Slot, names: &[EngineHash]) -> usize {
    let mut known = names.len();
    // Neighbours tend to leave together, so the tree hears of a span only when the next block is of another.
    let mut open = None;
    for chunk in names.chunks(CHUNK) {
        let located = residence.locate(chunk);
        for (&name, located) in chunk.iter().zip(&located) {
            match residence.take_located(name, located) {
                Taken::Unknown => known -= 1,
                Taken::StillHeld => {}
                Taken::LastName(spot) => {
                    residence.release(spot);
                    if let Some(left) = open.replace(spot.span).filter(|left| *left != spot.span) {
                        publish(tree, residence, slot, left);
                    }
                }
            }
        }
    }
    if let Some(left) = open {
        publish(tree, residence, slot, left);
    }
    residence.settle();
    known
}

/// Gives up everything: `residence` is to be thrown away.
pub(super) fn clear(tree: &mut Tree, residence: &Residence, slot: Slot) {
    for (id, span) in residence.spans() {
        tree.publish(span.node, Holder { slot, span: id, cut: 0, extent: 0 });
    }
}

/// Stores blocks that lie in one piece of one run. Returns how many it got through: a block that was held
/// elsewhere under the same name is given up there, and that may shorten this very run.
fn store_stretch(
    tree: &mut Tree,
    residence: &mut Residence,
    slot: Slot,
    at: Point,
    blocks: &[StoredBlock],
    again: Again,
    applied: &mut Applied,
) -> usize {
    let span = tree.span_of(at.node, slot).unwrap_or_else(|| residence.open(at.node, blocks.len()));
    let mut given_up = None;
    let mut done = 0;
    while done < blocks.len() && given_up.is_none() {
        let offset = at.offset + done as u32;
        let appended = residence.append(span, offset, &blocks[done..]);
        applied.stored += appended as u64;
        done += appended;
        let Some(block) = blocks.get(done) else { break };
        match residence.name(Spot { span, offset: offset + appended as u32 }, block.engine_hash) {
            Named::Already if again == Again::Copy && residence.add_copy(block.engine_hash) => applied.copies += 1,
            Named::Already => applied.duplicates += 1,
            Named::New | Named::Moved => applied.stored += 1,
            Named::MovedFrom(spot) => {
                applied.stored += 1;
                given_up = Some(spot);
            }
        }
        done += 1;
    }
    publish(tree, residence, slot, span);
    if let Some(spot) = given_up {
        residence.release(spot);
        publish(tree, residence, slot, spot.span);
    }
    done
}

/// Tells the tree what a span holds now, and frees the span if that is nothing.
fn publish(tree: &mut Tree, residence: &mut Residence, slot: Slot, id: u32) {
    let span = residence.span(id);
    let holder = Holder { slot, span: id, cut: span.cut(), extent: span.extent() };
    tree.publish(span.node, holder);
    if holder.extent == 0 {
        residence.close(id);
    } else {
        residence.settle_span(id);
    }
}
