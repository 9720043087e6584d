//! What an engine rank is like: its memory, its limits, and what a step costs.
//!
//! Owns the defaults and their limits. Promises that a configuration that validates never leaves the scheduler
//! without a way on. Leaves all behaviour to [`crate::engine::Rank`].

use thiserror::Error;

/// Most blocks a tier may have: 16 Mi, a bound on what is allocated before anything runs.
const BLOCKS_MAX: u32 = 1 << 24;

/// Longest sequence that may be configured, in tokens; keeps products of lengths within 64 bits.
const MODEL_LEN_MAX: u32 = 1 << 26;

/// One rank of an engine. The defaults are those of an 8-billion-parameter model on an H100 with 80 GB: about 60 GB
/// of KV cache at 128 KiB a token.
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
    /// Tokens a block. 64.
    pub block_size: u32,
    /// Blocks of device memory, one of which is never handed out. 7168.
    pub kv_blocks: u32,
    /// Blocks of host memory for what the device evicts. 0: no host tier.
    pub host_kv_blocks: u32,
    /// Whether a computed block that the device holds already is swapped for the one held, as in SGLang. Otherwise both
    /// stay, each announced by a store and a removal of its own, as in vLLM. False.
    pub deduplicates: bool,
    /// Tokens that a step may compute, decodes and prefills together. 8192.
    pub step_tokens_max: u32,
    /// Sequences that may run at once. 256.
    pub sequences_max: u32,
    /// Longest sequence, prompt and output together, in tokens. 131072.
    pub max_model_len: u32,
    /// Size of the vocabulary that output tokens are drawn from. 128256.
    pub vocab_size: u32,
    /// What a step takes.
    pub cost: StepCost,
    /// Names the blocks. Engines in the field differ in it unless told otherwise. 0.
    pub hash_seed: u64,
    /// Makes up the output tokens, so in place of a model's weights: equal for ranks of one model. 0.
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
    /// Whether a rank like this can serve whatever it accepts.
    ///
    /// # Errors
    ///
    /// A value out of its limits, a step too small for all sequences to decode in, or a device memory that the
    /// longest sequence does not fit into.
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

    /// Blocks of device memory that requests can have.
    #[must_use]
    pub fn blocks_usable(&self) -> u32 {
        self.kv_blocks.saturating_sub(1)
    }
}

fn within(name: &'static str, value: u32, min: u32, max: u32) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(ConfigError::OutOfRange { name, value, min, max }) }
}

/// Why a configuration cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// A value out of its limits. The least `step_tokens_max` is `sequences_max`.
    #[error("{name} is {value}, not within {min} to {max}")]
    OutOfRange {
        /// The value's name.
        name: &'static str,
        /// What it is.
        value: u32,
        /// The least it may be.
        min: u32,
        /// The most it may be.
        max: u32,
    },
    /// The longest sequence does not fit into the device's memory.
    #[error(
        "max_model_len {max_model_len} needs {needed} blocks, kv_blocks {kv_blocks} has one less than that to give"
    )]
    SequenceTooLong {
        /// Its length in tokens.
        max_model_len: u32,
        /// The blocks it needs.
        needed: u32,
        /// The blocks there are, the unused one included.
        kv_blocks: u32,
    },
}

/// What a step takes: a sum of terms that a roofline of the hardware gives. The defaults are published figures for 8
/// billion parameters in 16 bits on an H100; each can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCost {
    /// Every step, in µs: the weights are read once, kernels are launched. 4000.
    pub step_us: u32,
    /// Prompt tokens computed in a second, attention apart. 25000.
    pub prefill_tokens_per_second: u32,
    /// Attention of one prompt token to one token before it (or itself), in ps. 1200.
    pub attention_ps: u32,
    /// Each sequence that decodes, in µs: sampling, tables, its share of the output. 20.
    pub decode_sequence_us: u32,
    /// Each token of context that a decoding sequence reads, in ns: 128 KiB at some 2 TB/s. 65.
    pub kv_token_ns: u32,
    /// Each token loaded back from host memory, in ns: 128 KiB at some 50 GB/s. 2600.
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

/// What a step has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Prompt tokens to compute.
    pub prefill_tokens: u64,
    /// Pairs of a prompt token to compute and a token it attends to, itself included.
    pub attention_pairs: u64,
    /// Sequences that decode.
    pub decode_sequences: u64,
    /// Tokens of context that these read.
    pub kv_tokens: u64,
    /// Tokens loaded back from host memory.
    pub host_tokens: u64,
}

impl Work {
    /// Counts in a chunk of `tokens` prompt tokens behind `context` earlier ones.
    pub(crate) fn add_prefill(&mut self, tokens: u32, context: u32) {
        let (tokens, context) = (u64::from(tokens), u64::from(context));
        self.prefill_tokens += tokens;
        self.attention_pairs += tokens * context + tokens * (tokens + 1) / 2;
    }

    /// Counts in a decoding sequence that reads `context` tokens.
    pub(crate) fn add_decode(&mut self, context: u32) {
        self.decode_sequences += 1;
        self.kv_tokens += u64::from(context);
    }
}

impl StepCost {
    /// How long a step with this work takes, in µs, rounded up; never 0, so that time goes on. Saturates.
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
        // 3 + 4 + 5 tokens seen by tokens 2, 3 and 4 of a prompt.
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
    fn time_goes_on_and_never_wraps() {
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
    fn what_could_not_go_on_is_refused() {
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
