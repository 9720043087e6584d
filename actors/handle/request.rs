//! Requests of callers, their preparation, and the results of decisions.

use std::sync::Arc;
use std::time::Duration;

use crate::actors::telemetry::PromptKind;
use crate::config::{RouterConfig, RouterConfigOverride};
use crate::error::RouteError;
use crate::hashing::{BlockHasher, HashScheme, HashedPrompt, MmBlocks, MmSpan};
use crate::load::{LengthKeys, OutputLengths, PrefillLoadHint, PromptBlocks, PromptLimits};
use crate::predict::SpeculativePrompt;
use crate::protocol::{BlockHash, Timestamp, WorkerRank};
use crate::queue::{TenantKey, UnknownClass};
use crate::schedule::{Decision, Rejection, ResolvedOptions};
use crate::select::{Constraints, TierOverlap};
use crate::session::SessionId;

/// A prompt, as tokens or as hashes.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// Token ids. The calling task hashes them; they never leave it.
    Tokens(&'a [u32]),
    /// Hashes computed by the caller or returned by an earlier response. They already include LoRA name, salt and
    /// spans.
    Hashed(&'a HashedPrompt),
}

/// A request to be placed.
///
/// ```
/// use pointsman::{Prompt, RouteRequest};
///
/// let tokens = [1, 2, 3];
/// let request = RouteRequest { lora_name: Some("support-bot"), ..RouteRequest::new("req-1", Prompt::Tokens(&tokens)) };
/// assert_eq!(request.request_id, Some("req-1"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    /// Names the booking; unique among bookings that have not ended. Optional for queries.
    pub request_id: Option<&'a str>,
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// LoRA adapter; an empty name means none.
    pub lora_name: Option<&'a str>,
    /// Cache salt: only requests with equal salts share cached blocks. An empty salt means none.
    pub cache_salt: Option<&'a str>,
    /// Images and other media in the prompt, if the engine's events include their hashes.
    pub mm_spans: &'a [MmSpan],
    /// Whether the result includes the hashes of the prompt.
    pub routing_hashes: bool,
    /// Tenant of the request, any text. The tenants of a class are served in turn by fair queueing; requests without
    /// one form a tenant of their own.
    pub tenant: Option<&'a str>,
    /// Requests with a higher value leave the queue first, before all other criteria.
    pub strict_priority: u32,
    /// Seconds of advance over other requests of the same tenant in the queue. Finite; negative values count as 0.
    pub priority_jump: f64,
    /// Longest time until placement; after it the request is rejected as expired.
    pub deadline: Option<Duration>,
    /// Queueing class, or family of classes.
    pub policy_class: Option<&'a str>,
    /// Whether to reject the request instead of queueing it.
    pub do_not_queue: bool,
    /// Required and preferred ranks.
    pub constraints: Option<&'a Constraints>,
    /// Session id, at most 256 bytes: see `session.affinity`.
    pub session_id: Option<&'a str>,
    /// Expected output tokens, if the caller has a better estimate than the router. The router uses the mean of the
    /// session, the tenant or the pool.
    pub expected_output_tokens: Option<u32>,
    /// Limit of output tokens, such as `max_tokens`. Caps the expected length and is not an expectation itself.
    pub output_tokens_max: Option<u32>,
    /// Whether the response is not streamed, so no first token is reported. The prefill then counts as completed after
    /// its expected duration.
    pub not_streamed: bool,
    /// Per-request overrides of the router configuration.
    pub overrides: Option<&'a RouterConfigOverride>,
}

impl<'a> RouteRequest<'a> {
    /// Hash inputs besides tokens.
    fn kind(&self) -> PromptKind {
        let is_given = |name: Option<&str>| name.is_some_and(|name| !name.is_empty());
        if is_given(self.lora_name) {
            PromptKind::Lora
        } else if is_given(self.cache_salt) {
            PromptKind::Salt
        } else if !self.mm_spans.is_empty() {
            PromptKind::Images
        } else {
            PromptKind::Plain
        }
    }

