//! Counters of booking results: one result per request, cancelled requests included.

use metrics::Counter;

use super::Pool;
use crate::config::{QueueClass, RouterConfig};
use crate::error::RouteError;
use crate::queue::{Backpressure, LimitKind};
use crate::schedule::Rejection;

/// Result of a request at the edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BookingResult {
    /// Booked on the rank that the router chose.
    Chosen,
    /// Booked on the rank that the embedder specified.
    Given,
    NoRanks,
    UnknownRank,
    NoneEligible,
    AllOverloaded,
    Pinned,
    DeadlineExceeded,
    TargetsMissed,
    Backpressure,
    UnknownClass,
    Selector,
    RequestsMax,
    MissingRequestId,
    DuplicateRequest,
    Hashes,
    Multimodal,
    PromptTooLong,
    PriorityJump,
    Targets,
    Constraints,
    Overrides,
    Session,
    Freed,
    Lost,
    Down,
    /// Its caller cancelled it.
    Cancelled,
}

impl BookingResult {
    /// All results in the order of their declaration, which is the order of the counters.
    pub(super) const ALL: [Self; 27] = [
        Self::Chosen,
        Self::Given,
        Self::NoRanks,
        Self::UnknownRank,
        Self::NoneEligible,
        Self::AllOverloaded,
        Self::Pinned,
        Self::DeadlineExceeded,
        Self::TargetsMissed,
        Self::Backpressure,
        Self::UnknownClass,
        Self::Selector,
        Self::RequestsMax,
        Self::MissingRequestId,
        Self::DuplicateRequest,
        Self::Hashes,
        Self::Multimodal,
        Self::PromptTooLong,
        Self::PriorityJump,
        Self::Targets,
        Self::Constraints,
        Self::Overrides,
        Self::Session,
        Self::Freed,
        Self::Lost,
        Self::Down,
        Self::Cancelled,
    ];

    fn of(error: &RouteError) -> Self {
        match error {
            RouteError::Rejected(rejection) => match rejection {
                Rejection::NoRanks => Self::NoRanks,
                Rejection::UnknownRank(_) => Self::UnknownRank,
                Rejection::NoneEligible { .. } => Self::NoneEligible,
                Rejection::AllOverloaded { .. } => Self::AllOverloaded,
                Rejection::Pinned { .. } => Self::Pinned,
                Rejection::DeadlineExceeded { .. } => Self::DeadlineExceeded,
                Rejection::TargetsMissed(_) => Self::TargetsMissed,
                Rejection::Backpressure(_) => Self::Backpressure,
                Rejection::UnknownClass(_) => Self::UnknownClass,
                Rejection::Policy(_) => Self::Selector,
            },
            RouteError::Overloaded { .. } => Self::RequestsMax,
            RouteError::MissingRequestId => Self::MissingRequestId,
            RouteError::DuplicateRequest(_) => Self::DuplicateRequest,
            RouteError::Hashes(_) => Self::Hashes,
            RouteError::Multimodal(_) => Self::Multimodal,
            RouteError::PromptTooLong { .. } | RouteError::ContextLength { .. } => Self::PromptTooLong,
            RouteError::PriorityJump(_) => Self::PriorityJump,
            RouteError::ZeroTarget(_) | RouteError::TargetsNotPredicted { .. } => Self::Targets,
            RouteError::Constraints(_) => Self::Constraints,
            RouteError::Overrides(_) => Self::Overrides,
            RouteError::Session(_) => Self::Session,
            RouteError::Freed => Self::Freed,
            RouteError::Lost { .. } => Self::Lost,
            RouteError::Down(_) => Self::Down,
        }
    }

