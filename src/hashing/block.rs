//! Block hashes: hashes of the content of complete blocks, independent of their position.
//!
//! Defines the token windows, the hash seed, and the byte order. The iterator and the collected form return the same
//! values, and the trailing partial block is ignored. [`super::sequence_hashes`] chains the hashes.

use std::num::NonZeroU32;
use std::sync::Arc;

use twox_hash::XxHash3_64;
use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};
use zerocopy::IntoBytes;

use super::mm::{MmBlock, MmBlocks};
use crate::protocol::BlockHash;

/// Inputs of a prompt's block hashes besides the tokens.
///
/// Block size and EAGLE are properties of the pool; adapter and salt are properties of the request. Blocks with
/// different adapters or salts never match. An empty name equals no name.
///
/// ```
/// use std::num::NonZeroU32;
/// use pointsman::hashing::HashScheme;
///
/// let pool = HashScheme::new(NonZeroU32::new(4).expect("not zero"));
/// let request = HashScheme { lora_name: Some("my-lora"), ..pool };
/// assert_ne!(request.seed(), pool.seed());
/// assert_eq!(HashScheme { lora_name: Some(""), ..pool }.seed(), pool.seed());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashScheme<'a> {
    /// Tokens per block.
    pub block_size: NonZeroU32,
    /// Name of the request's LoRA adapter.
    pub lora_name: Option<&'a str>,
    /// Cache namespace of the request, `cache_salt` on the wire. Requests with different salts share no blocks.
    pub cache_salt: Option<&'a str>,
    /// Whether a block is hashed together with the following token, as required for EAGLE drafts: windows of
    /// `block_size + 1` tokens with a stride of `block_size`.
    pub is_eagle: bool,
}

impl<'a> HashScheme<'a> {
    /// Seed of the chain, and of the blocks of prompts without adapter and salt.
    pub const BASE_SEED: u64 = 1337;

    /// Plain blocks of `block_size` tokens, without adapter, salt and EAGLE.
    #[must_use]
    pub const fn new(block_size: NonZeroU32) -> Self {
        Self { block_size, lora_name: None, cache_salt: None, is_eagle: false }
    }

    /// Seed of the block hashes: the wrapping sum of [`Self::BASE_SEED`], xxh3-64 of the adapter name with seed 0, and
    /// xxh3-64 of the salt with seed 1.
    #[must_use]
    pub fn seed(&self) -> u64 {
        let lora = self.lora_name.filter(|name| !name.is_empty()).map_or(0, |name| xxh3_64(name.as_bytes()));
        let salt = self.cache_salt.filter(|salt| !salt.is_empty()).map_or(0, |s| xxh3_64_with_seed(s.as_bytes(), 1));
        Self::BASE_SEED.wrapping_add(lora).wrapping_add(salt)
    }

    /// Number of complete blocks of a prompt of `prompt_tokens` tokens. With EAGLE, a block is complete only with the
    /// token after it.
    ///
    /// ```
    /// # use std::num::NonZeroU32;
    /// # use pointsman::hashing::HashScheme;
    /// let plain = HashScheme::new(NonZeroU32::new(4).expect("not zero"));
    /// assert_eq!(plain.block_count(8), 2);
    /// assert_eq!(HashScheme { is_eagle: true, ..plain }.block_count(8), 1);
    /// ```
    #[must_use]
    pub fn block_count(&self, prompt_tokens: usize) -> usize {
        prompt_tokens.saturating_sub(usize::from(self.is_eagle)) / self.stride()
    }

    /// Minimum number of tokens for `block_count` complete blocks. Saturates.
    #[must_use]
    pub fn prompt_tokens_min(&self, block_count: usize) -> usize {
        match block_count {
            0 => 0,
            n => n.saturating_mul(self.stride()).saturating_add(usize::from(self.is_eagle)),
        }
    }

    /// Tokens between the starts of consecutive blocks.
    fn stride(&self) -> usize {
        self.block_size.get() as usize
    }
}

/// Block hasher for one [`HashScheme`], with a precomputed seed.
///
/// ```
/// use std::num::NonZeroU32;
/// use pointsman::hashing::HashScheme;
/// use pointsman::internals::hashing::{BlockHasher, MmBlocks};
///
/// let hasher = BlockHasher::new(HashScheme::new(NonZeroU32::new(4).expect("not zero")));
/// let hashes = hasher.block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8, 9], &MmBlocks::NONE);
/// assert_eq!(hashes.len(), 2); // the ninth token completes no block
/// assert_eq!(hashes[0].0, 14643705804678351452);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher<'a> {
    scheme: HashScheme<'a>,
    seed: u64,
}

impl<'a> BlockHasher<'a> {
    /// Creates a hasher for prompts with `scheme`.
    #[must_use]
    pub fn new(scheme: HashScheme<'a>) -> Self {
        Self { scheme, seed: scheme.seed() }
    }

