//! Allocations while a prompt is hashed.

use std::num::NonZeroU32;

use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks, sequence_hashes};
use stats_alloc::Region;

use crate::ALLOCATOR;

#[test]
fn a_prompt_costs_one_allocation_an_array() {
    alone!();
    let tokens: Vec<u32> = (0..12_000).collect();
    let hasher = BlockHasher::new(HashScheme::new(NonZeroU32::new(64).expect("not zero")));
    let mm = MmBlocks::listed([[1, 2]]);
    let blocks = hasher.block_hashes(&tokens, &mm);
    assert_eq!(fewest_allocations(|| drop(hasher.block_hashes(&tokens, &mm))), 1);
    assert_eq!(fewest_allocations(|| drop(sequence_hashes(&blocks))), 1);
    assert_eq!(fewest_allocations(|| assert_eq!(hasher.hashes(&tokens, &mm).count(), blocks.len())), 0);
}

/// The fewest allocations of a hundred runs. The test harness has its own thread, which can only increase the count.
fn fewest_allocations(mut run: impl FnMut()) -> usize {
    let mut once = || {
        let region = Region::new(ALLOCATOR);
        run();
        let change = region.change();
        change.allocations + change.reallocations
    };
    (0..100).map(|_| once()).min().expect("a hundred runs")
}
