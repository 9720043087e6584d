//! What a caller holds for its booking.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::lease_guard::LeaseGuard;
use super::request::BestMatch;
use crate::actors::sequence::table::SequenceAddress;
use crate::actors::telemetry::Prediction;
use crate::actors::views::rank::RankEntry;
use crate::error::RequestError;
use crate::hashing::HashedPrompt;
use crate::health::Outcome;
use crate::load::Weight;
use crate::protocol::WorkerRank;
use crate::select::TierOverlap;

/// A request's place on a rank: its booking lasts as long as this does.
///
/// Report what the request does, and drop it when it is over, however it ended. A placement does not keep its router
/// alive, and may outlive it.
#[must_use = "dropping a placement frees its booking"]
pub struct Placement {
    guard: LeaseGuard,
    address: Arc<SequenceAddress>,
    best: BestMatch,
    prediction: Prediction,
    /// Whether it has been said how the request went.
    told_outcome: AtomicBool,
}

impl Placement {
    pub(super) fn new(
        guard: LeaseGuard,
        address: Arc<SequenceAddress>,
        best: BestMatch,
        prediction: Prediction,
    ) -> Self {
        Self { guard, address, best, prediction, told_outcome: AtomicBool::new(false) }
    }

    /// Leaves the booking to its request id: it lasts until it is freed by that, or falls silent.
    pub(crate) fn detach(self) {
        self.guard.detach();
    }

    /// The decision's number: the router's decisions fall in this order, and follow from it and the seed. Counted from 0;
    /// after the n-th loss of the scheduler, from n × 2^32.
    #[must_use]
    pub fn decision(&self) -> u64 {
        self.best.decision()
    }

    /// Everything that the decision said.
    #[must_use]
    pub fn best_match(&self) -> &BestMatch {
        &self.best
    }

    /// The rank to send the request to.
    #[must_use]
    pub fn rank(&self) -> WorkerRank {
        self.best.rank()
    }

    /// Where that rank's worker is, as its configuration said.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.address.entry.endpoint
    }

    /// What the engine behind the endpoint calls the rank: its number among the worker's own, from 0, whatever its
    /// number in a larger group. That is what vLLM and SGLang read from `X-data-parallel-rank`. `None` where the worker
    /// has one rank only, and need not be told.
    #[must_use]
    pub fn rank_at_worker(&self) -> Option<u32> {
        Some(self.address.entry.number_at_worker.load(Ordering::Relaxed)).filter(|number| *number != RankEntry::ALONE)
    }

    #[cfg(feature = "tower")]
    pub(super) fn endpoint_shared(&self) -> Arc<str> {
        Arc::clone(&self.address.entry.endpoint)
    }

    #[cfg(feature = "http")]
    pub(super) fn block_size(&self) -> u32 {
        self.guard.edge().config.block_size
    }

    /// The request id it was booked under.
    #[must_use]
    pub fn request_id(&self) -> &str {
        self.guard.lease().request_id()
    }

    /// What the rank holds of the prompt, by tier.
    #[must_use]
    pub fn overlap(&self) -> TierOverlap {
        self.best.overlap()
    }

    /// Effective overlap in blocks, rounded.
    #[must_use]
    pub fn overlap_blocks(&self) -> u32 {
        self.best.overlap_blocks()
    }

    /// Effective overlap in blocks: lower tiers count for less.
    #[must_use]
    pub fn effective_overlap_blocks(&self) -> f64 {
        self.best.effective_overlap_blocks()
    }

    /// Effective overlap in tokens, rounded: what the prefill is expected to skip.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.best.cached_tokens()
    }

    /// How long its first token is expected to take from the decision on, where the policy is `latency`. The error is
    /// measured when the prefill is reported complete: `pointsman_predicted_ttft_error_seconds`.
    #[must_use]
    pub fn predicted_ttft(&self) -> Option<Duration> {
        self.best.predicted_ttft()
    }

    /// The prompt's hashes, when the request asked for them.
    #[must_use]
    pub fn routing_hashes(&self) -> Option<&HashedPrompt> {
        self.best.routing_hashes()
    }

    /// The first token is out: the rank has no prefill left to do for this request. Again is harmless.
    pub fn prefill_completed(&self) {
        let (edge, lease) = (self.guard.edge(), self.guard.lease());
        if lease.complete_prefill() {
            if let Some(predicted) = self.best.predicted_ttft() {
                let elapsed = edge.clock.now().since(lease.booked_at());
                edge.meters.predictions.first_token(predicted, elapsed);
            }
            self.address.prefill_completed(lease);
        }
    }

    /// The engine has found so many tokens of the prompt in its cache, as engines say in the usage of an answer. Only the
    /// first report counts. It goes into metrics: how much of what was chosen was there, and whether predictions of one
    /// kind of request never come true.
    pub fn delivered_cached_tokens(&self, tokens: u32) {
        if self.prediction.is_first_report() {
            self.guard.edge().meters.delivered(&self.prediction, self.cached_tokens(), tokens);
        }
    }

    /// How the request went, as far as it tells of the rank's health: after `health.outcome_failures_max` failures in a row the
    /// rank is kept out of service for a while. Only the first report counts; none is needed, and one that went well costs
    /// next to nothing.
    pub fn outcome(&self, outcome: Outcome) {
        if !self.told_outcome.swap(true, Ordering::Relaxed) {
            let began = self.guard.lease().booked_at();
            self.guard.edge().report_outcome(&self.address.entry, outcome, Some(began));
        }
    }

    /// One more block of output is there. `decay`, about 1 − generated / expected output, re-weighs all output of the
    /// request and the part of its prompt that nobody shares: blocks that will be gone soon count for less.
    ///
    /// # Errors
    /// A decay outside [0, 1].
    pub fn output_block(&self, decay: Option<f64>) -> Result<(), RequestError> {
        let decay = decay.map(Weight::new).transpose()?;
        if !self.guard.edge().config.load.track_output_blocks {
            return Ok(());
        }
        self.guard.lease().push_output_block(decay);
        self.address.reconcile(self.guard.lease());
        Ok(())
    }
}

impl std::fmt::Debug for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Placement")
            .field("request_id", &self.request_id())
            .field("best", &self.best)
            .field("endpoint", &self.endpoint())
            .finish()
    }
}
