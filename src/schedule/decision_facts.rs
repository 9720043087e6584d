//! Facts recorded with a decision: overlap, shared cache, prefill charge and its expected duration.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::case::Case;
use super::eligible::Eligibility;
use super::latency::prediction::duration;
use super::rank::Rank;
use super::search::Search;
use super::{Decision, LatencyPrediction, LoadView, Target};
use crate::load::{PrefillLoadHint, work_tokens};

impl<T, V: LoadView> Case<'_, T, V> {
    /// The decision for the rank at `position`, with what the `search` for the request has found.
    pub(super) fn decision(&self, position: usize, search: Option<&Search>) -> Decision {
        let Self { pending, candidate, .. } = *self;
        let (rank, request) = (&self.ranks().as_slice()[position], &pending.request);
        let overlap = self.overlap_on(rank);
        let overlap_tokens = self.cached_tokens(overlap);
        let reusable_tokens = self.settings.pool.reusable_tokens(request.prompt_tokens);
        let is_latency = self.settings.is_in_seconds();
        let evaluated = (is_latency || self.targets().is_some()).then(|| {
            search
                .and_then(|search| search.evaluated(position))
                .unwrap_or_else(|| (self.latency_cost(), self.latency_facts(rank, overlap, &rank.project(candidate))))
        });
        let predicted = evaluated.map(|(cost, facts)| self.predict(&cost, rank, &facts));
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
            let speed = evaluated.map_or_else(|| self.speed_of(rank), |(_, facts)| facts.speed);
            let work_tokens = work_tokens(request.prompt_tokens.saturating_sub(cached_tokens), cached_tokens);
            duration(speed.prefill(work_tokens))
        };
        let expected_duration = expected_duration
            .or_else(|| self.expected_duration(rank, cached_tokens, assumed_duration))
            .or_else(|| (!is_reported).then(assumed_duration));
        let track = self.tracks_prefill();
        // Eligibility belongs to this request if its rank was chosen; for a rank named by the embedder no other rank
        // counts.
        let eligibility = search.map(|search| &search.eligibility);
        let reachable = request.overlaps.iter().filter(|known| match request.target {
            Target::Any if eligibility.is_none_or(Eligibility::is_plain) => true,
            Target::Any => {
                let position = self.ranks().position_of(known.slot, known.generation);
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
            effective_overlap_blocks: overlap.effective_blocks(self.settings.pool.tier_weights),
            cached_tokens: overlap_tokens,
            predicted_cached_tokens: self.tokens(overlap.total_blocks().into()).min(reusable_tokens),
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
    fn expected_duration(
        &self,
        rank: &Rank,
        cached_tokens: u32,
        assumed_duration: impl FnOnce() -> Duration,
    ) -> Option<Duration> {
        let is_latency = self.settings.is_in_seconds();
        let new_tokens = self.pending.request.prompt_tokens.saturating_sub(cached_tokens);
        if let Some(estimator) = &self.settings.extensions.estimator {
            // A panic in the embedder's code costs an estimate, not the scheduler.
            let estimate = catch_unwind(AssertUnwindSafe(|| estimator(rank.rank, new_tokens, cached_tokens)));
            let estimate = estimate.ok().flatten();
            if estimate.is_some() || !is_latency {
                return estimate;
            }
        }
        if !self.settings.pool.models_prefill {
            return None;
        }
        // A policy in seconds must not treat an unknown wait as zero.
        if is_latency {
            return Some(assumed_duration());
        }
        self.loads.with_speed(rank.slot(), |cell| cell.prefill_time(work_tokens(new_tokens, cached_tokens)))
    }
}
