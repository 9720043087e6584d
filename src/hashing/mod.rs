//! Prompt hashing: block hashes (content of one block) and sequence hashes (content of the prefix up to a block).
//!
//! Defines both formulas and their inputs: the seeds that separate adapters and salts ([`HashScheme`]), the tokens of a
//! block (`BlockHasher`), the images and videos inside it (`MmBlocks`), the chain over blocks (`chain`), and a
//! hashed prompt ([`HashedPrompt`]), hashed here or by the caller.
//!
//! The values equal those of NVIDIA Dynamo's router for the same input, so requests hashed by its frontends and workers
//! that publish its hashes match. With `X(bytes, seed)` for xxh3-64, all integers little-endian and all sums wrapping:
//!
//! ```text
//! seed = 1337 + [lora given] X(lora, 0) + [salt given] X(salt, 1)
//! b[i] = X(tokens of block i as u32 ++ mm hashes of block i as u64, ascending, seed)
//! s[0] = b[0]
//! s[i] = X(s[i-1] as u64 ++ b[i] as u64, 1337)
//! ```
//!
//! One allocation per prompt and array, none per block, and none at all with `BlockHasher::hashes`. Hashing 12,000
//! tokens takes about 5 microseconds (`benches/hashing.rs`).
//!
//! Tokens and multimodal ids come from the embedder or the ingest. Engine hashes ([`crate::protocol::EngineHash`]) are
//! never computed here. A hash match is a hint: the hash is fast, not collision-proof, and the engine decides what it
//! reuses.

pub(crate) mod block;
pub(crate) mod mm;
pub(crate) mod prompt;
pub(crate) mod sequence;
#[cfg(test)]
mod tests;

pub(crate) use block::BlockHasher;
pub use block::HashScheme;
pub use mm::MmSpan;
pub(crate) use mm::{MmBlocks, MmError};
pub use prompt::HashedPrompt;
pub(crate) use prompt::HashedPromptError;
#[cfg(test)]
pub(crate) use sequence::hash_bytes;
pub(crate) use sequence::sequence_hashes;
