//! Inputs and effects of the scheduler.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::appraisal::ShadowReport;
use super::{Decision, Explanation, ResolvedOptions, TargetsMissed};
use crate::health::Exclusions;
use crate::load::{EngineSpeed, PlacementRate, PromptBlocks, RankLoad};
use crate::policy::PolicyError;
use crate::protocol::{BlockHash, BookingId, Generation, Slot, Timestamp, WorkerRank};
use crate::queue::{Backpressure, UnknownClass};
use crate::select::{Filter, Pin, RankConditions, RankOverlap, RankTraits, Removed, SharedHits};

/// One request as the scheduler receives it. `T` is the caller's context, returned with the decision.
#[derive(Debug)]
pub struct Request<T> {
    /// The caller's context, returned in exactly one effect.
    pub context: T,
    /// Blocks that it holds while it runs.
    pub prompt: PromptBlocks,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Overlaps from the index; ranks without any are absent.
    pub overlaps: Vec<RankOverlap>,
    /// Hits in the shared cache.
    pub shared_cache: SharedHits,
    /// Requested target.
    pub target: Target,
    /// Requested result.
    pub purpose: Purpose,
    /// Its options; `None` stands for the defaults.
    pub options: Option<Box<ResolvedOptions>>,
    /// Queueing and cancellation data; absent for requests that never wait.
    pub waits: Option<Box<Waits>>,
}

impl<T> Request<T> {
    /// A booking request with default options that never waits and has no known cached blocks.
    #[must_use]
    pub fn new(context: T, prompt: PromptBlocks, prompt_tokens: u32) -> Self {
        Self {
            context,
            prompt,
            prompt_tokens,
            overlaps: Vec::new(),
            shared_cache: SharedHits::default(),
            target: Target::Any,
            purpose: Purpose::Book,
            options: None,
            waits: None,
        }
    }
}

/// Data of a request that may wait.
#[derive(Clone, Debug)]
pub struct Waits {
    /// Unique booking id, which also identifies it for cancellation.
    pub booking: BookingId,
    /// Arrival time.
    pub arrival: Timestamp,
    /// Hashes for a new index query after its overlap has aged.
    pub block_hashes: Option<Arc<[BlockHash]>>,
}

/// Target of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// The choice of the policy.
    Any,
    /// A given rank: the embedder dispatches by itself and provides the facts of the prefill.
    Exactly {
        /// Chosen rank.
        rank: WorkerRank,
        /// Prompt tokens cached there; `None` uses the index.
        cached_tokens: Option<u32>,
        /// Duration of the prefill, if known.
        expected_duration: Option<Duration>,
    },
}

/// Result requested by a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A booking.
    Book,
    /// The rank that a booking would get, without a booking.
    Report,
    /// A load snapshot: each rank's load with this request added.
    LoadSnapshot,
    /// The candidate table: inputs and method of a booking's decision.
    Explain,
}

/// Input of the scheduler.
#[derive(Debug)]
pub enum Input<T> {
    /// A request for a decision.
    Request(Request<T>),
    /// Replies to a load query. Late replies to a closed batch only show that a rank is alive.
    Loads {
        /// Batch of the query.
        batch: u64,
        /// Replies in any order; lost or slow ranks are absent.
        answers: Vec<LoadAnswer>,
    },
    /// The caller of a waiting request has left: it leaves immediately, or after the replies to its batch.
    Cancel(BookingId),
    /// A booked call of a program has ended, with the finish reason `stop` or another one.
    Ended {
        /// The call.
        booking: BookingId,
        /// Whether the program returns late or never.
        is_stop: bool,
    },
    /// The present overlap of a waiting request: the reply to [`Effect::Refresh`].
    Overlaps {
        /// The request.
        booking: BookingId,
        /// Overlaps from the index.
        overlaps: Vec<RankOverlap>,
    },
    /// Time has passed or the load of a rank has fallen: reconcile the queue.
    Wake,
    /// Registers a rank.
    Admit(Admission),
    /// Changes the traits of a rank.
    Describe {
        /// Slot.
        slot: Slot,
        /// Generation.
        generation: Generation,
        /// New traits.
        traits: Arc<RankTraits>,
    },
    /// Stops new work for a rank.
    Drain {
        /// Slot.
        slot: Slot,
        /// Generation.
        generation: Generation,
    },
    /// Resumes new work for a rank.
    Undrain {
        /// Slot.
        slot: Slot,
        /// Generation.
        generation: Generation,
    },
    /// Removes a rank. No booking follows this input.
    Retire {
        /// Slot.
        slot: Slot,
        /// Generation; a retirement for another generation has no effect.
        generation: Generation,
    },
    /// Conditions set by the embedder, replacing earlier ones.
    Conditions(Arc<RankConditions>),
    /// Ranks excluded for health, replacing earlier ones. A returning rank starts slowly.
    Exclusions(Arc<Exclusions>),
}

/// A joining rank.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Name.
    pub rank: WorkerRank,
    /// Slot.
    pub slot: Slot,
    /// Generation of the slot.
    pub generation: Generation,
    /// Traits.
    pub traits: Arc<RankTraits>,
    /// Time of joining.
    pub since: Timestamp,
    /// Whether it receives no new work.
    pub draining: bool,
}

