//! Configuration of an engine rank: memory, limits, and cost of a step.
//!
//! A valid configuration guarantees that the scheduler can always make progress. [`crate::engine::Rank`] implements the
//! behaviour.

use thiserror::Error;

/// Maximum number of blocks per tier: 16 Mi, a bound on the initial allocation.
const BLOCKS_MAX: u32 = 1 << 24;

/// Maximum configurable sequence length in tokens; keeps products of lengths within 64 bits.
const MODEL_LEN_MAX: u32 = 1 << 26;

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
    /// Whether a computed block that the device already holds is replaced by the held one, as in SGLang. Otherwise both
    /// stay, each with its own store and removal event, as in vLLM. False.
    pub deduplicates: bool,
    /// Maximum number of tokens per step, decodes and prefills together. 8192.
    pub step_tokens_max: u32,
    /// Maximum number of running sequences. 256.
    pub sequences_max: u32,
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
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            block_size: 64,
            kv_blocks: 7168,
            host_kv_blocks: 0,
            deduplicates: false,
            step_tokens_max: 8192,
            sequences_max: 256,
            max_model_len: 131_072,
            vocab_size: 128_256,
            cost: StepCost::default(),
            hash_seed: 0,
            output_seed: 0,
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
        within("cost.prefill_tokens_per_second", self.cost.prefill_tokens_per_second, 1, u32::MAX)?;
        let needed = self.max_model_len.div_ceil(self.block_size);
        if needed > self.blocks_usable() {
            let Self { max_model_len, kv_blocks, .. } = *self;
            return Err(ConfigError::SequenceTooLong { max_model_len, needed, kv_blocks });
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
    if (min..=max).contains(&value) { Ok(()) } else { Err(ConfigError::OutOfRange { name, value, min, max }) }
}

/// Reasons for an invalid configuration.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// A value is out of its limits. The minimum of `step_tokens_max` is `sequences_max`.
    #[error("{name} is {value}, not within {min} to {max}")]
    OutOfRange {
        /// Name of the field.
        name: &'static str,
        /// Rejected value.
        value: u32,
        /// Minimum.
        min: u32,
        /// Maximum.
        max: u32,
    },
    /// The longest sequence does not fit into device memory.
    #[error("max_model_len {max_model_len} needs {needed} blocks, kv_blocks {kv_blocks} provides one less than that")]
    SequenceTooLong {
        /// Maximum sequence length in tokens.
        max_model_len: u32,
        /// Number of blocks for a sequence of that length.
        needed: u32,
        /// Number of device blocks, including the unused one.
        kv_blocks: u32,
    },
}

/// Cost model of a step: a sum of terms from a roofline model of the hardware. The defaults are published figures for 8
/// billion parameters in 16 bits on an H100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCost {
    /// Fixed time per step in µs: one read of the weights, kernel launches. 4000.
    pub step_us: u32,
    /// Prompt tokens computed per second, without attention. 25000.
    pub prefill_tokens_per_second: u32,
    /// Attention of one prompt token to one earlier token (or itself), in ps. 1200.
    pub attention_ps: u32,
    /// Time per decoding sequence in µs: sampling, tables, its share of the output. 20.
    pub decode_sequence_us: u32,
    /// Time per token of context that a decoding sequence reads, in ns: 128 KiB at about 2 TB/s. 65.
    pub kv_token_ns: u32,
    /// Time per token loaded from host memory, in ns: 128 KiB at about 50 GB/s. 2600.
    pub host_token_ns: u32,
}

impl Default for StepCost {
    fn default() -> Self {
        Self {
            step_us: 4000,
            prefill_tokens_per_second: 25_000,
            attention_ps: 1200,
            decode_sequence_us: 20,
            kv_token_ns: 65,
            host_token_ns: 2600,
        }
    }
}

/// Work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Number of prompt tokens to compute.
    pub prefill_tokens: u64,
    /// Number of pairs of a prompt token to compute and a token it attends to, including itself.
    pub attention_pairs: u64,
    /// Number of decoding sequences.
    pub decode_sequences: u64,
    /// Number of context tokens that the decoding sequences read.
    pub kv_tokens: u64,
    /// Number of tokens loaded from host memory.
    pub host_tokens: u64,
}

impl Work {
    /// Adds a chunk of `tokens` prompt tokens after `context` earlier ones.
    pub(crate) fn add_prefill(&mut self, tokens: u32, context: u32) {
        let (tokens, context) = (u64::from(tokens), u64::from(context));
        self.prefill_tokens += tokens;
        self.attention_pairs += tokens * context + tokens * (tokens + 1) / 2;
    }

