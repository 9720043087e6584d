//! Prompts as chains of blocks, with the names that engines use and the hashes of the router.

use std::num::NonZeroU32;
use std::sync::Arc;

use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::test_support::mix;
use pointsman_trial::engine::{Block, EngineHash};

/// Tokens per block.
pub(crate) const BLOCK_SIZE: u32 = 4;

pub(crate) struct Prompt {
    /// Blocks as the engines publish them.
    pub(crate) blocks: Vec<Arc<Block>>,
    pub(crate) hashed: HashedPrompt,
}

impl Prompt {
    /// A prompt of `shared` blocks of a document and `own` further ones that depend on `tail`.
    pub(crate) fn new(document: u64, shared: u32, tail: u64, own: u32) -> Self {
        let (mut parent, mut chain, mut blocks, mut tokens) = (None, 0, Vec::new(), Vec::new());
        for depth in 0..shared + own {
            let content = if depth < shared { document } else { mix(tail) };
            chain = mix(chain ^ mix(content ^ u64::from(depth) << 48));
            let of_block: Box<[u32]> =
                (0..BLOCK_SIZE).map(|n| (mix(content ^ u64::from(n)) >> 40) as u32 ^ depth).collect();
            tokens.extend_from_slice(&of_block);
            let mut bytes = [0; 32];
            bytes[24..].copy_from_slice(&chain.to_be_bytes());
            let hash = EngineHash(bytes);
            blocks.push(Arc::new(Block { hash, parent, depth, tokens: of_block, lora_name: None, cache_salt: None }));
            parent = Some(hash);
        }
        let scheme = HashScheme::new(NonZeroU32::new(BLOCK_SIZE).expect("not zero"));
        Self { blocks, hashed: HashedPrompt::from_tokens(&BlockHasher::new(scheme), &tokens, &MmBlocks::NONE) }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = u64> {
        self.blocks.iter().map(|block| block.hash.as_u64())
    }
}
