//! Search by costs that are all exact, because all ranks were queried: with a temperature, targets, or custom scorers.

use crate::policy::{CostFacts, PolicyError, RankScorer, checked_cost};
use crate::schedule::LoadView;
use crate::schedule::case::{Case, Cost};
use crate::schedule::choice::Choice;
use crate::schedule::eligible::Eligibility;
use crate::schedule::latency::formula::Real;
use crate::schedule::rank::Projected;
use crate::schedule::types::Rejection;
use crate::select::TierOverlap;

impl<T, V: LoadView> Case<'_, T, V> {
    /// The lowest cost, or one by chance at a temperature.
    pub(super) fn cheapest_of_all(&self, eligibility: &Eligibility) -> Choice {
        let (ranks, overlaps) = (self.ranks().as_slice(), self.overlaps());
        let open: Vec<(usize, Projected)> =
            eligibility.open().map(|position| (position, ranks[position].project(self.candidate))).collect();
        let prefill_tokens_least = open.iter().map(|(_, projected)| projected.prefill_tokens.1).min().unwrap_or(0);
        let cost = self.cost();
        let mut costs = Vec::with_capacity(open.len());
        for (position, projected) in &open {
            let (overlap, preference) = (overlaps[*position], eligibility.factor(*position));
            let own = match &cost {
                Cost::Kv(cost) => cost.cost(&CostFacts { prefill_tokens_least, ..self.cost_facts(overlap, projected) }),
                Cost::Latency(cost) => cost.cost(&self.latency_facts(&ranks[*position], overlap, projected)),
            };
            match self.added_cost(*position, overlap, projected, preference) {
                Ok(added) => costs.push(own * preference + added),
                Err(error) => return Choice::None(Rejection::Policy(error)),
            }
        }
        let temperature = self.temperature();
        let picked = if temperature > 0.0 {
            self.draw().sampled(&costs, temperature).map(|picked| open[picked].0)
        } else {
            let most = costs.iter().copied().fold(f64::INFINITY, |a, b| a.lesser(b)) * self.settings.tie_factor;
            let near = open.iter().zip(&costs).filter(|(_, cost)| **cost <= most);
            self.one_of_ties(&overlaps, near.map(|((position, _), cost)| (*position, *cost)).collect())
        };
        picked.map_or_else(|| self.no_choice(eligibility), Choice::Rank)
    }

    /// Cost that the custom scorers add to a rank's cost.
    ///
    /// # Errors
    /// A scorer panicked or returned an unusable cost.
    pub(in crate::schedule) fn added_cost(
        &self,
        position: usize,
        overlap: TierOverlap,
        projected: &Projected,
        preference: f64,
    ) -> Result<f64, PolicyError> {
        let scorers = &self.settings.extensions.scorers;
        if scorers.is_empty() {
            return Ok(0.0);
        }
        let facts = self.candidate_facts(position, overlap, projected, preference);
        checked_cost(scorers.iter().map(|scorer| &**scorer as &dyn RankScorer), &self.request_facts(), &facts)
    }
}
