//! Record of one decision: the candidate table.

use serde::Serialize;

use super::LatencyPrediction;
use super::latency::formula::LatencyTerms;
use crate::policy::{Candidate, CostTerms, Policy};
use crate::protocol::WorkerRank;
use crate::select::Filter;

/// All inputs of one decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Version of the record, raised when a field changes its meaning or is removed.
    pub schema: u32,
    /// Request number.
    pub request: u64,
    /// Policy.
    pub policy: Policy,
    /// Whether a custom selector replaced the policy.
    pub custom_selector: bool,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Chosen rank.
    pub chosen: Option<WorkerRank>,
    /// Reason for no choice.
    pub rejection: Option<String>,
    /// One row per registered rank, in rank order.
    pub ranks: Vec<ExplainedRank>,
}

/// A row of the candidate table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedRank {
    /// Facts of the rank. Load and blocks are upper bounds if it was not queried.
    #[serde(flatten)]
    pub facts: Candidate,
    /// The excluding filter.
    pub excluded_by: Option<Filter>,
    /// Whether its values are exact instead of bounds.
    pub exact: bool,
    /// Weighted overlap in tokens.
    pub cached_tokens: u32,
    /// Terms of its `kv` cost at the upper bounds.
    pub cost_terms: CostTerms,
    /// Terms of its `latency` cost at the upper bounds, under that policy.
    pub latency_terms: Option<LatencyTerms>,
    /// Predicted latency, where prefill speeds are learned.
    pub prediction: Option<LatencyPrediction>,
    /// Lower bound of its cost.
    pub cost_min: f64,
    /// Upper bound of its cost. Includes preferences, as compared.
    pub cost_max: f64,
}

impl Explanation {
    /// Version of the record written by this code.
    pub const SCHEMA: u32 = 2;
}
