//! Explanation of a decision: the candidate table.
//!
//! `explain` returns this record, and traces of sampled decisions contain it.

use super::cost::Cost;
use super::explanation::{ExplainedRank, Explanation};
use super::pending::Case;
use super::search::scratch::Scratch;
use super::{LoadView, Schedule};
use crate::policy::{Bounds, CostFacts};
use crate::protocol::WorkerRank;
use crate::select::Draw;

/// Separate from the seed of picks, so that sampling is independent of ties.
const TRACE_SEED: u64 = 0x7261_6365_5f73_6565;

impl<T> Schedule<T> {
    /// Whether this decision is sampled for the trace.
    pub(super) fn is_traced(&self, request: u64) -> bool {
        let share = self.settings.decision_trace;
        share > 0.0 && Draw { seed: self.settings.seed ^ TRACE_SEED, request }.unit() < share
    }

    /// The table in the present state.
    pub(super) fn explanation<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        outcome: Result<WorkerRank, String>,
        scratch: &mut Scratch,
    ) -> Box<Explanation> {
        let Case { pending, candidate, loads } = case;
        self.rules.evaluate(&self.ranks, pending.eligibility_inputs(), &mut scratch.eligibility);
        self.fill_overlaps(&pending.request.overlaps, scratch);
        // A rejection keeps every rank eligible; the outcome has its reason.
        let _ = self.restrict_to_targets(case, scratch);
        let (weights, block_size) = (self.settings.cost.tier_weights, self.settings.cost.block_size);
        let (cost, kv_cost) = (self.cost_of(pending), self.kv_cost_of(pending));
        let predictions = self.settings.models_prefill.then(|| self.latency_cost_of(pending));
        let all = self.ranks.as_slice();
        // The prefill of other ranks matters only with a decaying credit.
        let open = scratch.eligibility.open().map(|position| all[position].project(candidate));
        let prefill_tokens_least = open.map(|projected| projected.prefill_tokens.1).min().unwrap_or(0);
        let ranks = all.iter().enumerate().map(|(position, rank)| {
            let projected = rank.project(candidate);
            let facts = self.cost_facts(pending, scratch.overlaps[position], &projected);
            let facts = CostFacts { prefill_tokens_least, ..facts };
            let latency_facts = self.latency_facts(pending, rank, scratch.overlaps[position], &projected);
            let lowest = CostFacts {
                potential_blocks: projected.potential_blocks.0,
                prefill_tokens: projected.prefill_tokens.0,
                ..facts
            };
            let factor = scratch.eligibility.factor(position);
            let added_cost = self.added_cost(case, position, &projected, scratch).unwrap_or(0.0);
            let terms = kv_cost.terms(&facts);
            let (latency_terms, bounds) = match &cost {
                Cost::Kv(cost) => (None, Bounds { lo: cost.cost(&lowest), hi: terms.total() }),
                Cost::Latency(latency) => {
                    let bounds = self.latency_bounds(latency, &case, rank, &projected, &latency_facts);
                    (Some(latency.terms(&latency_facts)), bounds)
                }
            };
            ExplainedRank {
                facts: self.candidate_facts(pending, loads, position, &projected, scratch),
                excluded_by: scratch.eligibility.of(position),
                exact: projected.is_exact(),
                cached_tokens: scratch.overlaps[position].cached_tokens(weights, block_size),
                cost_terms: terms,
                latency_terms,
                prediction: predictions.map(|cost| self.predict(&cost, loads, rank, &latency_facts).latency),
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
            custom_selector: self.extensions.policy.is_some(),
            prompt_tokens: pending.request.prompt_tokens,
            block_size,
            chosen,
            rejection,
            ranks: ranks.collect(),
        })
    }
}
