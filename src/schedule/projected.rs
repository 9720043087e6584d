//! A rank's load as it would be with a request on it.
//!
//! Owns the bounds and what becomes of them where nobody can be asked. Leaves to `rank` how they come about.

/// What a rank's load would be, with a request on it. Each lowest, highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Projected {
    pub(super) potential_blocks: (u64, u64),
    pub(super) prefill_tokens: (u64, u64),
    pub(super) requests: u32,
    /// Blocks without the request's.
    pub(super) active_blocks: (u64, u64),
}

impl Projected {
    /// Takes the upper ends for the truth.
    pub(super) fn take_worst(&mut self) {
        self.potential_blocks.0 = self.potential_blocks.1;
        self.prefill_tokens.0 = self.prefill_tokens.1;
        self.active_blocks.0 = self.active_blocks.1;
    }

    /// Leading ones of the request's `block_count` blocks that active requests have too.
    pub(super) fn shared_blocks(&self, block_count: u64) -> (u64, u64) {
        let not_new = |active: u64, potential: u64| (active + block_count).saturating_sub(potential);
        (not_new(self.active_blocks.1, self.potential_blocks.1), not_new(self.active_blocks.0, self.potential_blocks.0))
    }

    pub(super) fn is_exact(&self) -> bool {
        self.potential_blocks.0 == self.potential_blocks.1 && self.prefill_tokens.0 == self.prefill_tokens.1
    }
}
