//! A request on its way through a rank.
//!
//! Owns a request's tokens, the names of its blocks and how much of it is computed. Promises that its next output token
//! follows from the seed, the prompt and the position alone. Leaves to the rank when it runs, to the cache its blocks.

use std::sync::Arc;

use thiserror::Error;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::engine::block::{Block, BlockHasher, EngineHash};
use crate::engine::config::EngineConfig;

/// What is asked of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestSpec {
    /// Names the request; free again once it has ended.
    pub id: u64,
    /// The prompt: at least one token.
    pub tokens: Arc<[u32]>,
    /// Tokens to generate, at least one. Fewer come when `max_model_len` is reached before.
    pub output_tokens_max: u32,
    /// The LoRA adapter to compute with. Empty is none.
    pub lora_name: Option<Arc<str>>,
    /// The namespace to share cached blocks within. Empty is none.
    pub cache_salt: Option<Arc<str>>,
}

impl RequestSpec {
    /// A request without adapter and salt.
    ///
    /// ```
    /// use pointsman_trial::engine::RequestSpec;
    ///
    /// let plain = RequestSpec::new(1, [10, 11, 12], 5);
    /// let salted = RequestSpec { cache_salt: Some("tenant".into()), ..plain };
    /// assert_eq!(salted.tokens.len(), 3);
    /// ```
    #[must_use]
    pub fn new(id: u64, tokens: impl Into<Arc<[u32]>>, output_tokens_max: u32) -> Self {
        Self { id, tokens: tokens.into(), output_tokens_max, lora_name: None, cache_salt: None }
    }
}

/// Why a rank does not take a request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// There is nothing to compute.
    #[error("request {0} has an empty prompt")]
    EmptyPrompt(u64),
    /// There is nothing to generate.
    #[error("request {0} asks for no output")]
    NoOutput(u64),
    /// The prompt leaves no room for output.
    #[error("request {id} has a prompt of {prompt_tokens} tokens, not fewer than max_model_len {max_model_len}")]
    PromptTooLong {
        /// The request.
        id: u64,
        /// Its length.
        prompt_tokens: usize,
        /// What it must stay below.
        max_model_len: u32,
    },
    /// A request of this name has not ended yet.
    #[error("request {0} is here already")]
    DuplicateId(u64),
}

pub(crate) struct Sequence {
    spec: RequestSpec,
    /// What the output depends on besides seed and position.
    prompt_hash: u64,
    outputs: Vec<u32>,
    /// The length at which it ends, prompt included.
    end: u32,
    /// Names of leading complete blocks: at least those of the prompt and of what was ever computed.
    hashes: Vec<EngineHash>,
    /// Tokens whose KV is there, or will be at the end of the step.
    pub(crate) computed: u32,
    /// Its blocks, in order.
    pub(crate) slots: Vec<u32>,
    /// Tokens that the present step computes.
    pub(crate) scheduled: u32,
    /// Tokens that were cached when it was first admitted.
    pub(crate) cached_tokens: Option<u32>,
}

impl Sequence {
    pub(crate) fn new(spec: RequestSpec, config: &EngineConfig, hasher: &mut BlockHasher) -> Result<Self, Refused> {
        let (id, prompt_tokens, max_model_len) = (spec.id, spec.tokens.len(), config.max_model_len);
        if prompt_tokens == 0 {
            return Err(Refused::EmptyPrompt(id));
        }
        if spec.output_tokens_max == 0 {
            return Err(Refused::NoOutput(id));
        }
        if prompt_tokens >= max_model_len as usize {
            return Err(Refused::PromptTooLong { id, prompt_tokens, max_model_len });
        }
        let named = |name: Option<Arc<str>>| name.filter(|name| !name.is_empty());
        let spec = RequestSpec { lora_name: named(spec.lora_name), cache_salt: named(spec.cache_salt), ..spec };
        let mut sequence = Self {
            prompt_hash: prompt_hash(&spec, config.output_seed),
            outputs: Vec::new(),
            end: (prompt_tokens as u32).saturating_add(spec.output_tokens_max).min(max_model_len),
            hashes: Vec::with_capacity(prompt_tokens / config.block_size as usize),
            computed: 0,
            slots: Vec::new(),
            scheduled: 0,
            cached_tokens: None,
            spec,
        };
        for block_idx in 0..prompt_tokens as u32 / config.block_size {
            sequence.hash(block_idx, config.block_size, hasher);
        }
        Ok(sequence)
    }

