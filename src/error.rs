//! What can go wrong for an embedder, one enum for each thing it does.

use crate::config::ConfigErrors;
use crate::directory::DuplicateRequest;
use crate::hashing::{HashedPromptError, MmError};
use crate::load::WeightError;
use crate::message::PromptMessageError;
use crate::protocol::{WorkerConfigError, WorkerId};
use crate::schedule::Rejection;
use crate::select::TaintWeightError;
use crate::session::SessionIdError;

/// Why the router does nothing at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Down {
    /// It lost a part of itself that it could not bring back. Start a new one.
    #[error("the router has failed: its restart budget is spent or its supervisor died")]
    Failed,
    /// It was told to stop.
    #[error("the router is shut down")]
    Stopped,
}

/// Why a request was not placed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RouteError {
    /// A booking needs a request id.
    #[error("request_id is missing: a booking needs one (find_best_match does not)")]
    MissingRequestId,
    /// The id has a booking that has not ended.
    #[error(transparent)]
    DuplicateRequest(#[from] DuplicateRequest),
    /// As many requests wait as may.
    #[error("{requests_max} requests are waiting, which is requests_max")]
    Overloaded {
        /// The limit.
        requests_max: u32,
    },
    /// No rank was chosen.
    #[error(transparent)]
    Rejected(#[from] Rejection),
    /// The hashes handed in do not fit together.
    #[error(transparent)]
    Hashes(#[from] HashedPromptError),
    /// The multimodal spans do not fit the prompt.
    #[error(transparent)]
    Multimodal(#[from] MmError),
    /// More tokens than can be counted.
    #[error("prompt has {isl_tokens} tokens, must be at most {max}", max = u32::MAX)]
    PromptTooLong {
        /// Its length.
        isl_tokens: usize,
    },
    /// The priority jump is no number of seconds.
    #[error("priority_jump is {0}, must be finite")]
    PriorityJump(f64),
    /// A preferred taint has no usable weight.
    #[error(transparent)]
    Constraints(#[from] TaintWeightError),
    /// An override breaks its rule.
    #[error(transparent)]
    Overrides(#[from] ConfigErrors),
    /// The session id is too long, or empty.
    #[error(transparent)]
    Session(#[from] SessionIdError),
    /// It was freed by its id before it was booked.
    #[error("the request was freed before it was booked")]
    Freed,
    /// The request was lost with an actor, again and again.
    #[error("the request was lost {attempts} times with the actor that had it")]
    Lost {
        /// Times tried.
        attempts: u32,
    },
    /// The router is down.
    #[error(transparent)]
    Down(#[from] Down),
}

/// Why not every event that was accepted is known to be in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// An index shard died with events that had been accepted. Its ranks are cold: `Router::resyncs` names them.
    #[error("an index shard was lost with events that had been accepted")]
    Lost,
    /// The router is down.
    #[error(transparent)]
    Down(#[from] Down),
}

/// Why a report about a booking, by request id, came to nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// No booking has this id: it has ended, or never was.
    #[error("request id {0:?} has no booking")]
    NotFound(String),
    /// The decay is no share.
    #[error(transparent)]
    Decay(#[from] WeightError),
}

/// Why a message was not carried out.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HandleError {
    /// It names no prompt.
    #[error(transparent)]
    Prompt(#[from] PromptMessageError),
    /// It was not routed.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// What it reports makes no sense.
    #[error(transparent)]
    Report(#[from] RequestError),
}

/// Why the set of workers did not change as asked.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MembershipError {
    /// The worker's configuration breaks a rule.
    #[error("worker {worker}: {error}")]
    Config {
        /// The worker.
        worker: WorkerId,
        /// The rule.
        error: WorkerConfigError,
    },
    /// No such worker.
    #[error("worker {0} is not registered")]
    UnknownWorker(WorkerId),
    /// It is on its way out.
    #[error("worker {0} is being drained")]
    Draining(WorkerId),
    /// The router is down.
    #[error(transparent)]
    Down(#[from] Down),
}

/// Why a router did not start.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StartError {
    /// The configuration breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// An initial worker was refused.
    #[error(transparent)]
    Worker(#[from] MembershipError),
    /// The discovery source ended before enough workers were there.
    #[error("the discovery source closed with {registered} workers registered, min_initial_workers is {wanted}")]
    SourceClosed {
        /// Workers there.
        registered: usize,
        /// Workers wanted.
        wanted: u32,
    },
    /// Enough workers can never come.
    #[error("{registered} workers are given and there is no discovery source, min_initial_workers is {wanted}")]
    NoSource {
        /// Workers there.
        registered: usize,
        /// Workers wanted.
        wanted: u32,
    },
    /// The router went down while it waited for workers.
    #[error(transparent)]
    Down(#[from] Down),
    /// An actor did not start.
    #[error("an actor did not start: {0}")]
    Spawn(String),
}
