//! Policy interfaces: a complete policy, a cost term, and a filter.
//!
//! The built-in policies that compare no costs implement [`RankPolicy`], too. Embedder code runs inside the scheduler
//! step: it must be quick and must not block. A panic or an unusable answer is an error of that one request.

use std::cmp::Reverse;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::needs::Needs;
use crate::engine_load::EngineLoadFact;
use crate::protocol::WorkerRank;
use crate::select::{Draw, RankTraits, TierOverlap};

/// Attributes of a request that policies, scorers and filters may use.
#[derive(Clone, Copy, Debug)]
pub struct RequestFacts<'a> {
    /// The request's number, with the router's seed the source of its random keys.
    pub request: u64,
    /// The router's seed.
    pub seed: u64,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Output tokens that the caller expects, if given.
    pub expected_output_tokens: Option<u32>,
    /// LoRA adapter.
    pub lora_name: Option<&'a str>,
    /// Session.
    pub session_id: Option<&'a str>,
}

impl RequestFacts<'_> {
    /// The rank's random key in this decision: uniform, and independent between ranks and requests.
    #[must_use]
    #[inline]
    pub fn random_key(&self, rank: WorkerRank) -> u64 {
        Draw { seed: self.seed, request: self.request }.key(rank)
    }
}

/// Facts about one eligible rank and the request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// The rank.
    pub rank: WorkerRank,
    /// Prompt blocks cached on the rank, by tier.
    pub overlap: TierOverlap,
    /// Prompt blocks that the shared cache holds beyond the rank's device blocks.
    pub shared_cache_blocks: u32,
    /// Prefill tokens that the rank has still to compute, without this request.
    pub prefill_tokens: u64,
    /// Blocks of the rank's active requests and of this one. Shared blocks count once.
    pub potential_blocks: u64,
    /// Active requests, without this one.
    pub active_requests: u32,
    /// Tokens per engine step (`max_num_batched_tokens`), if known.
    pub max_num_batched_tokens: Option<u32>,
    /// KV blocks of the rank, if known.
    pub total_kv_blocks: Option<u32>,
    /// Blocks that the index holds for the rank, in all tiers.
    pub held_blocks: u32,
    /// Time since the rank last published its load. An idle rank publishes nothing, so a high age is no error.
    #[serde(rename = "load_age_seconds", with = "crate::protocol::seconds")]
    pub load_age: Duration,
    /// Time since the last KV event; absent if there was none.
    #[serde(rename = "index_age_seconds", with = "crate::protocol::option_seconds")]
    pub index_age: Option<Duration>,
    /// Engine-reported load and its age; absent if never reported. Stale or absent means unknown, not idle.
    pub engine_load: Option<EngineLoadFact>,
    /// Product of the cost factors of taints, session and slow start; 1 for none. A preference, not a rule.
    pub preference: f64,
}

/// The eligible ranks of one decision, in rank order. Indexes run from 0 to `len() - 1`.
pub trait RankTable {
    /// Number of eligible ranks, at least 1.
    fn len(&self) -> usize;

    /// Whether no rank is eligible. Never true when a policy is called.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bookings that the scheduler has decided so far.
    fn bookings(&self) -> u64;

    /// Name of the rank.
    fn rank(&self, index: usize) -> WorkerRank;

    /// Active and booked requests, as published by the rank. Needs no load query.
    fn requests(&self, index: usize) -> u32;

    /// Active and booked requests, and the most blocks that these and the new request hold. Exact if the load of the rank
    /// was queried ([`RankPolicy::needs`]).
    fn projected_load(&self, index: usize) -> (u32, u64);

    /// Visits the ranks with cached blocks of the prompt: index and cached tokens, weighted by tier. In no particular
    /// order.
    fn visit_cached(&self, visit: &mut dyn FnMut(usize, u32));

    /// The two ranks with the highest random keys, which [`Needs::Two`] covers; fewer if fewer ranks are eligible.
    fn two_random(&self) -> [Option<usize>; 2];

    /// Every fact about the rank. Loads are exact if [`RankPolicy::needs`] covers the rank, else upper bounds.
    fn candidate(&self, index: usize) -> Candidate;
}

/// A routing policy: chooses one of the eligible ranks.
///
/// Filters, queue, booking and session memory are the router's.
///
/// ```
/// use pointsman::policy::{RankPolicy, RankTable, RequestFacts};
///
/// /// The least loaded rank of those with the longest cached prefix.
/// struct Warmest;
///
/// impl RankPolicy for Warmest {
///     fn choose(&self, _: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
///         (0..ranks.len()).max_by_key(|&index| {
///             let candidate = ranks.candidate(index);
///             (candidate.overlap.total_blocks(), std::cmp::Reverse(candidate.active_requests))
///         })
///     }
/// }
/// ```
pub trait RankPolicy: Send + Sync {
    /// The ranks whose exact load the choice needs. The scheduler queries them first. Read once, at start.
    /// [`Needs::Bounded`] counts as [`Needs::All`], because the bounds belong to the built-in costs.
    fn needs(&self) -> Needs {
        Needs::All
    }

    /// Index of the chosen rank, or `None` to reject the request.
    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize>;
}

