//! Explanation of a decision: the candidate table.
//!
//! `explain` returns this record, and traces of sampled decisions contain it.

use super::LoadView;
use super::case::{Case, Cost};
use super::eligible::Eligibility;
use super::explanation::{ExplainedRank, Explanation};
use crate::policy::{Bounds, CostFacts};
use crate::protocol::WorkerRank;
use crate::select::Draw;

/// Separate from the seed of picks, so that sampling is independent of ties.
const TRACE_SEED: u64 = 0x7261_6365_5f73_6565;

impl<T, V: LoadView> Case<'_, T, V> {
    /// Whether this decision is sampled for the trace.
    pub(super) fn is_traced(&self) -> bool {
        let (share, seed) = (self.settings.decision_trace, self.settings.seed ^ TRACE_SEED);
        share > 0.0 && Draw { seed, request: self.pending.number }.unit() < share
    }

    /// The table in the present state.
    pub(super) fn explanation(&self, outcome: Result<WorkerRank, String>) -> Box<Explanation> {
        let Self { pending, candidate, .. } = *self;
        let mut eligibility = Eligibility::default();
        self.settings.rules.evaluate(self.ranks(), pending.eligibility_inputs(), &mut eligibility);
        // A rejection keeps every rank eligible; the outcome has its reason.
        let _ = self.restrict_to_targets(&mut eligibility);
        let overlaps = self.overlaps();
        let (cost, kv_cost) = (self.cost(), self.kv_cost());
        let predictions = self.settings.pool.models_prefill.then(|| self.latency_cost());
        let all = self.ranks().as_slice();
        // The prefill of other ranks matters only with a decaying credit.
        let open = eligibility.open().map(|position| all[position].project(candidate));
        let prefill_tokens_least = open.map(|projected| projected.prefill_tokens.1).min().unwrap_or(0);
        let ranks = all.iter().enumerate().map(|(position, rank)| {
            let (projected, overlap) = (rank.project(candidate), overlaps[position]);
            let facts = self.cost_facts(overlap, &projected);
            let facts = CostFacts { prefill_tokens_least, ..facts };
            let latency_facts = self.latency_facts(rank, overlap, &projected);
            let lowest = CostFacts {
                potential_blocks: projected.potential_blocks.0,
                prefill_tokens: projected.prefill_tokens.0,
                ..facts
            };
            let factor = eligibility.factor(position);
            let added_cost = self.added_cost(position, overlap, &projected, factor).unwrap_or(0.0);
            let terms = kv_cost.terms(&facts);
            let (latency_terms, bounds) = match &cost {
                Cost::Kv(cost) => (None, Bounds { lo: cost.cost(&lowest), hi: terms.total() }),
                Cost::Latency(latency) => {
                    let bounds = self.latency_bounds(latency, rank, &projected, &latency_facts);
                    (Some(latency.terms(&latency_facts)), bounds)
                }
            };
            ExplainedRank {
                facts: self.candidate_facts(position, overlap, &projected, factor),
                excluded_by: eligibility.of(position),
                exact: projected.is_exact(),
                cached_tokens: self.cached_tokens(overlap),
                cost_terms: terms,
                latency_terms,
                prediction: predictions.map(|cost| self.predict(&cost, rank, &latency_facts).latency),
                cost_min: bounds.lo * factor + added_cost,
                cost_max: bounds.hi * factor + added_cost,
            }
        });
        let (chosen, rejection) = match outcome {
            Ok(rank) => (Some(rank), None),
            Err(reason) => (None, Some(reason)),
        };
        Box::new(Explanation {
            schema: Explanation::SCHEMA,
            request: pending.number,
            policy: self.settings.policy,
            custom_selector: self.settings.extensions.policy.is_some(),
            prompt_tokens: pending.request.prompt_tokens,
            block_size: self.settings.pool.block_size,
            chosen,
            rejection,
            ranks: ranks.collect(),
        })
    }
}
