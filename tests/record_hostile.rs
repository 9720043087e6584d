//! Records with valid checksums and hostile contents, with all allocated bytes counted.

use pointsman::{RecordFile, RecordPart, Replay};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;
use stats_alloc::Region;

use crate::ALLOCATOR;
use crate::effort::effort;
use crate::recorded::{Recorded, configs, settings};

const DECISIONS: u64 = 30;

/// Bytes that a replay may hold at once: tables by slot and the prompts of a batch.
const BYTES_MAX: isize = 128 << 20;

/// A change of recorded bytes at a position.
#[derive(Clone, Debug)]
enum Change {
    Set(u8),
    Insert(Vec<u8>),
    Remove(usize),
    /// Inserts bytes of another position.
    Copy(Index, usize),
}

fn changes() -> impl Strategy<Value = Vec<(Index, Change)>> {
    let hostile = prop_oneof![
        vec(any::<u8>(), 1..12),
        Just(vec![0xff; 9]),
        Just(vec![0xff, 0xff, 0xff, 0xff, 0x0f]),
        Just(vec![0xff, 0xff, 0xff, 0x01]),
    ];
    let change = prop_oneof![
        6 => any::<u8>().prop_map(Change::Set),
        3 => hostile.prop_map(Change::Insert),
        1 => (1_usize..40).prop_map(Change::Remove),
        1 => (any::<Index>(), 1_usize..400).prop_map(|(from, length)| Change::Copy(from, length)),
    ];
    vec((any::<Index>(), change), 1..8)
}

fn changed(entries: &[u8], changes: &[(Index, Change)]) -> Vec<u8> {
    let mut entries = entries.to_vec();
    for (at, change) in changes {
        let at = at.index(entries.len());
        match change {
            Change::Set(byte) => entries[at] = *byte,
            Change::Insert(bytes) => drop(entries.splice(at..at, bytes.iter().copied())),
            Change::Remove(length) => drop(entries.drain(at..(at + length).min(entries.len() - 1).max(at))),
            Change::Copy(from, length) => {
                let from = from.index(entries.len());
                let bytes = entries[from..(from + length).min(entries.len())].to_vec();
                drop(entries.splice(at..at, bytes));
            }
        }
    }
    entries
}

/// Reads and replays a file, as `replay-decisions` and explanations do.
fn read(entries: &[u8], verifies: bool) {
    let mut file = RecordFile::head();
    let part = RecordPart { sequence: 1, begins: true, bytes: entries.to_vec(), ends: Vec::new() };
    RecordFile::put(&mut file, &part, "pool", 0);
    let replay = if verifies { Replay::verifying(settings) } else { Replay::following(settings) };
    let mut replay = replay.explaining(|_, _| true);
    let end = RecordFile::read(&file, &mut |part| {
        let _ = replay.feed(part.entries, &mut |_| {}); // an error is as good as a decision
    });
    assert!(end.is_ok_and(|end| end.damaged_at.is_none()), "the checksum is valid");
}

#[test]
fn hostile_records_neither_panic_nor_exhaust_memory() {
    alone!();
    let mut segments = Vec::new();
    for (seed, config) in configs().iter().enumerate() {
        let mut recorded = Recorded::new(config);
        recorded.run(DECISIONS, seed as u64);
        segments.extend(recorded.segments);
    }
    let drawn = (any::<Index>(), changes(), any::<bool>());
    let mut runner = TestRunner::new(effort(192, "tests/record_hostile.proptest-regressions"));
    let result = runner.run(&drawn, |(segment, changes, verifies)| {
        let entries = changed(&segments[segment.index(segments.len())], &changes);
        let region = Region::new(ALLOCATOR);
        read(&entries, verifies);
        // The total of allocations is an upper bound of the live memory of a replay.
        let allocated = region.change().bytes_allocated as isize;
        let bound = BYTES_MAX + 4_096 * entries.len() as isize;
        prop_assert!(allocated <= bound, "{} bytes for {} bytes of entries", allocated, entries.len());
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
