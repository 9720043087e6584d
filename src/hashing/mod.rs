//! Hashes of prompts: what one block holds, and what everything up to a block holds.
//!
//! Owns the two formulas and all that flows into them: the seeds that keep adapters and tenants apart
//! ([`HashScheme`]), the tokens of a block ([`BlockHasher`]), the images and videos inside it ([`MmBlocks`]),
//! the chain over blocks ([`chain`]), and a prompt whose hashing is done, here or by the caller
//! ([`HashedPrompt`]).
//!
//! Promises the values that NVIDIA Dynamo's router computes for the same input, so that requests hashed by its
//! frontends, and workers that speak its hashes, match ours. With `X(bytes, seed)` for xxh3-64, all integers
//! little-endian and all sums wrapping:
//!
//! ```text
//! seed = 1337 + [lora given] X(lora, 0) + [salt given] X(salt, 1)
//! b[i] = X(tokens of block i as u32 ++ mm hashes of block i as u64, ascending, seed)
//! s[0] = b[0]
//! s[i] = X(s[i-1] as u64 ++ b[i] as u64, 1337)
//! ```
//!
//! One allocation per prompt and array, none per block, and none at all through [`BlockHasher::hashes`]. Hashing
//! 12,000 tokens costs about 5 microseconds (`benches/hashing.rs`).
//!
//! Leaves to others where tokens and multimodal ids come from (embedder, ingest), what engines call their blocks
//! ([`crate::protocol::EngineHash`], never computed here), and what is done with a match. A hash match is a hint:
//! the hash is fast, not collision-proof, and the engine alone decides what it reuses.

mod block;
mod mm;
mod prompt;
mod sequence;
#[cfg(test)]
mod tests;

use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use block::{BlockHasher, HashScheme};
pub use mm::{MmBlocks, MmError, MmSpan, fill_runs, fill_spans, mm_hash_of_id, pad_value};
pub use prompt::{HashedPrompt, HashedPromptError};
pub use sequence::{chain, sequence_hashes};

/// Seed of the chain, and of the blocks of prompts that have neither adapter nor salt.
pub const BASE_SEED: u64 = 1337;

/// xxh3-64 of raw bytes with [`BASE_SEED`].
///
/// ```
/// assert_eq!(pointsman::hashing::hash_bytes(b"hello world"), 10239022491161036150);
/// ```
#[must_use]
#[inline] // The chain's links are 16 bytes: knowing that here makes them 4 ns instead of 6.
pub fn hash_bytes(bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, BASE_SEED)
}
