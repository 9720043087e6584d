//! What is kept of a run over time, whoever served it: a simulated fleet or a real endpoint.
//!
//! Owns the facts of each request and of each rank, unsummarised. Promises that times are of one clock, in µs since the
//! run's start. Leaves percentiles, ratios and doubts about the run to those who read it.

use hdrhistogram::Histogram;
use serde::Serialize;

/// A whole run.
#[derive(Clone, Debug)]
pub struct Run {
    /// One a request of the workload, in its order.
    pub requests: Vec<RequestRecord>,
    /// Gaps between tokens of one answer, in µs, over all measured requests.
    pub itl_us: Histogram<u64>,
    /// What ranks looked like, in order of time; empty where nobody can see them.
    pub rank_samples: Vec<RankSample>,
    /// Ranks of the fleet; 0 where unknown.
    pub ranks: u32,
    /// The first so many requests only warm caches and count in no figure.
    pub warmup_requests: usize,
    /// When the last answer had ended.
    pub ended_us: u64,
}

/// What became of one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RequestRecord {
    /// When it was due.
    pub due_us: u64,
    /// When it was sent: later than due where the client could not keep up.
    pub sent_us: u64,
    /// When the router had chosen its rank; absent where that cannot be seen.
    pub placed_us: Option<u64>,
    /// When its first token came.
    pub first_token_us: Option<u64>,
    /// When its last token came.
    pub ended_us: Option<u64>,
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// Tokens it was answered with.
    pub output_tokens: u64,
    /// Prompt tokens that its engine found cached; absent where the engine does not say.
    pub cached_tokens: Option<u64>,
    /// Prompt tokens that the router believed its rank held.
    pub predicted_cached_tokens: Option<u64>,
    /// Prompt tokens that the best eligible rank held at the decision.
    pub reachable_tokens: Option<u64>,
    /// The time to its first token that the router foresaw, in µs.
    pub predicted_ttft_us: Option<u64>,
    /// How much later its first token came than on the rank the oracle would have chosen, as the oracle reckons, in µs.
    pub regret_us: Option<u64>,
    /// Dense number of the rank that served it.
    pub rank: Option<u32>,
    /// Why it has no answer, or not all of it.
    pub failure: Option<String>,
}

/// What one rank looked like at one time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankSample {
    /// When.
    pub at_us: u64,
    /// Dense number of the rank.
    pub rank: u32,
    /// Requests that run or wait on it.
    pub requests: u32,
    /// Prompt tokens given to it to compute that are not computed yet.
    pub prefill_tokens: u64,
    /// KV blocks in use.
    pub used_blocks: u32,
    /// Prompt tokens of requests it has admitted since the start.
    pub prompt_tokens_total: u64,
    /// Those of them that it found cached.
    pub cached_tokens_total: u64,
}
