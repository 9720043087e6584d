//! Inputs and effects of the scheduler.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::{Explanation, ResolvedOptions};
use crate::health::Exclusions;
use crate::load::{EngineSpeed, PrefillLoadHint, PromptBlocks, RankLoad};
use crate::protocol::{BlockHash, BookingId, Generation, Slot, Timestamp, WorkerRank};
use crate::queue::{Backpressure, UnknownClass};
use crate::select::{
    Filter, Pin, RankConditions, RankOverlap, RankTraits, Removed, SelectorError, SharedHits, TierOverlap,
};

/// One request as the scheduler receives it. `T` is the caller's context, returned with the decision.
#[derive(Debug)]
pub struct Request<T> {
    /// The caller's context, returned in exactly one effect.
    pub context: T,
    /// The blocks it will hold while it runs.
    pub prompt: PromptBlocks,
    /// Prompt length in tokens.
    pub isl_tokens: u32,
    /// What the index knows; ranks that hold nothing are absent.
    pub overlaps: Vec<RankOverlap>,
    /// What the shared cache holds.
    pub shared_cache: SharedHits,
    /// Who may serve it.
    pub target: Target,
    /// What is wanted.
    pub purpose: Purpose,
    /// Its options; `None` stands for the defaults.
    pub options: Option<Box<ResolvedOptions>>,
    /// What makes it wait and be cancelled: absent for what never waits.
    pub waits: Option<Box<Waits>>,
}

impl<T> Request<T> {
    /// A booking request with default options that never waits and has no known cached blocks.
    #[must_use]
    pub fn new(context: T, prompt: PromptBlocks, isl_tokens: u32) -> Self {
        Self {
            context,
            prompt,
            isl_tokens,
            overlaps: Vec::new(),
            shared_cache: SharedHits::default(),
            target: Target::Any,
            purpose: Purpose::Book,
            options: None,
            waits: None,
        }
    }
}

/// What is known of a request that may have to wait.
#[derive(Clone, Debug)]
pub struct Waits {
    /// Its booking: unique, and how it is named when it is cancelled.
    pub booking: BookingId,
    /// When it arrived.
    pub arrival: Timestamp,
    /// What to ask the index for when its overlap has aged.
    pub block_hashes: Option<Arc<[BlockHash]>>,
}

/// Who may serve a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// Whoever the policy prefers.
    Any,
    /// This rank: its embedder dispatches by itself, and says what it knows of the prefill.
    Exactly {
        /// The rank.
        rank: WorkerRank,
        /// Prompt tokens already cached there, or `None` for what the index says.
        cached_tokens: Option<u32>,
        /// How long the prefill will take, where known.
        expected_duration: Option<Duration>,
    },
}

/// What a caller wants of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A booking.
    Book,
    /// The rank that a booking would get, without one.
    Report,
    /// A load snapshot: each rank's load with this request added.
    LoadSnapshot,
    /// The candidate table: what a booking would be decided by, and how.
    Explain,
}

/// What the scheduler is told.
#[derive(Debug)]
pub enum Input<T> {
    /// A request wants a decision.
    Request(Request<T>),
    /// The answers to a load query. Late ones, of a batch long closed, only show that a rank is alive.
    Loads {
        /// The query's batch.
        batch: u64,
        /// Answers, in any order; ranks that were lost or slow are absent.
        answers: Vec<LoadAnswer>,
    },
    /// The caller of a request that may wait has gone: it leaves at once, or when the answers to its batch are in.
    Cancel(BookingId),
    /// A waiting request's overlap as it is now: the answer to [`Effect::Refresh`].
    Overlaps {
        /// The request.
        booking: BookingId,
        /// What the index knows.
        overlaps: Vec<RankOverlap>,
    },
    /// Time has passed, or some rank's load has fallen: see who need not wait any longer.
    Wake,
    /// A rank may be chosen from now on.
    Admit(Admission),
    /// A rank's worker says otherwise of itself.
    Describe {
        /// Its slot.
        slot: Slot,
        /// Its incarnation.
        generation: Generation,
        /// What it offers now.
        traits: Arc<RankTraits>,
    },
    /// A rank gets no new work.
    Drain {
        /// Its slot.
        slot: Slot,
        /// Its incarnation.
        generation: Generation,
    },
    /// A rank gets new work again.
    Undrain {
        /// Its slot.
        slot: Slot,
        /// Its incarnation.
        generation: Generation,
    },
    /// A rank may not be chosen any more. Nothing is booked on it after this input.
    Retire {
        /// Its slot.
        slot: Slot,
        /// Its incarnation; a retirement for another one does nothing.
        generation: Generation,
    },
    /// What the embedder knows of the ranks, in place of what it said before.
    Conditions(Arc<RankConditions>),
    /// The ranks that are excluded for their health, in place of those before. A rank that returns to service starts
    /// slowly.
    Exclusions(Arc<Exclusions>),
}

/// A rank as it joins.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Its name.
    pub rank: WorkerRank,
    /// Its slot.
    pub slot: Slot,
    /// Its incarnation in that slot.
    pub generation: Generation,
    /// What it offers.
    pub traits: Arc<RankTraits>,
    /// When it joined.
    pub since: Timestamp,
    /// Whether it gets no new work.
    pub draining: bool,
}

