//! Blocks that an engine may hold although it has removed them once.
//!
//! A store at the start of a prompt of blocks that the rank holds either reports them or is a computation of further
//! copies, and the events do not show which ([`RepeatedStore`](crate::protocol::RepeatedStore)). It changes nothing. If it
//! was a computation, the engine removes the blocks twice. After the first removal the index does not hold them, so that it
//! never holds too much, but keeps their names and places. Then an answer that took them from the cache restores them
//! under these names, and a second removal ends them.

use super::doubts::{Doubts, Place};
use super::tree::Point;
use super::{Applied, Index};
use crate::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, Slot, StorageTier, StoredBlock};

/// Number of removed blocks before a removed block that are followed.
const STEPS_MAX: u32 = 64;

impl Index {
    /// Updates the doubts after a store in the device tier, which may have been a repeated one at the start of a prompt.
    pub(super) fn doubt_copies(&mut self, slot: Slot, blocks: &[StoredBlock], is_repeated: bool) {
        let hasher = &self.hasher;
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let doubts = rank.doubts.get_or_insert_with(|| Box::new(Doubts::new(hasher)));
        for name in blocks.iter().map(|block| block.engine_hash) {
            // A removed block that is stored again has one certain copy, and the further one.
            if doubts.end(name) || is_repeated {
                doubts.repeat(name);
            }
        }
    }

    /// Updates the doubts before a removal from the device tier.
    pub(super) fn doubt_removals(&mut self, slot: Slot, names: &[EngineHash]) {
        let Some(mut doubts) = self.rank_mut(slot).doubts.take() else { return };
        for &name in names {
            if doubts.is_removed(name) {
                if !doubts.take_repeated(name) {
                    doubts.end(name); // its last copy
                }
                continue;
            }
            let device = self.rank(slot).residence(StorageTier::Device).expect("every rank has a device residence");
            if !device.has_copies(name)
                && doubts.take_repeated(name)
                && let Some(place) = self.place_of(slot, name, &doubts)
            {
                doubts.remove(name, place);
            }
        }
        self.rank_mut(slot).doubts = Some(doubts);
    }

    /// The place of a held block, if the name of the block before is known.
    fn place_of(&self, slot: Slot, name: EngineHash, doubts: &Doubts) -> Option<Place> {
        let behind = self.find(slot, StorageTier::Device, name)?;
        self.place_before(slot, behind, doubts, STEPS_MAX)
    }

    /// The place of the block before a position. Blocks are removed from the end of a prompt, so few steps reach a held block.
    fn place_before(&self, slot: Slot, behind: Point, doubts: &Doubts, steps_max: u32) -> Option<Place> {
        let (at, block_hash) = self.device.step_back(behind);
        if at.offset == 0 {
            return Some((None, block_hash));
        }
        let device = self.rank(slot).residence(StorageTier::Device)?;
        let span = self.device.span_of(at.node, slot).map(|span| device.span(span));
        let held = span.filter(|span| span.holds(at.offset - 1)).map(|span| span.name(at.offset - 1));
        let removed = || doubts.at(&self.place_before(slot, at, doubts, steps_max.checked_sub(1)?)?);
        Some((Some(held.or_else(removed)?), block_hash))
    }

    /// Restores the removed blocks among those of a prompt that the engine took from its cache.
    pub(super) fn restore_doubted(&mut self, slot: Slot, prompt: &[BlockHash]) -> Applied {
        let mut applied = Applied::default();
        if self.rank(slot).doubts.is_none() {
            return applied;
        }
        let (id, mut parent) = (self.rank(slot).id, None);
        for (held, &block_hash) in self.device_names(slot, prompt).into_iter().zip(prompt) {
            // An eviction by the stores of this loop ends the doubts.
            let removed = || self.rank(slot).doubts.as_ref()?.at(&(parent, block_hash));
            let Some(engine_hash) = held.or_else(removed) else { break };
            if held.is_none() {
                self.rank_mut(slot).doubts.as_mut().map(|doubts| doubts.end(engine_hash));
                let data = KvEvent::Stored { parent, blocks: vec![StoredBlock { engine_hash, block_hash }] };
                applied += self.apply(&RouterEvent { rank: id, tier: StorageTier::Device, data });
            }
            parent = Some(engine_hash);
        }
        Applied { proven: applied.stored, stored: 0, ..applied }
    }
}