    /// Adds a decoding sequence that reads `context` tokens.
    pub(crate) fn add_decode(&mut self, context: u32) {
        self.decode_sequences += 1;
        self.kv_tokens += u64::from(context);
    }
}

impl StepCost {
    /// Duration of a step with this work in µs, rounded up. At least 1, so that time always advances. Saturates.
    ///
    /// ```
    /// use pointsman_trial::engine::{StepCost, Work};
    ///
    /// // 4 ms, and 40 ms for 1000 tokens at 25000 a second.
    /// let work = Work { prefill_tokens: 1000, ..Work::default() };
    /// assert_eq!(StepCost::default().duration_us(&work), 44_000);
    /// ```
    #[must_use]
    pub fn duration_us(&self, work: &Work) -> u64 {
        let terms = [
            u64::from(self.step_us).saturating_mul(1000),
            work.prefill_tokens.saturating_mul(1_000_000_000) / u64::from(self.prefill_tokens_per_second.max(1)),
            work.attention_pairs.saturating_mul(u64::from(self.attention_ps)) / 1000,
            work.decode_sequences.saturating_mul(u64::from(self.decode_sequence_us) * 1000),
            work.kv_tokens.saturating_mul(u64::from(self.kv_token_ns)),
            work.host_tokens.saturating_mul(u64::from(self.host_token_ns)),
        ];
        terms.into_iter().fold(0_u64, u64::saturating_add).div_ceil(1000).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::{ConfigError, EngineConfig, StepCost, Work};

    #[test]
    fn a_mixed_step_costs_the_sum_of_its_terms() {
        let mut work = Work::default();
        // 3 + 4 + 5 tokens attended to by tokens 2, 3 and 4 of a prompt.
        work.add_prefill(3, 2);
        assert_eq!((work.prefill_tokens, work.attention_pairs), (3, 12));
        work.add_prefill(2000, 1000);
        assert_eq!((work.prefill_tokens, work.attention_pairs), (2003, 12 + 2_000_000 + 2_001_000));
        work.add_decode(500);
        work.add_decode(9500);
        work.host_tokens = 64;
        // 4000 + 2003 / 0.025 + 4001012 * 0.0012 + 2 * 20 + 10000 * 0.065 + 64 * 2.6
        // 4000 + 80120 + 4801.2144 + 40 + 650 + 166.4 = 89777.6
        assert_eq!(StepCost::default().duration_us(&work), 89_778);
    }

    #[test]
    fn step_durations_are_positive_and_saturate() {
        let free = StepCost {
            step_us: 0,
            prefill_tokens_per_second: u32::MAX,
            attention_ps: 0,
            decode_sequence_us: 0,
            kv_token_ns: 0,
            host_token_ns: 0,
        };
        assert_eq!(free.duration_us(&Work::default()), 1);
        let endless = Work { kv_tokens: u64::MAX, attention_pairs: u64::MAX, ..Work::default() };
        assert_eq!(StepCost::default().duration_us(&endless), u64::MAX.div_ceil(1000));
    }

    #[test]
    fn invalid_configurations_are_rejected() {
        let good = EngineConfig::default();
        assert_eq!(good.validate(), Ok(()));
        let slow = StepCost { prefill_tokens_per_second: 0, ..StepCost::default() };
        for bad in [
            EngineConfig { block_size: 0, ..good },
            EngineConfig { kv_blocks: 1, ..good },
            EngineConfig { kv_blocks: u32::MAX, ..good },
            EngineConfig { host_kv_blocks: u32::MAX, ..good },
            EngineConfig { sequences_max: 0, ..good },
            EngineConfig { step_tokens_max: 255, ..good },
            EngineConfig { max_model_len: 1, ..good },
            EngineConfig { vocab_size: 0, ..good },
            EngineConfig { cost: slow, ..good },
        ] {
            assert!(matches!(bad.validate(), Err(ConfigError::OutOfRange { .. })), "{bad:?}");
        }
        let tight = EngineConfig { block_size: 4, kv_blocks: 9, max_model_len: 32, ..good };
        assert_eq!(tight.validate(), Ok(()));
        let refused = EngineConfig { max_model_len: 33, ..tight }.validate();
        assert_eq!(refused, Err(ConfigError::SequenceTooLong { max_model_len: 33, needed: 9, kv_blocks: 9 }));
    }
}
