//! Comparison with a slow and simple implementation, and rejected inputs.

use std::num::NonZeroU32;

use proptest::collection::vec;
use proptest::prelude::*;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::*;
use crate::protocol::{BlockHash, SequenceHash};

fn size(block_size: u32) -> NonZeroU32 {
    NonZeroU32::new(block_size).unwrap()
}

/// All inputs of a prompt's hashes.
#[derive(Clone, Debug)]
struct Case {
    block_size: u32,
    is_eagle: bool,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    tokens: Vec<u32>,
    mm: Vec<Vec<u64>>,
}

impl Case {
    fn hasher(&self) -> BlockHasher<'_> {
        BlockHasher::new(HashScheme {
            block_size: size(self.block_size),
            lora_name: self.lora_name.as_deref(),
            cache_salt: self.cache_salt.as_deref(),
            is_eagle: self.is_eagle,
        })
    }

    /// Literal implementation of the formulas in the module documentation.
    fn slow(&self) -> (Vec<u64>, Vec<u64>) {
        let mut seed = 1337_u64;
        if let Some(name) = self.lora_name.as_ref().filter(|name| !name.is_empty()) {
            seed = seed.wrapping_add(xxh3_64(name.as_bytes()));
        }
        if let Some(salt) = self.cache_salt.as_ref().filter(|salt| !salt.is_empty()) {
            seed = seed.wrapping_add(xxh3_64_with_seed(salt.as_bytes(), 1));
        }
        let (stride, borrowed) = (self.block_size as usize, usize::from(self.is_eagle));
        let mut blocks: Vec<u64> = Vec::new();
        let mut sequence: Vec<u64> = Vec::new();
        while let Some(window) = self.tokens.get(blocks.len() * stride..(blocks.len() + 1) * stride + borrowed) {
            let mut bytes: Vec<u8> = window.iter().flat_map(|token| token.to_le_bytes()).collect();
            let mut objects = self.mm.get(blocks.len()).cloned().unwrap_or_default();
            objects.sort_unstable();
            bytes.extend(objects.iter().flat_map(|hash| hash.to_le_bytes()));
            let block = xxh3_64_with_seed(&bytes, seed);
            let link = |parent: &u64| xxh3_64_with_seed(&[parent.to_le_bytes(), block.to_le_bytes()].concat(), 1337);
            sequence.push(sequence.last().map_or(block, link));
            blocks.push(block);
        }
        (blocks, sequence)
    }
}

/// Block sizes around 60 tokens and around 256, where the hashing method changes, and multiples of a stripe.
fn cases() -> impl Strategy<Value = Case> {
    let block_size = prop_oneof![1..80_u32, 230..280_u32, 500..530_u32, (1..40_u32).prop_map(|n| 16 * n)];
    let name = || proptest::option::of("[a-z]{0,5}");
    (block_size, any::<bool>(), name(), name(), vec(any::<u32>(), 0..1200), vec(vec(0..50_u64, 0..40), 0..6)).prop_map(
        |(block_size, is_eagle, lora_name, cache_salt, tokens, mm)| Case {
            block_size,
            is_eagle,
            lora_name,
            cache_salt,
            tokens,
            mm,
        },
    )
}

proptest! {
    #[test]
    fn hashes_match_the_simple_implementation(case in cases()) {
        let mm = MmBlocks::listed(case.mm.clone());
        let prompt = HashedPrompt::from_tokens(&case.hasher(), &case.tokens, &mm);
        let blocks: Vec<u64> = prompt.block_hashes().iter().map(|hash| hash.0).collect();
        let sequence: Vec<u64> = prompt.sequence_hashes().iter().map(|hash| hash.0).collect();
        prop_assert_eq!(case.hasher().scheme().block_count(case.tokens.len()), blocks.len());
        prop_assert_eq!((blocks, sequence), case.slow());
    }

    #[test]
    fn length_and_block_count_are_inverse(block_size in 1..600_u32, is_eagle: bool, blocks in 0..5000_usize) {
        let scheme = HashScheme { is_eagle, ..HashScheme::new(size(block_size)) };
        let prompt_tokens = scheme.prompt_tokens_min(blocks);
        prop_assert_eq!(scheme.block_count(prompt_tokens), blocks);
        if blocks > 0 {
            prop_assert_eq!(scheme.block_count(prompt_tokens - 1), blocks - 1);
        }
    }

    #[test]
    fn spans_affect_only_their_blocks(
        block_size in 1..9_u32,
        spans in vec((0..4_u64, 0..30_usize, 0..30_usize), 0..6),
    ) {
        let spans: Vec<MmSpan> = spans
            .into_iter()
            .map(|(mm_hash, start, len)| MmSpan { mm_hash, start, end: (start + len).min(40).max(start) })
            .collect();
        let mut covered = vec![Vec::new(); 40_usize.div_ceil(block_size as usize)];
        for span in &spans {
            (span.start..span.end).for_each(|position| covered[position / block_size as usize].push(span.mm_hash));
        }
        for hashes in &mut covered {
            hashes.sort_unstable();
            hashes.dedup();
        }
        prop_assert_eq!(MmBlocks::split(&spans, 40, size(block_size)), Ok(MmBlocks::listed(covered)));
    }
}

#[test]
fn invalid_spans_are_rejected() {
    let good = MmSpan { mm_hash: 1, start: 0, end: 2 };
    let cases = [
        (MmSpan { mm_hash: 9, start: 7, end: 2 }, "mm range 7..2 ends before it starts"),
        (MmSpan { mm_hash: 9, start: 2, end: 11 }, "mm range 2..11 must end within the 10 tokens of the prompt"),
    ];
    for (bad, message) in cases {
        assert_eq!(MmBlocks::split(&[good, bad], 10, size(4)).unwrap_err().to_string(), message);
    }
}

#[test]
fn overlapping_spans_are_limited() {
    let whole = MmSpan { mm_hash: 1, start: 0, end: 1 << 11 };
    assert!(MmBlocks::split(&[whole; 1 << 9], 1 << 11, size(1)).is_ok());
    let error = MmBlocks::split(&[whole; (1 << 9) + 1], 1 << 11, size(1)).unwrap_err();
    assert_eq!(error.to_string(), "mm ranges cover 1050624 blocks in total, must be at most 1048576");
}

#[test]
fn inconsistent_hashes_of_a_caller_are_rejected() {
    let take = |n_blocks: u64, n_sequence: Option<u64>, prompt_tokens, is_eagle| {
        let scheme = HashScheme { is_eagle, ..HashScheme::new(size(4)) };
        let sequence = n_sequence.map(|n| (0..n).map(SequenceHash).collect());
        HashedPrompt::from_hashes((0..n_blocks).map(BlockHash).collect(), sequence, prompt_tokens, &scheme)
            .map_err(|error| error.to_string())
    };
    assert_eq!(take(2, Some(2), 8, false).map(|prompt| prompt.prompt_tokens()), Ok(8));
    assert!(take(0, None, 0, true).is_ok());
    assert!(take(1, Some(1), 400, false).is_ok());
    let short = |isl, min| Err(format!("prompt_tokens is {isl}, must be at least {min} for 2 block hashes"));
    assert_eq!(take(2, Some(2), 7, false), short(7, 8));
    assert_eq!(take(2, None, 8, true), short(8, 9));
    let lengths = "sequence_hashes has length 1, must be 2 like block_hashes";
    assert_eq!(take(2, Some(1), 9, false), Err(lengths.to_string()));
}