/// An additional cost term of a policy that compares costs (`latency` or `kv`).
///
/// The term is added to the policy's cost, in the policy's unit: seconds for `latency`, blocks for `kv`. The exact load
/// of every rank is queried first.
///
/// ```
/// use pointsman::policy::{Candidate, RankScorer, RequestFacts};
///
/// /// Keeps load away from ranks whose engines report waiting requests: a tenth of a second each.
/// struct EngineQueue;
///
/// impl RankScorer for EngineQueue {
///     fn cost(&self, _: &RequestFacts<'_>, rank: &Candidate) -> f64 {
///         let fresh = rank.engine_load.filter(|load| !load.is_stale);
///         f64::from(fresh.and_then(|load| load.waiting).unwrap_or(0)) * 0.1
///     }
/// }
/// ```
pub trait RankScorer: Send + Sync {
    /// Cost of the rank for the request, lower is better. Must be finite and not negative.
    fn cost(&self, request: &RequestFacts<'_>, rank: &Candidate) -> f64;
}

/// An additional filter of ranks, for every policy.
///
/// It may depend on the request and on static attributes of the rank only: its verdict must not change while a request
/// waits.
///
/// ```
/// use pointsman::policy::{RankFilter, RequestFacts};
/// use pointsman::protocol::WorkerRank;
/// use pointsman::RankTraits;
///
/// /// Long prompts need ranks with many KV blocks.
/// struct FitsInCache;
///
/// impl RankFilter for FitsInCache {
///     fn accepts(&self, request: &RequestFacts<'_>, _: WorkerRank, traits: &RankTraits) -> bool {
///         traits.total_kv_blocks.is_none_or(|blocks| blocks / 2 > request.prompt_tokens / request.block_size)
///     }
/// }
/// ```
pub trait RankFilter: Send + Sync {
    /// Whether the rank may serve the request. A panic counts as `false`.
    fn accepts(&self, request: &RequestFacts<'_>, rank: WorkerRank, traits: &RankTraits) -> bool;
}

/// Unusable result of a custom policy or scorer.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// It chose no rank.
    #[error("the custom policy rejected all {candidates} candidates")]
    Refused {
        /// Number of candidates.
        candidates: usize,
    },
    /// It chose an index outside the table.
    #[error("the custom policy chose candidate {position}, must be below {candidates}")]
    OutOfRange {
        /// The chosen index.
        position: usize,
        /// Number of candidates.
        candidates: usize,
    },
    /// The custom scorers' cost is negative or not finite.
    #[error("custom scorers return {cost} for rank {rank}, must be finite and not negative")]
    InvalidCost {
        /// The cost.
        cost: f64,
        /// The rank.
        rank: WorkerRank,
    },
    /// It panicked.
    #[error("the custom policy or scorer panicked")]
    Panicked,
}

/// Calls a custom policy and checks its answer.
pub(crate) fn checked_choice(
    policy: &dyn RankPolicy,
    request: &RequestFacts<'_>,
    ranks: &dyn RankTable,
) -> Result<usize, PolicyError> {
    let candidates = ranks.len();
    let choice = catch_unwind(AssertUnwindSafe(|| policy.choose(request, ranks)));
    match choice.map_err(|_| PolicyError::Panicked)? {
        None => Err(PolicyError::Refused { candidates }),
        Some(position) if position >= candidates => Err(PolicyError::OutOfRange { position, candidates }),
        Some(position) => Ok(position),
    }
}

/// Calls custom scorers and checks their sum.
pub(crate) fn checked_cost<'a>(
    scorers: impl Iterator<Item = &'a dyn RankScorer>,
    request: &RequestFacts<'_>,
    rank: &Candidate,
) -> Result<f64, PolicyError> {
    let sum = catch_unwind(AssertUnwindSafe(|| scorers.map(|scorer| scorer.cost(request, rank)).sum::<f64>()));
    let cost = sum.map_err(|_| PolicyError::Panicked)?;
    if cost.is_finite() && cost >= 0.0 { Ok(cost) } else { Err(PolicyError::InvalidCost { cost, rank: rank.rank }) }
}

/// Index with the least load; equal loads go to the highest random key.
#[inline]
pub(super) fn least_loaded<R: RankTable + ?Sized, L: Ord>(
    request: &RequestFacts<'_>,
    ranks: &R,
    indexes: impl Iterator<Item = usize>,
    load: impl Fn(usize) -> L,
) -> Option<usize> {
    indexes.min_by_key(|&index| (load(index), Reverse(request.random_key(ranks.rank(index)))))
}

/// Custom filters; a rank must be accepted by each.
#[derive(Clone, Default)]
pub struct RankFilters(Vec<Arc<dyn RankFilter>>);

impl RankFilters {
    /// Adds a filter.
    pub fn push(&mut self, filter: Arc<dyn RankFilter>) {
        self.0.push(filter);
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether every filter accepts the rank.
    pub(crate) fn accept(&self, request: &RequestFacts<'_>, rank: WorkerRank, traits: &RankTraits) -> bool {
        let accepts = |filter: &Arc<dyn RankFilter>| {
            catch_unwind(AssertUnwindSafe(|| filter.accepts(request, rank, traits))).unwrap_or(false)
        };
        self.0.iter().all(accepts)
    }
}

impl fmt::Debug for RankFilters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} filters", self.0.len())
    }
}
