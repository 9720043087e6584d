//! Counters of booking results: one result per request, cancelled requests included.

use metrics::Counter;

use super::Pool;
use crate::config::{QueueClass, RouterConfig};
use crate::error::RouteError;
use crate::names::named;
use crate::queue::{Backpressure, LimitKind};
use crate::schedule::Rejection;

named! {
    /// Result of a request at the edge: those placed, those rejected, then errors.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) enum BookingResult {
        /// Booked on the rank that the router chose.
        Chosen = "chosen",
        /// Booked on the rank that the embedder specified.
        Given = "given",
        NoRanks = "no_ranks",
        UnknownRank = "unknown_rank",
        NoneEligible = "none_eligible",
        AllOverloaded = "all_overloaded",
        Pinned = "pinned",
        DeadlineExceeded = "deadline_exceeded",
        TargetsMissed = "targets_missed",
        Backpressure = "backpressure",
        UnknownClass = "unknown_class",
        Selector = "selector",
        RequestsMax = "requests_max",
        MissingRequestId = "missing_request_id",
        DuplicateRequest = "duplicate_request",
        Hashes = "hashes",
        Multimodal = "multimodal",
        PromptTooLong = "prompt_too_long",
        PriorityJump = "priority_jump",
        Targets = "targets",
        Constraints = "constraints",
        Overrides = "overrides",
        Session = "session",
        Freed = "freed",
        Lost = "lost",
        Down = "down",
        /// Its caller cancelled it.
        Cancelled = "cancelled",
    }
}

impl BookingResult {
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
        if self <= Self::Given {
            "placed"
        } else if self <= Self::RequestsMax {
            "rejected"
        } else {
            "error"
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
            let labels = &[("outcome", result.outcome()), ("reason", result.name())];
            pool.counter("pointsman_decisions_total", labels)
        };
        let of_class = |class: QueueClass| {
            LimitKind::ALL.map(|limit| {
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
            self.span.record("outcome", self.result.outcome()).record("reason", self.result.name());
        }
    }
}
