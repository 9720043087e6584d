//! Projected load of a rank with an additional request.
//!
//! Holds bounds, and selects the upper bounds if no query is possible. `rank` computes them.

use crate::load::{PromptBlocks, PromptFingerprint};

/// The prompt of a request and its position in the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProjectedPrompt<'a> {
    pub(super) prompt: &'a PromptBlocks,
    /// Blocks of the prompt.
    pub(super) block_count: u64,
    pub(super) fingerprint: &'a PromptFingerprint,
    /// Position of its reply within the batch.
    pub(super) in_batch: usize,
}

/// Projected load with an additional request, each lowest and highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Projected {
    pub(super) potential_blocks: (u64, u64),
    pub(super) prefill_tokens: (u64, u64),
    pub(super) requests: u32,
    /// Blocks that a step reads without the request.
    pub(super) read_blocks: u32,
    /// Blocks without those of the request.
    pub(super) active_blocks: (u64, u64),
}

impl Projected {
    /// Replaces the bounds by the upper bounds.
    pub(super) fn take_worst(&mut self) {
        self.potential_blocks.0 = self.potential_blocks.1;
        self.prefill_tokens.0 = self.prefill_tokens.1;
        self.active_blocks.0 = self.active_blocks.1;
    }

    /// Leading blocks of the request's `block_count` that active requests share.
    pub(super) fn shared_blocks(&self, block_count: u64) -> (u64, u64) {
        let not_new = |active: u64, potential: u64| (active + block_count).saturating_sub(potential);
        (not_new(self.active_blocks.1, self.potential_blocks.1), not_new(self.active_blocks.0, self.potential_blocks.0))
    }

    pub(super) fn is_exact(&self) -> bool {
        self.potential_blocks.0 == self.potential_blocks.1 && self.prefill_tokens.0 == self.prefill_tokens.1
    }
}
