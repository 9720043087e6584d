//! State of a request in a rank.
//!
//! Holds the tokens of a request, the hashes of its blocks and the number of computed tokens. An output token depends
//! on the seed, the prompt and the position alone. The rank schedules the sequence; the cache holds its blocks.

use std::sync::Arc;

use thiserror::Error;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::engine::block::{Block, BlockHasher, EngineHash};
use crate::engine::config::EngineConfig;

/// A request to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestSpec {
    /// Id of the request; reusable after the request has ended.
    pub id: u64,
    /// Prompt of at least one token.
    pub tokens: Arc<[u32]>,
    /// Number of tokens to generate, at least one. `max_model_len` may end the output earlier.
    pub output_tokens_max: u32,
    /// LoRA adapter. An empty name means none.
    pub lora_name: Option<Arc<str>>,
    /// Cache namespace. Only requests with equal salts share blocks. An empty salt means none.
    pub cache_salt: Option<Arc<str>>,
    /// Session that refers to the blocks of the request after its end.
    pub session_id: Option<Arc<str>>,
}

impl RequestSpec {
    /// Creates a request without adapter, salt and session.
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
        Self { id, tokens: tokens.into(), output_tokens_max, lora_name: None, cache_salt: None, session_id: None }
    }
}

impl RequestSpec {
    /// Hash that determines the first output token.
    fn output_hash(&self, config: &EngineConfig) -> u64 {
        if !config.output_from_context {
            return prompt_hash(self, config.output_seed);
        }
        let adapter = self.lora_name.as_deref().unwrap_or_default();
        let start = xxh3_64_with_seed(adapter.as_bytes(), config.output_seed);
        self.tokens.iter().fold(start, |context, token| followed_by(context, *token))
    }

    /// First output token of the request on a rank with this configuration. Linear in the prompt.
    ///
    /// ```
    /// use pointsman_trial::engine::{EngineConfig, Rank, RequestSpec};
    ///
    /// let (config, spec) = (EngineConfig::default(), RequestSpec::new(1, [10, 11, 12], 1));
    /// let mut rank = Rank::new(config)?;
    /// let token = spec.first_token(&config);
    /// rank.submit(spec)?;
    /// assert_eq!(rank.step().expect("a request waits").outputs[0].token, token);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn first_token(&self, config: &EngineConfig) -> u32 {
        token_at(self.output_hash(config), 0, config)
    }
}

/// Part of a request that a rank serves, in disaggregated serving.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// Prefill and decode.
    #[default]
    Whole,
    /// Prefill for another rank. The complete blocks of the prompt stay in use after the end of the request, until
    /// [`Rank::release`](super::Rank::release).
    Prefill,
    /// Decode after the prefill by another rank. Only the last token of the prompt is computed. Its other tokens count
    /// as cached, and its complete blocks are stored and published as after a prefill. A preempted request loses the
    /// transferred blocks and computes its prompt.
    Decode,
}

/// Reasons for the rejection of a request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// The prompt is empty.
    #[error("request {0} has an empty prompt")]
    EmptyPrompt(u64),
    /// The request allows no output tokens.
    #[error("request {0} allows no output tokens")]
    NoOutput(u64),
    /// The prompt leaves no room for output.
    #[error("request {id} has a prompt of {prompt_tokens} tokens, not fewer than max_model_len {max_model_len}")]
    PromptTooLong {
        /// Id of the request.
        id: u64,
        /// Length of the prompt.
        prompt_tokens: usize,
        /// Exclusive upper limit of that length.
        max_model_len: u32,
    },
    /// A request with this id has not ended yet.
    #[error("request {0} has not ended yet")]
    DuplicateId(u64),
}

/// Changes the seed for draws of accepted draft tokens.
const ACCEPTANCE: u64 = 0x9E37_79B9_7F4A_7C15;

pub(crate) struct Sequence {
    spec: RequestSpec,
    /// The only input of the output besides seed and position. With `output_from_context`, of prompt and output so far.
    prompt_hash: u64,
    outputs: Vec<u32>,
    /// Final length, including the prompt.
    end: u32,
    /// Hashes of leading complete blocks: at least those of the prompt and of all tokens ever computed.
    hashes: Vec<EngineHash>,
    /// Number of tokens whose KV is computed by the end of the current step.
    pub(crate) computed: u32,
    /// Slots of its blocks, in order.
    pub(crate) slots: Vec<u32>,
    /// Number of tokens that the current step computes, draft tokens included.
    pub(crate) scheduled: u32,
    /// Number of its leading blocks that are complete and in the cache.
    pub(crate) filled: u32,
    /// Number of draft tokens for the next step.
    pub(crate) drafts: u32,
    /// Number of cached tokens at the first admission, transferred ones included.
    pub(crate) cached_tokens: Option<u32>,
    /// Number of `cached_tokens` that were transferred from another rank.
    pub(crate) transferred_tokens: u32,
    pub(crate) stage: Stage,
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
            prompt_hash: spec.output_hash(config),
            outputs: Vec::new(),
            end: (prompt_tokens as u32).saturating_add(spec.output_tokens_max).min(max_model_len),
            hashes: Vec::with_capacity(prompt_tokens / config.block_size as usize),
            computed: 0,
            slots: Vec::new(),
            scheduled: 0,
            filled: 0,
            drafts: 0,
            cached_tokens: None,
            transferred_tokens: 0,
            stage: Stage::Whole,
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

