//! The decision for one request.

use std::time::Duration;

use serde::Serialize;

use crate::hashing::HashedPrompt;
use crate::load::{PredictionBias, PrefillLoadHint};
use crate::protocol::{Generation, Slot, WorkerRank};
use crate::select::TierOverlap;

/// The rank chosen for a request, and the facts known at the choice.
///
/// The handle returns it for queries (`find_best_match`); a `Placement` dereferences to it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decision {
    pub(crate) number: u64,
    pub(crate) rank: WorkerRank,
    #[serde(skip)]
    pub(crate) slot: Slot,
    #[serde(skip)]
    pub(crate) generation: Generation,
    pub(crate) overlap: TierOverlap,
    pub(crate) effective_overlap_blocks: f64,
    pub(crate) cached_tokens: u32,
    pub(crate) predicted_cached_tokens: u32,
    pub(crate) shared_cache_blocks: u32,
    pub(crate) reachable_blocks: u32,
    pub(crate) prefill_load: Option<PrefillLoadHint>,
    #[serde(rename = "predicted_ttft_seconds", with = "crate::protocol::option_seconds")]
    pub(crate) predicted_ttft: Option<Duration>,
    #[serde(rename = "predicted_itl_seconds", with = "crate::protocol::option_seconds")]
    pub(crate) predicted_itl: Option<Duration>,
    #[serde(skip)]
    pub(crate) prediction_bias: PredictionBias,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) routing_hashes: Option<Box<HashedPrompt>>,
}

impl Decision {
    /// Number of the decision: how many requests the scheduler received before this one. Counted from 0; after the n-th
    /// loss of the scheduler, from n × 2^32. Where no request waits, decisions fall in this order, and follow from it
    /// and the seed.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The rank.
    #[must_use]
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Slot of the rank in the router's tables.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Incarnation of the rank in that slot.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Blocks of the prompt that the rank holds, by tier.
    #[must_use]
    pub fn overlap(&self) -> TierOverlap {
        self.overlap
    }

