//! Cost of hashing on a caller's task: a prompt of 12,000 tokens.
//!
//! `cargo bench --bench hashing -- --warm-up-time 0.5 --measurement-time 1.5` takes a minute and a half, including the
//! build.

use std::hint::black_box;
use std::num::NonZeroU32;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks, sequence_hashes};

fn benches(criterion: &mut Criterion) {
    // Spread over a vocabulary of 150,000.
    let tokens: Vec<u32> = (0..12_000_u32).map(|i| i.wrapping_mul(2_654_435_761) % 150_000).collect();

    let mut group = criterion.benchmark_group("prompt of 12,000 tokens");
    group.throughput(Throughput::Bytes(size_of_val(&tokens[..]) as u64));
    for block_size in [16, 32, 64, 128, 512].map(|n| NonZeroU32::new(n).expect("not zero")) {
        let hasher = BlockHasher::new(HashScheme::new(block_size));
        group.bench_function(format!("block hashes, block size {block_size}"), |bencher| {
            bencher.iter(|| hasher.block_hashes(black_box(&tokens), &MmBlocks::NONE));
        });
    }
    let hasher = BlockHasher::new(HashScheme::new(NonZeroU32::new(64).expect("not zero")));
    let blocks = hasher.block_hashes(&tokens, &MmBlocks::NONE);
    group.bench_function("sequence hashes, block size 64", |bencher| {
        bencher.iter(|| sequence_hashes(black_box(&blocks)));
    });
    group.finish();
}

criterion_group!(hashing, benches);
criterion_main!(hashing);
