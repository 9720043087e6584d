//! Blocks that answers prove: blocks that an engine took from its cache although no event has stored them.
//!
//! A router that subscribes late has missed the stores of every older block. The stores behind them wait for a parent
//! whose name refers to nothing. The answer to a request states how many of its leading blocks the engine had. This is a
//! proof if the stream shows the loss as well: the engine has stored the following block of the prompt behind an unknown
//! parent, whose name then is that of the last block before, or the rank is cold. Without such evidence the blocks are
//! merely in flight, and their events follow.
//!
//! Proven blocks are held under names of this index, since the engine's names are unknown. No removal refers to them:
//! they end when the engine names them itself, and otherwise within [`Index::PROVEN_FOR`] after their last proof. Dumps,
//! digests and names of a rank exclude them. The name of an unknown parent is the engine's, and ends with its removal.

use std::time::Duration;

use super::proven::ProvenNames;
use super::{Applied, Index};
use crate::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, Slot, StorageTier};
use crate::protocol::{StoredBlock, Timestamp, WorkerRank};

/// Number of proven blocks that a rank may have. Further proofs are ignored, whatever an engine answers.
const BLOCKS_MAX: usize = if cfg!(test) { 1 << 6 } else { 1 << 16 };

impl Index {
    /// Time within which a proven block ends after its last proof, at the earliest after half of it.
    pub const PROVEN_FOR: Duration = Duration::from_secs(120);

    /// Records that an engine took the first `blocks` blocks of a prompt from its cache. `is_cold` states that events of
    /// the rank are lost for good. Has no effect without evidence that events are missing, for ranks with cache groups,
    /// which would not match, and for ranks with blocks evicted from the index.
    ///
    /// ```
    /// use pointsman::internals::index::Index;
    /// use pointsman::internals::protocol::{Generation, Slot};
    /// use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier};
    /// use pointsman::protocol::{StoredBlock, Timestamp, WorkerId, WorkerRank};
    ///
    /// let (mut index, rank) = (Index::new(), WorkerRank::new(WorkerId(7), 0));
    /// index.register(rank, Slot(0), Generation(1));
    /// let blocks = vec![StoredBlock { engine_hash: EngineHash(93), block_hash: BlockHash(3) }];
    /// let data = KvEvent::Stored { parent: Some(EngineHash(92)), blocks };
    /// index.apply(&RouterEvent { rank, tier: StorageTier::Device, data });
    ///
    /// let prompt = [1, 2, 3].map(BlockHash);
    /// assert_eq!(index.device_depth(Slot(0), &prompt), 0);
    /// assert_eq!(index.prove(rank, &prompt, 2, false, Timestamp::default()).proven, 2);
    /// assert_eq!(index.device_depth(Slot(0), &prompt), 3);
    /// ```
    pub fn prove(
        &mut self,
        rank: WorkerRank,
        prompt: &[BlockHash],
        blocks: u32,
        is_cold: bool,
        now: Timestamp,
    ) -> Applied {
        let Some(slot) = self.slot_of(rank) else { return Applied { unknown_ranks: 1, ..Applied::default() } };
        if self.rank(slot).groups.is_some() || self.rank(slot).evicted_blocks > 0 {
            return Applied::default();
        }
        self.expire_proven(now);
        let blocks = prompt.len().min(blocks as usize);
        let is_missing = |index: &Self| (index.device_depth(slot, &prompt[..blocks]) as usize) < blocks;
        let mut applied =
            if is_missing(self) { self.restore_doubted(slot, &prompt[..blocks]) } else { Applied::default() };
        let linked = if is_missing(self) { self.unknown_parent(slot, prompt, blocks) } else { None };
        if let Some((depth, name)) = linked {
            applied += self.hold_proven(slot, &prompt[..depth], Some(name), now);
        }
        if is_cold || self.rank(slot).proven.is_some() {
            let depth = if is_cold { blocks } else { self.surrounded(slot, prompt, blocks) };
            applied += self.hold_proven(slot, &prompt[..depth], None, now);
        }
        applied
    }

    /// Whether any block is proven, so that [`Index::expire_proven`] can have an effect.
    #[must_use]
    pub fn has_proven(&self) -> bool {
        self.proven_turn.is_some()
    }

    /// Ends the proven blocks whose time has passed.
    pub fn expire_proven(&mut self, now: Timestamp) {
        let Some(due) = self.proven_turn.filter(|due| *due <= now) else { return };
        let (late, period) = (now.since(due).as_nanos(), (Self::PROVEN_FOR / 2).as_nanos());
        let mut has_names = false;
        for slot in (0..self.ranks.len() as u32).map(Slot) {
            let Some(proven) = self.ranks[slot.index()].as_mut().and_then(|rank| rank.proven.as_mut()) else {
                continue;
            };
            let mut ended = proven.turn();
            if late >= period {
                ended.extend(proven.turn());
            }
            has_names |= proven.len() > 0;
            self.drop_proven(slot, &ended);
            self.recount(slot);
        }
        self.proven_turn =
            Some(due + Duration::from_nanos((late - late % period + period) as u64)).filter(|_| has_names);
    }

