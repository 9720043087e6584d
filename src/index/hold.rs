//! Holding and giving up blocks: where one rank's blocks and the tree they lie in change together.
//!
//! Owns nothing. Promises that after each function the tree says of the rank what its spans say. Works on whole
//! stretches of a run: what is appended or taken off in one piece touches the tree once.

use super::Applied;
use super::residence::{CHUNK, Named, Residence, Taken};
use super::table::Spot;
use super::tree::{Holder, Point, Tree};
use crate::protocol::{EngineHash, Slot, StoredBlock};

/// Holds `blocks`, one after the other, behind `at`.
pub(super) fn store(
    tree: &mut Tree,
    residence: &mut Residence,
    slot: Slot,
    mut at: Point,
    mut blocks: &[StoredBlock],
) -> Applied {
    let mut applied = Applied::default();
    while !blocks.is_empty() {
        let (start, len) = tree.grow(at, blocks.iter().map(|block| block.block_hash));
        let done = store_stretch(tree, residence, slot, start, &blocks[..len as usize], &mut applied);
        at = Point { node: start.node, offset: start.offset + done as u32 };
        blocks = &blocks[done..];
    }
    applied
}

/// Takes names away, and gives up the blocks that have none left. Returns how many names were known.
pub(super) fn remove(tree: &mut Tree, residence: &mut Residence, slot: Slot, names: &[EngineHash]) -> usize {
    let mut known = names.len();
    // Neighbours tend to leave together, so the tree hears of a span only when the next block is of another.
    let mut open = None;
    for chunk in names.chunks(CHUNK) {
        let located = residence.locate(chunk);
        for (&name, located) in chunk.iter().zip(&located) {
            match residence.take_located(name, located) {
                Taken::Unknown => known -= 1,
                Taken::StillNamed => {}
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
