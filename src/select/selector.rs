//! Custom selectors of embedders.
//!
//! A selector receives every eligible rank with raw, exact facts. Invalid results and panics are errors of that one
//! request. `schedule` filters, queues and books.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use serde::Serialize;

use super::TierOverlap;
use crate::engine_load::EngineLoadFact;
use crate::protocol::WorkerRank;

/// An eligible rank with all facts about it and the request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// The rank.
    pub rank: WorkerRank,
    /// Overlap of the prompt, by tier, in blocks.
    pub overlap: TierOverlap,
    /// Blocks in the shared cache beyond its device blocks.
    pub shared_cache_blocks: u32,
    /// Remaining prefill tokens, without this request.
    pub prefill_tokens: u64,
    /// Blocks of its active requests and this one; shared blocks count once.
    pub potential_blocks: u64,
    /// Active requests, without this one.
    pub active_requests: u32,
    /// Maximum tokens per engine step, if known.
    pub max_num_batched_tokens: Option<u32>,
    /// Total KV blocks, if known.
    pub total_kv_blocks: Option<u32>,
    /// Indexed blocks in all tiers.
    pub held_blocks: u32,
    /// Age of its last published load. An idle rank publishes nothing, so age is no sign of an error.
    pub load_age: Duration,
    /// Age of its last KV event; absent without any.
    pub index_age: Option<Duration>,
    /// Engine-reported load with its age; absent without any report. Stale or absent means unknown, not idle.
    pub engine_load: Option<EngineLoadFact>,
    /// Product of the cost factors of taints, session and slow start; 1 for none. A preference, not a rule.
    pub preference: f64,
}

/// Inputs of a selection.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// Request number, usable as a seed.
    pub request: u64,
    /// Prompt length in tokens.
    pub isl_tokens: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Output tokens expected by the caller, if given.
    pub expected_output_tokens: Option<u32>,
    /// LoRA adapter.
    pub lora_name: Option<&'a str>,
    /// Session.
    pub session_id: Option<&'a str>,
    /// Eligible ranks, in rank order. Never empty.
    pub candidates: &'a [Candidate],
}

/// Replaces the configured policy.
///
/// Runs on the scheduler's strand: it must be fast and must not block. Its inputs include all earlier decisions.
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
    /// Position of the chosen candidate, or `None` to reject the request.
    fn select(&self, selection: &Selection<'_>) -> Option<usize>;
}

/// Unusable result of a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// No choice.
    #[error("the selector refused all {candidates} candidates")]
    Refused {
        /// Number of candidates.
        candidates: usize,
    },
    /// Choice out of range.
    #[error("the selector chose candidate {position}, must be below {candidates}")]
    OutOfRange {
        /// Returned position.
        position: usize,
        /// Number of candidates.
        candidates: usize,
    },
    /// Panic.
    #[error("the selector panicked")]
    Panicked,
}

/// Calls a selector and validates its result.
pub(crate) fn chosen(selector: &dyn WorkerSelector, selection: &Selection<'_>) -> Result<usize, SelectorError> {
    let candidates = selection.candidates.len();
    let answer = catch_unwind(AssertUnwindSafe(|| selector.select(selection))).map_err(|_| SelectorError::Panicked)?;
    match answer {
        None => Err(SelectorError::Refused { candidates }),
        Some(position) if position >= candidates => Err(SelectorError::OutOfRange { position, candidates }),
        Some(position) => Ok(position),
    }
}