impl Admission {
    /// A rank without particular traits.
    #[must_use]
    pub fn new(rank: WorkerRank, slot: Slot, generation: Generation) -> Self {
        Self { rank, slot, generation, traits: Arc::default(), since: Timestamp::default(), draining: false }
    }
}

/// Effect to perform, in order.
#[derive(Debug)]
pub enum Effect<T> {
    /// Query the potential load of each prompt on these ranks, and reply with [`Input::Loads`].
    Query(LoadQuery),
    /// Query the index again, and reply with [`Input::Overlaps`].
    Refresh {
        /// The waiting request.
        booking: BookingId,
        /// Block hashes.
        block_hashes: Arc<[BlockHash]>,
        /// Number of these blocks that an engine can take from its cache.
        reusable_blocks: u32,
    },
    /// Publish typical values of the pool.
    PublishTypical {
        /// Typical speed of the ranks, for every rank's sequence actor.
        speed: EngineSpeed,
        /// Own placements, for other replicas.
        rate: PlacementRate,
    },
    /// Book the request on the decision's rank.
    Book {
        /// The request's context.
        context: T,
        /// Decision.
        decision: Decision,
        /// Number of the Book on that rank.
        number: BookNumber,
        /// All inputs of the decision, if it was sampled for the trace.
        trace: Option<Box<Explanation>>,
        /// Choices of the shadow policies, if it was sampled for them.
        shadow: Option<Box<ShadowReport>>,
    },
    /// Return the decision to the caller, without a booking.
    Report {
        /// The request's context.
        context: T,
        /// Decision.
        decision: Decision,
    },
    /// Return the load snapshot to the caller.
    LoadSnapshot {
        /// The request's context.
        context: T,
        /// One row per rank, in rank order.
        loads: Vec<PotentialLoad>,
    },
    /// Return the candidate table to the caller.
    Explain {
        /// The request's context.
        context: T,
        /// The table.
        explanation: Box<Explanation>,
    },
    /// Return the reason for which no rank was chosen.
    Reject {
        /// The request's context.
        context: T,
        /// Reason.
        reason: Rejection,
    },
    /// The request has left the queue at its caller's wish. No caller waits for a reply.
    Cancelled {
        /// The request's context.
        context: T,
    },
}

/// Load query to the shortlisted ranks.
#[derive(Clone, Debug)]
pub struct LoadQuery {
    /// Batch of the query.
    pub batch: u64,
    /// Queried slots.
    pub slots: Vec<Slot>,
    /// The prompts of the batch, in decision order.
    pub prompts: Arc<[PromptBlocks]>,
}

/// Reply of one rank to a [`LoadQuery`].
#[derive(Clone, Debug, PartialEq)]
pub struct LoadAnswer {
    /// Replying slot.
    pub slot: Slot,
    /// Generation; replies of an earlier one are ignored.
    pub generation: Generation,
    /// Current load.
    pub load: RankLoad,
    /// For each prompt of the query, its leading blocks that are already active on the rank.
    pub shared_blocks: SmallVec<[u32; 2]>,
}

/// Number of a Book on one rank, counted from 1 in each incarnation of its sequence actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookNumber {
    /// Incarnation of the count.
    pub incarnation: u32,
    /// The count.
    pub number: u32,
}

/// Load of one rank with an added request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PotentialLoad {
    /// The rank.
    pub rank: WorkerRank,
    /// Prefill tokens to compute, including the uncached ones of the request.
    pub potential_prefill_tokens: u64,
    /// Held blocks, including those of the request.
    pub potential_decode_blocks: u64,
    /// Active requests, without this one.
    pub active_requests: u32,
}

/// Reason for which no rank was chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejection {
    /// No rank is registered.
    #[error("no rank is registered")]
    NoRanks,
    /// The requested rank is not registered.
    #[error("rank {0} is not registered")]
    UnknownRank(WorkerRank),
    /// All ranks were excluded by filters.
    #[error("no rank is eligible: {removed}")]
    NoneEligible {
        /// Ranks removed per filter.
        removed: Removed,
    },
    /// All ranks that could serve it are overloaded.
    #[error("all eligible workers are overloaded: {removed}")]
    AllOverloaded {
        /// Ranks removed per filter.
        removed: Removed,
    },
    /// The pinned worker or rank is not eligible.
    #[error("pinned to {pin}, which is {}", refused_by.map_or("not registered", Filter::name))]
    Pinned {
        /// The pin.
        pin: Pin,
        /// The excluding filter; absent if the rank is not registered.
        refused_by: Option<Filter>,
    },
    /// The deadline passed in the queue.
    #[error("the deadline passed after {} ms", waited.as_millis())]
    DeadlineExceeded {
        /// Waiting time.
        waited: Duration,
    },
    /// No eligible rank is predicted to meet the latency targets, and the request must not be served then.
    #[error(transparent)]
    TargetsMissed(#[from] TargetsMissed),
    /// The request would have to wait, but must not or cannot.
    #[error(transparent)]
    Backpressure(#[from] Backpressure),
    /// Unknown queue class.
    #[error(transparent)]
    UnknownClass(#[from] UnknownClass),
    /// Unusable result of a custom policy or scorer.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}
