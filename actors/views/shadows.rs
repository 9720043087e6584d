//! Totals of shadow policies, published by the scheduler.

/// One shadow policy beside the active policy, over the decisions that both have made since the start of the router.
///
/// The values of the shadow assume the state that the active policy has created. The difference is therefore the saving
/// of single decisions, not the outcome of a whole fleet under the shadow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShadowTotals {
    /// Name of the shadow policy.
    pub policy: &'static str,
    /// Decisions of both policies, a sample of all.
    pub decisions: u64,
    /// Decisions for the same rank.
    pub agreements: u64,
    /// Prompt tokens that the index held for the ranks of the shadow.
    pub cached_tokens: u64,
    /// Prompt tokens that the index held for the chosen ranks.
    pub chosen_cached_tokens: u64,
    /// Decisions with a predicted time to first token of both.
    pub predictions: u64,
    /// Sum of these times on the ranks of the shadow, in seconds.
    pub ttft_seconds: f64,
    /// Sum of these times on the chosen ranks, in seconds.
    pub chosen_ttft_seconds: f64,
}

impl ShadowTotals {
    /// Totals of no decisions.
    pub(crate) fn new(policy: &'static str) -> Self {
        Self { policy, ..Self::default() }
    }
}
