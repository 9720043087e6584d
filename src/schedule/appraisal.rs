//! Choices of several policies for one request, measured alike.

use crate::protocol::WorkerRank;

/// A rank that a policy chose, measured alike for every policy: by the index, and by the latency model of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AppraisedRank {
    /// The rank; `None` if the policy chose none.
    pub rank: Option<WorkerRank>,
    /// Prompt tokens that the index holds for it, at most the prompt.
    pub cached_tokens: u32,
    /// Predicted time to first token in seconds, if prefill speeds are learned and prefill is tracked.
    pub ttft_seconds: Option<f64>,
}

/// Choices for one request on the same state: of the active policy, and of its shadows.
#[derive(Clone, Debug, PartialEq)]
pub struct ShadowReport {
    /// Choice of the active policy.
    pub chosen: AppraisedRank,
    /// Name and choice of each shadow, in their order.
    pub shadows: Vec<(&'static str, AppraisedRank)>,
}
