//! Errors of the public API, one enum per operation.

use crate::config::ConfigErrors;
use crate::directory::DuplicateRequest;
use crate::hashing::{HashedPromptError, MmError};
use crate::load::WeightError;
use crate::protocol::{WorkerConfigError, WorkerId};
use crate::schedule::Rejection;
use crate::select::{Filter, TaintWeightError};
use crate::session::SessionIdError;
use crate::snapshot::SnapshotError;

/// Reason for a stopped router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Down {
    /// A component could not be restarted. Start a new router.
    #[error("the router has failed: its restart budget is spent or its supervisor died")]
    Failed,
    /// The router was shut down.
    #[error("the router is shut down")]
    Stopped,
}

/// Reason for which a request was not placed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RouteError {
    /// A booking requires a request id.
    #[error("request_id is missing: a booking needs one (find_best_match does not)")]
    MissingRequestId,
    /// The id has an active booking.
    #[error(transparent)]
    DuplicateRequest(#[from] DuplicateRequest),
    /// Limit of pending requests reached.
    #[error("{requests_max} requests are waiting, which is requests_max")]
    Overloaded {
        /// The limit.
        requests_max: u32,
    },
    /// No rank was chosen.
    #[error(transparent)]
    Rejected(#[from] Rejection),
    /// Inconsistent precomputed hashes.
    #[error(transparent)]
    Hashes(#[from] HashedPromptError),
    /// Multimodal spans that do not fit the prompt.
    #[error(transparent)]
    Multimodal(#[from] MmError),
    /// Prompt length out of range.
    #[error("prompt has {prompt_tokens} tokens, must be at most {max}", max = u32::MAX)]
    PromptTooLong {
        /// Prompt length.
        prompt_tokens: usize,
    },
    /// Prompt longer than the model of every worker accepts.
    #[error("prompt has {prompt_tokens} tokens, must be at most {max_model_len}, the model's length")]
    ContextLength {
        /// Prompt length.
        prompt_tokens: usize,
        /// Maximum sequence length over all workers.
        max_model_len: u32,
    },
    /// Priority jump that is not finite.
    #[error("priority_jump is {0}, must be finite")]
    PriorityJump(f64),
    /// Latency target of zero.
    #[error("{0} is 0, must be positive")]
    ZeroTarget(&'static str),
    /// Latency targets that must be met, without predictions.
    #[error("on_target_miss is reject, but nothing is predicted: policy {policy} without learned prefill speeds")]
    TargetsNotPredicted {
        /// Name of the policy.
        policy: &'static str,
    },
    /// Unusable weight of a preferred taint.
    #[error(transparent)]
    Constraints(#[from] TaintWeightError),
    /// Override that violates its rule.
    #[error(transparent)]
    Overrides(#[from] ConfigErrors),
    /// Session id that is too long or empty.
    #[error(transparent)]
    Session(#[from] SessionIdError),
    /// Freed by its id before it was booked.
    #[error("the request was freed before it was booked")]
    Freed,
    /// Repeatedly lost with an actor.
    #[error("the request was lost {attempts} times with the actor that had it")]
    Lost {
        /// Number of attempts.
        attempts: u32,
    },
    /// The router is down.
    #[error(transparent)]
    Down(#[from] Down),
}

/// Kind of an error for clients, named after gRPC's status codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Invalid request; a retry does not help. HTTP 400.
    InvalidArgument,
    /// Unknown resource. HTTP 404.
    NotFound,
    /// Request id in use. HTTP 409.
    AlreadyExists,
    /// No capacity at present. HTTP 429.
    ResourceExhausted,
    /// Deadline passed. HTTP 504.
    DeadlineExceeded,
    /// Ended by its caller. 499, as servers log it: its client no longer waits for a status.
    Cancelled,
    /// No rank can serve at present. HTTP 503.
    Unavailable,
    /// Failure of the embedder's code or the router. HTTP 500.
    Internal,
}

impl ErrorKind {
    /// HTTP status of the response to the client.
    ///
    /// ```
    /// use pointsman::error::{Down, ErrorKind, RouteError};
    ///
    /// assert_eq!(RouteError::Down(Down::Stopped).kind().http_status(), 503);
    /// assert_eq!(ErrorKind::ResourceExhausted.http_status(), 429);
    /// ```
    #[must_use]
    pub fn http_status(self) -> u16 {
        match self {
            Self::InvalidArgument => 400,
            Self::NotFound => 404,
            Self::AlreadyExists => 409,
            Self::ResourceExhausted => 429,
            Self::Cancelled => 499,
            Self::Internal => 500,
            Self::Unavailable => 503,
            Self::DeadlineExceeded => 504,
        }
    }
}

impl RouteError {
    /// Kind for the response to the client.
    ///
    /// ```
    /// use pointsman::error::{ErrorKind, RouteError};
    /// use pointsman::internals::select::Removed;
    /// use pointsman::Rejection;
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
            | Self::ZeroTarget(_)
            | Self::TargetsNotPredicted { .. }
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
    /// Kind for the response to the client.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoRanks | Self::NoneEligible { .. } => ErrorKind::Unavailable,
            Self::UnknownRank(_) | Self::Pinned { refused_by: None, .. } => ErrorKind::NotFound,
            Self::AllOverloaded { .. } | Self::TargetsMissed(_) | Self::Backpressure(_) => ErrorKind::ResourceExhausted,
            Self::Pinned { refused_by: Some(filter), .. } => match filter {
                Filter::Allowed | Filter::Pin | Filter::RequiredTaints | Filter::Custom => ErrorKind::InvalidArgument,
                Filter::Overloaded | Filter::Busy | Filter::Full => ErrorKind::ResourceExhausted,
                // The rank was excluded after a failure, so a later retry may succeed.
                Filter::Excluded
                | Filter::Unavailable
                | Filter::Draining
                | Filter::Asleep
                | Filter::Unresponsive
                | Filter::Refusing
                | Filter::Lora
                | Filter::Targets => ErrorKind::Unavailable,
            },
            Self::DeadlineExceeded { .. } => ErrorKind::DeadlineExceeded,
            Self::UnknownClass(_) => ErrorKind::InvalidArgument,
            Self::Policy(_) => ErrorKind::Internal,
        }
    }
}

/// Reason for which accepted events may be missing in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// An index shard died with accepted events. Its ranks are cold: `Router::resyncs` lists them.
    #[error("an index shard was lost with events that had been accepted")]
    Lost,
    /// The router is down.
    #[error(transparent)]
    Down(#[from] Down),
}

/// Rejected report about a booking by request id.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// No booking has this id: it has ended or never existed.
    #[error("request id {0:?} has no booking")]
    NotFound(String),
    /// Decay outside of its range.
    #[error(transparent)]
    Decay(#[from] WeightError),
}

/// Rejected change of workers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MembershipError {
    /// Configuration that violates a rule.
    #[error("worker {worker}: {error}")]
    Config {
        /// Worker.
        worker: WorkerId,
        /// Rule.
        error: WorkerConfigError,
    },
    /// Unknown worker.
    #[error("worker {0} is not registered")]
    UnknownWorker(WorkerId),
    /// Worker is draining.
    #[error("worker {0} is being drained")]
    Draining(WorkerId),
    /// Worker is not draining, so there is no drain to undo.
    #[error("worker {0} is not being drained")]
    NotDraining(WorkerId),
    /// Only the discovery source of the worker can end its drain.
    #[error("worker {0} is being drained by its discovery source, and only the source can end this")]
    DrainedBySource(WorkerId),
    /// The drain was undone before its end.
    #[error("the drain of worker {0} was undone")]
    Undrained(WorkerId),
    /// The router is down.
    #[error(transparent)]
    Down(#[from] Down),
}

/// Startup error of a router.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StartError {
    /// Invalid configuration.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// Rejected initial worker.
    #[error(transparent)]
    Worker(#[from] MembershipError),
    /// The discovery source ended with too few workers.
    #[error("the discovery source closed with {registered} workers registered, min_initial_workers is {wanted}")]
    SourceClosed {
        /// Registered workers.
        registered: usize,
        /// Required workers.
        wanted: u32,
    },
    /// Too few workers without any discovery source.
    #[error("{registered} workers are given and there is no discovery source, min_initial_workers is {wanted}")]
    NoSource {
        /// Registered workers.
        registered: usize,
        /// Required workers.
        wanted: u32,
    },
    /// Snapshot of another layout.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The router went down while waiting for workers.
    #[error(transparent)]
    Down(#[from] Down),
    /// An actor did not start.
    #[error("an actor did not start: {0}")]
    Spawn(String),
}
