//! Shadow policies: other choices for the same request on the same state, without a booking.
//!
//! A shadow queries no rank. Loads that the active policy has not queried count at their upper bounds.

use super::appraisal::{AppraisedRank, ShadowReport};
use super::case::Case;
use super::choice::Choice;
use super::deciding_policy::DecidingPolicy;
use super::latency::formula::LatencyCost;
use super::{Extensions, LoadView, PendingRequest, Schedule, Target};
use crate::config::RouterConfig;
use crate::policy::CostUnit;
use crate::select::Draw;

/// Separate from the seed of picks, so that sampling is independent of ties.
const SHADOW_SEED: u64 = 0x7368_6164_6f77_2173;

/// Ranks up to which the whole share is sampled. The cost of a shadow grows with the ranks, so that of larger pools a
/// smaller share is, in proportion.
const RANKS_FULL_SHARE: usize = 64;

impl<T> Schedule<T> {
    /// Replaces the shadow policies, which decide a `share` of the requests. Each differs from the active configuration
    /// in what `shadows` change. Call this before the first rank is admitted.
    pub(super) fn set_shadows(&mut self, shadows: impl IntoIterator<Item = RouterConfig>, share: f64) {
        // Custom policies and scorers belong to the active policy.
        let Extensions { filters, estimator, .. } = self.active.settings.extensions.clone();
        let extensions = Extensions { filters, estimator, ..Extensions::default() };
        self.shadow_share = share;
        let shadow = |config: RouterConfig| (config.policy.name(), DecidingPolicy::new(&config, extensions.clone()));
        self.shadows = shadows.into_iter().map(shadow).collect();
        let compares_latency = self.shadows.iter().any(|(_, shadow)| shadow.settings.is_in_seconds());
        self.learns_typical |= compares_latency && share > 0.0;
        self.pool.ranks.follow(compares_latency, compares_latency);
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
        let ranks = self.pool.ranks.as_slice().len().max(RANKS_FULL_SHARE) as f64;
        let share = self.shadow_share * RANKS_FULL_SHARE as f64 / ranks;
        let draw = Draw { seed: self.active.settings.seed ^ SHADOW_SEED, request: pending.number };
        if draw.unit() >= share {
            return None;
        }
        let reads_decay = |(_, shadow): &(&str, DecidingPolicy)| {
            shadow.settings.unit == Some(CostUnit::Blocks) || !shadow.settings.rules.lenient
        };
        if self.queueing || self.shadows.iter().any(reads_decay) {
            self.pool.ranks.age();
        }
        let case = self.active.case(&self.pool, pending, in_batch, loads);
        let cost = self.active.settings.pool.models_prefill.then(|| case.latency_cost());
        let chosen = case.appraise(Some(position), cost.as_ref());
        let shadows = self.shadows.iter_mut().map(|(name, shadow)| {
            let (choice, search) = shadow.choose(&self.pool, (pending, in_batch), loads, true, None);
            shadow.keep(search);
            let position = if let Choice::Rank(position) = choice { Some(position) } else { None };
            (*name, case.appraise(position, cost.as_ref()))
        });
        Some(Box::new(ShadowReport { chosen, shadows: shadows.collect() }))
    }
}

impl<T, V: LoadView> Case<'_, T, V> {
    fn appraise(&self, position: Option<usize>, cost: Option<&LatencyCost>) -> AppraisedRank {
        let Some(position) = position else { return AppraisedRank::default() };
        let rank = &self.ranks().as_slice()[position];
        let overlap = self.overlap_on(rank);
        let predicted = cost.map(|cost| {
            let facts = self.latency_facts(rank, overlap, &rank.project(self.candidate));
            self.predict(cost, rank, &facts).latency
        });
        AppraisedRank {
            rank: Some(rank.rank),
            cached_tokens: self.cached_tokens(overlap),
            ttft_seconds: predicted.and_then(|latency| latency.ttft_seconds),
        }
    }
}