    pub(crate) fn id(&self) -> u64 {
        self.spec.id
    }

    /// Tokens of prompt and output so far.
    pub(crate) fn len(&self) -> u32 {
        (self.spec.tokens.len() + self.outputs.len()) as u32
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// Whether only the token generated last is left to compute.
    pub(crate) fn is_decoding(&self) -> bool {
        self.has_output() && self.computed + 1 == self.len()
    }

    /// Names of the blocks that may be found in the cache: not the one with the last token, for that is computed.
    pub(crate) fn reusable(&self, block_size: u32) -> &[EngineHash] {
        &self.hashes[..((self.len() - 1) / block_size) as usize]
    }

    /// The name of a complete block; all before it have theirs.
    pub(crate) fn hash(&mut self, block_idx: u32, block_size: u32, hasher: &mut BlockHasher) -> EngineHash {
        if let Some(hash) = self.hashes.get(block_idx as usize) {
            return *hash;
        }
        let parent = self.hashes.last().copied();
        let (lora_name, cache_salt) = (self.spec.lora_name.as_deref(), self.spec.cache_salt.as_deref());
        let hash = hasher.hash(parent, self.tokens(block_idx, block_size), lora_name, cache_salt);
        self.hashes.push(hash);
        hash
    }

    /// A complete block whose name is known.
    pub(crate) fn block(&self, block_idx: u32, block_size: u32) -> Block {
        let at = block_idx as usize;
        Block {
            hash: self.hashes[at],
            parent: at.checked_sub(1).map(|before| self.hashes[before]),
            depth: block_idx,
            tokens: self.tokens(block_idx, block_size).collect(),
            lora_name: self.spec.lora_name.clone(),
            cache_salt: self.spec.cache_salt.clone(),
        }
    }

    /// Generates the next token.
    pub(crate) fn sample(&mut self, config: &EngineConfig) -> u32 {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.prompt_hash.to_le_bytes());
        bytes[8..].copy_from_slice(&(self.outputs.len() as u64).to_le_bytes());
        let drawn = xxh3_64_with_seed(&bytes, config.output_seed);
        let token = ((u128::from(drawn) * u128::from(config.vocab_size)) >> 64) as u32;
        self.outputs.push(token);
        token
    }

    /// Whether it has its last token, and if so, whether it is the last that was asked for.
    pub(crate) fn ended(&self) -> Option<bool> {
        (self.len() >= self.end).then(|| self.outputs.len() as u64 >= u64::from(self.spec.output_tokens_max))
    }

    fn tokens(&self, block_idx: u32, block_size: u32) -> impl Iterator<Item = u32> {
        let start = block_idx as usize * block_size as usize;
        let (prompt, end) = (&self.spec.tokens, start + block_size as usize);
        let in_prompt = &prompt[start.min(prompt.len())..end.min(prompt.len())];
        let in_outputs = &self.outputs[start.saturating_sub(prompt.len())..end.saturating_sub(prompt.len())];
        in_prompt.iter().chain(in_outputs).copied()
    }
}

/// Of tokens and adapter; a salt changes who shares, not what a model says.
fn prompt_hash(spec: &RequestSpec, seed: u64) -> u64 {
    let mut hash = Xxh3::with_seed(seed);
    hash.update(&(spec.tokens.len() as u64).to_le_bytes());
    spec.tokens.iter().for_each(|token| hash.update(&token.to_le_bytes()));
    hash.update(spec.lora_name.as_deref().unwrap_or_default().as_bytes());
    hash.digest()
}
