//! State of a gateway for operators, as shown by the live page and by `pointsman top`.
//!
//! [`LiveSnapshot`] is one complete state. The administration listener encodes it once for all viewers, and both
//! displays read only this encoding. [`assess`] turns facts into levels and sentences. Names are untrusted text: displays
//! must not interpret them.

pub mod assess;
pub mod names;

use serde::{Deserialize, Serialize};

use assess::Level;

/// Maximum number of ranks per model in a snapshot, those with the most trouble.
pub const RANKS_MAX: usize = 64;

/// Maximum number of decisions per model in a snapshot.
pub const DECISIONS_MAX: usize = 20;

/// State of the gateway at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LiveSnapshot {
    /// Version of the gateway.
    pub version: String,
    /// Time in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// Number of the snapshot since the start of the gateway, from 1.
    pub number: u64,
    /// Highest level of any model.
    pub level: Level,
    /// State in one sentence.
    pub sentence: String,
    /// The models, in the order of their configuration.
    pub models: Vec<ModelState>,
}

/// State of one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelState {
    /// Configured name.
    pub name: String,
    /// `aggregated`, `prefill` or `decode`.
    pub role: String,
    /// Policy of the router.
    pub policy: String,
    /// Tokens per block.
    pub block_size: u32,
    /// Highest level of its problems.
    pub level: Level,
    /// State in one sentence.
    pub sentence: String,
    /// Bookings and waiting requests.
    pub leases: u64,
    /// Registered ranks.
    pub ranks_registered: u64,
    /// Ranks that can serve.
    pub ranks_eligible: u64,
    /// The ranks with the most trouble, at most [`RANKS_MAX`].
    pub ranks: Vec<RankState>,
    /// Rates of the last seconds.
    pub rates: RatesState,
    /// Requests of the last ten minutes.
    pub course: CourseState,
    /// Cache hits of all requests.
    pub hits: HitsState,
    /// Waiting requests by class. Empty without queueing.
    pub queue: Vec<ClassState>,
    /// Other replicas of the router.
    pub replicas: Vec<ReplicaState>,
    /// The last decisions, the newest first, at most [`DECISIONS_MAX`].
    pub decisions: Vec<DecisionState>,
    /// Shadow policies beside the active one. Empty before the first sampled decision.
    pub shadows: Vec<ShadowState>,
    /// Place of the prefills, for a model with a prefill pool.
    pub legs: Option<LegsState>,
}

/// Rates of the requests of the last ten to fifteen seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RatesState {
    /// Requests that ended per second.
    pub requests_per_second: f64,
    /// Share of these that failed through no fault of the client; absent without requests.
    pub error_share: Option<f64>,
    /// Mean measured time to the first token of streamed responses.
    pub ttft_seconds: Option<f64>,
    /// Mean measured time between their tokens.
    pub itl_seconds: Option<f64>,
}

/// Requests over time: one value per point, the oldest first, the running point last. At most ten minutes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CourseState {
    /// Duration of a point.
    pub point_seconds: u64,
    /// Requests that ended.
    pub requests: Vec<u32>,
    /// Those of them that failed.
    pub errors: Vec<u32>,
    /// Mean time to first token in milliseconds; `null` without a measurement.
    pub ttft_ms: Vec<Option<f64>>,
    /// Mean time between tokens in milliseconds.
    pub itl_ms: Vec<Option<f64>>,
}

/// State of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankState {
    /// Name for people: see [`names`].
    pub name: String,
    /// Worker id, as text because it exceeds the numbers of JavaScript.
    pub worker: String,
    /// Rank of the worker.
    pub rank: u32,
    /// Address of the worker.
    pub endpoint: String,
    /// Level of its problems.
    pub level: Level,
    /// `serving`, `draining`, `cordoned`, `suspected`, `stalled`, `refusing` or `ejected`.
    pub status: String,
    /// Its problems, the most serious first.
    pub problems: Vec<String>,
    /// Booked requests.
    pub active_requests: u64,
    /// Prompt tokens still to compute.
    pub prefill_tokens: u64,
    /// Expected time until these are computed, in seconds.
    pub prefill_wait_seconds: f64,
    /// KV blocks of the booked requests.
    pub active_blocks: u64,
    /// KV blocks of the rank, if configured or discovered.
    pub total_blocks: Option<u64>,
    /// Indexed blocks.
    pub held_blocks: u64,
    /// Cache hits of its requests.
    pub hits: HitsState,
    /// Load as reported by the engine.
    pub engine: Option<EngineState>,
    /// KV event stream, for a rank with one.
    pub events: Option<EventsState>,
}