    /// The options in the form that the scheduler reads; `None` for a request with default options, the usual case.
    fn resolve(&self, preparation: &Preparation<'_>) -> Result<Option<Box<ResolvedOptions>>, RouteError> {
        let Preparation { config, now, output_lengths, .. } = *preparation;
        let lora_name = self.lora_name.filter(|name| !name.is_empty());
        let tenant = self.tenant.filter(|_| config.queue.is_enabled()).map(TenantKey::of); // unused without a queue
        let asks = tenant.is_some()
            || self.strict_priority != 0
            || self.priority_jump != 0.0
            || self.deadline.is_some()
            || self.policy_class.is_some()
            || self.do_not_queue
            || self.constraints.is_some()
            || lora_name.is_some()
            || self.session_id.is_some()
            || self.expected_output_tokens.is_some()
            || self.output_tokens_max.is_some()
            || self.not_streamed
            || self.tenant.is_some()
            || self.overrides.is_some();
        if !asks {
            return Ok(None);
        }
        if let Some(name) = self.policy_class.filter(|name| !config.queue.knows_class(name)) {
            return Err(Rejection::UnknownClass(UnknownClass(name.to_owned())).into());
        }
        if !self.priority_jump.is_finite() {
            return Err(RouteError::PriorityJump(self.priority_jump));
        }
        let constraints = self.constraints.cloned().unwrap_or_default();
        constraints.validate()?;
        let overrides = self.overrides.copied().unwrap_or_default();
        overrides.validate(&config.policy)?;
        Ok(Some(Box::new(ResolvedOptions {
            tenant: tenant.unwrap_or_default(),
            strict_priority: self.strict_priority,
            priority_jump: self.priority_jump.max(0.0),
            due: self.deadline.map(|deadline| now + deadline),
            policy_class: self.policy_class.map(Arc::from),
            do_not_queue: self.do_not_queue,
            constraints,
            lora_name: lora_name.map(Arc::from),
            session_id: self.session_id.map(SessionId::new).transpose()?,
            expected_output_tokens: self.expected_output_tokens,
            usual_output_tokens: output_lengths.expected(self.length_keys()),
            output_tokens_max: self.output_tokens_max,
            not_streamed: self.not_streamed,
            overrides,
        })))
    }

    /// Keys under which the output length is recorded.
    fn length_keys(&self) -> LengthKeys {
        LengthKeys::of(self.session_id, self.tenant)
    }

    /// A request with a prompt and default options.
    #[must_use]
    pub fn new(request_id: &'a str, prompt: Prompt<'a>) -> Self {
        Self { request_id: Some(request_id), ..Self::query(prompt) }
    }

    /// A query with a prompt and default options.
    #[must_use]
    pub fn query(prompt: Prompt<'a>) -> Self {
        Self {
            request_id: None,
            prompt,
            lora_name: None,
            cache_salt: None,
            mm_spans: &[],
            routing_hashes: false,
            tenant: None,
            strict_priority: 0,
            priority_jump: 0.0,
            deadline: None,
            policy_class: None,
            do_not_queue: false,
            constraints: None,
            session_id: None,
            expected_output_tokens: None,
            output_tokens_max: None,
            not_streamed: false,
            overrides: None,
        }
    }
}

/// A request that the embedder has sent to a rank of its own choice.
#[derive(Clone, Copy, Debug)]
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

    pub(super) fn as_route(&self) -> RouteRequest<'a> {
        let Self { lora_name, cache_salt, .. } = *self;
        RouteRequest { lora_name, cache_salt, ..RouteRequest::new(self.request_id, self.prompt) }
    }
}

/// The chosen rank of a request and the inputs of the choice.
#[derive(Clone, Debug, PartialEq)]
pub struct BestMatch {
    decision: u64,
    rank: WorkerRank,
    overlap: TierOverlap,
    shared_cache_blocks: u32,
    reachable_blocks: u32,
    effective_overlap_blocks: f64,
    cached_tokens: u32,
    expected_prefill_duration: Option<Duration>,
    predicted_ttft: Option<Duration>,
    routing_hashes: Option<HashedPrompt>,
}

