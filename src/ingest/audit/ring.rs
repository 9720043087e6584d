//! Contents of a publisher's replay buffer.

use std::collections::BTreeMap;

use super::BlockName;
use crate::protocol::{KvEvent, RouterEvent, StorageTier};

/// Maximum number of blocks in a ring that is compared.
const RING_BLOCKS_MAX: usize = 1 << 20;

/// State of the blocks in a replay buffer, by the last event of each block.
///
/// A buffer with the first message of the publisher, or with a clear, describes the whole cache. Otherwise a removal
/// proves nothing: a block may have had copies before the beginning of the buffer. Its stores still prove that the index
/// must hold these blocks.
#[derive(Clone, Debug, Default)]
pub struct RingContents {
    /// Number of copies; 0 after the last removal.
    blocks: BTreeMap<BlockName, u32>,
    is_whole: bool,
    /// The number after the last message.
    pub(super) next: u64,
    is_too_large: bool,
}

impl RingContents {
    /// Adds a message with its decoded events.
    pub fn add(&mut self, sequence: u64, events: &[RouterEvent]) {
        self.is_whole |= sequence == 0;
        self.next = sequence + 1;
        for event in events {
            match &event.data {
                KvEvent::Cleared => {
                    self.blocks.clear();
                    self.is_whole = true;
                }
                KvEvent::Stored { parent, .. } => {
                    // As in the index: only a repeated store behind a parent is another copy.
                    let is_copy = parent.is_some() && event.tier == StorageTier::Device;
                    for name in names_of(event) {
                        let copies = self.blocks.entry(name).or_default();
                        *copies = if is_copy || *copies == 0 { copies.saturating_add(1) } else { *copies };
                    }
                }
                KvEvent::Removed { .. } => {
                    for name in names_of(event) {
                        let copies = self.blocks.entry(name).or_default();
                        *copies = copies.saturating_sub(1);
                    }
                }
            }
        }
        if self.blocks.len() > RING_BLOCKS_MAX {
            self.blocks.clear();
            self.is_too_large = true;
        }
    }

    pub(super) fn is_evidence(&self) -> bool {
        !self.is_too_large && !self.blocks.is_empty()
    }

    pub(super) fn held(&self) -> impl Iterator<Item = BlockName> {
        self.blocks.iter().filter(|(_, copies)| **copies > 0).map(|(name, _)| *name)
    }

    pub(super) fn is_gone(&self, name: BlockName) -> bool {
        self.is_whole && self.blocks.get(&name).is_none_or(|copies| *copies == 0)
    }
}

/// Names in an event.
pub(super) fn names_of(event: &RouterEvent) -> impl Iterator<Item = BlockName> {
    let (stored, removed) = match &event.data {
        KvEvent::Stored { blocks, .. } => (blocks.as_slice(), &[][..]),
        KvEvent::Removed { blocks } => (&[][..], blocks.as_slice()),
        KvEvent::Cleared => (&[][..], &[][..]),
    };
    let names = stored.iter().map(|block| block.engine_hash).chain(removed.iter().copied());
    names.map(|name| (event.tier, name))
}
