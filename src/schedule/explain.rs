//! Why a request goes where it goes: the candidate table.
//!
//! Owns the record and its schema. The same record answers `explain` and is what sampled decisions are traced with.

use serde::Serialize;

use super::cost::Cost;
use super::decide::{Case, Scratch};
use super::{LoadView, Schedule};
use crate::protocol::WorkerRank;
use crate::select::{Bounds, Candidate, CostFacts, CostTerms, Draw, Filter, LatencyTerms, Policy};

/// Apart from the seed of picks, so that what is traced says nothing about ties.
const TRACE_SEED: u64 = 0x7261_6365_5f73_6565;

/// Everything one decision was based on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Version of this record: raised when a field changes its meaning or goes.
    pub schema: u32,
    /// The request's number.
    pub request: u64,
    /// How ranks were compared.
    pub policy: Policy,
    /// Whether the embedder's selector chose in place of the policy.
    pub custom_selector: bool,
    /// Prompt length.
    pub isl_tokens: u32,
    /// Tokens a block.
    pub block_size: u32,
    /// The choice.
    pub chosen: Option<WorkerRank>,
    /// Why there is none.
    pub refused: Option<String>,
    /// One row a registered rank, in rank order.
    pub ranks: Vec<ExplainedRank>,
}

/// One row of the candidate table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedRank {
    /// What is known of the rank. Where it was not asked, load and blocks are upper bounds.
    #[serde(flatten)]
    pub facts: Candidate,
    /// The filter that refused it.
    pub refused_by: Option<Filter>,
    /// Whether its numbers are exact, and not only bounds.
    pub exact: bool,
    /// Effective overlap in tokens.
    pub cached_tokens: u32,
    /// What its `kv` cost is made of, at the upper bounds.
    pub cost_terms: CostTerms,
    /// What its `latency` cost is made of, at the upper bounds, where that is the policy.
    pub latency_terms: Option<LatencyTerms>,
    /// Its cost: no lower than this.
    pub cost_lo: f64,
    /// Its cost: no higher than this. What was compared, preferences included.
    pub cost_hi: f64,
}

impl Explanation {
    /// The version of the record that this code writes.
    pub const SCHEMA: u32 = 1;
}

impl<T> Schedule<T> {
    /// Whether this decision is one of those traced.
    pub(super) fn is_traced(&self, request: u64) -> bool {
        let share = self.settings.decision_trace;
        share > 0.0 && Draw { seed: self.settings.seed ^ TRACE_SEED, request }.unit() < share
    }

    /// The table, as things stand.
    pub(super) fn explanation<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        outcome: Result<WorkerRank, String>,
        scratch: &mut Scratch,
    ) -> Box<Explanation> {
        let Case { pending, candidate, loads } = case;
        self.rules.judge(&self.ranks, pending.asked(), &mut scratch.verdicts);
        self.fill_overlaps(&pending.request.overlaps, scratch);
        let (weights, block_size) = (self.settings.cost.tier_weights, self.settings.cost.block_size);
        let (cost, kv_cost) = (self.cost_of(pending), self.kv_cost_of(pending));
        let all = self.ranks.as_slice();
        // What the others have to prefill matters only to a credit that decays.
        let open = scratch.verdicts.open().map(|position| all[position].project(candidate));
        let prefill_tokens_least = open.map(|projected| projected.prefill_tokens.1).min().unwrap_or(0);
        let ranks = all.iter().enumerate().map(|(position, rank)| {
            let projected = rank.project(candidate);
            let facts = self.cost_facts(pending, scratch.overlaps[position], &projected);
            let facts = CostFacts { prefill_tokens_least, ..facts };
            let lowest = CostFacts {
                potential_blocks: projected.potential_blocks.0,
                prefill_tokens: projected.prefill_tokens.0,
                ..facts
            };
            let factor = scratch.verdicts.factor(position);
            let terms = kv_cost.terms(&facts);
            let (latency_terms, bounds) = match &cost {
                Cost::Kv(cost) => (None, Bounds { lo: cost.cost(&lowest), hi: terms.total() }),
                Cost::Latency(latency) => {
                    let facts = self.latency_facts(pending, loads, rank, scratch.overlaps[position], &projected);
                    let bounds = self.plain_bounds(&cost, rank, false, case, scratch.overlaps[position]);
                    (Some(latency.terms(&facts)), bounds)
                }
            };
            ExplainedRank {
                facts: self.candidate_facts(pending, loads, position, &projected, scratch),
                refused_by: scratch.verdicts.of(position),
                exact: projected.is_exact(),
                cached_tokens: scratch.overlaps[position].cached_tokens(weights, block_size),
                cost_terms: terms,
                latency_terms,
                cost_lo: bounds.lo * factor,
                cost_hi: bounds.hi * factor,
            }
        });
        let (chosen, refused) = match outcome {
            Ok(rank) => (Some(rank), None),
            Err(reason) => (None, Some(reason)),
        };
        Box::new(Explanation {
            schema: Explanation::SCHEMA,
            request: pending.number,
            policy: self.settings.policy,
            custom_selector: self.extensions.selector.is_some(),
            isl_tokens: pending.request.isl_tokens,
            block_size,
            chosen,
            refused,
            ranks: ranks.collect(),
        })
    }
}
