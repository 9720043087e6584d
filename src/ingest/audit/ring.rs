//! Contents of a publisher's replay buffer.

use std::collections::{BTreeMap, BTreeSet};

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
    /// Number of copies; 0 after the last removal.
    blocks: BTreeMap<BlockName, u32>,
    /// Blocks whose number of copies is not known; they are not compared. With several cache groups a repeated store at
    /// the start of a prompt may be a copy, which the index recognises from the groups. A removal may remove all copies.
    uncertain: BTreeSet<BlockName>,
    has_groups: bool,
    is_whole: bool,
    /// The number after the last message; `None` before the first.
    next: Option<u64>,
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
                    self.uncertain.clear();
                    self.is_whole = true;
                }
                KvEvent::Stored { parent, .. } => {
                    let repeated = RepeatedStore::of(event.tier, parent.is_some(), self.has_groups);
                    for name in names_of(event) {
                        let copies = self.blocks.entry(name).or_default();
                        match repeated {
                            _ if *copies == 0 => *copies = 1,
                            RepeatedStore::Copy => *copies = copies.saturating_add(1),
                            RepeatedStore::ByGroups => drop(self.uncertain.insert(name)),
                            RepeatedStore::Announcement => {}
                        }
                    }
                }
                KvEvent::Offloaded { blocks, .. } => {
                    for &(name, block_hash) in blocks {
                        // As in the index: a copy of a block that no tier has is not known without its content.
                        if block_hash.is_some() || StorageTier::ALL.iter().any(|tier| self.holds((*tier, name))) {
                            *self.blocks.entry((event.tier, name)).or_default() += 1;
                        }
                    }
                }
                KvEvent::TierCleared => {
                    self.blocks.retain(|(tier, _), _| *tier != event.tier);
                    self.uncertain.retain(|(tier, _)| *tier != event.tier);
                }
                KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => self.has_groups = true,
                KvEvent::Removed { .. } => {
                    for name in names_of(event) {
                        let copies = self.blocks.entry(name).or_default();
                        *copies = copies.saturating_sub(1);
                        if *copies > 0 && event.tier == StorageTier::Device {
                            self.uncertain.insert(name);
                        } else if !self.has_groups {
                            self.uncertain.remove(&name);
                        }
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
        let held = self.blocks.iter().filter(|(name, copies)| **copies > 0 && !self.uncertain.contains(*name));
        held.map(|(name, _)| *name)
    }

    fn holds(&self, name: BlockName) -> bool {
        self.blocks.get(&name).is_some_and(|copies| *copies > 0)
    }

    pub(super) fn is_gone(&self, name: BlockName) -> bool {
        self.is_whole && !self.uncertain.contains(&name) && self.blocks.get(&name).is_none_or(|copies| *copies == 0)
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

    /// Cause: the index counts a copy where the groups show a computation, and the ring did not.
    #[test]
    fn repeated_prompts_of_several_groups_are_not_compared() {
        let event = |data| RouterEvent { rank: rank(0), tier: StorageTier::Device, data };
        let stored = |names: &[u64]| {
            let block = |name: &u64| StoredBlock { engine_hash: EngineHash(*name), block_hash: BlockHash(*name) };
            event(KvEvent::Stored { parent: None, blocks: names.iter().map(block).collect() })
        };
        let names = vec![EngineHash(2)];
        let of_group = event(KvEvent::GroupStored {
            group: 1,
            window_blocks: NonZeroU32::MIN,
            starts_prompt: true,
            blocks: names.clone(),
        });
        let mut ring = RingContents::default();
        ring.add(0, &[stored(&[1, 2]), of_group.clone(), stored(&[3])]);
        ring.add(1, &[event(KvEvent::GroupRemoved { group: 1, blocks: names.clone() }), stored(&[1, 2]), of_group]);
        ring.add(2, &[event(KvEvent::Removed { blocks: names })]);
        let device = |name| (StorageTier::Device, EngineHash(name));
        assert!(![1, 2, 3].map(device).into_iter().any(|name| ring.is_gone(name)) && ring.is_gone(device(4)));
        assert_eq!(ring.held().collect::<Vec<_>>(), [device(3)]);
    }
}
