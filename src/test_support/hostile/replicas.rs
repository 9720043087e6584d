//! Target of the messages between replicas.

use crate::protocol::BlockHash;
use crate::replica::{
    LoadSummary, RankContribution, ReplicaLayout, RoutedPrompt, SummaryKind, decode_routed, decode_sessions,
    encode_routed, encode_sessions,
};
use crate::test_support::rank;

/// Decoded messages encode to bytes that decode to the same messages, and have no more ranks than bytes.
pub fn replica_messages(bytes: &[u8]) {
    if let Ok(summary) = LoadSummary::decode(bytes) {
        assert!(summary.ranks.len() <= bytes.len(), "more ranks than bytes");
        let encoded = summary.encode();
        let again = LoadSummary::decode(&encoded).expect("an encoded summary decodes");
        // Rates are floats, and NaN differs from itself.
        assert_eq!(again.encode(), encoded, "the encoded summary differs");
    }
    if let Ok((layout, prompts)) = decode_routed(bytes) {
        let again = decode_routed(&encode_routed(layout, &prompts));
        assert_eq!(again, Ok((layout, prompts)), "the encoded prompts differ");
    }
    if let Ok(bindings) = decode_sessions(bytes) {
        let again = decode_sessions(&encode_sessions(&bindings));
        assert_eq!(again, Ok(bindings), "the encoded sessions differ");
    }
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let contribution = |worker| RankContribution {
        worker,
        dp_rank: 1,
        active_blocks: 1_000,
        read_blocks: 1_200,
        requests: 20,
        prefills: 3,
        prefill_tokens: 8_000,
        unmodelled_tokens: 0,
        prefill_us: 320_000,
        booked: 70_000,
    };
    let layout = ReplicaLayout { block_size: 64, hash_seed: 7 };
    let summary = LoadSummary {
        layout,
        sequence: 300,
        interval_ms: 20,
        placements_per_second: 12.5,
        work_per_second: 0.5,
        longest_wait_ms: Some(900),
        kind: SummaryKind::Full,
        ranks: (1..4).map(contribution).collect(),
    };
    let routed = RoutedPrompt { rank: rank(2), hashes: [1, 2, 3].map(BlockHash).into() };
    vec![summary.encode(), encode_routed(layout, &[routed]), encode_sessions(&[])]
}
