//! Hashed prompts, with validation of hashes from callers.
//!
//! Both hash arrays have the same length and the prompt is long enough for them. The correctness of hashes from a
//! caller cannot be verified; wrong hashes cost cache hits only.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{BlockHasher, HashScheme, MmBlocks, MmError, MmSpan, sequence_hashes};
use crate::protocol::{BlockHash, SequenceHash};

/// Block hashes, sequence hashes and length of a prompt, computed from tokens or provided by the caller.
///
/// ```
/// use std::num::NonZeroU32;
/// use pointsman::hashing::{HashScheme, HashedPrompt};
/// use pointsman::internals::hashing::{BlockHasher, MmBlocks};
///
/// let scheme = HashScheme::new(NonZeroU32::new(4).expect("not zero"));
/// let ours = HashedPrompt::from_tokens(&BlockHasher::new(scheme), &[1, 2, 3, 4, 5, 6, 7, 8, 9], &MmBlocks::NONE);
/// let theirs = HashedPrompt::from_hashes(ours.block_hashes().clone(), None, 9, &scheme)?;
/// assert_eq!(ours, theirs);
/// # Ok::<(), pointsman::internals::hashing::HashedPromptError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "HashedPromptFields")]
pub struct HashedPrompt {
    block_hashes: Arc<[BlockHash]>,
    sequence_hashes: Arc<[SequenceHash]>,
    prompt_tokens: usize,
}

/// [`HashedPrompt`] as deserialized. Sequence hashes are derived where absent.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HashedPromptFields {
    block_hashes: Arc<[BlockHash]>,
    sequence_hashes: Option<Arc<[SequenceHash]>>,
    prompt_tokens: usize,
}

impl TryFrom<HashedPromptFields> for HashedPrompt {
    type Error = HashedPromptError;

    fn try_from(fields: HashedPromptFields) -> Result<Self, HashedPromptError> {
        let HashedPromptFields { block_hashes, sequence_hashes: sequence, prompt_tokens } = fields;
        Self::from_parts(block_hashes, sequence, prompt_tokens)
    }
}

/// Reason for rejecting hashes of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HashedPromptError {
    /// The numbers of sequence hashes and block hashes differ.
    #[error("sequence_hashes has length {sequence_hashes}, must be {block_hashes} like block_hashes")]
    Lengths {
        /// Number of block hashes.
        block_hashes: usize,
        /// Number of sequence hashes.
        sequence_hashes: usize,
    },
    /// The prompt is too short for its block hashes.
    #[error("prompt_tokens is {prompt_tokens}, must be at least {prompt_tokens_min} for {block_hashes} block hashes")]
    PromptTokens {
        /// Given length in tokens.
        prompt_tokens: usize,
        /// Minimum number of tokens for the block hashes.
        prompt_tokens_min: usize,
        /// Number of block hashes.
        block_hashes: usize,
    },
}

impl HashedPrompt {
    /// Hashes a prompt. Two allocations, independent of its length.
    #[must_use]
    pub fn from_tokens(hasher: &BlockHasher<'_>, tokens: &[u32], mm: &MmBlocks) -> Self {
        let block_hashes = hasher.block_hashes(tokens, mm);
        Self { sequence_hashes: sequence_hashes(&block_hashes), block_hashes, prompt_tokens: tokens.len() }
    }

    /// Hashes a prompt with multimodal objects at `spans`.
    ///
    /// ```
    /// use std::num::NonZeroU32;
    /// use pointsman::hashing::{HashScheme, HashedPrompt};
    ///
    /// let scheme = HashScheme::new(NonZeroU32::new(4).expect("positive"));
    /// let prompt = HashedPrompt::hash(scheme, &[1, 2, 3, 4, 5], &[]).expect("no spans");
    /// assert_eq!(prompt.block_hashes().len(), 1);
    /// ```
    ///
    /// # Errors
    /// A span that ends before it starts or beyond the prompt, or too many objects.
    pub fn hash(scheme: HashScheme<'_>, tokens: &[u32], spans: &[MmSpan]) -> Result<Self, MmError> {
        let mm = match spans {
            [] => MmBlocks::NONE,
            spans => MmBlocks::split(spans, tokens.len(), scheme.block_size)?,
        };
        Ok(Self::from_tokens(&BlockHasher::new(scheme), tokens, &mm))
    }

    /// Wraps the hashes of a prompt of `prompt_tokens` tokens that the caller computed with `scheme`. Derives missing
    /// sequence hashes. Given sequence hashes are not required to be chained: a caller may use keyed
    /// hashes.
    ///
    /// Fewer block hashes than the prompt's blocks are allowed; the uncovered blocks count as unknown.
    ///
    /// # Errors
    /// Arrays of different lengths, or a prompt too short for its block hashes.
    pub fn from_hashes(
        block_hashes: Arc<[BlockHash]>,
        sequence: Option<Arc<[SequenceHash]>>,
        prompt_tokens: usize,
        scheme: &HashScheme<'_>,
    ) -> Result<Self, HashedPromptError> {
        let hashed = Self::from_parts(block_hashes, sequence, prompt_tokens)?;
        hashed.check(scheme)?;
        Ok(hashed)
    }

    /// Checks that the prompt is long enough for its block hashes under `scheme`.
    ///
    /// # Errors
    /// A prompt too short for its block hashes.
    pub fn check(&self, scheme: &HashScheme<'_>) -> Result<(), HashedPromptError> {
        let (prompt_tokens, block_hashes) = (self.prompt_tokens, self.block_hashes.len());
        let prompt_tokens_min = scheme.prompt_tokens_min(block_hashes);
        if prompt_tokens < prompt_tokens_min {
            return Err(HashedPromptError::PromptTokens { prompt_tokens, prompt_tokens_min, block_hashes });
        }
        Ok(())
    }

    fn from_parts(
        block_hashes: Arc<[BlockHash]>,
        sequence: Option<Arc<[SequenceHash]>>,
        prompt_tokens: usize,
    ) -> Result<Self, HashedPromptError> {
        let sequence_hashes = sequence.unwrap_or_else(|| sequence_hashes(&block_hashes));
        if sequence_hashes.len() != block_hashes.len() {
            let (block_hashes, sequence_hashes) = (block_hashes.len(), sequence_hashes.len());
            return Err(HashedPromptError::Lengths { block_hashes, sequence_hashes });
        }
        Ok(Self { block_hashes, sequence_hashes, prompt_tokens })
    }

    /// Content hash of each complete block: the input of index queries.
    #[must_use]
    pub fn block_hashes(&self) -> &Arc<[BlockHash]> {
        &self.block_hashes
    }

    /// Hash of the prefix up to each complete block: the input of load accounting. As many as block hashes.
    #[must_use]
    pub fn sequence_hashes(&self) -> &Arc<[SequenceHash]> {
        &self.sequence_hashes
    }

    /// Length of the prompt in tokens, including the trailing partial block.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }
}
