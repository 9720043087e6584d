//! Cache group beside the main one: a sliding window, or the state of a Mamba layer.
//!
//! The group keeps the last blocks of each computation in separate memory. A hit ends where the group holds the blocks of
//! its window before the end. It then names its blocks like the main group. Copies count.

use std::collections::VecDeque;
use std::sync::Arc;

use ahash::AHashMap;

use crate::engine::block::{Block, EngineHash};
use crate::engine::event::{CacheEvent, Tier};

/// Blocks of the main group per block of the group.
const SHARE: usize = 2;

pub(crate) struct BesideGroup {
    window_blocks: usize,
    capacity: usize,
    /// Least recently used first.
    order: VecDeque<Arc<Block>>,
    copies: AHashMap<EngineHash, u32>,
}

impl BesideGroup {
    pub(crate) fn new(window_blocks: u32, main_blocks: u32) -> Self {
        let window_blocks = window_blocks as usize;
        let capacity = (main_blocks as usize / SHARE).max(window_blocks);
        Self { window_blocks, capacity, order: VecDeque::new(), copies: AHashMap::new() }
    }

    /// Number of leading blocks that a prompt can reuse.
    pub(crate) fn longest(&self, hashes: &[EngineHash]) -> usize {
        let mut end = hashes.len();
        while let Some(missing) = self.window(&hashes[..end]).iter().rposition(|hash| !self.copies.contains_key(hash)) {
            end = end.saturating_sub(self.window_blocks) + missing;
        }
        end
    }

    /// Keeps the blocks of a hit for longer.
    pub(crate) fn touch(&mut self, hashes: &[EngineHash]) {
        for hash in self.window(hashes) {
            let at = self.order.iter().position(|block| block.hash == *hash).expect("a block of a hit is held");
            let block = self.order.remove(at).expect("the position is valid");
            self.order.push_back(block);
        }
    }

    /// Stores the last of the computed `blocks`.
    pub(crate) fn store(&mut self, blocks: &[Arc<Block>], events: &mut Vec<CacheEvent>) {
        let kept = &blocks[blocks.len().saturating_sub(self.window_blocks)..];
        while self.order.len() + kept.len() > self.capacity {
            let hash = self.order.pop_front().expect("the capacity is at least the window").hash;
            let copies = self.copies.get_mut(&hash).expect("a listed block is counted");
            *copies -= 1;
            if *copies == 0 {
                self.copies.remove(&hash);
            }
            events.push(CacheEvent::Removed { tier: Tier::Beside, hash });
        }
        for block in kept {
            *self.copies.entry(block.hash).or_default() += 1;
            self.order.push_back(Arc::clone(block));
        }
        events.push(CacheEvent::Stored { tier: Tier::Beside, blocks: blocks.to_vec() });
    }

    pub(crate) fn clear(&mut self) {
        self.order.clear();
        self.copies.clear();
    }

    pub(crate) fn held(&self) -> impl Iterator<Item = &Arc<Block>> {
        self.order.iter()
    }

    fn window<'a>(&self, hashes: &'a [EngineHash]) -> &'a [EngineHash] {
        &hashes[hashes.len().saturating_sub(self.window_blocks)..]
    }
}
