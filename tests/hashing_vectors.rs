//! Hashes computed by NVIDIA Dynamo's router, taken from runs of `dynamo-kv-router` 1.6.1. They guarantee that
//! components with Dynamo's hashes are compatible. The numbers in the names and comments are the rows of those runs.

use std::num::NonZeroU32;

use pointsman::hashing::{HashScheme, HashedPrompt, MmSpan};
use pointsman::internals::hashing::{BlockHasher, MmBlocks, chain, hash_bytes};
use pointsman::internals::protocol::SequenceHash;
use pointsman::protocol::BlockHash;

fn scheme(block_size: u32) -> HashScheme<'static> {
    HashScheme::new(NonZeroU32::new(block_size).expect("not zero"))
}

/// Block hashes and sequence hashes.
fn hash(scheme: HashScheme<'_>, tokens: impl IntoIterator<Item = u32>, mm: &MmBlocks) -> (Vec<u64>, Vec<u64>) {
    let tokens: Vec<u32> = tokens.into_iter().collect();
    let prompt = HashedPrompt::from_tokens(&BlockHasher::new(scheme), &tokens, mm);
    assert_eq!(prompt.prompt_tokens(), tokens.len());
    let blocks = prompt.block_hashes().iter().map(|hash| hash.0).collect();
    (blocks, prompt.sequence_hashes().iter().map(|hash| hash.0).collect())
}

fn text(scheme: HashScheme<'_>, tokens: impl IntoIterator<Item = u32>) -> (Vec<u64>, Vec<u64>) {
    hash(scheme, tokens, &MmBlocks::NONE)
}

const ROW_1: [u64; 2] = [14643705804678351452, 16777012769546811212];
const ROW_1_LAST: u64 = 4945711292740353085;
const ROW_3: [u64; 4] = [9143094415614847814, 12124091508212882195, 1088361764653601668, 16024980976528976948];
const ROW_3_SEQUENCE: [u64; 4] = [9143094415614847814, 9510318385840434533, 16998148715716822651, 16790386768269814709];

#[test]
fn rows_1_to_6_plain_text() {
    assert_eq!(text(scheme(4), 1..=8), (ROW_1.to_vec(), vec![ROW_1[0], ROW_1_LAST]));
    assert_eq!(text(scheme(8), 1..=8), (vec![4595599524572611415], vec![4595599524572611415]));
    assert_eq!(text(scheme(4), 0..=15), (ROW_3.to_vec(), ROW_3_SEQUENCE.to_vec()));
    assert_eq!(text(scheme(16), 0..=15), (vec![15310707395893867146], vec![15310707395893867146]));
    assert_eq!(text(scheme(4), 0..=9), (ROW_3[..2].to_vec(), ROW_3_SEQUENCE[..2].to_vec()));
    assert_eq!(text(scheme(4), 0..=2), (vec![], vec![]));
}

#[test]
fn rows_7_to_9_adapter_and_namespace() {
    let (lora_name, cache_salt) = (Some("my-lora"), Some("tenant-a"));
    let rows = [
        (HashScheme { lora_name, ..scheme(4) }, [15671544057904749233, 7919241211032067838], 15486599009994050725),
        (HashScheme { lora_name: Some(""), ..scheme(4) }, ROW_1, ROW_1_LAST),
        (HashScheme { cache_salt: Some(""), ..scheme(4) }, ROW_1, ROW_1_LAST),
        (HashScheme { cache_salt, ..scheme(4) }, [5738685477468498325, 11202231085456067787], 1076233986426276607),
        (
            HashScheme { lora_name, cache_salt, ..scheme(4) },
            [6157910915076630503, 3256431856703716508],
            9770935122131878621,
        ),
    ];
    for (scheme, blocks, last) in rows {
        assert_eq!(text(scheme, 1..=8), (blocks.to_vec(), vec![blocks[0], last]), "{scheme:?}");
    }
}

#[test]
fn rows_10_and_11_multimodal() {
    let rows = [
        (vec![vec![42], vec![]], [14000361058806882387, 16777012769546811212], 10247411101078363231),
        (vec![vec![7, 3], vec![0xdead_beef]], [3497545641356191295, 12694621982192020601], 8588087570713940361),
        (vec![vec![]], ROW_1, ROW_1_LAST),
    ];
    for (objects, blocks, last) in rows {
        let mm = MmBlocks::listed(objects.clone());
        assert_eq!(hash(scheme(4), 1..=8, &mm), (blocks.to_vec(), vec![blocks[0], last]), "{objects:?}");
    }
}

#[test]
fn rows_12_and_13_eagle_windows_borrow_the_next_token() {
    let eagle = HashScheme { is_eagle: true, ..scheme(4) };
    let blocks = [1914873892905420881, 1929047464662796003];
    assert_eq!(text(eagle, 1..=9), (blocks.to_vec(), vec![blocks[0], 13136491855314414045]));
    assert_eq!(text(eagle, 1..=8), (vec![blocks[0]], vec![blocks[0]]));
}

#[test]
fn rows_14_and_15_large_and_padded_tokens() {
    assert_eq!(text(scheme(4), [4294967295, 0, 1, 2147483648]).0, [11560968206683026830]);
    assert_eq!(text(scheme(4), [100, 1000042, 1000042, 101]).0, [13129040125388584444]);
}

#[test]
fn rows_16_to_18_bytes_and_chain() {
    assert_eq!(HashScheme::BASE_SEED, 1337);
    assert_eq!(hash_bytes(b""), 15128690059815094969);
    assert_eq!(hash_bytes(b"hello world"), 10239022491161036150);
    assert_eq!(chain(Some(SequenceHash(1)), BlockHash(2)), SequenceHash(16740963408272063728));
}

#[test]
fn row_20_string_ids() {
    assert_eq!(MmSpan::hash_of_id("img-1"), Some(14770383865288705413));
    assert_eq!(MmSpan::hash_of_id(&"0123456789abcdef".repeat(4)), Some(81985529216486895));
    assert_eq!(MmSpan::hash_of_id(""), None);
}

#[test]
fn row_21_one_more_block_after_row_1() {
    assert_eq!(text(scheme(4), 9..=12).0, [483935686894639516]);
    let next = chain(Some(SequenceHash(ROW_1_LAST)), BlockHash(483935686894639516));
    assert_eq!(next, SequenceHash(12583592247330656132));
    assert_eq!(text(scheme(4), 1..=12).1[2], next.0);
}

#[test]
fn row_22_a_range_is_split_over_its_blocks() {
    let span = MmSpan { mm_hash: 9, start: 2, end: 7 };
    let block_size = scheme(4).block_size;
    assert_eq!(MmBlocks::split(&[span], 10, block_size).unwrap(), MmBlocks::listed([vec![9], vec![9], vec![]]));
}
