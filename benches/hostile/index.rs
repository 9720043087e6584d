//! Attacks on the prefix index: event streams of one rank or many, and prompts.

use std::hint::black_box;
use std::ops::Range;

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

/// An index with ranks 0 to `ranks` − 1 after these events.
fn after(ranks: u64, events: impl IntoIterator<Item = RouterEvent>) -> Index {
    let mut index = Index::new();
    for slot in 0..ranks {
        index.register(rank(slot), Slot(slot as u32), Generation(1));
    }
    events.into_iter().for_each(|event| _ = index.apply(&event));
    index
}

fn apply(index: &mut Index, events: &[RouterEvent]) {
    events.iter().for_each(|event| _ = black_box(index.apply(event)));
}

fn measure(index: &mut Index, events: impl IntoIterator<Item = RouterEvent>) {
    let events: Vec<_> = events.into_iter().collect();
    measured(&mut || apply(index, &events));
}

fn event(of: u64, tier: StorageTier, data: KvEvent) -> RouterEvent {
    RouterEvent { rank: rank(of), tier, data }
}

/// Stores blocks as pairs of a name and a content.
fn store_in(
    of: u64,
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
fn prompt(names: Range<u64>) -> RouterEvent {
    store(None, names.map(|name| (name, name)))
}

/// Stores prompts of one block.
fn single_blocks(names: Range<u64>) -> impl Iterator<Item = RouterEvent> {
    names.map(|name| prompt(name..name + 1))
}

fn remove_from(of: u64, names: impl IntoIterator<Item = u64>) -> RouterEvent {
    let blocks = names.into_iter().map(EngineHash).collect();
    event(of, StorageTier::Device, KvEvent::Removed { blocks })
}

fn remove(names: impl IntoIterator<Item = u64>) -> RouterEvent {
    remove_from(0, names)
}

/// One event for each removed name.
fn remove_each(names: impl IntoIterator<Item = u64>) -> impl Iterator<Item = RouterEvent> {
    names.into_iter().map(|name| remove([name]))
}

/// Each prompt leaves the previous one after its first own block.
fn forks(size: u64) -> Vec<RouterEvent> {
    let fork = |n: u64| store((2 * n).checked_sub(2), [(2 * n, 2 * n), (2 * n + 1, 2 * n + 1)]);
    (0..size / 2).map(fork).collect()
}

fn chain_of_forks(size: u64) -> u64 {
    let events = forks(size);
    let bytes = after(1, events.clone()).bytes_used() as u64;
    let mut index = after(1, []);
    index.set_budget(Some(bytes * 11 / 10));
    let (before, after) = events.split_at(events.len() * 6 / 10);
    apply(&mut index, before);
    measure(&mut index, after.to_vec());
    2 * after.len() as u64
}

fn clear_of_forks(size: u64) -> u64 {
    measure(&mut after(1, forks(size)), [event(0, StorageTier::Device, KvEvent::Cleared)]);
    size
}

fn forks_of_one_run(size: u64) -> u64 {
    let forks = (0..size).map(|n| store(Some(n), [(size + n, size + n)]));
    let mut index = after(1, [prompt(0..size)].into_iter().chain(forks));
    measure(&mut index, remove_each((0..size).rev().chain((size..2 * size).rev())));
    2 * size
}

fn one_block_many_names(size: u64) -> u64 {
    let names = (1..=size).map(|name| store(Some(0), [(name, 1)]));
    let mut index = after(1, [prompt(0..1)].into_iter().chain(names));
    let half = size / 2;
    measure(&mut index, remove_each((1..=half).chain((half + 1..=size).rev())));
    size
}

fn repeated_name(size: u64) -> u64 {
    measure(&mut after(1, []), [store(None, (0..size).map(|hash| (7, hash)))]);
    size
}

fn moved_names(size: u64) -> u64 {
    let moved = || (0..size).map(|name| (name, size + name));
    let mut index = after(2, [prompt(0..size), store_in(1, StorageTier::Device, None, moved())]);
    measure(&mut index, [store(None, moved())]);
    size
}

fn one_hole(size: u64) -> u64 {
    const TIMES: usize = 256;
    let middle = size / 2;
    let mut index = after(1, [prompt(0..size)]);
    let events = [remove([middle]), store(Some(middle - 1), [(middle, middle)])];
    measured(&mut || (0..TIMES).for_each(|_| apply(&mut index, &events)));
    2 * TIMES as u64
}

fn removals_from_the_front(size: u64) -> u64 {
    measure(&mut after(1, [prompt(0..size)]), remove_each(0..size));
    size
}

fn removals_in_random_order(size: u64) -> u64 {
    let mut names: Vec<u64> = (0..size).collect();
    names.sort_unstable_by_key(|name| mix(*name));
    measure(&mut after(1, [prompt(0..size)]), remove_each(names));
    size
}

fn repeated_stores(size: u64) -> u64 {
    let again = (1..size).map(|name| store(Some(name - 1), (name..size.min(name + 4)).map(|n| (n, n))));
    measure(&mut after(1, [prompt(0..size)]), again);
    4 * size
}

fn unknown_parents(size: u64) -> u64 {
    let events = (0..size).flat_map(|n| [store(Some(size + n), [(n, n)]), remove([2 * size + n])]);
    measure(&mut after(1, [prompt(0..size)]), events);
    2 * size
}

fn host_behind_device(size: u64) -> u64 {
    let host = |n: u64| store_in(0, StorageTier::HostPinned, Some(n), [(n + 1, n + 1)]);
    measure(&mut after(1, [prompt(0..size)]), (0..size - 1).step_by(2).map(host));
    size / 2
}

fn pending_host_blocks(size: u64) -> u64 {
    let host = |n: u64| store_in(0, StorageTier::HostPinned, Some(size), [(size + n, size + n)]);
    let mut index = after(1, [prompt(0..size)].into_iter().chain((1..=size).map(host)));
    measure(&mut index, [store(Some(size - 1), [(size, size)])]);
    size
}

fn vacant_spans(size: u64) -> u64 {
    const TIMES: u64 = 16;
    const BLOCKS: u64 = 128;
    let mut index = after(1, single_blocks(0..size + 1).chain(remove_each(1..=size)));
    let events: Vec<_> = single_blocks(1..BLOCKS + 1).chain([remove(1..=BLOCKS)]).collect();
    measured(&mut || (0..TIMES).for_each(|_| apply(&mut index, &events)));
    2 * TIMES * BLOCKS
}

fn alternating_spans(size: u64) -> u64 {
    let half = size / 2;
    let mut index = after(1, [prompt(0..half), prompt(half..2 * half)]);
    measure(&mut index, [remove((0..half).rev().flat_map(|n| [n, half + n]))]);
    size
}

fn shared_tails(size: u64) -> u64 {
    const BLOCKS: u64 = 64;
    let stores = (0..size).map(|of| store_in(of, StorageTier::Device, None, (0..BLOCKS).map(|n| (n, n))));
    let mut index = after(size, stores);
    measure(&mut index, (0..BLOCKS).rev().flat_map(|n| (0..size).map(move |of| remove_from(of, [n]))));
    BLOCKS * size
}

fn interleaved_ranks(size: u64) -> u64 {
    const RANKS: u64 = 64;
    // Run `n` leaves the previous one after its first block, on each rank.
    let of_rank = |of| forks(2 * size).into_iter().map(move |fork| RouterEvent { rank: rank(of), ..fork });
    let index = after(RANKS, (0..RANKS).flat_map(of_rank));
    let hashes: Vec<_> = (0..size).map(|n| BlockHash(mix(2 * n))).collect();
    let mut overlaps = Overlaps::default();
    index.overlaps(&hashes, &mut overlaps);
    measured(&mut || index.overlaps(&hashes, &mut overlaps));
    assert_eq!(u64::from(overlaps.hits()[0].device_blocks), size);
    size
}

fn evictions(size: u64) -> u64 {
    let mut index = after(1, single_blocks(0..size));
    index.set_budget(Some(index.bytes_used() as u64));
    measure(&mut index, single_blocks(size..2 * size));
    assert!(index.budget_state().is_some_and(|state| state.evicted_blocks > 0));
    size
}

fn evictions_of_many_ranks(size: u64) -> u64 {
    const BLOCKS: u64 = 64;
    let name = |of: u64, n| of << 32 | n;
    let of_rank = |n| (0..size).map(move |of| store_in(of, StorageTier::Device, None, [(name(of, n), name(of, n))]));
    let mut index = after(size, (0..BLOCKS).flat_map(of_rank));
    index.set_budget(Some(index.bytes_used() as u64));
    measure(&mut index, (BLOCKS..2 * BLOCKS).flat_map(of_rank));
    BLOCKS * size
}

fn dump_of_holes(size: u64) -> u64 {
    let index = after(1, [prompt(0..size), remove((0..size).step_by(2))]);
    measured(&mut || assert!(!black_box(index.dump()).is_empty()));
    size
}
