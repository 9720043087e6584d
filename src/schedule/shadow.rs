//! Shadow policies: other choices for the same request on the same state, without a booking.
//!
//! A shadow queries no rank. Loads that the active policy has not queried count at their upper bounds.

use std::mem::swap;

use super::appraisal::{AppraisedRank, ShadowReport};
use super::decide::{Choice, overlap_on};
use super::eligible::Rules;
use super::latency::formula::LatencyCost;
use super::pending::Case;
use super::{Extensions, LoadView, PendingRequest, Schedule, Settings, Shadow, Target};
use crate::config::RouterConfig;
use crate::policy::Policy;
use crate::select::Draw;

/// Separate from the seed of picks, so that sampling is independent of ties.
const SHADOW_SEED: u64 = 0x7368_6164_6f77_2173;

/// Ranks up to which the whole share is sampled. The cost of a shadow grows with the ranks, so that of larger pools a
/// smaller share is, in proportion.
const RANKS_FULL_SHARE: usize = 64;

impl<T> Schedule<T> {
    /// Replaces the shadow policies, which decide a `share` of the requests. Each differs from the active configuration
    /// in what `shadows` change. Call this before the first rank is admitted.
    pub fn set_shadows(&mut self, shadows: impl IntoIterator<Item = RouterConfig>, share: f64) {
        // Custom policies and scorers belong to the active policy.
        let Extensions { filters, estimator, .. } = self.extensions.clone();
        let extensions = Extensions { filters, estimator, ..Extensions::default() };
        self.shadow_share = share;
        self.shadows = shadows
            .into_iter()
            .map(|config| Shadow {
                name: config.policy.name(),
                settings: Settings::of(&config, &extensions),
                rules: Rules::new(&config, &config.queue.classes_or_default(), extensions.filters.clone()),
                extensions: extensions.clone(),
                scratch: None,
            })
            .collect();
        let compares_latency = self.shadows.iter().any(|shadow| shadow.settings.policy == Policy::Latency);
        self.learns_typical |= compares_latency && share > 0.0;
        self.ranks.follow(compares_latency, compares_latency);
    }

    /// Choices of the shadows for a request that the active policy places at `position`; `None` if it is not sampled.
    pub(super) fn shadow_report<V: LoadView>(
        &mut self,
        in_batch: usize,
        loads: &V,
        position: usize,
        pending: &PendingRequest<T>,
    ) -> Option<Box<ShadowReport>> {
        if self.shadows.is_empty() || pending.request.target != Target::Any {
            return None;
        }
        let ranks = self.ranks.as_slice().len().max(RANKS_FULL_SHARE) as f64;
        let share = self.shadow_share * RANKS_FULL_SHARE as f64 / ranks;
        let draw = Draw { seed: self.settings.seed ^ SHADOW_SEED, request: pending.number };
        if draw.unit() >= share {
            return None;
        }
        let reads_decay = |shadow: &Shadow| shadow.settings.policy == Policy::Kv || !shadow.rules.lenient;
        if self.queueing || self.shadows.iter().any(reads_decay) {
            self.ranks.age();
        }
        let case = pending.case(in_batch, loads);
        let cost = self.settings.models_prefill.then(|| self.latency_cost_of(pending));
        let chosen = self.appraise(case, Some(position), cost.as_ref());
        let mut shadows = std::mem::take(&mut self.shadows);
        let choices = shadows
            .iter_mut()
            .map(|shadow| {
                self.swap_with(shadow);
                let choice = self.choose(case, true);
                self.swap_with(shadow);
                let position = if let Choice::Rank(position) = choice { Some(position) } else { None };
                (shadow.name, self.appraise(case, position, cost.as_ref()))
            })
            .collect();
        self.shadows = shadows;
        Some(Box::new(ShadowReport { chosen, shadows: choices }))
    }

    /// Exchanges what differs between policies; the state of the ranks stays.
    fn swap_with(&mut self, shadow: &mut Shadow) {
        swap(&mut self.settings, &mut shadow.settings);
        swap(&mut self.rules, &mut shadow.rules);
        swap(&mut self.extensions, &mut shadow.extensions);
        swap(&mut self.scratch, &mut shadow.scratch);
    }

    fn appraise<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        position: Option<usize>,
        cost: Option<&LatencyCost>,
    ) -> AppraisedRank {
        let Some(position) = position else { return AppraisedRank::default() };
        let (rank, request) = (&self.ranks.as_slice()[position], &case.pending.request);
        let overlap = overlap_on(&request.overlaps, rank);
        let kv = &self.settings.cost;
        let predicted = cost.map(|cost| {
            let facts = self.latency_facts(case.pending, rank, overlap, &rank.project(case.candidate));
            self.predict(cost, case.loads, rank, &facts).latency
        });
        AppraisedRank {
            rank: Some(rank.rank),
            cached_tokens: overlap.cached_tokens(kv.tier_weights, kv.block_size).min(request.prompt_tokens),
            ttft_seconds: predicted.and_then(|latency| latency.ttft_seconds),
        }
    }
}
