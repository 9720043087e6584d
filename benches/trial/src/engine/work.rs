//! Work of a step and its duration.

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
    /// Time of the drafter per draft token of the sequence with the most, in µs: it proposes one token of all sequences
    /// at a time. An assumption: one of the model's 32 layers, as in EAGLE. 125.
    pub draft_us: u32,
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
            draft_us: 125,
        }
    }
}

/// Work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Number of prompt tokens to compute.
    pub prefill_tokens: u64,
    /// Number of pairs of a prompt or draft token to compute and a token it attends to, including itself.
    pub attention_pairs: u64,
    /// Number of decoding sequences.
    pub decode_sequences: u64,
    /// Number of context tokens that the decoding sequences read.
    pub kv_tokens: u64,
    /// Number of tokens loaded from host memory.
    pub host_tokens: u64,
    /// Number of draft tokens to verify, each computed like a prompt token.
    pub draft_tokens: u64,
    /// Maximum number of draft tokens of one sequence.
    pub draft_tokens_longest: u64,
}

impl Work {
    /// Adds a chunk of `tokens` prompt tokens after `context` earlier ones.
    pub fn add_prefill(&mut self, tokens: u32, context: u32) {
        let (tokens, context) = (u64::from(tokens), u64::from(context));
        self.prefill_tokens += tokens;
        self.attention_pairs += tokens * context + tokens * (tokens + 1) / 2;
    }

    /// Adds a decoding sequence that reads `context` tokens.
    pub(crate) fn add_decode(&mut self, context: u32) {
        self.decode_sequences += 1;
        self.kv_tokens += u64::from(context);
    }

    /// Adds `tokens` draft tokens of a decoding sequence after `context` other ones.
    pub(crate) fn add_drafts(&mut self, tokens: u32, context: u32) {
        let (tokens, context) = (u64::from(tokens), u64::from(context));
        self.draft_tokens += tokens;
        self.draft_tokens_longest = self.draft_tokens_longest.max(tokens);
        self.attention_pairs += tokens * context + tokens * (tokens + 1) / 2;
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
        let computed = work.prefill_tokens.saturating_add(work.draft_tokens);
        let terms = [
            u64::from(self.step_us).saturating_mul(1000),
            computed.saturating_mul(1_000_000_000) / u64::from(self.prefill_tokens_per_second.max(1)),
            work.attention_pairs.saturating_mul(u64::from(self.attention_ps)) / 1000,
            work.decode_sequences.saturating_mul(u64::from(self.decode_sequence_us) * 1000),
            work.kv_tokens.saturating_mul(u64::from(self.kv_token_ns)),
            work.host_tokens.saturating_mul(u64::from(self.host_token_ns)),
            work.draft_tokens_longest.saturating_mul(u64::from(self.draft_us) * 1000),
        ];
        terms.into_iter().fold(0_u64, u64::saturating_add).div_ceil(1000).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::{StepCost, Work};

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
    fn draft_tokens_cost_computation_attention_and_drafting() {
        let mut work = Work::default();
        work.add_decode(1000);
        work.add_drafts(3, 1000);
        work.add_decode(500);
        work.add_drafts(1, 500);
        // 1001 + 1002 + 1003 tokens attended to by the drafts of the first sequence, 501 by that of the second.
        assert_eq!((work.draft_tokens, work.draft_tokens_longest, work.attention_pairs), (4, 3, 3507));
        // 4000 + 4 / 0.025 + 3507 * 0.0012 + 2 * 20 + 1500 * 0.065 + 3 * 125
        // 4000 + 160 + 4.2084 + 40 + 97.5 + 375 = 4676.7084
        assert_eq!(StepCost::default().duration_us(&work), 4677);
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
            draft_us: 0,
        };
        assert_eq!(free.duration_us(&Work::default()), 1);
        let endless = Work { kv_tokens: u64::MAX, attention_pairs: u64::MAX, ..Work::default() };
        assert_eq!(StepCost::default().duration_us(&endless), u64::MAX.div_ceil(1000));
    }
}
