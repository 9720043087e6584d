//! Requests in preparation: validated, hashed and bounded.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::actors::telemetry::PromptKind;
use crate::config::RouterConfig;
use crate::error::RouteError;
use crate::hashing::{BlockHasher, HashScheme, HashedPrompt, MmBlocks};
use crate::load::{OutputLengths, PromptBlocks, PromptLimits, RequestKeys};
use crate::predict::SpeculativePrompt;
use crate::protocol::{BlockHash, Timestamp, WorkerRank};
use crate::request::{Prompt, RequestOptions, RouteRequest};
use crate::schedule::{ResolvedOptions, ResolvedTargets};

/// Maximum outputs of a request that count, which is that of vLLM.
const OUTPUTS_MAX: u32 = 16_384;

/// A request that the embedder has sent to a rank of its own choice.
#[derive(Clone, Debug)]
pub struct AddRequest<'a> {
    /// Names the booking.
    pub request_id: &'a str,
    /// Rank of the request.
    pub rank: WorkerRank,
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// LoRA adapter.
    pub lora_name: Option<&'a str>,
    /// Cache salt.
    pub cache_salt: Option<&'a str>,
    /// Prompt tokens cached on the rank; `None` to use the index.
    pub cached_tokens: Option<u32>,
    /// Expected prefill duration, if known. The prefill load of the rank then decays with time.
    pub expected_prefill_duration: Option<Duration>,
}

impl<'a> AddRequest<'a> {
    /// A request with an id, a rank, a prompt and default options.
    #[must_use]
    pub fn new(request_id: &'a str, rank: WorkerRank, prompt: Prompt<'a>) -> Self {
        let (lora_name, cache_salt, cached_tokens, expected_prefill_duration) = (None, None, None, None);
        Self { request_id, rank, prompt, lora_name, cache_salt, cached_tokens, expected_prefill_duration }
    }

    /// The same request without the choice of the rank.
    pub(super) fn into_route(self) -> RouteRequest<'a> {
        let name = |name: Option<&str>| name.map(Arc::from);
        let options = RequestOptions {
            lora_name: name(self.lora_name),
            cache_salt: name(self.cache_salt),
            ..RequestOptions::default()
        };
        RouteRequest { options, ..RouteRequest::new(self.request_id, self.prompt) }
    }
}

/// A request with the prompt hashes that its decision needs.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) hashes: Option<HashedPrompt>,
    /// The blocks of the first of several prompts that the engine can take from its cache.
    first_prompt: Option<Arc<[BlockHash]>>,
    wants_overlap: bool,
    /// Prompt blocks of the charge.
    pub(super) prompt: PromptBlocks,
    pub(super) prompt_tokens: u32,
    pub(super) options: Option<Box<ResolvedOptions>>,
    pub(super) request_keys: RequestKeys,
    /// Speculative entry that the booking creates, if entries are speculative.
    pub(super) speculative_prompt: Option<SpeculativePrompt>,
    /// Absent if the cached tokens of the whole request are not predicted.
    kind: Option<PromptKind>,
    /// Start of hashing.
    pub(super) started: Timestamp,
}

/// Inputs of the preparation of a request.
pub(super) struct Preparation<'a> {
    pub(super) config: &'a RouterConfig,
    /// Block size in force.
    pub(super) block_size: NonZeroU32,
    pub(super) now: Timestamp,
    pub(super) limits: PromptLimits,
    pub(super) output_lengths: &'a OutputLengths,
    /// Whether decisions create speculative entries.
    pub(super) speculates: bool,
}

