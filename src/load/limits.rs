//! How long a prompt may be in a pool, and how much it may weigh.
//!
//! Owns the two numbers and how they follow from the workers. A prompt that no engine takes would otherwise weigh on
//! its rank, by the square of its length, until the engine refuses it.

use crate::protocol::WorkerConfig;

/// What bounds a prompt, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLimits {
    /// The longest sequence that any worker's model takes; absent where a worker does not say.
    pub model_len: Option<u32>,
    /// What a prompt weighs at most: as much as the roomiest worker can hold.
    pub weight_tokens: u32,
}

impl PromptLimits {
    /// What a prompt weighs at most on a worker of which neither the model's length nor the cache is known.
    pub const WEIGHT_TOKENS_UNKNOWN: u32 = 131_072;

    /// The limits of a pool of these workers, with blocks of `block_size` tokens.
    ///
    /// ```
    /// use pointsman::load::PromptLimits;
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

    /// Both in one word, for publication through an atomic.
    #[must_use]
    pub fn to_word(self) -> u64 {
        u64::from(self.model_len.unwrap_or(0)) << 32 | u64::from(self.weight_tokens)
    }

    /// The limits that [`to_word`](Self::to_word) was called on.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the halves that `to_word` joined")]
    pub fn from_word(word: u64) -> Self {
        Self { model_len: Some((word >> 32) as u32).filter(|longest| *longest > 0), weight_tokens: word as u32 }
    }
}

impl Default for PromptLimits {
    /// Nothing is known of any worker.
    fn default() -> Self {
        Self::of([], 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for model_len in [None, Some(1), Some(u32::MAX)] {
            let limits = PromptLimits { model_len, weight_tokens: 7 };
            assert_eq!(PromptLimits::from_word(limits.to_word()), limits);
        }
        assert_eq!(PromptLimits::default().weight_tokens, PromptLimits::WEIGHT_TOKENS_UNKNOWN);
    }
}