    /// Effective overlap in blocks, rounded.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rounded count of blocks, at least 0"
    )]
    pub fn overlap_blocks(&self) -> u32 {
        self.effective_overlap_blocks.round() as u32
    }

    /// Effective overlap in blocks: lower tiers count for less.
    #[must_use]
    pub fn effective_overlap_blocks(&self) -> f64 {
        self.effective_overlap_blocks
    }

    /// Effective overlap in tokens, rounded: the part of the prompt that the prefill is expected to skip.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    /// Cached tokens that the engine is expected to report: as [`cached_tokens`](Self::cached_tokens), but blocks in lower
    /// tiers count whole.
    #[must_use]
    pub fn predicted_cached_tokens(&self) -> u32 {
        self.predicted_cached_tokens
    }

    /// Blocks of the shared cache beyond the rank's device blocks.
    #[must_use]
    pub fn shared_cache_blocks(&self) -> u32 {
        self.shared_cache_blocks
    }

    /// The largest number of leading blocks that any eligible rank holds, in any tier: the reachable overlap.
    #[must_use]
    pub fn reachable_blocks(&self) -> u32 {
        self.reachable_blocks
    }

    /// Blocks of the [reachable overlap](Self::reachable_blocks) that the chosen rank does not hold in any tier: the
    /// cache hits that the decision gives up, mostly for a lower load.
    #[must_use]
    pub fn forgone_blocks(&self) -> u32 {
        self.reachable_blocks.saturating_sub(self.overlap.total_blocks())
    }

    /// Prefill load booked for the request; `None` if nothing is to be computed, or prefill is not tracked.
    #[must_use]
    pub fn prefill_load(&self) -> Option<PrefillLoadHint> {
        self.prefill_load
    }

    /// Expected duration of the rank's prefill of the tokens that are not cached, if it is modelled.
    #[must_use]
    pub fn expected_prefill_duration(&self) -> Option<Duration> {
        self.prefill_load.and_then(PrefillLoadHint::expected_duration)
    }

    /// Expected time from the decision to the first token: the work ahead on the rank, the uncached prompt and one step.
    /// Only with prefill tracked, under the policy `latency`; with other policies and learned prefill speeds for requests
    /// with latency targets. The metric `pointsman_predicted_ttft_error_seconds` measures the error when the prefill is
    /// reported complete.
    #[must_use]
    pub fn predicted_ttft(&self) -> Option<Duration> {
        self.predicted_ttft
    }

    /// Expected mean time between two tokens of the response: a decode step of the rank with this request. Absent in
    /// prefill pools, and where no time to first token is predicted.
    #[must_use]
    pub fn predicted_itl(&self) -> Option<Duration> {
        self.predicted_itl
    }

    /// Correction that the predictions include: the bias of the rank, learned from its earlier predictions.
    #[must_use]
    pub fn prediction_bias(&self) -> PredictionBias {
        self.prediction_bias
    }

    /// Checksum of every fact, to compare decisions bit for bit.
    pub(super) fn digest(&self) -> u64 {
        let nanos = |duration: Option<Duration>| duration.map_or(u64::MAX, |duration| duration.as_nanos() as u64);
        let hint = self.prefill_load;
        let facts = [
            self.number,
            self.rank.worker.0,
            u64::from(self.rank.rank) << 32 | u64::from(self.cached_tokens),
            self.effective_overlap_blocks.to_bits(),
            u64::from(self.shared_cache_blocks) << 32 | u64::from(self.reachable_blocks),
            hint.map_or(0, |hint| u64::from(hint.effective_tokens()) << 1 | u64::from(hint.is_reported())),
            nanos(hint.and_then(PrefillLoadHint::expected_duration)),
            nanos(self.predicted_ttft),
            nanos(self.predicted_itl),
            self.prediction_bias.ttft.to_bits(),
            self.prediction_bias.itl.to_bits(),
        ];
        // Any mix of odd constants: no one chooses these numbers, so that collisions are accidents.
        facts
            .into_iter()
            .fold(0, |digest: u64, fact| (digest.rotate_left(23) ^ fact).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// The predictions without correction, in seconds: time to first token, time between tokens.
    pub(crate) fn uncorrected_predictions(&self) -> [Option<f64>; 2] {
        let PredictionBias { ttft, itl } = self.prediction_bias;
        [
            self.predicted_ttft.map(|time| time.as_secs_f64() / ttft),
            self.predicted_itl.map(|time| time.as_secs_f64() / itl),
        ]
    }

    /// The prompt's hashes, if the request set `routing_hashes`.
    #[must_use]
    pub fn routing_hashes(&self) -> Option<&HashedPrompt> {
        self.routing_hashes.as_deref()
    }

    #[cfg(feature = "runtime")]
    pub(crate) fn with_routing_hashes(self, routing_hashes: Option<HashedPrompt>) -> Self {
        Self { routing_hashes: routing_hashes.map(Box::new), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::WorkerId;

    #[test]
    fn a_decision_serializes_without_internal_positions() {
        let decision = Decision {
            number: 3,
            rank: WorkerRank::new(WorkerId(7), 1),
            slot: Slot(4),
            generation: Generation(2),
            overlap: TierOverlap { device_blocks: 2, ..TierOverlap::default() },
            effective_overlap_blocks: 2.0,
            cached_tokens: 32,
            predicted_cached_tokens: 32,
            shared_cache_blocks: 0,
            reachable_blocks: 2,
            prefill_load: None,
            predicted_ttft: Some(Duration::from_millis(250)),
            predicted_itl: None,
            prediction_bias: PredictionBias::default(),
            routing_hashes: None,
        };
        let json = serde_json::to_value(&decision).expect("plain data");
        assert_eq!(json["rank"], serde_json::json!({ "worker": 7, "rank": 1 }));
        assert_eq!((&json["number"], &json["cached_tokens"]), (&3.into(), &32.into()));
        assert_eq!((&json["predicted_ttft_seconds"], &json["predicted_itl_seconds"]), (&0.25.into(), &().into()));
        assert!(json.get("slot").is_none() && json.get("generation").is_none() && json.get("routing_hashes").is_none());
    }
}