impl Prepared {
    pub(super) fn new(preparation: &Preparation<'_>, request: &RouteRequest<'_>) -> Result<Self, RouteError> {
        let Preparation { config, block_size, now, limits, output_lengths, speculates } = *preparation;
        let RouteRequest { prompt, options, .. } = request;
        let mut request_keys = RequestKeys::of(options.session_id.as_deref(), options.tenant.as_deref());
        let usual_output_tokens = || output_lengths.expected(request_keys);
        let resolved = ResolvedOptions::resolve(options, config, usual_output_tokens, now)?;
        request_keys.program = resolved.as_ref().map_or(0, |resolved| resolved.program);
        let overrides = options.overrides;
        let scheme = HashScheme {
            block_size,
            lora_name: options.lora_name.as_deref(),
            cache_salt: options.cache_salt.as_deref(),
            is_eagle: config.is_eagle,
        };
        let prompt_tokens = prompt.prompt_tokens();
        let assume_kv_reuse = overrides.assume_kv_reuse.unwrap_or(config.load.assume_kv_reuse);
        let shares_blocks = config.load.track_active_blocks && assume_kv_reuse;
        let wants_overlap = config.has_index() && overrides.overlap_score_credit != Some(0.0);
        let wants_hashes = config.has_index() || shares_blocks || options.routing_hashes;
        let hashes = hashes_of(request, scheme, wants_hashes)?;
        let PromptLimits { model_len, weight_tokens } = limits;
        if let Some(max_model_len) = model_len.filter(|longest| prompt_tokens > *longest as usize) {
            return Err(RouteError::ContextLength { prompt_tokens, max_model_len });
        }
        let too_long = |_| RouteError::PromptTooLong { prompt_tokens };
        let blocks = u32::try_from(scheme.block_count(prompt_tokens)).map_err(too_long)?;
        let RequestOptions { further_prompt_tokens, further_outputs, .. } = *options;
        // The charge is capped at the capacity of a rank, in blocks and in tokens, for a prompt of any length.
        let blocks_max = weight_tokens.div_ceil(block_size.get());
        let prompt = match &hashes {
            _ if !config.load.track_active_blocks => PromptBlocks::Counted(0),
            _ if further_outputs > 0 || further_prompt_tokens > 0 => PromptBlocks::Several {
                blocks: blocks.saturating_add(further_prompt_tokens / block_size).min(blocks_max),
                sequences: further_outputs.min(OUTPUTS_MAX - 1) + 1,
                read_blocks: blocks.min(blocks_max),
            },
            Some(hashed) if shares_blocks && blocks <= blocks_max => {
                PromptBlocks::Hashed(Arc::clone(hashed.sequence_hashes()))
            }
            Some(hashed) if shares_blocks => {
                PromptBlocks::Hashed(hashed.sequence_hashes().iter().copied().take(blocks_max as usize).collect())
            }
            Some(_) | None => PromptBlocks::Counted(blocks.min(blocks_max)),
        };
        // The scheduler limits the cached tokens by the sum of all prompts, of which only the first one is in the index.
        let first_prompt = hashes.as_ref().filter(|_| further_prompt_tokens > 0).map(|hashed| {
            let reusable = prompt_tokens.saturating_sub(1) / block_size.get() as usize;
            hashed.block_hashes().iter().copied().take(reusable).collect()
        });
        let prompt_tokens = u32::try_from(prompt_tokens).map_err(too_long)?;
        let prompt_tokens = prompt_tokens.saturating_add(further_prompt_tokens).min(weight_tokens);
        let speculative_prompt = hashes.as_ref().filter(|_| speculates);
        let speculative_prompt = speculative_prompt.map(|hashed| SpeculativePrompt::of(hashed, block_size.get()));
        let kind = kind_of(options);
        Ok(Self {
            hashes,
            first_prompt,
            wants_overlap,
            prompt,
            prompt_tokens,
            options: resolved,
            request_keys,
            speculative_prompt,
            kind,
            started: now,
        })
    }

    /// Skips the overlap query, because the caller has supplied the cached tokens.
    pub(super) fn without_overlap(mut self) -> Self {
        self.wants_overlap = false;
        self
    }

    pub(super) fn targets(&self) -> Option<ResolvedTargets> {
        self.options.as_ref().and_then(|options| options.targets)
    }

    /// Block hashes of the overlap query, if one is needed.
    pub(super) fn block_hashes(&self) -> Option<&Arc<[BlockHash]>> {
        let hashes = self.hashes.as_ref().filter(|_| self.wants_overlap)?;
        Some(self.first_prompt.as_ref().unwrap_or(hashes.block_hashes()))
    }

    /// Kind of the request for predictions of cached tokens. `None` without an overlap query, and for prompts shorter
    /// than one block, which cannot be cached.
    pub(super) fn predicted_kind(&self) -> Option<PromptKind> {
        self.provable().and(self.kind)
    }

    /// Blocks of a prompt of which an answer can prove that they are cached. One of several prompts is not alone in it.
    pub(super) fn provable(&self) -> Option<&Arc<[BlockHash]>> {
        self.block_hashes().filter(|hashes| !hashes.is_empty() && self.kind.is_some())
    }
}

/// Hashes of the prompt, if they are given or wanted.
fn hashes_of(
    request: &RouteRequest<'_>,
    scheme: HashScheme<'_>,
    is_wanted: bool,
) -> Result<Option<HashedPrompt>, RouteError> {
    match (&request.prompt, request.prompt.tokens()) {
        (Prompt::Hashed(hashed), _) => {
            hashed.check(&scheme)?;
            Ok(Some(hashed.clone()))
        }
        (_, Some(tokens)) if is_wanted => {
            let mm = match request.options.mm_spans.as_slice() {
                [] => MmBlocks::NONE,
                spans => MmBlocks::split(spans, tokens.len(), scheme.block_size)?,
            };
            Ok(Some(HashedPrompt::from_tokens(&BlockHasher::new(scheme), tokens, &mm)))
        }
        (Prompt::Tokens(_) | Prompt::OwnedTokens(_), _) => Ok(None),
    }
}

/// The inputs of the prompt's hashes besides its tokens.
fn kind_of(options: &RequestOptions) -> Option<PromptKind> {
    let is_given = |name: &Option<Arc<str>>| name.as_ref().is_some_and(|name| !name.is_empty());
    if options.further_prompt_tokens > 0 {
        None // engines report the cached tokens of all prompts
    } else if is_given(&options.lora_name) {
        Some(PromptKind::Lora)
    } else if is_given(&options.cache_salt) {
        Some(PromptKind::Salt)
    } else if options.mm_spans.is_empty() {
        Some(PromptKind::Plain)
    } else {
        Some(PromptKind::Images)
    }
}
