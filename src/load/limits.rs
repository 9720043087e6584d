//! Prompt limits of a pool: maximum length and maximum load weight.
//!
//! Both follow from the workers' configurations. Without the limits, a prompt that no engine accepts would add load to
//! its rank, growing with the square of its length, until the engine rejects it.

use crate::protocol::WorkerConfig;

/// Limits of a prompt, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLimits {
    /// The longest model length of the workers; `None` if any worker does not report it.
    pub model_len: Option<u32>,
    /// Maximum load weight of a prompt: the capacity of the largest worker.
    pub weight_tokens: u32,
}

impl PromptLimits {
    /// Load weight limit for a worker with unknown model length and cache size.
    pub const WEIGHT_TOKENS_UNKNOWN: u32 = 131_072;

    /// The limits of a pool with these workers and blocks of `block_size` tokens.
    ///
    /// ```
    /// use pointsman::internals::load::PromptLimits;
    /// use pointsman::protocol::WorkerConfig;
    ///
    /// let long = WorkerConfig { max_model_len: Some(32_768), ..WorkerConfig::at("http://a") };
    /// let small = WorkerConfig { max_model_len: Some(32_768), total_kv_blocks: Some(256), ..WorkerConfig::at("http://b") };
    /// let limits = PromptLimits { model_len: Some(32_768), weight_tokens: 16_384 };
    /// assert_eq!(PromptLimits::of([&small], 64), limits);
    /// assert_eq!(PromptLimits::of([&small, &long], 64).weight_tokens, 32_768);
    /// assert_eq!(PromptLimits::of([&long, &WorkerConfig::at("http://c")], 64).model_len, None);
    /// ```
    #[must_use]
    pub fn of<'a>(workers: impl IntoIterator<Item = &'a WorkerConfig>, block_size: u32) -> Self {
        let (mut model_len, mut weight_tokens) = (Some(0), 0);
        for worker in workers {
            model_len = model_len.zip(worker.max_model_len).map(|(longest, this)| longest.max(this));
            let cache = worker.total_kv_blocks.map(|blocks| blocks.saturating_mul(block_size));
            let holds = [worker.max_model_len, cache].into_iter().flatten().min();
            weight_tokens = weight_tokens.max(holds.unwrap_or(Self::WEIGHT_TOKENS_UNKNOWN));
        }
        let model_len = model_len.filter(|longest| *longest > 0);
        Self { model_len, weight_tokens: if weight_tokens > 0 { weight_tokens } else { Self::WEIGHT_TOKENS_UNKNOWN } }
    }

    /// Both limits in one word, for publication in an atomic.
    #[must_use]
    pub fn to_word(self) -> u64 {
        u64::from(self.model_len.unwrap_or(0)) << 32 | u64::from(self.weight_tokens)
    }

    /// The inverse of [`to_word`](Self::to_word).
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the halves that `to_word` joined")]
    pub fn from_word(word: u64) -> Self {
        Self { model_len: Some((word >> 32) as u32).filter(|longest| *longest > 0), weight_tokens: word as u32 }
    }
}

impl Default for PromptLimits {
    /// Limits without any known worker.
    fn default() -> Self {
        Self::of([], 1)
    }
}
