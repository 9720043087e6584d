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

    fn apply(&mut self, rank: u64, tier: StorageTier, data: KvEvent) -> pointsman::internals::index::Applied {
        let applied = self.0.apply(&RouterEvent { rank: WorkerRank::new(WorkerId(rank), 0), tier, data });
        self.0.check_invariants();
        applied
    }

    /// Stores blocks given as (name, hash) on the device.
    fn store(&mut self, rank: u64, parent: Option<u64>, blocks: &[(u64, u64)]) -> pointsman::internals::index::Applied {
        self.store_in(StorageTier::Device, rank, parent, blocks)
    }

    fn store_in(
        &mut self,
        tier: StorageTier,
        rank: u64,
        parent: Option<u64>,
        blocks: &[(u64, u64)],
    ) -> pointsman::internals::index::Applied {
        let block =
            |&(name, hash): &(u64, u64)| StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(hash) };
        let blocks = blocks.iter().map(block).collect();
        self.apply(rank, tier, KvEvent::Stored { parent: parent.map(EngineHash), blocks })
    }

    fn remove(&mut self, rank: u64, names: &[u64]) -> pointsman::internals::index::Applied {
        let blocks = names.iter().copied().map(EngineHash).collect();
        self.apply(rank, StorageTier::Device, KvEvent::Removed { blocks })
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

/// Found by the property: blocks 0 and 1 wait for a block named 10, and the first of them has that name too.
#[test]
fn a_pending_block_with_the_name_of_its_parent_becomes_the_parent() {
    let mut fleet = Fleet::of(1);
    fleet.store_in(StorageTier::HostPinned, 0, Some(10), &[(10, 0), (11, 0)]);
    let applied = fleet.store(0, None, &[(10, 0)]);
    assert_eq!((applied.stored, applied.adopted), (1, 2));
    assert_eq!(fleet.ask(&[0, 0, 0]), [(0, 1, 2)]);
}

/// Regression: the second name was looked up before the removal of the first one had inserted it into the table.
#[test]
fn both_names_of_a_block_leave_in_one_list() {
    for names in [[11, 21], [21, 11]] {
        let mut fleet = Fleet::of(1);
        fleet.store(0, None, &[(11, 1)]);
        fleet.store(0, None, &[(21, 1)]);
        assert_eq!(fleet.remove(0, &names[..1]).removed, 1);
        assert_eq!(fleet.ask(&[1]), [(0, 1, 0)]);
        fleet.store(0, None, &[(names[0], 1)]);
        assert_eq!(fleet.remove(0, &[names[1], names[0]]).removed, 2);
        assert_eq!(fleet.ask(&[1]), []);
    }
}

#[test]
fn a_shared_prefix_is_one_run_for_any_held_lengths() {
    let mut fleet = Fleet::of(64);
    let prompt: Vec<_> = (100..200).collect();
    for rank in 0..64 {
        fleet.store(rank, None, &named(&prompt[..1 + rank as usize]));
    }
    let shape = fleet.0.shape(StorageTier::Device);
    assert_eq!((shape.runs, shape.run_blocks, shape.holders), (1, 64, 64));
    assert!(fleet.ask(&prompt).iter().all(|(slot, blocks, _)| *blocks == slot + 1));
    // The run keeps only the blocks that some rank holds.
    fleet.0.remove_rank(WorkerRank::new(WorkerId(63), 0));
    fleet.remove(62, &[110]);
    assert_eq!(fleet.0.shape(StorageTier::Device).run_blocks, 63);
    fleet.0.remove_rank(WorkerRank::new(WorkerId(62), 0));
    assert_eq!(fleet.0.shape(StorageTier::Device).run_blocks, 62);
}

#[test]
fn prompts_above_the_longest_run_continue_in_a_second_run() {
    const RUN: u64 = 1 << 14;
    let mut fleet = Fleet::of(1);
    let prompt: Vec<_> = (0..RUN + 5).collect();
    fleet.store(0, None, &named(&prompt[..16_000]));
    fleet.store(0, Some(16_009), &named(&prompt[16_000..]));
    assert_eq!(fleet.0.shape(StorageTier::Device).runs, 2);
    assert_eq!(fleet.ask(&prompt), [(0, RUN as u32 + 5, 0)]);
    fleet.remove(0, &[RUN + 12]);
    assert_eq!(fleet.ask(&prompt), [(0, RUN as u32 + 2, 0)]);
}