impl Admission {
    /// A rank that offers nothing in particular.
    #[must_use]
    pub fn new(rank: WorkerRank, slot: Slot, generation: Generation) -> Self {
        Self { rank, slot, generation, traits: Arc::default(), since: Timestamp::default(), draining: false }
    }
}

/// What the scheduler wants done, in this order.
#[derive(Debug)]
pub enum Effect<T> {
    /// Ask these ranks what each prompt would find there, and answer with [`Input::Loads`].
    Query(LoadQuery),
    /// Ask the index again, and answer with [`Input::Overlaps`].
    Refresh {
        /// The waiting request.
        booking: BookingId,
        /// Its blocks.
        block_hashes: Arc<[BlockHash]>,
    },
    /// Publish the typical speed of the pool's ranks to every rank's sequence actor.
    PublishTypicalSpeed(EngineSpeed),
    /// Book the request on the decision's rank.
    Book {
        /// The request's context.
        context: T,
        /// Where it goes.
        decision: Decision,
        /// The Book's number on that rank.
        number: BookNumber,
        /// Everything it was decided by, where this decision was drawn for the trace.
        trace: Option<Box<Explanation>>,
    },
    /// Return the decision to the caller, without a booking.
    Report {
        /// The request's context.
        context: T,
        /// Where it would go.
        decision: Decision,
    },
    /// Return the load snapshot to the caller.
    LoadSnapshot {
        /// The request's context.
        context: T,
        /// One row a rank, in rank order.
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
        /// Why.
        reason: Rejection,
    },
    /// The request has left the queue as its caller wished. Nobody waits for an answer.
    Cancelled {
        /// The request's context.
        context: T,
    },
}

/// A round of questions to the shortlisted ranks.
#[derive(Clone, Debug)]
pub struct LoadQuery {
    /// The batch it belongs to.
    pub batch: u64,
    /// Who is asked.
    pub slots: Vec<Slot>,
    /// The prompts of the batch, in decision order.
    pub prompts: Arc<[PromptBlocks]>,
}

/// One rank's answer to a [`LoadQuery`].
#[derive(Clone, Debug, PartialEq)]
pub struct LoadAnswer {
    /// Who answers.
    pub slot: Slot,
    /// Its incarnation; an answer of an earlier one is ignored.
    pub generation: Generation,
    /// Its load now.
    pub load: RankLoad,
    /// For each prompt of the query, its leading blocks that are active on the rank already.
    pub shared_blocks: SmallVec<[u32; 2]>,
}

/// Number of one Book on one rank: counted from 1 in each incarnation of its sequence actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookNumber {
    /// The incarnation it was counted for.
    pub incarnation: u32,
    /// The count.
    pub number: u32,
}

/// Where a request goes, and what was known when that was decided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The request's number: how many the scheduler had taken in before it. Where nothing waits, decisions fall in this
    /// order.
    pub request: u64,
    /// The rank.
    pub rank: WorkerRank,
    /// Its slot.
    pub slot: Slot,
    /// Its incarnation.
    pub generation: Generation,
    /// What it holds of the prompt.
    pub overlap: TierOverlap,
    /// Blocks that the shared cache has beyond the rank's device blocks.
    pub shared_cache_blocks: u32,
    /// The most leading blocks that any eligible rank holds, in whatever tier: what could have been reached.
    pub reachable_blocks: u32,
    /// The prefill it was charged with.
    pub hint: Option<PrefillLoadHint>,
    /// How long its first token is expected to take from now on, where the policy reckons in time and prefill is tracked.
    pub predicted_ttft: Option<Duration>,
}

/// One rank's load as it would be with a request on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PotentialLoad {
    /// The rank.
    pub rank: WorkerRank,
    /// Prefill tokens to compute, the request's own uncached ones included.
    pub potential_prefill_tokens: u64,
    /// Blocks held, the request's included.
    pub potential_decode_blocks: u64,
    /// Requests active now, without this one.
    pub active_requests: u32,
}

/// Why no rank was chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejection {
    /// No rank is registered.
    #[error("no rank is registered")]
    NoRanks,
    /// The rank asked for is not registered.
    #[error("rank {0} is not registered")]
    UnknownRank(WorkerRank),
    /// The filters left nobody.
    #[error("no rank is eligible: {removed}")]
    NoneEligible {
        /// How many ranks each filter removed.
        removed: Removed,
    },
    /// Those that could serve it have too much to do.
    #[error("all eligible workers are overloaded: {removed}")]
    AllOverloaded {
        /// How many ranks each filter removed.
        removed: Removed,
    },
    /// The worker or rank it is pinned to may not serve it.
    #[error("pinned to {pin}, which is {}", refused_by.map_or("not registered", Filter::name))]
    Pinned {
        /// The pin.
        pin: Pin,
        /// The filter that refused it; absent where it is not registered.
        refused_by: Option<Filter>,
    },
    /// Its time was up.
    #[error("the deadline passed after {} ms", waited.as_millis())]
    DeadlineExceeded {
        /// How long it had waited.
        waited: Duration,
    },
    /// It would have had to wait, and may not.
    #[error(transparent)]
    Backpressure(#[from] Backpressure),
    /// It names a class that is not there.
    #[error(transparent)]
    UnknownClass(#[from] UnknownClass),
    /// The embedder's selector gave no usable answer.
    #[error(transparent)]
    Selector(#[from] SelectorError),
}
