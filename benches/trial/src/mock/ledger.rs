//! Contents of a rank's cache at the position of its last published message, for audits.
//!
//! A step changes the cache before its events are published, so the cache itself is between two positions most of the
//! time. The ledger follows the events as they are published, before faults change them. Copies count by the rule of
//! the index: a repeated block in a list without a parent is no copy, unless there are several groups.

use std::collections::BTreeMap;

use bytes::Bytes;
use pointsman::EngineContents;
use pointsman::protocol::{EngineHash, StorageTier};

use crate::engine::{CacheEvent, Tier};

/// A block: its tier and its name.
type BlockName = (StorageTier, EngineHash);

#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Number of copies of each held block of the main group.
    blocks: BTreeMap<BlockName, u32>,
    has_groups: bool,
}

impl Ledger {
    pub(super) fn apply(&mut self, events: &[CacheEvent]) {
        for event in events {
            match event {
                CacheEvent::Stored { tier: Tier::Beside, .. } => self.has_groups = true,
                CacheEvent::Removed { tier: Tier::Beside, .. } => {}
                CacheEvent::Stored { tier, blocks } => {
                    let is_behind = blocks.first().is_some_and(|block| block.parent.is_some());
                    let is_copy = *tier == Tier::Device && (is_behind || self.has_groups);
                    for block in blocks {
                        let copies = self.blocks.entry(name(*tier, &block.hash)).or_default();
                        *copies = if is_copy { *copies + 1 } else { (*copies).max(1) };
                    }
                }
                CacheEvent::Removed { tier, hash } => {
                    let name = name(*tier, hash);
                    if let Some(copies) = self.blocks.get_mut(&name) {
                        *copies -= 1;
                        if *copies == 0 {
                            self.blocks.remove(&name);
                        }
                    }
                }
                CacheEvent::Cleared => self.blocks.retain(|(tier, _), _| *tier != StorageTier::Device),
            }
        }
    }

    /// Reply to an audit request; `None` for other numbers.
    pub(super) fn reply(&self, request: u64) -> Option<Bytes> {
        EngineContents::reply(request, self.blocks.keys().copied()).map(Bytes::from)
    }
}

fn name(tier: Tier, hash: &crate::engine::EngineHash) -> BlockName {
    let tier = match tier {
        Tier::Device | Tier::Beside => StorageTier::Device,
        Tier::Host => StorageTier::HostPinned,
    };
    (tier, EngineHash(hash.as_u64()))
}
