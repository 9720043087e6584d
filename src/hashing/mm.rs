//! Multimodal objects in prompts: images, videos and similar content that tokens do not distinguish.
//!
//! Every image occupies a run of placeholder tokens, and all images use the same placeholder. The hashes of the objects
//! are therefore appended to the tokens of each block that the object overlaps ([`MmBlocks`]), both for requests and for
//! an engine's events, whose `extra_keys` the ingest parses. An engine that publishes other tokens in place of the
//! placeholders (SGLang) needs requests with the same tokens, which are hashed as text.

use std::num::NonZeroU32;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// Position of one multimodal object, or of one part of it, in a prompt: tokens `start..end`.
///
/// An object in several parts has several spans with the same hash. Spans may overlap (for example audio inside a
/// video).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MmSpan {
    /// Hash of the object's content. See [`MmSpan::hash_of_id`].
    pub mm_hash: u64,
    /// First token.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
}

impl MmSpan {
    /// The hash of an object identified by a string: `None` for the empty string; the first 16 digits of a string of 64 hex
    /// digits (vLLM identifies images by SHA-256); otherwise xxh3-64 of the bytes with seed 0.
    ///
    /// ```
    /// use pointsman::hashing::MmSpan;
    ///
    /// assert_eq!(MmSpan::hash_of_id(""), None);
    /// assert_eq!(MmSpan::hash_of_id(&"0123456789abcdef".repeat(4)), Some(0x0123_4567_89ab_cdef));
    /// assert_eq!(MmSpan::hash_of_id("img-1"), Some(14770383865288705413));
    /// ```
    #[must_use]
    pub fn hash_of_id(id: &str) -> Option<u64> {
        if id.is_empty() {
            return None;
        }
        if id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return u64::from_str_radix(&id[..16], 16).ok();
        }
        Some(xxh3_64(id.as_bytes()))
    }

    fn block_range(self, block_size: NonZeroU32) -> Range<usize> {
        let size = block_size.get() as usize;
        if self.start < self.end { self.start / size..self.end.div_ceil(size) } else { 0..0 }
    }

    fn check(self, prompt_tokens: usize) -> Result<(), MmError> {
        let Self { start, end, .. } = self;
        if end < start {
            return Err(MmError::Reversed { start, end });
        }
        if end > prompt_tokens {
            return Err(MmError::BeyondPrompt { start, end, prompt_tokens });
        }
        Ok(())
    }
}

/// Reason for rejecting multimodal spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MmError {
    /// The span ends before it starts.
    #[error("mm range {start}..{end} ends before it starts")]
    Reversed {
        /// First token.
        start: usize,
        /// One past the last token.
        end: usize,
    },
    /// The span exceeds the prompt.
    #[error("mm range {start}..{end} must end within the {prompt_tokens} tokens of the prompt")]
    BeyondPrompt {
        /// First token.
        start: usize,
        /// One past the last token.
        end: usize,
        /// Tokens of the prompt.
        prompt_tokens: usize,
    },
    /// Heavily overlapping spans, which would let a short request use much memory.
    #[error("mm ranges cover {blocks} blocks in total, must be at most {max}", max = MmBlocks::SPLIT_MAX)]
    TooMany {
        /// Sum of the blocks of all spans.
        blocks: usize,
    },
}

/// The multimodal objects of each block of a prompt.
///
/// ```
/// use std::num::NonZeroU32;
/// use pointsman::hashing::{HashScheme, MmSpan};
/// use pointsman::internals::hashing::{BlockHasher, MmBlocks};
///
/// let block_size = NonZeroU32::new(4).expect("not zero");
/// let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
/// let mm = MmBlocks::split(&[MmSpan { mm_hash: 42, start: 1, end: 3 }], tokens.len(), block_size)?;
/// let hashes = BlockHasher::new(HashScheme::new(block_size)).block_hashes(&tokens, &mm);
/// assert_eq!(hashes[0].0, 14000361058806882387);
/// assert_eq!(hashes[1].0, 16777012769546811212); // no object here: hashed as text
/// # Ok::<(), pointsman::internals::hashing::MmError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MmBlocks {
    /// Ascending by block, then by hash.
    objects: Vec<MmBlock>,
}

impl MmBlocks {
    /// No objects, for text prompts.
    pub const NONE: Self = Self { objects: Vec::new() };

    /// Maximum number of objects from [`MmBlocks::split`], counted once per block. Sufficient for any prompt below a
    /// million blocks without overlapping objects.
    pub const SPLIT_MAX: usize = 1 << 20;

    /// Splits the spans of a prompt of `prompt_tokens` tokens into blocks. Objects with the same hash count once per
    /// block. Positions inside a block do not affect its hash.
    ///
    /// With EAGLE as well, an object belongs to the blocks of `block_size` tokens that it covers. The additional token
    /// of a window does not add objects of the next block.
    ///
    /// # Errors
    /// A span that ends before it starts or beyond the prompt, or more than [`MmBlocks::SPLIT_MAX`] objects.
    pub fn split(spans: &[MmSpan], prompt_tokens: usize, block_size: NonZeroU32) -> Result<Self, MmError> {
        let mut blocks = 0_usize;
        for span in spans {
            span.check(prompt_tokens)?;
            blocks = blocks.saturating_add(span.block_range(block_size).len());
        }
        if blocks > Self::SPLIT_MAX {
            return Err(MmError::TooMany { blocks });
        }
        let mut objects = Vec::with_capacity(blocks);
        for &span in spans {
            objects.extend(span.block_range(block_size).map(|block_idx| MmBlock { block_idx, mm_hash: span.mm_hash }));
        }
        objects.sort_unstable();
        objects.dedup();
        Ok(Self { objects })
    }

    /// Creates the list from the objects of block 0, 1, 2, ..., in any order inside a block: the form of KV events and
    /// of callers with split objects. Duplicates inside a block are kept.
    ///
    /// ```
    /// use pointsman::internals::hashing::MmBlocks;
    ///
    /// assert_eq!(MmBlocks::listed([vec![7, 3], vec![]]), MmBlocks::listed([[3, 7]]));
    /// assert_eq!(MmBlocks::listed([[], []] as [[u64; 0]; 2]), MmBlocks::NONE);
    /// ```
    #[must_use]
    pub fn listed(blocks: impl IntoIterator<Item = impl IntoIterator<Item = u64>>) -> Self {
        let mut objects = Vec::new();
        for (block_idx, hashes) in blocks.into_iter().enumerate() {
            objects.extend(hashes.into_iter().map(|mm_hash| MmBlock { block_idx, mm_hash }));
        }
        objects.sort_unstable();
        Self { objects }
    }

    pub(super) fn blocks(&self) -> MmCursor<'_> {
        MmCursor { rest: &self.objects }
    }
}

/// One object in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MmBlock {
    block_idx: usize,
    pub(super) mm_hash: u64,
}

/// Iterates over the objects block by block.
pub(super) struct MmCursor<'a> {
    rest: &'a [MmBlock],
}

impl<'a> MmCursor<'a> {
    /// The objects of block `block_idx`, ascending. Must be called for every block in order.
    pub(super) fn take(&mut self, block_idx: usize) -> &'a [MmBlock] {
        let n_objects = self.rest.iter().take_while(|object| object.block_idx == block_idx).count();
        let (objects, rest) = self.rest.split_at(n_objects);
        self.rest = rest;
        objects
    }
}
