//! Attacks on the prefix index: event streams of one rank or many, and prompts.

use std::hint::black_box;

use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock};
use pointsman::test_support::{mix, rank};

use crate::{attacks, measured};

attacks! {
    chain_of_forks: "store at the end of a chain of forks, budget half used", "block", 1_024;
    forks_of_one_run: "remove a run below its forks, then the forks", "block", 1_024;
    one_block_many_names: "remove the names of one block", "name", 1_024;
    repeated_name: "one list with one name", "block", 1_024;
    moved_names: "store the names of a prompt at other positions", "block", 1_024;
    one_hole: "remove and store the middle block of a prompt", "event", 4_096;
    removals_from_the_front: "remove a prompt, first block first", "block", 4_096;
    removals_in_random_order: "remove a prompt in random order", "block", 4_096;
    repeated_stores: "store the blocks of a prompt again and again", "block", 4_096;
    unknown_parents: "store behind unknown parents, remove unknown names", "event", 4_096;
    host_behind_device: "store host blocks behind device blocks", "block", 1_024;
    pending_host_blocks: "store the parent of pending host blocks", "block", 1_024;
    vacant_spans: "store and remove prompts after a larger number of them", "block", 4_096;
    alternating_spans: "remove the blocks of two prompts alternately", "block", 4_096;
    shared_tails: "remove the tail of a prompt, on n ranks", "block", 16;
    interleaved_ranks: "query a prompt whose blocks are n runs of 64 ranks", "block", 64;
    evictions: "store prompts of one block in a full index", "block", 4_096;
    evictions_of_many_ranks: "the same on n ranks", "block", 64;
    dump_of_holes: "dump a prompt without every second block", "block", 1_024;
    clear_of_forks: "clear a chain of forks", "block", 1_024;
}

/// An index with ranks 0 to `ranks` − 1.
fn index_of(ranks: u32) -> Index {
    let mut index = Index::new();
    for slot in 0..ranks {
        index.register(rank(slot.into()), Slot(slot), Generation(1));
    }
    index
}

fn event(of: u32, tier: StorageTier, data: KvEvent) -> RouterEvent {
    RouterEvent { rank: rank(of.into()), tier, data }
}

/// Stores blocks as pairs of a name and a content.
fn store_in(
    of: u32,
    tier: StorageTier,
    parent: Option<u64>,
    blocks: impl IntoIterator<Item = (u64, u64)>,
) -> RouterEvent {
    let block = |(name, hash)| StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(mix(hash)) };
    let blocks = blocks.into_iter().map(block).collect();
    event(of, tier, KvEvent::Stored { parent: parent.map(EngineHash), blocks })
}

fn store(parent: Option<u64>, blocks: impl IntoIterator<Item = (u64, u64)>) -> RouterEvent {
    store_in(0, StorageTier::Device, parent, blocks)
}

/// Stores a prompt whose blocks have equal names and contents.
fn prompt(names: std::ops::Range<u64>) -> RouterEvent {
    store(None, names.map(|name| (name, name)))
}

fn remove_from(of: u32, names: impl IntoIterator<Item = u64>) -> RouterEvent {
    let blocks = names.into_iter().map(EngineHash).collect();
    event(of, StorageTier::Device, KvEvent::Removed { blocks })
}

fn remove(names: impl IntoIterator<Item = u64>) -> RouterEvent {
    remove_from(0, names)
}

fn apply(index: &mut Index, events: &[RouterEvent]) {
    events.iter().for_each(|event| _ = black_box(index.apply(event)));
}

fn measure(index: &mut Index, events: &[RouterEvent]) {
    measured(&mut || apply(index, events));
}

/// Each prompt leaves the previous one after its first own block.
fn forks(size: u32) -> Vec<RouterEvent> {
    let fork = |n: u64| store((2 * n).checked_sub(2), [(2 * n, 2 * n), (2 * n + 1, 2 * n + 1)]);
    (0..u64::from(size) / 2).map(fork).collect()
}

