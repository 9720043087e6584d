//! Blocks and their hashes.
//!
//! Equal hashes mean equal tokens, ancestors, adapter and salt. Engines with different hash seeds produce different
//! hashes for the same content, as real ones do. The cache tracks which blocks are held.

use std::fmt;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128_with_seed;

/// The engine's own hash of a block and all blocks before it: 32 bytes.
///
/// ```
/// use pointsman_trial::engine::EngineHash;
///
/// let mut bytes = [0; 32];
/// bytes[31] = 7;
/// assert_eq!(EngineHash(bytes).as_u64(), 7);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(pub [u8; 32]);

impl EngineHash {
    /// The hash as engines shorten it to an integer: the last eight bytes, big-endian.
    #[must_use]
    pub fn as_u64(&self) -> u64 {
        let mut last = [0; 8];
        last.copy_from_slice(&self.0[24..]);
        u64::from_be_bytes(last)
    }
}

impl fmt::Debug for EngineHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.as_u64())
    }
}

/// A complete block, with all fields that an event or an index may need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Hash of the block and all blocks before it.
    pub hash: EngineHash,
    /// Hash of the previous block; none for the first block of a prompt.
    pub parent: Option<EngineHash>,
    /// Number of blocks before this one.
    pub depth: u32,
    /// Tokens of the block, exactly `block_size`.
    pub tokens: Box<[u32]>,
    /// LoRA adapter of the computation. Part of every block's hash.
    pub lora_name: Option<Arc<str>>,
    /// Cache namespace of the computation. It is hashed into the first block only and reaches the others through the
    /// parent hash. Engines publish it with the first block only.
    pub cache_salt: Option<Arc<str>>,
}

/// Computes block hashes; holds the buffer for the hashed bytes.
pub(crate) struct BlockHasher {
    seed: u64,
    buffer: Vec<u8>,
}

impl BlockHasher {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, buffer: Vec::new() }
    }

    /// Hashes the block of `tokens` after `parent`. The salt is only used without a parent.
    pub(crate) fn hash(
        &mut self,
        parent: Option<EngineHash>,
        tokens: impl Iterator<Item = u32>,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> EngineHash {
        self.buffer.clear();
        // Length prefixes in front of names keep the encoding injective: different inputs give different bytes.
        self.put_name(lora_name);
        match parent {
            Some(parent) => self.buffer.extend_from_slice(&parent.0),
            None => self.put_name(cache_salt),
        }
        self.buffer.push(u8::from(parent.is_some()));
        tokens.for_each(|token| self.buffer.extend_from_slice(&token.to_le_bytes()));
        let mut name = [0; 32];
        name[..16].copy_from_slice(&xxh3_128_with_seed(&self.buffer, self.seed).to_be_bytes());
        name[16..].copy_from_slice(&xxh3_128_with_seed(&self.buffer, !self.seed).to_be_bytes());
        EngineHash(name)
    }

    fn put_name(&mut self, name: Option<&str>) {
        let name = name.unwrap_or_default();
        self.buffer.extend_from_slice(&(name.len() as u64).to_le_bytes());
        self.buffer.extend_from_slice(name.as_bytes());
    }
}
