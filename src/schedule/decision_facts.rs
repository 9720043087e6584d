//! Facts recorded with a decision: overlap, shared cache, prefill charge and its expected duration.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::decide::overlap_on;
use super::eligible::Eligibility;
use super::latency::prediction::duration;
use super::pending::Case;
use super::rank::Rank;
use super::{Decision, LatencyPrediction, LoadView, Schedule, Target};
use crate::load::{PrefillFacts, PrefillLoadHint, work_tokens};
use crate::policy::Policy;

impl<T> Schedule<T> {
    pub(super) fn decision<V: LoadView>(&self, case: Case<'_, T, V>, position: usize) -> Decision {
        let Case { pending, candidate, loads } = case;
        let (rank, request) = (&self.ranks.as_slice()[position], &pending.request);
        let overlap = overlap_on(&request.overlaps, rank);
        let weights = self.settings.cost.tier_weights;
        let overlap_tokens = overlap.cached_tokens(weights, self.settings.cost.block_size);
        let is_latency = self.settings.policy == Policy::Latency;
        let evaluated = (is_latency || self.targets_of(pending).is_some()).then(|| {
            let contenders = self.scratch.as_deref().map(|scratch| &scratch.contenders);
            contenders.and_then(|contenders| contenders.evaluated(pending.number, position)).unwrap_or_else(|| {
                let facts = self.latency_facts(pending, rank, overlap, &rank.project(candidate));
                (self.latency_cost_of(pending), facts)
            })
        });
        let predicted = evaluated.map(|(cost, facts)| self.predict(&cost, loads, rank, &facts));
        let known = evaluated.filter(|_| is_latency).map_or(overlap_tokens, |(_, facts)| facts.cached_tokens);
        let LatencyPrediction { ttft_seconds, itl_seconds } =
            predicted.map(|predicted| predicted.latency).unwrap_or_default();
        let (cached_tokens, expected_duration) = match request.target {
            Target::Exactly { cached_tokens, expected_duration, .. } => {
                (cached_tokens.unwrap_or(known), expected_duration)
            }
            Target::Any => (known, None),
        };
        let is_reported = !request.options.as_ref().is_some_and(|options| options.not_streamed);
        let assumed_duration = || {
            let speed = evaluated.map_or_else(|| self.speed_of(loads, rank), |(_, facts)| facts.speed);
            let work_tokens = work_tokens(request.prompt_tokens.saturating_sub(cached_tokens), cached_tokens);
            duration(speed.prefill(work_tokens))
        };
        let expected_duration = expected_duration
            .or_else(|| self.expected_duration(loads, rank, request.prompt_tokens, cached_tokens, assumed_duration))
            .or_else(|| (!is_reported).then(assumed_duration));
        let track = self.tracks_prefill(pending);
        // Eligibility belongs to this request if its rank was chosen; for a rank named by the embedder no other rank
        // counts.
        let eligibility = self.scratch.as_deref().map(|scratch| &scratch.eligibility);
        let reachable = request.overlaps.iter().filter(|known| match request.target {
            Target::Any if eligibility.is_none_or(Eligibility::is_plain) => true,
            Target::Any => {
                let position = self.ranks.position_of(known.slot, known.generation);
                position.zip(eligibility).is_some_and(|(position, eligibility)| eligibility.is_open(position))
            }
            Target::Exactly { .. } => (known.slot, known.generation) == (rank.slot(), rank.generation),
        });
        Decision {
            number: pending.number,
            rank: rank.rank,
            slot: rank.slot(),
            generation: rank.generation,
            overlap,
            effective_overlap_blocks: overlap.effective_blocks(weights),
            cached_tokens: overlap_tokens,
            shared_cache_blocks: request.shared_cache.beyond(overlap.device_blocks),
            reachable_blocks: reachable.map(|known| known.overlap.total_blocks()).max().unwrap_or(0),
            prefill_load: PrefillLoadHint::new(request.prompt_tokens, cached_tokens, track, expected_duration)
                .map(|hint| if is_reported { hint } else { hint.unreported() }),
            predicted_ttft: ttft_seconds.map(duration),
            predicted_itl: itl_seconds.map(duration),
            prediction_bias: predicted.map(|predicted| predicted.bias).unwrap_or_default(),
            routing_hashes: None,
        }
    }

    /// Expected duration of the uncached prefill on the rank, from the embedder's estimator or the learned speed.
    /// `assumed_duration` also applies before any learning.
    fn expected_duration<V: LoadView>(
        &self,
        loads: &V,
        rank: &Rank,
        prompt_tokens: u32,
        cached_tokens: u32,
        assumed_duration: impl FnOnce() -> Duration,
    ) -> Option<Duration> {
        let new_tokens = prompt_tokens.saturating_sub(cached_tokens);
        if let Some(estimator) = &self.extensions.estimator {
            let facts = PrefillFacts { rank: rank.rank, new_tokens, cached_tokens, batch: 1 };
            // A panic in the embedder's code costs an estimate, not the scheduler.
            let estimate = catch_unwind(AssertUnwindSafe(|| estimator.estimate(&facts))).ok().flatten();
            if estimate.is_some() || self.settings.policy != Policy::Latency {
                return estimate;
            }
        }
        if !self.settings.models_prefill {
            return None;
        }
        // A policy in seconds must not treat an unknown wait as zero.
        if self.settings.policy == Policy::Latency {
            return Some(assumed_duration());
        }
        loads.speed(rank.slot()).prefill_time(work_tokens(new_tokens, cached_tokens))
    }
}
