//! The scheduler's decisions, as one pure state machine: inputs in, effects out.
//!
//! Owns the order of requests, the one batch in flight, what was booked since each rank last published
//! (the overlay), and every choice of a rank. Promises that a batch books exactly what a serial run in the
//! same order would, that every request leaves in exactly one effect, and the same effects for the same
//! seed and inputs. Leaves to its actor the performing of effects, and to the sequence actors the bookings.
//!
//! ```text
//! Request ─► waiting ─► batch ─(shortlist)─► Query ─► Loads ─► Book | Report | Survey | Reject
//! ```

mod decide;
mod rank;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::config::RouterConfig;
use crate::load::{BoardSlot, PrefillLoadHint, PromptBlocks, PromptMark, RankLoad};
use crate::protocol::{Generation, Slot, Timestamp, WorkerRank};
use crate::select::{RankOverlap, TierOverlap};

use rank::Ranks;

/// Requests decided from one round of load queries.
const BATCH_MAX: usize = 64;

/// One request as the scheduler sees it. `T` is whatever the caller wants back with the decision.
#[derive(Debug)]
pub struct Request<T> {
    /// Handed back in exactly one effect.
    pub ticket: T,
    /// The blocks it will hold while it runs.
    pub prompt: PromptBlocks,
    /// PromptBlocks length in tokens.
    pub isl_tokens: u32,
    /// What the index knows; ranks that hold nothing are absent.
    pub overlaps: Vec<RankOverlap>,
    /// Who may serve it.
    pub target: Target,
    /// What is wanted.
    pub purpose: Purpose,
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
        /// PromptBlocks tokens already cached there, or `None` for what the index says.
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
    /// What every rank's load would be with this request on it.
    Survey,
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
    /// A rank may be chosen from now on.
    Admit {
        /// Its name.
        rank: WorkerRank,
        /// Its slot.
        slot: Slot,
        /// Its incarnation in that slot.
        generation: Generation,
        /// Where it publishes its load.
        board: Arc<BoardSlot>,
    },
    /// A rank may not be chosen any more. Nothing is booked on it after this input.
    Retire {
        /// Its slot.
        slot: Slot,
        /// Its incarnation; a retirement for another one does nothing.
        generation: Generation,
    },
}

/// What the scheduler wants done, in this order.
#[derive(Debug)]
pub enum Effect<T> {
    /// Ask these ranks what each prompt would find there, and answer with [`Input::Loads`].
    Query(LoadQuery),
    /// Book the ticket's request on the decision's rank.
    Book {
        /// The request's ticket.
        ticket: T,
        /// Where it goes.
        decision: Decision,
        /// The Book's number on that rank.
        number: BookNumber,
    },
    /// Tell the caller where it would go.
    Report {
        /// The request's ticket.
        ticket: T,
        /// Where it would go.
        decision: Decision,
    },
    /// Tell the caller what each rank's load would be.
    Survey {
        /// The request's ticket.
        ticket: T,
        /// One row a rank, in rank order.
        loads: Vec<PotentialLoad>,
    },
    /// Tell the caller that no rank can be had, and why.
    Reject {
        /// The request's ticket.
        ticket: T,
        /// Why.
        reason: Rejection,
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
    /// The request's number: how many the scheduler had taken in before it. Decisions fall in this order.
    pub request: u64,
    /// The rank.
    pub rank: WorkerRank,
    /// Its slot.
    pub slot: Slot,
    /// Its incarnation.
    pub generation: Generation,
    /// What it holds of the prompt.
    pub overlap: TierOverlap,
    /// The prefill it was charged with.
    pub hint: Option<PrefillLoadHint>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// No rank is registered.
    NoRanks,
    /// The rank asked for is not registered.
    UnknownRank(WorkerRank),
}

/// The state machine. See the module's head.
#[derive(Debug)]
pub struct Schedule<T> {
    config: RouterConfig,
    ranks: Ranks,
    waiting: VecDeque<Numbered<T>>,
    in_flight: Option<Batch<T>>,
    /// Requests numbered so far.
    requests: u64,
    /// Batches numbered so far.
    batches: u64,
    /// Bookings decided so far: whose turn it is under round robin.
    turns: u64,
    scratch: decide::Scratch,
}

#[derive(Debug)]
struct Numbered<T> {
    number: u64,
    /// Where the prompt stands in ranks' sketches.
    mark: PromptMark,
    request: Request<T>,
}

/// Requests whose load queries are out.
#[derive(Debug)]
struct Batch<T> {
    number: u64,
    requests: VecDeque<Numbered<T>>,
}

impl<T> Schedule<T> {
    /// An empty scheduler under a validated configuration.
    ///
    /// `incarnation` counts its restarts: requests and batches are numbered from a base of its own, so that an answer to
    /// an earlier incarnation's question is nobody's.
    #[must_use]
    pub fn new(config: RouterConfig, incarnation: u32) -> Self {
        let base = u64::from(incarnation) << 32;
        Self {
            config,
            ranks: Ranks::default(),
            waiting: VecDeque::new(),
            in_flight: None,
            requests: base,
            batches: base,
            turns: 0,
            scratch: decide::Scratch::default(),
        }
    }

