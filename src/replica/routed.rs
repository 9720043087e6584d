//! Message with routed prompts, from which the receivers derive speculative entries, and their queue at the sender.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ReplicaLayout;
use super::codec::{MessageError, decode, encode, malformed};
use crate::protocol::{BlockHash, WorkerId, WorkerRank};

/// A prompt that a decision has placed on a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedPrompt {
    /// The rank.
    pub rank: WorkerRank,
    /// The first complete blocks of the prompt.
    pub hashes: Arc<[BlockHash]>,
}

/// Routed prompts that wait for the next message. A full queue drops the oldest ones.
///
/// ```
/// use pointsman::protocol::{BlockHash, WorkerId, WorkerRank};
/// use pointsman::internals::replica::{RoutedPrompt, RoutedPrompts};
///
/// let rank = WorkerRank::new(WorkerId(1), 0);
/// let prompt = |blocks: u64| RoutedPrompt { rank, hashes: (0..blocks).map(BlockHash).collect() };
/// let mut queue = RoutedPrompts::new(10);
/// (1..=4).for_each(|blocks| queue.push(prompt(blocks)));
/// assert_eq!(queue.take(5), [prompt(1), prompt(2)]);
/// queue.push(prompt(9)); // the queue has room for 10 blocks
/// assert_eq!((queue.take(5), queue.take_dropped()), (vec![prompt(5)], 2)); // the beginning of a long prompt
/// ```
#[derive(Clone, Debug)]
pub struct RoutedPrompts {
    prompts: VecDeque<RoutedPrompt>,
    blocks: usize,
    blocks_max: usize,
    dropped: u64,
}

impl RoutedPrompts {
    /// An empty queue for `blocks_max` blocks.
    #[must_use]
    pub fn new(blocks_max: usize) -> Self {
        Self { prompts: VecDeque::new(), blocks: 0, blocks_max, dropped: 0 }
    }

    /// Appends a prompt. Drops the oldest ones if there are too many blocks.
    pub fn push(&mut self, prompt: RoutedPrompt) {
        if prompt.hashes.is_empty() {
            return;
        }
        self.blocks += prompt.hashes.len();
        self.prompts.push_back(prompt);
        while self.blocks > self.blocks_max
            && let Some(oldest) = self.prompts.pop_front()
        {
            self.blocks -= oldest.hashes.len();
            self.dropped += 1;
        }
    }

    /// Removes the oldest prompts, at most `blocks_max` blocks. A longer prompt is shortened.
    pub fn take(&mut self, blocks_max: usize) -> Vec<RoutedPrompt> {
        let (mut taken, mut blocks) = (Vec::new(), 0);
        while let Some(next) = self.prompts.front() {
            let length = next.hashes.len();
            if blocks > 0 && blocks + length > blocks_max {
                break;
            }
            let Some(mut prompt) = self.prompts.pop_front() else { break };
            self.blocks -= length;
            blocks += length;
            if length > blocks_max {
                prompt.hashes = prompt.hashes[..blocks_max].into();
            }
            taken.push(prompt);
        }
        taken
    }

    /// Number of prompts dropped since the last call.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }
}

/// Maximum number of blocks in a message.
pub const ROUTED_BLOCKS_MAX: usize = 8_192;

#[derive(Serialize, Deserialize)]
struct EncodedRouted {
    layout: ReplicaLayout,
    prompts: Vec<EncodedPrompt>,
}

#[derive(Serialize, Deserialize)]
struct EncodedPrompt {
    worker: u64,
    dp_rank: u32,
    /// Little-endian hashes: eight bytes each, where a variable length takes ten.
    hashes: Vec<[u8; 8]>,
}

/// Routed prompts as bytes: eight per block, and up to 32 per prompt.
///
/// ```
/// use pointsman::protocol::{BlockHash, WorkerId, WorkerRank};
/// use pointsman::internals::replica::{decode_routed, encode_routed, ReplicaLayout, RoutedPrompt};
///
/// let layout = ReplicaLayout { block_size: 64, hash_seed: 1 };
/// let prompt = RoutedPrompt { rank: WorkerRank::new(WorkerId(1), 0), hashes: [BlockHash(7)].into() };
/// let bytes = encode_routed(layout, std::slice::from_ref(&prompt));
/// assert_eq!(decode_routed(&bytes)?, (layout, vec![prompt]));
/// # Ok::<(), pointsman::internals::replica::MessageError>(())
/// ```
#[must_use]
pub fn encode_routed(layout: ReplicaLayout, prompts: &[RoutedPrompt]) -> Vec<u8> {
    let encoded = |prompt: &RoutedPrompt| EncodedPrompt {
        worker: prompt.rank.worker.0,
        dp_rank: prompt.rank.rank,
        hashes: prompt.hashes.iter().map(|hash| hash.0.to_le_bytes()).collect(),
    };
    encode(&EncodedRouted { layout, prompts: prompts.iter().map(encoded).collect() })
}

/// Reads routed prompts.
///
/// # Errors
/// See [`MessageError`]. More than [`ROUTED_BLOCKS_MAX`] blocks, or a prompt without blocks, make the message malformed.
pub fn decode_routed(bytes: &[u8]) -> Result<(ReplicaLayout, Vec<RoutedPrompt>), MessageError> {
    let EncodedRouted { layout, prompts } = decode(bytes)?;
    let blocks: usize = prompts.iter().map(|prompt| prompt.hashes.len()).sum();
    if blocks > ROUTED_BLOCKS_MAX {
        return Err(malformed(bytes, format_args!("it has {blocks} blocks, must have at most {ROUTED_BLOCKS_MAX}")));
    }
    if prompts.iter().any(|prompt| prompt.hashes.is_empty()) {
        return Err(malformed(bytes, "a prompt has no blocks"));
    }
    let decoded = |prompt: EncodedPrompt| RoutedPrompt {
        rank: WorkerRank::new(WorkerId(prompt.worker), prompt.dp_rank),
        hashes: prompt.hashes.into_iter().map(|hash| BlockHash(u64::from_le_bytes(hash))).collect(),
    };
    Ok((layout, prompts.into_iter().map(decoded).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: ReplicaLayout = ReplicaLayout { block_size: 16, hash_seed: 3 };

    fn prompt(blocks: usize) -> RoutedPrompt {
        let rank = WorkerRank::new(WorkerId(u64::MAX), u32::MAX);
        RoutedPrompt {
            rank,
            hashes: (0..blocks as u64).map(|n| BlockHash(n.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect(),
        }
    }

    #[test]
    fn length_is_bounded() {
        let bytes = encode_routed(LAYOUT, &[prompt(100), prompt(1)]).len();
        assert!(bytes <= 101 * 8 + 3 * 32, "{bytes}");
    }

    #[test]
    fn errors_name_the_value_and_the_rule() {
        let error = |prompts: &[RoutedPrompt]| {
            let bytes = encode_routed(LAYOUT, prompts);
            decode_routed(&bytes).expect_err("malformed").to_string()
        };
        let too_many = "it has 8193 blocks, must have at most 8192";
        assert!(error(&[prompt(8_192), prompt(1)]).ends_with(too_many));
        assert!(error(&[prompt(0)]).ends_with("a prompt has no blocks"));
    }
}