/// Requests and cache hits within a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HitsState {
    /// Length of that time, at most about a minute; absent if it began when the rank joined.
    pub seconds: Option<f64>,
    /// Placed requests since the rank joined, whatever the time.
    pub placements: u64,
    /// Prompt tokens of requests with a report of cached tokens.
    pub prompt_tokens: u64,
    /// Cached tokens of these prompts, as predicted at placement.
    pub predicted_tokens: u64,
    /// Cached tokens of these prompts, as reported by the engine.
    pub delivered_tokens: u64,
}

impl HitsState {
    /// Predicted and delivered cached tokens as shares of the prompts; none without prompts.
    #[expect(clippy::cast_precision_loss, reason = "shares are shown in percent")]
    pub fn shares(&self) -> Option<(f64, f64)> {
        let prompt = self.prompt_tokens as f64;
        let shares = (self.predicted_tokens as f64 / prompt, self.delivered_tokens as f64 / prompt);
        (self.prompt_tokens > 0).then_some(shares)
    }
}

/// Load as reported by an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineState {
    /// Running requests.
    pub running: Option<u32>,
    /// Requests in the queue of the engine.
    pub waiting: Option<u32>,
    /// Used share of the KV cache.
    pub kv_usage: Option<f64>,
    /// Age of the report in seconds.
    pub age_seconds: f64,
    /// Whether the report is too old to count.
    pub is_stale: bool,
}

/// KV event stream of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventsState {
    /// Stream state.
    pub state: String,
    /// Whether the subscription is connected.
    pub is_connected: bool,
    /// Received messages.
    pub messages: u64,
    /// Time since the last message, in seconds.
    pub message_age_seconds: Option<f64>,
}

/// Waiting requests of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassState {
    /// Name of the class.
    pub class: String,
    /// Waiting requests.
    pub requests: u64,
    /// Their prompt tokens.
    pub tokens: u64,
    /// Age of the oldest, in seconds.
    pub oldest_age_seconds: Option<f64>,
}

/// Another replica of the router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaState {
    /// Its id.
    pub replica: String,
    /// `live`, `silent` or `left`.
    pub state: String,
    /// Time since its last summary, in seconds.
    pub summary_age_seconds: f64,
    /// Factor of its share in the load, below 1 while it fades.
    pub weight: f64,
}

/// A decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecisionState {
    /// Number of the decision in this list since the start of the gateway.
    pub number: u64,
    /// Request id, with which `GET /admin/decisions/{request id}` returns the candidate table.
    pub request_id: String,
    /// Time since the decision, in seconds.
    pub age_seconds: f64,
    /// Length of the prompt in tokens.
    pub prompt_tokens: u64,
    /// Reason for a prompt without tokens.
    pub no_tokens: Option<String>,
    /// Tokens of the prompt that the index held for the chosen rank.
    pub cached_tokens: u64,
    /// Name of the chosen rank.
    pub chosen: Option<String>,
    /// Its id.
    pub chosen_id: Option<String>,
    /// Predicted time to first token, if the policy predicts it.
    pub predicted_ttft_seconds: Option<f64>,
    /// Error code of a request without a rank.
    pub rejection: Option<String>,
}

/// A shadow policy beside the active one, over the same sampled decisions since the start of the router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShadowState {
    /// Name of the shadow policy.
    pub policy: String,
    /// Sampled decisions.
    pub decisions: u64,
    /// Decisions for the same rank.
    pub agreements: u64,
    /// Cached tokens on the chosen ranks minus those on the ranks of the shadow.
    pub saved_tokens: i64,
    /// Saved tokens of all requests so far, extrapolated from the sampled ones to all placements.
    pub saved_tokens_estimate: i64,
    /// Mean predicted time to first token on the chosen ranks; absent without predictions.
    pub chosen_ttft_seconds: Option<f64>,
    /// The same on the ranks of the shadow.
    pub ttft_seconds: Option<f64>,
}

/// Place of the prefills of a model with a prefill pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LegsState {
    /// Name of the model of the prefill pool.
    pub prefill_model: String,
    /// Requests by place of their prefill since the start of the gateway.
    pub results: Vec<LegResult>,
    /// Requests by pair of ranks, at most [`RANKS_MAX`] pairs, those with the most requests.
    pub pairs: Vec<LegPair>,
}

/// Requests with one place of the prefill.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LegResult {
    /// `remote`, `skipped`, `unsplit`, `fallback` or `complete`.
    pub result: String,
    /// Number of requests.
    pub requests: u64,
}

/// Requests with a prefill on one rank and the decode on another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LegPair {
    /// Name of the prefill rank.
    pub prefill: String,
    /// Name of the decode rank.
    pub decode: String,
    /// Number of requests since the start of the gateway.
    pub requests: u64,
}
