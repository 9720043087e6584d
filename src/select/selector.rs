//! The embedder's own choice of a rank.
//!
//! Owns what a custom selector is shown and how its answer is checked. Promises that it sees every eligible rank with
//! raw, exact facts and no half-computed score, and that a wrong answer or a panic is an error of that one request.
//! Leaves filtering, queueing and booking to `schedule`: a selector chooses, it does not admit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use serde::Serialize;

use super::TierOverlap;
use crate::engine_load::EngineLoadFact;
use crate::protocol::WorkerRank;

/// One rank that may be chosen, with everything that is known of it and the request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// The rank.
    pub rank: WorkerRank,
    /// What it holds of the prompt, by tier, in blocks.
    pub overlap: TierOverlap,
    /// Blocks that the shared cache has beyond its device blocks.
    pub shared_cache_blocks: u32,
    /// Prefill tokens it has still to compute, without this request.
    pub prefill_tokens: u64,
    /// Blocks its active requests hold, this one included and what it shares with them counted once.
    pub potential_blocks: u64,
    /// Requests active on it, without this one.
    pub active_requests: u32,
    /// Tokens one engine step may hold, where known.
    pub max_num_batched_tokens: Option<u32>,
    /// KV blocks it has, where known.
    pub total_kv_blocks: Option<u32>,
    /// Blocks it holds in all tiers, as the index knows.
    pub held_blocks: u32,
    /// Since its load was last published. An idle rank publishes nothing, so age is no sign of error.
    pub load_age: Duration,
    /// Since its last KV event; absent where none has come.
    pub index_age: Option<Duration>,
    /// What its engine says of its load, and how long ago; absent where it never has. Stale or absent is unknown, not
    /// idle.
    pub engine_load: Option<EngineLoadFact>,
    /// The product of what taints, session and slow start do to its cost; 1 for none. A wish, not a rule.
    pub preference: f64,
}

/// What a selector is asked.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// The request's number: a seed for draws, if the selector makes any.
    pub request: u64,
    /// Prompt length.
    pub isl_tokens: u32,
    /// Tokens a block.
    pub block_size: u32,
    /// Output the caller expects, where it said so.
    pub expected_output_tokens: Option<u32>,
    /// The LoRA adapter it runs under.
    pub lora_name: Option<&'a str>,
    /// Its session.
    pub session_id: Option<&'a str>,
    /// The eligible ranks, in rank order. Never empty.
    pub candidates: &'a [Candidate],
}

/// Chooses a rank in place of the configured policy.
///
/// Runs in the scheduler's turn: it must be quick, and must not block. It sees what was decided before it.
///
/// ```
/// use pointsman::select::{Selection, WorkerSelector};
///
/// /// Whoever has the most of the prompt.
/// struct Warmest;
///
/// impl WorkerSelector for Warmest {
///     fn select(&self, selection: &Selection<'_>) -> Option<usize> {
///         let candidates = selection.candidates.iter().enumerate();
///         candidates.max_by_key(|(_, candidate)| candidate.overlap.total_blocks()).map(|(position, _)| position)
///     }
/// }
/// ```
pub trait WorkerSelector: Send + Sync {
    /// The position of the chosen candidate, or `None` to refuse the request.
    fn select(&self, selection: &Selection<'_>) -> Option<usize>;
}

/// Why a selector's answer could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// It chose nobody.
    #[error("the selector refused all {candidates} candidates")]
    Refused {
        /// Their number.
        candidates: usize,
    },
    /// It chose somebody who is not there.
    #[error("the selector chose candidate {position}, must be below {candidates}")]
    OutOfRange {
        /// Its answer.
        position: usize,
        /// Number of candidates.
        candidates: usize,
    },
    /// It panicked.
    #[error("the selector panicked")]
    Panicked,
}

/// Asks a selector, and checks its answer.
pub(crate) fn chosen(selector: &dyn WorkerSelector, selection: &Selection<'_>) -> Result<usize, SelectorError> {
    let candidates = selection.candidates.len();
    let answer = catch_unwind(AssertUnwindSafe(|| selector.select(selection))).map_err(|_| SelectorError::Panicked)?;
    match answer {
        None => Err(SelectorError::Refused { candidates }),
        Some(position) if position >= candidates => Err(SelectorError::OutOfRange { position, candidates }),
        Some(position) => Ok(position),
    }
}