    /// Creates a hasher with a custom seed, for namespaces that no request can name.
    pub(crate) fn with_seed(scheme: HashScheme<'a>, seed: u64) -> Self {
        Self { scheme, seed }
    }

    /// The hashing scheme.
    #[must_use]
    pub fn scheme(&self) -> &HashScheme<'a> {
        &self.scheme
    }

    /// Hashes of the complete blocks of `tokens`, in one allocation; empty if no block is complete.
    ///
    /// `mm` contains the multimodal objects of each block ([`MmBlocks::NONE`] for text). Objects beyond the last
    /// complete block are ignored.
    #[must_use]
    pub fn block_hashes(&self, tokens: &[u32], mm: &MmBlocks) -> Arc<[BlockHash]> {
        self.hashes(tokens, mm).collect()
    }

    /// Like [`BlockHasher::block_hashes`], as an iterator without allocation.
    pub fn hashes<'t>(
        &self,
        tokens: &'t [u32],
        mm: &'t MmBlocks,
    ) -> impl ExactSizeIterator<Item = BlockHash> + use<'t> {
        let stride = self.scheme.stride();
        let window = stride + usize::from(self.scheme.is_eagle);
        let mut content = Content::new(self.seed);
        let mut mm = mm.blocks();
        // A mapped range, because `collect` knows the size of an `Arc<[_]>` in advance only for standard iterators.
        (0..self.scheme.block_count(tokens.len())).map(move |block_idx| {
            let start = block_idx * stride;
            content.hash(&tokens[start..start + window], mm.take(block_idx))
        })
    }
}

/// Longest input that xxh3 hashes directly with its seed. Longer inputs use a secret derived from the seed.
const SECRETLESS_BYTES_MAX: usize = 240;

/// Size of the buffer for blocks with objects; a multiple of the four bytes of a token.
const BUFFER_BYTES: usize = 1024;

/// Hashes the blocks of one prompt, with a secret derived once.
///
/// On little-endian machines tokens are hashed in place. A block with objects is copied to a buffer, because the
/// objects must follow the tokens. Measured with 64 tokens per block, in ns per block, best of 5,000 runs over 12,000
/// tokens on a busy 2-core AMD EPYC without `target-cpu`: copied to a buffer, `xxhash-rust` (SSE2 here) takes 30 and
/// `twox-hash` (detects AVX2) also 30, because reading recently written data in other widths is slow; in place they
/// take 28 and 15. Deriving the secret per block, or streaming, takes 50 % longer.
struct Content {
    seed: u64,
    secret: [u8; 192],
    buffer: [u8; BUFFER_BYTES],
}

impl Content {
    fn new(seed: u64) -> Self {
        Self { seed, secret: const_custom_default_secret(seed), buffer: [0; BUFFER_BYTES] }
    }

    fn hash(&mut self, tokens: &[u32], mm: &[MmBlock]) -> BlockHash {
        if cfg!(target_endian = "little") && mm.is_empty() {
            return self.hash_bytes(tokens.as_bytes());
        }
        let token_bytes = size_of_val(tokens);
        let bytes = token_bytes + size_of::<u64>() * mm.len();
        if bytes > BUFFER_BYTES {
            return self.hash_in_parts(tokens, mm);
        }
        self.fill(tokens);
        for (to, object) in self.buffer[token_bytes..bytes].chunks_exact_mut(size_of::<u64>()).zip(mm) {
            to.copy_from_slice(&object.mm_hash.to_le_bytes());
        }
        self.hash_bytes(&self.buffer[..bytes])
    }

    fn hash_bytes(&self, content: &[u8]) -> BlockHash {
        BlockHash(match content.len() {
            ..=SECRETLESS_BYTES_MAX => xxh3_64_with_seed(content, self.seed),
            _ => XxHash3_64::oneshot_with_secret(&self.secret, content).expect("the secret has the required length"),
        })
    }

    fn hash_in_parts(&mut self, tokens: &[u32], mm: &[MmBlock]) -> BlockHash {
        let mut stream = Xxh3::with_seed(self.seed);
        for tokens in tokens.chunks(BUFFER_BYTES / size_of::<u32>()) {
            let filled = self.fill(tokens);
            stream.update(&self.buffer[..filled]);
        }
        for object in mm {
            stream.update(&object.mm_hash.to_le_bytes());
        }
        BlockHash(stream.digest())
    }

    /// Copies `tokens` to the start of the buffer and returns their number of bytes.
    fn fill(&mut self, tokens: &[u32]) -> usize {
        let bytes = size_of_val(tokens);
        for (to, token) in self.buffer[..bytes].chunks_exact_mut(size_of::<u32>()).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        bytes
    }
}
