//! Contents of a publisher's replay buffer.

use std::collections::BTreeMap;

use super::BlockName;
use crate::protocol::{KvEvent, RepeatedStore, RouterEvent, StorageTier};

/// Maximum number of blocks in a ring that is compared.
const RING_BLOCKS_MAX: usize = 1 << 20;

/// State of the blocks in a replay buffer, by the last event of each block of consecutive messages.
///
/// A buffer with the first message of the publisher, or with a clear, describes the whole cache. Otherwise a removal
/// proves nothing: a block may have had copies before the beginning of the buffer. Its stores still prove that the index
/// must hold these blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct RingContents {
    blocks: BTreeMap<BlockName, RingBlock>,
    /// Two removals of a block without a store between them prove that a removal removes one copy.
    removes_one: bool,
    has_groups: bool,
    is_whole: bool,
    /// The number after the last message; `None` before the first.
    next: Option<u64>,
}

/// State of one block.
#[derive(Clone, Copy, Debug, Default)]
struct RingBlock {
    /// 0 after the last removal.
    copies: u32,
    /// Whether the number of copies is not known. With several cache groups a repeated store at the start of a prompt may
    /// be a copy, which the index recognises from the groups.
    is_uncertain: bool,
    /// Whether copies are left by the last event, a removal of one copy or of all.
    is_reduced: bool,
}

impl RingContents {
    /// The number after the last message; 0 before the first.
    pub(super) fn next(&self) -> u64 {
        self.next.unwrap_or(0)
    }

    /// Whether the message follows the last one. The first message can have any number.
    pub(super) fn continues_with(&self, sequence: u64) -> bool {
        self.next.is_none_or(|next| next == sequence)
    }