impl BestMatch {
    pub(super) fn new(decision: &Decision, config: &RouterConfig, routing_hashes: Option<HashedPrompt>) -> Self {
        let (overlap, weights) = (decision.overlap, config.index.tier_weights());
        Self {
            decision: decision.request,
            rank: decision.rank,
            overlap,
            shared_cache_blocks: decision.shared_cache_blocks,
            reachable_blocks: decision.reachable_blocks,
            expected_prefill_duration: decision.hint.and_then(PrefillLoadHint::expected_duration),
            predicted_ttft: decision.predicted_ttft,
            effective_overlap_blocks: overlap.effective_blocks(weights),
            cached_tokens: overlap.cached_tokens(weights, config.block_size),
            routing_hashes,
        }
    }

    /// Number of the decision. The decisions of a router follow in this order, and depend on it and on the seed.
    /// Counted from 0; after the n-th loss of the scheduler, from n × 2^32.
    #[must_use]
    pub fn decision(&self) -> u64 {
        self.decision
    }

    /// The rank.
    #[must_use]
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Overlap of the prompt with the rank, by tier.
    #[must_use]
    pub fn overlap(&self) -> TierOverlap {
        self.overlap
    }

    /// Effective overlap in blocks, rounded.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rounded count of blocks, at least 0"
    )]
    pub fn overlap_blocks(&self) -> u32 {
        self.effective_overlap_blocks.round() as u32
    }

    /// Effective overlap in blocks; lower tiers have lower weights.
    #[must_use]
    pub fn effective_overlap_blocks(&self) -> f64 {
        self.effective_overlap_blocks
    }

    /// Effective overlap in tokens, rounded.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    /// Blocks that the shared cache holds beyond the device blocks of the rank.
    #[must_use]
    pub fn shared_cache_blocks(&self) -> u32 {
        self.shared_cache_blocks
    }

    /// Largest number of leading blocks on any eligible rank, in any tier: the best reachable overlap.
    #[must_use]
    pub fn reachable_blocks(&self) -> u32 {
        self.reachable_blocks
    }

    /// Expected duration of the uncached prefill on the rank, if modelled.
    #[must_use]
    pub fn expected_prefill_duration(&self) -> Option<Duration> {
        self.expected_prefill_duration
    }

    /// Expected time from the decision to the first token: earlier work of the rank, the uncached prompt, and one step.
    /// Present if the policy is `latency`.
    #[must_use]
    pub fn predicted_ttft(&self) -> Option<Duration> {
        self.predicted_ttft
    }

    /// Hashes of the prompt, if the request asked for them.
    #[must_use]
    pub fn routing_hashes(&self) -> Option<&HashedPrompt> {
        self.routing_hashes.as_ref()
    }
}

/// A request with the prompt hashes that its decision needs.
#[derive(Debug)]
pub(super) struct Prepared {
    hashes: Option<HashedPrompt>,
    wants_overlap: bool,
    /// Prompt blocks of the charge.
    prompt: PromptBlocks,
    isl_tokens: u32,
    options: Option<Box<ResolvedOptions>>,
    length_keys: LengthKeys,
    /// Speculative entry that the booking creates, if entries are speculative.
    guess: Option<SpeculativePrompt>,
    kind: PromptKind,
    /// Start of hashing.
    started: Timestamp,
}

/// Inputs of the preparation of a request.
pub(super) struct Preparation<'a> {
    pub(super) config: &'a RouterConfig,
    pub(super) now: Timestamp,
    pub(super) limits: PromptLimits,
    pub(super) output_lengths: &'a OutputLengths,
    /// Whether decisions create speculative entries.
    pub(super) speculates: bool,
}

