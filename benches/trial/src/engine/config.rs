//! Configuration of an engine rank: memory, limits, and cost of a step.
//!
//! A valid configuration guarantees that the scheduler can always make progress. [`crate::engine::Rank`] implements the
//! behaviour.

use thiserror::Error;

use crate::engine::work::StepCost;

/// Maximum number of blocks per tier: 16 Mi, a bound on the initial allocation.
pub(crate) const BLOCKS_MAX: u32 = 1 << 24;

/// Maximum configurable sequence length in tokens; keeps products of lengths within 64 bits.
const MODEL_LEN_MAX: u32 = 1 << 26;

/// Maximum number of draft tokens per sequence and step.
const DRAFT_TOKENS_MAX: u32 = 64;

/// Configuration of one rank. The defaults model 8 billion parameters on an H100 with 80 GB: about 60 GB of KV cache at
/// 128 KiB per token.
///
/// ```
/// use pointsman_trial::engine::EngineConfig;
///
/// let config = EngineConfig { block_size: 16, kv_blocks: 1024, max_model_len: 8192, ..EngineConfig::default() };
/// assert!(config.validate().is_ok());
/// assert!(EngineConfig { kv_blocks: 512, ..config }.validate().is_err()); // 512 are needed, and one stays unused
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Tokens per block. 64.
    pub block_size: u32,
    /// Blocks of device memory, one of which is never allocated. 7168.
    pub kv_blocks: u32,
    /// Blocks of host memory for blocks evicted from the device. 0: no host tier.
    pub host_kv_blocks: u32,
    /// Whether computed blocks are copied to the host at once, as by vLLM's connectors. False.
    pub writes_through: bool,
    /// Window in blocks of a second cache group, which restricts the hits on the device: that of a sliding window, or 1
    /// for the state of a Mamba layer. 0: no such group.
    pub beside_window_blocks: u32,
    /// Whether a computed block that the device already holds is replaced by the held one, as in SGLang. Otherwise both
    /// stay, each with its own store and removal event, as in vLLM. False.
    pub deduplicates: bool,
    /// Whether the blocks of open sessions are evicted last, as in SGLang with `--enable-session-radix-cache`. False.
    pub refers_sessions: bool,
    /// Maximum number of tokens per step, decodes and prefills together. 8192.
    pub step_tokens_max: u32,
    /// Maximum number of running sequences. 256.
    pub sequences_max: u32,
    /// Maximum number of tokens of one sequence per step, vLLM's `long_prefill_token_threshold`. With a limit several
    /// prompts may be partially computed. 0: no limit.
    pub prefill_chunk_max: u32,
    /// Rules for a rank without free blocks. [`BlockShortage::PromptsWait`].
    pub block_shortage: BlockShortage,
    /// Speculative decoding. None.
    pub speculation: Speculation,
    /// Maximum sequence length in tokens, prompt and output together. 131072.
    pub max_model_len: u32,
    /// Size of the vocabulary for output tokens. 128256.
    pub vocab_size: u32,
    /// Cost model of a step.
    pub cost: StepCost,
    /// Seed of the block hashes. Real engines use different seeds unless configured otherwise. 0.
    pub hash_seed: u64,
    /// Seed of the output tokens, in place of model weights: equal for ranks of one model. 0.
    pub output_seed: u64,
    /// Whether an output token depends on all tokens before it, as with greedy decoding: a prompt and its continued
    /// output give the same text. Otherwise it depends on prompt and position. False.
    pub output_from_context: bool,
}

/// Rules for a rank without free blocks. Under both, a decoding sequence without a block for its next token preempts the
/// youngest sequence, which may be itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "mock", derive(clap::ValueEnum))]
pub enum BlockShortage {
    /// A request is admitted if the blocks of its first chunk are free. The youngest sequence keeps its blocks and waits
    /// if there are none for its next chunk, and no other request is admitted.
    #[default]
    PromptsWait,
    /// A request is admitted if the blocks of all its tokens are free, which reserves none of them. The youngest sequence
    /// is preempted if there are none for its next chunk. As in vLLM V1 with its default `scheduler_reserve_full_isl`.
    PromptsPreempt,
}

/// Speculative decoding: a drafter proposes the next tokens of each decoding sequence, and one step verifies them all.
/// The output is the same as without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    /// Number of draft tokens per decoding sequence and step. 0: no speculative decoding.
    pub draft_tokens: u32,
    /// Probability in percent that a draft token is accepted if all earlier ones of its step were.
    pub acceptance_percent: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            block_size: 64,
            kv_blocks: 7168,
            host_kv_blocks: 0,
            writes_through: false,
            beside_window_blocks: 0,
            deduplicates: false,
            refers_sessions: false,
            step_tokens_max: 8192,
            sequences_max: 256,
            prefill_chunk_max: 0,
            block_shortage: BlockShortage::default(),
            speculation: Speculation::default(),
            max_model_len: 131_072,
            vocab_size: 128_256,
            cost: StepCost::default(),
            hash_seed: 0,
            output_seed: 0,
            output_from_context: false,
        }
    }
}

impl EngineConfig {
    /// Checks that a rank with this configuration can serve every request that it accepts.
    ///
    /// # Errors
    ///
    /// A value is out of its limits, a step is too small for all sequences to decode in, or the longest sequence does
    /// not fit into device memory.
    pub fn validate(&self) -> Result<(), ConfigError> {
        within("block_size", self.block_size, 1, 1 << 16)?;
        within("kv_blocks", self.kv_blocks, 2, BLOCKS_MAX)?;
        within("host_kv_blocks", self.host_kv_blocks, 0, BLOCKS_MAX)?;
        within("sequences_max", self.sequences_max, 1, u32::MAX)?;
        within("step_tokens_max", self.step_tokens_max, self.sequences_max, u32::MAX)?;
        within("max_model_len", self.max_model_len, 2, MODEL_LEN_MAX)?;
        within("vocab_size", self.vocab_size, 1, u32::MAX)?;
        within("speculation.draft_tokens", self.speculation.draft_tokens, 0, DRAFT_TOKENS_MAX)?;
        within("speculation.acceptance_percent", self.speculation.acceptance_percent, 0, 100)?;
        within("cost.prefill_tokens_per_second", self.cost.prefill_tokens_per_second, 1, u32::MAX)?;
        let needed = self.max_model_len.div_ceil(self.block_size);
        if needed > self.blocks_usable() {
            let Self { max_model_len, kv_blocks, .. } = *self;
            return Err(ConfigError(format!(
                "max_model_len {max_model_len} needs {needed} blocks, kv_blocks {kv_blocks} provides one less than that"
            )));
        }
        Ok(())
    }

    /// Number of device blocks available to requests.
    #[must_use]
    pub fn blocks_usable(&self) -> u32 {
        self.kv_blocks.saturating_sub(1)
    }
}

fn within(name: &'static str, value: u32, min: u32, max: u32) -> Result<(), ConfigError> {
    let out_of_range = || ConfigError(format!("{name} is {value}, not within {min} to {max}"));
    if (min..=max).contains(&value) { Ok(()) } else { Err(out_of_range()) }
}

/// An invalid configuration, as a message with the field and its limits.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ConfigError(String);