    /// Drops the names of proven blocks that the engine has stored under its own.
    pub(super) fn supersede_proven(&mut self, slot: Slot, blocks: &[StoredBlock]) {
        let rank = self.rank_mut(slot);
        let mut ended = Vec::new();
        for name in blocks.iter().map(|block| block.engine_hash) {
            let device = rank.residence(StorageTier::Device).expect("every rank has a device residence");
            let oldest = device.find(name).map(|spot| device.span(spot.span).name(spot.offset));
            let (Some(oldest), Some(proven)) = (oldest.filter(|oldest| *oldest != name), &mut rank.proven) else {
                continue;
            };
            if proven.remove(oldest) {
                ended.push(oldest);
            }
        }
        self.drop_proven(slot, &ended);
    }

    fn drop_proven(&mut self, slot: Slot, names: &[EngineHash]) {
        if !names.is_empty() {
            self.blocks(slot, StorageTier::Device).forget(names);
        }
    }

    /// The number of blocks before the deepest block of a prompt that waits for a parent, and the name of this parent.
    /// All further blocks of the prompt must wait behind that block: its content alone may occur in other prompts.
    fn unknown_parent(&self, slot: Slot, prompt: &[BlockHash], blocks: usize) -> Option<(usize, EngineHash)> {
        let waiting = self.rank(slot).waiting()?;
        let mut depths = (1..=blocks.min(prompt.len().saturating_sub(1))).rev();
        depths.find_map(|depth| Some((depth, waiting.unknown_parent(&prompt[depth..])?)))
    }

    /// Of the first `blocks` blocks of a prompt, the number up to the last block that the rank holds, which may also be
    /// the following one. The engine has the blocks between as well.
    fn surrounded(&self, slot: Slot, prompt: &[BlockHash], blocks: usize) -> usize {
        let names = self.device_names(slot, &prompt[..prompt.len().min(blocks + 1)]);
        names.iter().rposition(Option::is_some).map_or(0, |last| blocks.min(last + 1))
    }

    /// Holds the blocks of a prompt that the rank does not hold yet, the last one under `last` if given.
    fn hold_proven(&mut self, slot: Slot, prompt: &[BlockHash], last: Option<EngineHash>, now: Timestamp) -> Applied {
        let mut names = self.device_names(slot, prompt);
        let is_complete = last.is_none() && names.iter().all(Option::is_some);
        if let (Some(name), Some(_)) = (names.last_mut(), last) {
            *name = last;
        }
        let (mut blocks, mut proven) = (Vec::with_capacity(prompt.len()), Vec::new());
        let mut path = 0;
        for (block_hash, name) in prompt.iter().copied().zip(names) {
            path = self.hasher.hash_one((path, block_hash));
            let engine_hash = name.unwrap_or(EngineHash(path));
            proven.extend(Some(engine_hash).filter(|name| name.0 == path));
            blocks.push(StoredBlock { engine_hash, block_hash });
        }
        let rank = self.ranks[slot.index()].as_mut().expect("every registered slot has a rank");
        let (id, known) = (rank.id, rank.proven.get_or_insert_with(|| Box::new(ProvenNames::new(&self.hasher))));
        let more = proven.iter().filter(|name| !known.contains(**name)).count();
        let has_room = known.len() + more <= BLOCKS_MAX;
        if has_room && !proven.is_empty() {
            self.proven_turn.get_or_insert(now + Self::PROVEN_FOR / 2);
            proven.into_iter().for_each(|name| known.add(name));
        }
        self.recount(slot);
        if is_complete || !has_room {
            return Applied::default();
        }
        let data = KvEvent::Stored { parent: None, blocks };
        let applied = self.apply(&RouterEvent { rank: id, tier: StorageTier::Device, data });
        Applied { proven: applied.stored, stored: 0, duplicates: 0, ..applied }
    }

    /// The oldest name of each block of a prompt that the rank holds on the device.
    pub(super) fn device_names(&self, slot: Slot, prompt: &[BlockHash]) -> Vec<Option<EngineHash>> {
        let mut names = vec![None; prompt.len()];
        let device = self.rank(slot).residence(StorageTier::Device).expect("every rank has a device residence");
        self.device.walk(prompt, |node, agree| {
            let held = node.holders.binary_search_by_key(&slot, |holder| holder.slot);
            let span = held.ok().map(|at| device.span(node.holders[at].span));
            for offset in 0..agree {
                names[(node.depth + offset) as usize] =
                    span.filter(|span| span.holds(offset)).map(|span| span.name(offset));
            }
            true
        });
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Generation;
    use crate::test_support::rank;

    #[test]
    fn proofs_use_bounded_memory() {
        let mut index = Index::new();
        index.register(rank(0), Slot(0), Generation(1));
        for prompt in 0..100 {
            let prompt: Vec<_> = (0..10).map(|block| BlockHash(100 * prompt + block)).collect();
            index.prove(rank(0), &prompt, 10, true, Timestamp::default());
            index.check_invariants();
            assert!(index.held_blocks() <= BLOCKS_MAX);
        }
        assert_eq!(index.held_blocks(), BLOCKS_MAX / 10 * 10);
        index.expire_proven(Timestamp::default() + Index::PROVEN_FOR);
        assert_eq!(index.prove(rank(0), &[BlockHash(1)], 1, true, Timestamp::default()).proven, 1);
    }
}
