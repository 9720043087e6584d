//! What can go wrong for an embedder, one enum for each thing it does.

use crate::config::ConfigErrors;
use crate::directory::DuplicateRequest;
use crate::hashing::{HashedPromptError, MmError};
use crate::load::WeightError;
use crate::message::PromptMessageError;
use crate::protocol::{WorkerConfigError, WorkerId};
use crate::schedule::Rejection;
use crate::select::{Filter, TaintWeightError};
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
    /// More tokens than the model of any worker takes.
    #[error("prompt has {isl_tokens} tokens, must be at most {max_model_len}, the model's length")]
    ContextLength {
        /// Its length.
        isl_tokens: usize,
        /// The longest sequence that any worker's model takes.
        max_model_len: u32,
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

/// What an error means for whoever answers a client, in the words of gRPC's status codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request makes no sense as it is: asking again will not help. HTTP 400.
    InvalidArgument,
    /// It names something that is not there. HTTP 404.
    NotFound,
    /// Its id is taken. HTTP 409.
    AlreadyExists,
    /// There is no room for it now. HTTP 429.
    ResourceExhausted,
    /// Its deadline has passed. HTTP 504.
    DeadlineExceeded,
    /// Its caller has ended it.
    Cancelled,
    /// Nobody can serve it now. HTTP 503.
    Unavailable,
    /// The embedder's own code, or the router, is at fault. HTTP 500.
    Internal,
}

impl RouteError {
    /// What it means for whoever answers the client.
    ///
    /// ```
    /// use pointsman::error::{ErrorKind, RouteError};
    /// use pointsman::schedule::Rejection;
    /// use pointsman::select::Removed;
    ///
    /// let overloaded = RouteError::Rejected(Rejection::AllOverloaded { removed: Removed::default() });
    /// assert_eq!(overloaded.kind(), ErrorKind::ResourceExhausted);
    /// ```
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::MissingRequestId
            | Self::Hashes(_)
            | Self::Multimodal(_)
            | Self::PromptTooLong { .. }
            | Self::ContextLength { .. }
            | Self::PriorityJump(_)
            | Self::Constraints(_)
            | Self::Overrides(_)
            | Self::Session(_) => ErrorKind::InvalidArgument,
            Self::DuplicateRequest(_) => ErrorKind::AlreadyExists,
            Self::Overloaded { .. } => ErrorKind::ResourceExhausted,
            Self::Rejected(rejection) => rejection.kind(),
            Self::Freed => ErrorKind::Cancelled,
            Self::Lost { .. } | Self::Down(_) => ErrorKind::Unavailable,
        }
    }
}

impl Rejection {
    /// What it means for whoever answers the client.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoRanks | Self::NoneEligible { .. } => ErrorKind::Unavailable,
            Self::UnknownRank(_) | Self::Pinned { refused_by: None, .. } => ErrorKind::NotFound,
            Self::AllOverloaded { .. } | Self::Backpressure(_) => ErrorKind::ResourceExhausted,
            Self::Pinned { refused_by: Some(filter), .. } => match filter {
                Filter::Allowed | Filter::Pin | Filter::RequiredTaints => ErrorKind::InvalidArgument,
                Filter::Overloaded | Filter::Busy => ErrorKind::ResourceExhausted,
                // Whoever excluded the rank did so because it failed: another try, later, is not hopeless.
                Filter::Excluded
                | Filter::Unavailable
                | Filter::Draining
                | Filter::Unresponsive
                | Filter::Refusing
                | Filter::Lora => ErrorKind::Unavailable,
            },
            Self::DeadlineExceeded { .. } => ErrorKind::DeadlineExceeded,
            Self::UnknownClass(_) => ErrorKind::InvalidArgument,
            Self::Selector(_) => ErrorKind::Internal,
        }
    }
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
    /// It is registered and not being drained, so there is no drain to undo.
    #[error("worker {0} is not being drained")]
    NotDraining(WorkerId),
    /// Its drain was undone before it ended.
    #[error("the drain of worker {0} was undone")]
    Undrained(WorkerId),
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