    /// Adds the next message. Returns whether the number of blocks is within the limit.
    pub(super) fn add(&mut self, sequence: u64, events: &[RouterEvent]) -> bool {
        debug_assert!(self.continues_with(sequence), "consecutive messages");
        self.is_whole |= sequence == 0;
        self.next = Some(sequence + 1);
        for event in events {
            match &event.data {
                KvEvent::Cleared => {
                    self.blocks.clear();
                    self.is_whole = true;
                }
                KvEvent::Stored { parent, .. } => {
                    let repeated = RepeatedStore::of(event.tier, parent.is_some(), self.has_groups);
                    for name in names_of(event) {
                        let block = self.blocks.entry(name).or_default();
                        block.is_reduced = false;
                        match repeated {
                            _ if block.copies == 0 => block.copies = 1,
                            RepeatedStore::Copy => block.copies = block.copies.saturating_add(1),
                            RepeatedStore::ByGroups => block.is_uncertain = true,
                            RepeatedStore::Announcement => {}
                        }
                    }
                }
                KvEvent::Offloaded { blocks, .. } => {
                    for &(name, block_hash) in blocks {
                        // As in the index: a copy of a block that no tier has is not known without its content.
                        if block_hash.is_some() || StorageTier::ALL.iter().any(|tier| self.holds((*tier, name))) {
                            let block = self.blocks.entry((event.tier, name)).or_default();
                            (block.copies, block.is_reduced) = (block.copies + 1, false);
                        }
                    }
                }
                KvEvent::TierCleared => self.blocks.retain(|(tier, _), _| *tier != event.tier),
                KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => self.has_groups = true,
                KvEvent::Removed { .. } => {
                    for name in names_of(event) {
                        let block = self.blocks.entry(name).or_default();
                        block.copies = block.copies.saturating_sub(1);
                        self.removes_one |= block.is_reduced;
                        block.is_reduced = block.copies > 0 && event.tier == StorageTier::Device;
                    }
                }
            }
        }
        self.blocks.len() <= RING_BLOCKS_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn held(&self) -> impl Iterator<Item = BlockName> {
        let is_known = |block: &RingBlock| !block.is_uncertain && (self.removes_one || !block.is_reduced);
        self.blocks.iter().filter(move |(_, block)| block.copies > 0 && is_known(block)).map(|(name, _)| *name)
    }

    fn holds(&self, name: BlockName) -> bool {
        self.blocks.get(&name).is_some_and(|block| block.copies > 0)
    }

    pub(super) fn is_gone(&self, name: BlockName) -> bool {
        self.is_whole && self.blocks.get(&name).is_none_or(|block| block.copies == 0 && !block.is_uncertain)
    }

    /// Whether a replay from the beginning of the buffer would not restore the block.
    pub(super) fn is_older(&self, name: BlockName) -> bool {
        !self.is_whole && !self.blocks.contains_key(&name)
    }
}

/// Names in an event that are compared: those of the main attention. Other cache groups are not audited.
pub(super) fn names_of(event: &RouterEvent) -> impl Iterator<Item = BlockName> {
    let (stored, offloaded, removed) = match &event.data {
        KvEvent::Stored { blocks, .. } => (blocks.as_slice(), &[][..], &[][..]),
        KvEvent::Offloaded { blocks, .. } => (&[][..], blocks.as_slice(), &[][..]),
        KvEvent::Removed { blocks } => (&[][..], &[][..], blocks.as_slice()),
        KvEvent::Cleared | KvEvent::TierCleared | KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => {
            (&[][..], &[][..], &[][..])
        }
    };
    let stored = stored.iter().map(|block| block.engine_hash);
    let names = stored.chain(offloaded.iter().map(|(name, _)| *name)).chain(removed.iter().copied());
    names.map(|name| (event.tier, name))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::protocol::{BlockHash, EngineHash, StoredBlock};
    use crate::test_support::rank;

    fn stored(parent: Option<u64>, names: &[u64]) -> RouterEvent {
        let block = |name: &u64| StoredBlock { engine_hash: EngineHash(*name), block_hash: BlockHash(*name) };
        let parent = parent.map(EngineHash);
        event(KvEvent::Stored { parent, blocks: names.iter().map(block).collect() })
    }

    fn removed(names: &[u64]) -> RouterEvent {
        event(KvEvent::Removed { blocks: names.iter().copied().map(EngineHash).collect() })
    }

    fn event(data: KvEvent) -> RouterEvent {
        RouterEvent { rank: rank(0), tier: StorageTier::Device, data }
    }

    fn device(name: u64) -> BlockName {
        (StorageTier::Device, EngineHash(name))
    }

    /// Cause: blocks of which one of several copies is removed were never compared again.
    #[test]
    fn removals_of_single_copies_are_recognised() {
        let mut ring = RingContents::default();
        ring.add(0, &[stored(None, &[1, 2, 3]), stored(Some(1), &[2, 3]), removed(&[2, 3])]);
        assert_eq!(ring.held().collect::<Vec<_>>(), [device(1)]);
        ring.add(1, &[removed(&[3])]);
        assert_eq!(ring.held().collect::<Vec<_>>(), [device(1), device(2)]);
        ring.add(2, &[stored(Some(1), &[2]), removed(&[2])]);
        assert!(ring.is_gone(device(3)) && ring.held().any(|name| name == device(2)));
    }

    /// Cause: the index counts a copy where the groups show a computation, and the ring did not.
    #[test]
    fn repeated_prompts_of_several_groups_are_not_compared() {
        let names = vec![EngineHash(2)];
        let of_group = event(KvEvent::GroupStored {
            group: 1,
            window_blocks: NonZeroU32::MIN,
            starts_prompt: true,
            blocks: names.clone(),
        });
        let mut ring = RingContents::default();
        ring.add(0, &[stored(None, &[1, 2]), of_group.clone(), stored(None, &[3])]);
        ring.add(
            1,
            &[event(KvEvent::GroupRemoved { group: 1, blocks: names.clone() }), stored(None, &[1, 2]), of_group],
        );
        ring.add(2, &[removed(&[2])]);
        assert!(![1, 2, 3].map(device).into_iter().any(|name| ring.is_gone(name)) && ring.is_gone(device(4)));
        assert_eq!(ring.held().collect::<Vec<_>>(), [device(3)]);
    }
}