    pub(super) fn outcome(self) -> &'static str {
        match self {
            Self::Chosen | Self::Given => "placed",
            Self::NoRanks
            | Self::UnknownRank
            | Self::NoneEligible
            | Self::AllOverloaded
            | Self::Pinned
            | Self::DeadlineExceeded
            | Self::TargetsMissed
            | Self::Backpressure
            | Self::UnknownClass
            | Self::Selector
            | Self::RequestsMax => "rejected",
            Self::MissingRequestId
            | Self::DuplicateRequest
            | Self::Hashes
            | Self::Multimodal
            | Self::PromptTooLong
            | Self::PriorityJump
            | Self::Targets
            | Self::Constraints
            | Self::Overrides
            | Self::Session
            | Self::Freed
            | Self::Lost
            | Self::Down
            | Self::Cancelled => "error",
        }
    }

    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Chosen => "chosen",
            Self::Given => "given",
            Self::NoRanks => "no_ranks",
            Self::UnknownRank => "unknown_rank",
            Self::NoneEligible => "none_eligible",
            Self::AllOverloaded => "all_overloaded",
            Self::Pinned => "pinned",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::TargetsMissed => "targets_missed",
            Self::Backpressure => "backpressure",
            Self::UnknownClass => "unknown_class",
            Self::Selector => "selector",
            Self::RequestsMax => "requests_max",
            Self::MissingRequestId => "missing_request_id",
            Self::DuplicateRequest => "duplicate_request",
            Self::Hashes => "hashes",
            Self::Multimodal => "multimodal",
            Self::PromptTooLong => "prompt_too_long",
            Self::PriorityJump => "priority_jump",
            Self::Targets => "targets",
            Self::Constraints => "constraints",
            Self::Overrides => "overrides",
            Self::Session => "session",
            Self::Freed => "freed",
            Self::Lost => "lost",
            Self::Down => "down",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Counters of results, and of rejections by queue limit.
pub(crate) struct Decisions {
    /// By result.
    counts: Vec<Counter>,
    backpressure: Vec<BackpressureCount>,
}

/// Counter of rejections by one limit of one class.
struct BackpressureCount {
    class: String,
    limit: LimitKind,
    count: Counter,
}

/// A request without a result yet. Dropping it counts a cancelled request.
#[must_use = "dropping it counts a cancelled request"]
pub(crate) struct Undecided<'a> {
    decisions: &'a Decisions,
    span: &'a tracing::Span,
    result: BookingResult,
}

impl Decisions {
    pub(super) fn new(pool: &Pool, config: &RouterConfig) -> Self {
        let count = |result: BookingResult| {
            let labels = &[("outcome", result.outcome()), ("reason", result.reason())];
            pool.counter("pointsman_decisions_total", labels)
        };
        let limits = [LimitKind::Requests, LimitKind::RawTokens, LimitKind::CachedTokens, LimitKind::DoNotQueue];
        let of_class = |class: QueueClass| {
            limits.map(|limit| {
                let labels = &[("class", class.name.as_str()), ("limit", limit.name())];
                let count = pool.counter("pointsman_queue_backpressure_total", labels);
                BackpressureCount { class: class.name.clone(), limit, count }
            })
        };
        let classes = if config.queue.is_enabled() { config.queue.classes_or_default() } else { Vec::new() };
        Self {
            counts: BookingResult::ALL.into_iter().map(count).collect(),
            backpressure: classes.into_iter().flat_map(of_class).collect(),
        }
    }

    /// Begins a request.
    pub(crate) fn begin<'a>(&'a self, span: &'a tracing::Span) -> Undecided<'a> {
        Undecided { decisions: self, span, result: BookingResult::Cancelled }
    }

    fn count_backpressure(&self, refused: &Backpressure) {
        let same = |known: &&BackpressureCount| *known.class == *refused.class && known.limit == refused.limit;
        if let Some(known) = self.backpressure.iter().find(same) {
            known.count.increment(1);
        }
    }
}

impl Undecided<'_> {
    /// Records `placed` for a successful request, else the booking result of its error.
    pub(crate) fn end<T>(mut self, result: &Result<T, RouteError>, placed: BookingResult) {
        self.result = match result {
            Ok(_) => placed,
            Err(error) => {
                if let RouteError::Rejected(Rejection::Backpressure(refused)) = error {
                    self.decisions.count_backpressure(refused);
                }
                BookingResult::of(error)
            }
        };
    }
}

impl Drop for Undecided<'_> {
    fn drop(&mut self) {
        self.decisions.counts[self.result as usize].increment(1);
        if !self.span.is_disabled() {
            self.span.record("outcome", self.result.outcome()).record("reason", self.result.reason());
        }
    }
}