fn chain_of_forks(size: u32) -> u64 {
    let events = forks(size);
    let mut index = index_of(1);
    apply(&mut index, &events);
    let bytes = index.bytes_used() as u64;
    let mut index = index_of(1);
    index.set_budget(Some(bytes * 11 / 10));
    let (before, after) = events.split_at(events.len() * 6 / 10);
    apply(&mut index, before);
    measure(&mut index, after);
    2 * after.len() as u64
}

fn clear_of_forks(size: u32) -> u64 {
    let mut index = index_of(1);
    apply(&mut index, &forks(size));
    measure(&mut index, &[event(0, StorageTier::Device, KvEvent::Cleared)]);
    size.into()
}

fn forks_of_one_run(size: u32) -> u64 {
    let size = u64::from(size);
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size)]);
    let forks: Vec<_> = (0..size).map(|n| store(Some(n), [(size + n, size + n)])).collect();
    apply(&mut index, &forks);
    let run = (0..size).rev().map(|n| remove([n]));
    let events: Vec<_> = run.chain((size..2 * size).rev().map(|n| remove([n]))).collect();
    measure(&mut index, &events);
    2 * size
}

fn one_block_many_names(size: u32) -> u64 {
    let size = u64::from(size);
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..1)]);
    let names: Vec<_> = (1..=size).map(|name| store(Some(0), [(name, 1)])).collect();
    apply(&mut index, &names);
    let half = size / 2;
    let events: Vec<_> = (1..=half).chain((half + 1..=size).rev()).map(|name| remove([name])).collect();
    measure(&mut index, &events);
    size
}

fn repeated_name(size: u32) -> u64 {
    let mut index = index_of(1);
    measure(&mut index, &[store(None, (0..size.into()).map(|hash| (7, hash)))]);
    size.into()
}

fn moved_names(size: u32) -> u64 {
    let size = u64::from(size);
    let mut index = index_of(2);
    apply(&mut index, &[prompt(0..size), store_in(1, StorageTier::Device, None, (0..size).map(|n| (n, size + n)))]);
    measure(&mut index, &[store(None, (0..size).map(|name| (name, size + name)))]);
    size
}

fn one_hole(size: u32) -> u64 {
    const TIMES: usize = 256;
    let middle = u64::from(size) / 2;
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size.into())]);
    let events = [remove([middle]), store(Some(middle - 1), [(middle, middle)])];
    measured(&mut || (0..TIMES).for_each(|_| apply(&mut index, &events)));
    2 * TIMES as u64
}

fn removals_from_the_front(size: u32) -> u64 {
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size.into())]);
    measure(&mut index, &(0..size.into()).map(|name| remove([name])).collect::<Vec<_>>());
    size.into()
}

fn removals_in_random_order(size: u32) -> u64 {
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size.into())]);
    let mut names: Vec<u64> = (0..size.into()).collect();
    names.sort_unstable_by_key(|name| mix(*name));
    measure(&mut index, &names.into_iter().map(|name| remove([name])).collect::<Vec<_>>());
    size.into()
}

fn repeated_stores(size: u32) -> u64 {
    let size = u64::from(size);
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size)]);
    let again: Vec<_> =
        (1..size).map(|name| store(Some(name - 1), (name..size.min(name + 4)).map(|n| (n, n)))).collect();
    measure(&mut index, &again);
    4 * size
}

fn unknown_parents(size: u32) -> u64 {
    let size = u64::from(size);
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size)]);
    let events = (0..size).flat_map(|n| [store(Some(size + n), [(n, n)]), remove([2 * size + n])]);
    measure(&mut index, &events.collect::<Vec<_>>());
    2 * size
}

fn host_behind_device(size: u32) -> u64 {
    let size = u64::from(size);
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size)]);
    let host = |n: u64| store_in(0, StorageTier::HostPinned, Some(n), [(n + 1, n + 1)]);
    let events: Vec<_> = (0..size - 1).step_by(2).map(host).collect();
    measure(&mut index, &events);
    events.len() as u64
}