    /// Session of the request, and its blocks in the cache.
    pub(crate) fn session(&self) -> Option<(&Arc<str>, &[EngineHash])> {
        Some((self.spec.session_id.as_ref()?, &self.hashes[..self.filled as usize]))
    }

    /// Number of prompt and output tokens so far.
    pub(crate) fn len(&self) -> u32 {
        (self.spec.tokens.len() + self.outputs.len()) as u32
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// Number of output tokens so far.
    pub(crate) fn output_tokens(&self) -> u32 {
        self.outputs.len() as u32
    }

    /// Returns whether only the last generated token is left to compute.
    pub(crate) fn is_decoding(&self) -> bool {
        self.has_output() && self.computed + 1 == self.len()
    }

    /// Hashes of the blocks that may be reused. The block with the last token is excluded, because that token is always
    /// computed.
    pub(crate) fn reusable(&self, block_size: u32) -> &[EngineHash] {
        &self.hashes[..((self.len() - 1) / block_size) as usize]
    }

    /// Hash of a complete block. The hashes of all earlier blocks must be known.
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

    /// A complete block with a known hash.
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
        let position = if config.output_from_context { 0 } else { self.outputs.len() as u64 };
        let token = token_at(self.prompt_hash, position, config);
        self.outputs.push(token);
        if config.output_from_context {
            self.prompt_hash = followed_by(self.prompt_hash, token);
        }
        token
    }

    /// Number of leading draft tokens of `drafts` that equal the next output tokens. The fate of a draft token depends on
    /// seed, prompt and position alone.
    pub(crate) fn accepted(&self, drafts: u32, config: &EngineConfig) -> u32 {
        let accepts = |draft: &u32| {
            let position = u64::from(self.output_tokens() + draft);
            let drawn = draw(self.prompt_hash, position, config.output_seed ^ ACCEPTANCE);
            (u128::from(drawn) * 100) >> 64 < u128::from(config.speculation.acceptance_percent)
        };
        (0..drafts).take_while(accepts).count() as u32
    }

    /// Number of complete blocks of the prompt.
    pub(crate) fn prompt_blocks(&self, block_size: u32) -> usize {
        self.spec.tokens.len() / block_size as usize
    }

    /// Removes all progress except the output. The hashes of the blocks that a later admission can reuse are kept.
    pub(crate) fn reset(&mut self, block_size: u32, hasher: &mut BlockHasher) {
        for block_idx in 0..(self.len() - 1) / block_size {
            self.hash(block_idx, block_size, hasher);
        }
        self.slots.clear();
        (self.computed, self.filled, self.drafts) = (0, 0, 0);
    }

    /// None until the last token; then whether all requested tokens were generated.
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

/// Hash of a context with one more token.
fn followed_by(context: u64, token: u32) -> u64 {
    xxh3_64_with_seed(&token.to_le_bytes(), context)
}

/// Hashes tokens and adapter. The salt is excluded: it restricts sharing and does not change the output.
fn prompt_hash(spec: &RequestSpec, seed: u64) -> u64 {
    let mut hash = Xxh3::with_seed(seed);
    hash.update(&(spec.tokens.len() as u64).to_le_bytes());
    spec.tokens.iter().for_each(|token| hash.update(&token.to_le_bytes()));
    hash.update(spec.lora_name.as_deref().unwrap_or_default().as_bytes());
    hash.digest()
}

/// Draws 64 bits for an output position.
fn draw(prompt_hash: u64, position: u64, seed: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&prompt_hash.to_le_bytes());
    bytes[8..].copy_from_slice(&position.to_le_bytes());
    xxh3_64_with_seed(&bytes, seed)
}

/// Output token at a position.
fn token_at(prompt_hash: u64, position: u64, config: &EngineConfig) -> u32 {
    let drawn = draw(prompt_hash, position, config.output_seed);
    ((u128::from(drawn) * u128::from(config.vocab_size)) >> 64) as u32
}
