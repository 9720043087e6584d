//! Contents of a rank's cache at the position of its last published message, for audits.
//!
//! A step changes the cache before its events are published, so the cache itself is between two positions most of the
//! time. The ledger follows the events as they are published, before faults change them. Copies count by the rule of
//! the index: a repeated block in a list without a parent is no copy.

use std::collections::BTreeMap;

use bytes::Bytes;
use pointsman::EngineContents;
use pointsman::protocol::{EngineHash, StorageTier};

use crate::engine::{CacheEvent, Tier};

/// A block: its tier and its name.
type BlockName = (StorageTier, EngineHash);

/// Number of copies of each held block.
#[derive(Debug, Default)]
pub(super) struct Ledger(BTreeMap<BlockName, u32>);

impl Ledger {
    pub(super) fn apply(&mut self, events: &[CacheEvent]) {
        for event in events {
            match event {
                CacheEvent::Stored { tier, blocks } => {
                    let is_copy = *tier == Tier::Device && blocks.first().is_some_and(|block| block.parent.is_some());
                    for block in blocks {
                        let copies = self.0.entry(name(*tier, &block.hash)).or_default();
                        *copies = if is_copy { *copies + 1 } else { (*copies).max(1) };
                    }
                }
                CacheEvent::Removed { tier, hash } => {
                    let name = name(*tier, hash);
                    if let Some(copies) = self.0.get_mut(&name) {
                        *copies -= 1;
                        if *copies == 0 {
                            self.0.remove(&name);
                        }
                    }
                }
                CacheEvent::Cleared => self.0.clear(),
            }
        }
    }

    /// Reply to an audit request; `None` for other numbers.
    pub(super) fn reply(&self, request: u64) -> Option<Bytes> {
        EngineContents::reply(request, self.0.keys().copied()).map(Bytes::from)
    }
}

fn name(tier: Tier, hash: &crate::engine::EngineHash) -> BlockName {
    let tier = match tier {
        Tier::Device => StorageTier::Device,
        Tier::Host => StorageTier::HostPinned,
    };
    (tier, EngineHash(hash.as_u64()))
}
