//! Cost of the load model on a busy rank: booking and freeing one request, and projecting one.
//!
//! Prompts are 190 blocks (12k tokens in blocks of 64), and 64 requests are active: eight conversations, whose requests
//! share prefixes of different depths.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use pointsman::internals::load::{ActiveSequences, PrefillLoadHint, PromptBlocks};
use pointsman::internals::protocol::{BookingId, SequenceHash};
use pointsman::protocol::Timestamp;

const BLOCKS: u64 = 190;
const ACTIVE: u64 = 64;

/// A prompt that shares `shared` blocks with the others of its conversation.
fn prompt(conversation: u64, own: u64, shared: u64) -> PromptBlocks {
    let mix = |seed: u64, block: u64| {
        let hash = (seed << 32 | block).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        SequenceHash(hash ^ (hash >> 31))
    };
    let hashes =
        (0..BLOCKS).map(|block| if block < shared { mix(conversation, block) } else { mix(own + 1000, block) });
    PromptBlocks::Hashed(hashes.collect::<Arc<[_]>>())
}

fn hint() -> Option<PrefillLoadHint> {
    PrefillLoadHint::new(12_000, 4_000, true, Some(Duration::from_millis(800)))
}

/// A rank with 64 requests, the first `prefilling` of which are in prefill.
fn busy(assume_kv_reuse: bool, prefilling: u64) -> ActiveSequences {
    let mut rank = ActiveSequences::new(assume_kv_reuse);
    for id in 0..ACTIVE {
        let prompt = prompt(id % 8, id, 20 + 16 * (id / 8));
        rank.book(BookingId(id), prompt, hint(), Timestamp(id)).expect("no duplicates");
        if id >= prefilling {
            rank.complete_prefill(BookingId(id), Timestamp(id));
        }
    }
    rank
}

fn book_and_free(c: &mut Criterion) {
    let mut group = c.benchmark_group("load/book+free");
    for (name, reuse, prompt) in [
        ("shared 100 of 190", true, prompt(3, 999, 100)),
        ("nothing shared", true, prompt(999, 999, 100)),
        ("without reuse", false, prompt(3, 999, 100)),
    ] {
        let mut rank = busy(reuse, 4);
        group.bench_function(name, |b| {
            b.iter(|| {
                rank.book(BookingId(ACTIVE), black_box(&prompt).clone(), hint(), Timestamp(99))
                    .expect("the id is free");
                rank.free(black_box(BookingId(ACTIVE)), Timestamp(99))
            });
        });
    }
    // All operations of a sequence actor over the lifetime of a request, with prompts that are not in the cache yet.
    group.finish();
}

fn project(c: &mut Criterion) {
    let mut group = c.benchmark_group("load/project");
    let rank = busy(true, 4);
    for (name, prompt) in [
        ("shared 100 of 190", prompt(3, 999, 100)),
        ("all shared", prompt(3, 3 + 8 * 7, 20 + 16 * 7)),
        ("nothing shared", prompt(999, 999, 100)),
    ] {
        group.bench_function(name, |b| b.iter(|| rank.project(black_box(&prompt))));
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = book_and_free, project
}
criterion_main!(benches);