impl Prepared {
    pub(super) fn new(preparation: &Preparation<'_>, request: &RouteRequest<'_>) -> Result<Self, RouteError> {
        let Preparation { config, now, limits, speculates, .. } = *preparation;
        let options = request.resolve(preparation)?;
        let overrides = request.overrides.copied().unwrap_or_default();
        let scheme = HashScheme {
            block_size: config.block_size_nonzero(),
            lora_name: request.lora_name,
            cache_salt: request.cache_salt,
            is_eagle: config.is_eagle,
        };
        let isl_tokens = match request.prompt {
            Prompt::Tokens(tokens) => tokens.len(),
            Prompt::Hashed(hashed) => hashed.isl_tokens(),
        };
        let assume_kv_reuse = overrides.assume_kv_reuse.unwrap_or(config.load.assume_kv_reuse);
        let shares_blocks = config.load.track_active_blocks && assume_kv_reuse;
        let wants_overlap = config.has_index() && overrides.overlap_score_credit != Some(0.0);
        let wants_hashes = config.has_index() || shares_blocks || request.routing_hashes;
        let hashes = match request.prompt {
            Prompt::Hashed(hashed) => Some(hashed.clone()),
            Prompt::Tokens(tokens) if wants_hashes => {
                let mm = match request.mm_spans {
                    [] => MmBlocks::NONE,
                    spans => MmBlocks::split(spans, tokens.len(), scheme.block_size)?,
                };
                Some(HashedPrompt::from_tokens(&BlockHasher::new(scheme), tokens, &mm))
            }
            Prompt::Tokens(_) => None,
        };
        let PromptLimits { model_len, weight_tokens } = limits;
        if let Some(max_model_len) = model_len.filter(|longest| isl_tokens > *longest as usize) {
            return Err(RouteError::ContextLength { isl_tokens, max_model_len });
        }
        let too_long = |_| RouteError::PromptTooLong { isl_tokens };
        let blocks = u32::try_from(scheme.block_count(isl_tokens)).map_err(too_long)?;
        // The charge is capped at the capacity of a rank, in blocks and in tokens, for a prompt of any length.
        let blocks_max = weight_tokens.div_ceil(config.block_size);
        let prompt = match &hashes {
            _ if !config.load.track_active_blocks => PromptBlocks::Counted(0),
            Some(hashed) if shares_blocks && blocks <= blocks_max => {
                PromptBlocks::Hashed(Arc::clone(hashed.sequence_hashes()))
            }
            Some(hashed) if shares_blocks => {
                PromptBlocks::Hashed(hashed.sequence_hashes().iter().copied().take(blocks_max as usize).collect())
            }
            Some(_) | None => PromptBlocks::Counted(blocks.min(blocks_max)),
        };
        let isl_tokens = u32::try_from(isl_tokens).map_err(too_long)?.min(weight_tokens);
        let guess = hashes.as_ref().filter(|_| speculates);
        let guess = guess.map(|hashed| SpeculativePrompt::of(hashed, config.block_size));
        let (length_keys, kind) = (request.length_keys(), request.kind());
        Ok(Self { hashes, wants_overlap, prompt, isl_tokens, options, length_keys, guess, kind, started: now })
    }

    /// Skips the overlap query, because the caller has supplied the cached tokens.
    pub(super) fn without_overlap(mut self) -> Self {
        self.wants_overlap = false;
        self
    }

    pub(super) fn prompt(&self) -> PromptBlocks {
        self.prompt.clone()
    }

    pub(super) fn isl_tokens(&self) -> u32 {
        self.isl_tokens
    }

    pub(super) fn guess(&self) -> Option<SpeculativePrompt> {
        self.guess.clone()
    }

    pub(super) fn options(&self) -> Option<Box<ResolvedOptions>> {
        self.options.clone()
    }

    pub(super) fn length_keys(&self) -> LengthKeys {
        self.length_keys
    }

    /// Block hashes of the overlap query, if one is needed.
    pub(super) fn block_hashes(&self) -> Option<&Arc<[BlockHash]>> {
        self.hashes.as_ref().filter(|_| self.wants_overlap).map(HashedPrompt::block_hashes)
    }

    pub(super) fn hashes(&self) -> Option<&HashedPrompt> {
        self.hashes.as_ref()
    }

    pub(super) fn started(&self) -> Timestamp {
        self.started
    }

    /// Kind of the request for predictions of cached tokens. `None` without an overlap query, and for prompts shorter
    /// than one block, which cannot be cached.
    pub(super) fn predicted_kind(&self) -> Option<PromptKind> {
        self.block_hashes().filter(|hashes| !hashes.is_empty()).map(|_| self.kind)
    }
}