    /// Takes one input and appends what follows from it to `effects`, in the order it must be done.
    pub fn step(&mut self, input: Input<T>, now: Timestamp, effects: &mut VecDeque<Effect<T>>) {
        match input {
            Input::Request(request) => {
                let number = self.requests;
                self.requests += 1;
                let mark = request.prompt.mark();
                self.waiting.push_back(Numbered { number, mark, request });
            }
            Input::Loads { batch, answers } => self.on_loads(batch, answers, effects),
            Input::Admit { rank, slot, generation, board } => {
                self.ranks.admit(rank, slot, generation, board);
                self.scratch.forget();
            }
            Input::Retire { slot, generation } => {
                self.ranks.retire(slot, generation);
                self.scratch.forget();
            }
        }
        self.start_batches(now, effects);
    }

    /// The batch whose answers are awaited, if one is in flight.
    #[must_use]
    pub fn batch_in_flight(&self) -> Option<u64> {
        self.in_flight.as_ref().map(|batch| batch.number)
    }

    /// Requests that have not left yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.waiting.len() + self.in_flight.as_ref().map_or(0, |batch| batch.requests.len())
    }

    fn on_loads(&mut self, batch: u64, answers: Vec<LoadAnswer>, effects: &mut VecDeque<Effect<T>>) {
        if self.batch_in_flight() != Some(batch) {
            for answer in &answers {
                self.ranks.is_alive(answer.slot, answer.generation);
            }
            return;
        }
        for answer in answers {
            self.ranks.answered(answer);
        }
        self.ranks.close();
        if let Some(batch) = self.in_flight.take() {
            self.decide(batch.requests, true, effects);
        }
    }

    /// Decides what the board alone can decide, and sends queries for the rest; one batch at a time.
    fn start_batches(&mut self, now: Timestamp, effects: &mut VecDeque<Effect<T>>) {
        while self.in_flight.is_none() && !self.waiting.is_empty() {
            self.batches += 1;
            let number = self.batches;
            let size = self.waiting.len().min(BATCH_MAX);
            let requests: VecDeque<_> = self.waiting.drain(..size).collect();
            self.ranks.refresh(now);
            self.scratch.forget();
            let slots = self.shortlist(&requests);
            if slots.is_empty() {
                self.decide(requests, false, effects);
                continue;
            }
            self.ranks.asked(&slots);
            let prompts = requests.iter().map(|numbered| numbered.request.prompt.clone()).collect();
            effects.push_back(Effect::Query(LoadQuery { batch: number, slots, prompts }));
            self.in_flight = Some(Batch { number, requests });
        }
    }
}
