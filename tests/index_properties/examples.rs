//! Examples of known engine behavior, and the resulting tree.

use super::*;

/// Ranks of the examples: `0`, `1`, ... are single-rank workers in slots with the same numbers.
struct Fleet(Index);

impl Fleet {
    fn of(ranks: u64) -> Self {
        let mut index = Index::new();
        for rank in 0..ranks {
            assert!(index.register(WorkerRank::new(WorkerId(rank), 0), Slot(rank as u32), Generation(1)));
        }
        Self(index)
    }

    fn apply(&mut self, rank: u64, data: KvEvent) {
        let tier = StorageTier::Device;
        self.0.apply(&RouterEvent { rank: WorkerRank::new(WorkerId(rank), 0), tier, data });
        self.0.check_invariants();
    }

    /// Stores blocks given as (name, hash).
    fn store(&mut self, rank: u64, parent: Option<u64>, blocks: &[(u64, u64)]) {
        let block =
            |&(name, hash): &(u64, u64)| StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(hash) };
        let blocks = blocks.iter().map(block).collect();
        self.apply(rank, KvEvent::Stored { parent: parent.map(EngineHash), blocks });
    }

    fn remove(&mut self, rank: u64, names: &[u64]) {
        self.apply(rank, KvEvent::Removed { blocks: names.iter().copied().map(EngineHash).collect() });
    }

    /// (slot, device blocks, blocks of lower tiers) of every hit.
    fn ask(&self, hashes: &[u64]) -> Vec<(u32, u32, u32)> {
        let hashes: Vec<_> = hashes.iter().copied().map(BlockHash).collect();
        let mut overlaps = Overlaps::default();
        self.0.overlaps(&hashes, &mut overlaps);
        overlaps.iter().map(|(hit, more)| (hit.slot.0, hit.device_blocks, more.blocks())).collect()
    }
}

/// Blocks named by their hashes plus ten.
fn named(hashes: &[u64]) -> Vec<(u64, u64)> {
    hashes.iter().map(|hash| (hash + 10, *hash)).collect()
}

#[test]
fn a_shared_prefix_is_one_run_for_any_held_lengths() {
    let mut fleet = Fleet::of(64);
    let prompt: Vec<_> = (100..200).collect();
    for rank in 0..64 {
        fleet.store(rank, None, &named(&prompt[..1 + rank as usize]));
    }
    assert_eq!(fleet.0.shape(StorageTier::Device), [1, 64, 64]);
    assert!(fleet.ask(&prompt).iter().all(|(slot, blocks, _)| *blocks == slot + 1));
    // The run keeps only the blocks that some rank holds.
    fleet.0.remove_rank(WorkerRank::new(WorkerId(63), 0));
    fleet.remove(62, &[110]);
    assert_eq!(fleet.0.shape(StorageTier::Device)[1], 63);
    fleet.0.remove_rank(WorkerRank::new(WorkerId(62), 0));
    assert_eq!(fleet.0.shape(StorageTier::Device)[1], 62);
}

#[test]
fn prompts_above_the_longest_run_continue_in_a_second_run() {
    const RUN: u64 = 1 << 14;
    let mut fleet = Fleet::of(1);
    let prompt: Vec<_> = (0..RUN + 5).collect();
    fleet.store(0, None, &named(&prompt[..16_000]));
    fleet.store(0, Some(16_009), &named(&prompt[16_000..]));
    assert_eq!(fleet.0.shape(StorageTier::Device)[0], 2);
    assert_eq!(fleet.ask(&prompt), [(0, RUN as u32 + 5, 0)]);
    fleet.remove(0, &[RUN + 12]);
    assert_eq!(fleet.ask(&prompt), [(0, RUN as u32 + 2, 0)]);
}