fn pending_host_blocks(size: u32) -> u64 {
    let size = u64::from(size);
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size)]);
    let host = |n: u64| store_in(0, StorageTier::HostPinned, Some(size), [(size + n, size + n)]);
    apply(&mut index, &(1..=size).map(host).collect::<Vec<_>>());
    measure(&mut index, &[store(Some(size - 1), [(size, size)])]);
    size
}

fn vacant_spans(size: u32) -> u64 {
    const TIMES: u64 = 16;
    const BLOCKS: u64 = 128;
    let size = u64::from(size);
    let mut index = index_of(1);
    apply(&mut index, &(0..=size).map(|n| store(None, [(n, n)])).collect::<Vec<_>>());
    apply(&mut index, &(1..=size).map(|n| remove([n])).collect::<Vec<_>>());
    let stores = (1..=BLOCKS).map(|n| store(None, [(n, n)]));
    let events: Vec<_> = stores.chain([remove(1..=BLOCKS)]).collect();
    measured(&mut || (0..TIMES).for_each(|_| apply(&mut index, &events)));
    2 * TIMES * BLOCKS
}

fn alternating_spans(size: u32) -> u64 {
    let half = u64::from(size) / 2;
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..half), prompt(half..2 * half)]);
    measure(&mut index, &[remove((0..half).rev().flat_map(|n| [n, half + n]))]);
    size.into()
}

fn shared_tails(size: u32) -> u64 {
    const BLOCKS: u64 = 64;
    let mut index = index_of(size);
    for of in 0..size {
        apply(&mut index, &[store_in(of, StorageTier::Device, None, (0..BLOCKS).map(|n| (n, n)))]);
    }
    let events = (0..BLOCKS).rev().flat_map(|n| (0..size).map(move |of| remove_from(of, [n])));
    measure(&mut index, &events.collect::<Vec<_>>());
    BLOCKS * u64::from(size)
}

fn interleaved_ranks(size: u32) -> u64 {
    const RANKS: u32 = 64;
    let mut index = index_of(RANKS);
    // Run `n` leaves the previous one after its first block, on each rank.
    for of in 0..RANKS {
        for fork in forks(2 * size) {
            apply(&mut index, &[RouterEvent { rank: rank(of.into()), ..fork }]);
        }
    }
    let hashes: Vec<_> = (0..u64::from(size)).map(|n| BlockHash(mix(2 * n))).collect();
    let mut overlaps = Overlaps::default();
    index.overlaps(&hashes, &mut overlaps);
    measured(&mut || index.overlaps(&hashes, &mut overlaps));
    assert_eq!(overlaps.hits()[0].device_blocks, size);
    size.into()
}

fn evictions(size: u32) -> u64 {
    let size = u64::from(size);
    let mut index = index_of(1);
    apply(&mut index, &(0..size).map(|n| store(None, [(n, n)])).collect::<Vec<_>>());
    index.set_budget(Some(index.bytes_used() as u64));
    measure(&mut index, &(size..2 * size).map(|n| store(None, [(n, n)])).collect::<Vec<_>>());
    assert!(index.budget_state().is_some_and(|state| state.evicted_blocks > 0));
    size
}

fn evictions_of_many_ranks(size: u32) -> u64 {
    const BLOCKS: u64 = 64;
    let mut index = index_of(size);
    let name = |of: u32, n| u64::from(of) << 32 | n;
    let stores = |blocks: std::ops::Range<u64>| {
        let of_rank =
            move |n| (0..size).map(move |of| store_in(of, StorageTier::Device, None, [(name(of, n), name(of, n))]));
        blocks.flat_map(of_rank).collect::<Vec<_>>()
    };
    apply(&mut index, &stores(0..BLOCKS));
    index.set_budget(Some(index.bytes_used() as u64));
    measure(&mut index, &stores(BLOCKS..2 * BLOCKS));
    BLOCKS * u64::from(size)
}

fn dump_of_holes(size: u32) -> u64 {
    let mut index = index_of(1);
    apply(&mut index, &[prompt(0..size.into()), remove((0..u64::from(size)).step_by(2))]);
    measured(&mut || assert!(!black_box(index.dump()).is_empty()));
    size.into()
}
