//! KV cache of one rank under held load. It holds every shared prefix from the start, so that its size does not depend on
//! the placements. Own blocks of requests leave in the order of their arrival.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, StoredBlock};
use pointsman_trial::workload::mix;

use super::BLOCK_SIZE;

/// Shared prefixes.
const GROUPS: u64 = 200;

/// Blocks of a shared prefix.
const SHARED_BLOCKS: usize = 6;

/// Own blocks of a request.
const OWN_BLOCKS: usize = 10;

/// Blocks of one event.
const BLOCKS_PER_EVENT: usize = 2;

fn token(seed: u64, at: u64) -> u32 {
    u32::try_from(mix(seed ^ at << 40) % 100_000).expect("below 100,000")
}

/// Token ids of a shared prefix.
fn prefix(group: u64) -> Vec<u32> {
    (0..SHARED_BLOCKS as u64 * u64::from(BLOCK_SIZE)).map(|at| token(group, at)).collect()
}

/// Token ids of request `n`: a shared prefix, its own blocks, and a part of one.
pub(super) fn prompt(n: u64) -> Vec<u32> {
    let own = (0..OWN_BLOCKS as u64 * u64::from(BLOCK_SIZE) + 7).map(|at| token(n + GROUPS, at));
    prefix(mix(n) % GROUPS).into_iter().chain(own).collect()
}

fn hashes(tokens: &[u32]) -> Vec<BlockHash> {
    let block_size = NonZeroU32::new(BLOCK_SIZE).expect("not zero");
    BlockHasher::new(HashScheme::new(block_size)).hashes(tokens, &MmBlocks::NONE).collect()
}

/// State of one rank.
pub(super) struct HeldRank {
    n: u64,
    next_name: u64,
    own: VecDeque<EngineHash>,
    own_max: usize,
}

impl HeldRank {
    pub(super) fn new(n: usize, own_max: usize) -> Self {
        Self { n: n as u64, next_name: 0, own: VecDeque::new(), own_max }
    }

    /// Events of the shared prefixes.
    pub(super) fn fill(&self) -> Vec<KvEvent> {
        let stored = |group| {
            let blocks = hashes(&prefix(group)).into_iter().map(|hash| self.shared(hash)).collect();
            KvEvent::Stored { parent: None, blocks }
        };
        (0..GROUPS).map(stored).collect()
    }

    /// Events of a request: `events` in all for own and removed blocks.
    pub(super) fn serve(&mut self, tokens: &[u32], events: u32) -> Vec<KvEvent> {
        let hashes = hashes(tokens);
        let (shared, own) = hashes.split_at(SHARED_BLOCKS);
        let mut parent = shared.last().map(|hash| self.shared(*hash).engine_hash);
        let mut changes = Vec::new();
        for blocks in own.chunks(BLOCKS_PER_EVENT).take(events as usize / 2) {
            let blocks: Vec<StoredBlock> = blocks.iter().map(|hash| self.named(*hash)).collect();
            self.own.extend(blocks.iter().map(|block| block.engine_hash));
            let last = blocks.last().map(|block| block.engine_hash);
            changes.push(KvEvent::Stored { parent, blocks });
            parent = last;
        }
        while self.own.len() > self.own_max {
            let blocks = self.own.drain(..BLOCKS_PER_EVENT.min(self.own.len())).collect();
            changes.push(KvEvent::Removed { blocks });
        }
        changes
    }

    /// A shared block. Its name depends on rank and contents, so that later requests can refer to it.
    fn shared(&self, block_hash: BlockHash) -> StoredBlock {
        StoredBlock { engine_hash: EngineHash(mix(block_hash.0 ^ mix(self.n))), block_hash }
    }

    fn named(&mut self, block_hash: BlockHash) -> StoredBlock {
        self.next_name += 1;
        StoredBlock { engine_hash: EngineHash(mix(self.next_name ^ self.n << 40)), block_hash }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_rank_removes_as_many_blocks_as_it_stores() {
        let mut rank = HeldRank::new(3, 40);
        let all: Vec<KvEvent> = (0..50).flat_map(|n| rank.serve(&prompt(n), 10)).collect();
        let count = |is_stored: bool| -> usize {
            let of_kind = all.iter().filter(|event| matches!(event, KvEvent::Stored { .. }) == is_stored);
            of_kind.map(KvEvent::block_count).sum()
        };
        assert_eq!(count(true) - count(false), 40);
        assert_eq!(rank.serve(&prompt(51), 10).len(), 10);
    }
}
