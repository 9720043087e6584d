//! Exceptions for the errors of the library, with their fields.
//!
//! The classes are those of `pointsman.errors`. Each exception has the error's message, a `reason` that names the error's
//! variant, and its fields as attributes.

use pointsman::config::ConfigErrors;
use pointsman::error::{Down, ErrorKind, FlushError, MembershipError, RequestError, RouteError, StartError};
use pointsman::policy::PolicyError;
use pointsman::protocol::WorkerRank;
use pointsman::{Filter, Rejection, Router};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::discovery;

/// A field of an error.
enum Field {
    Text(String),
    Texts(Vec<String>),
    Number(u64),
    Float(f64),
    Rank(WorkerRank),
    Counts(Vec<(&'static str, u32)>),
    Absent,
}

/// An exception to raise.
pub(crate) struct Failure {
    class: &'static str,
    reason: &'static str,
    message: String,
    fields: Vec<(&'static str, Field)>,
}

impl Failure {
    pub(crate) fn new(class: &'static str, reason: &'static str, message: impl Into<String>) -> Self {
        Self { class, reason, message: message.into(), fields: Vec::new() }
    }

    fn with(mut self, name: &'static str, field: Field) -> Self {
        self.fields.push((name, field));
        self
    }

    pub(crate) fn with_number(self, name: &'static str, number: u64) -> Self {
        self.with(name, Field::Number(number))
    }

    /// Adds `problems`, one text each.
    pub(crate) fn with_problems(self, problems: Vec<String>) -> Self {
        self.with("problems", Field::Texts(problems))
    }

    /// Adds errors of discovery, which explain a lack of workers, to the message.
    fn explained_by(mut self, problems: Vec<String>) -> Self {
        if !problems.is_empty() {
            self.message = format!("{}: {}", self.message, problems.join("; "));
        }
        self.with_problems(problems)
    }

    /// The failure of a request, with the reasons for a pool without workers.
    pub(crate) fn of_request(error: RouteError, router: &Router) -> Self {
        let is_empty = matches!(error, RouteError::Rejected(Rejection::NoRanks));
        let failure = Self::from(error);
        if is_empty { failure.explained_by(discovery::problems(router)) } else { failure }
    }

    /// The exception.
    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        self.exception(py).unwrap_or_else(|error| error)
    }

    fn exception(self, py: Python<'_>) -> PyResult<PyErr> {
        static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
        let module = MODULE.get_or_try_init(py, || py.import("pointsman.errors").map(Bound::unbind))?;
        let fields = PyDict::new(py);
        fields.set_item("reason", self.reason)?;
        for (name, field) in self.fields {
            match field {
                Field::Text(text) => fields.set_item(name, text)?,
                Field::Texts(texts) => fields.set_item(name, texts)?,
                Field::Number(number) => fields.set_item(name, number)?,
                Field::Float(number) => fields.set_item(name, number)?,
                Field::Rank(rank) => fields.set_item(name, (rank.worker.0, rank.rank))?,
                Field::Counts(counts) => {
                    let listed = PyDict::new(py);
                    counts.into_iter().try_for_each(|(key, count)| listed.set_item(key, count))?;
                    fields.set_item(name, listed)?;
                }
                Field::Absent => fields.set_item(name, py.None())?,
            }
        }
        let class = module.bind(py).getattr(self.class)?;
        Ok(PyErr::from_value(class.call((self.message,), Some(&fields))?))
    }
}

fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidArgument => "InvalidArgument",
        ErrorKind::NotFound => "NotFound",
        ErrorKind::AlreadyExists => "AlreadyExists",
        ErrorKind::ResourceExhausted => "ResourceExhausted",
        ErrorKind::DeadlineExceeded => "DeadlineExceeded",
        ErrorKind::Cancelled => "Freed",
        ErrorKind::Unavailable => "Unavailable",
        ErrorKind::Internal => "Internal",
    }
}

fn seconds(duration: std::time::Duration) -> Field {
    Field::Float(duration.as_secs_f64())
}

fn tokens(count: usize) -> Field {
    Field::Number(count as u64)
}

impl From<RouteError> for Failure {
    fn from(error: RouteError) -> Self {
        let (class, message) = (class_of(error.kind()), error.to_string());
        let named = |reason| Self::new(class, reason, message.as_str());
        match error {
            RouteError::MissingRequestId => named("missing_request_id"),
            RouteError::DuplicateRequest(id) => named("duplicate_request").with("request_id", Field::Text(id.0)),
            RouteError::Overloaded { requests_max } => {
                named("overloaded").with_number("requests_max", requests_max.into())
            }
            RouteError::Rejected(rejection) => rejected(class, &message, rejection),
            RouteError::Hashes(_) => named("hashes"),
            RouteError::Multimodal(_) => named("multimodal"),
            RouteError::PromptTooLong { prompt_tokens } => {
                named("prompt_too_long").with("prompt_tokens", tokens(prompt_tokens))
            }
            RouteError::ContextLength { prompt_tokens, max_model_len } => named("context_length")
                .with("prompt_tokens", tokens(prompt_tokens))
                .with_number("max_model_len", max_model_len.into()),
            RouteError::PriorityJump(jump) => named("priority_jump").with("priority_jump", Field::Float(jump)),
            RouteError::ZeroTarget(target) => named("zero_target").with("target", Field::Text(target.to_owned())),
            RouteError::TargetsNotPredicted { policy } => {
                named("targets_not_predicted").with("policy", Field::Text(policy.to_owned()))
            }
            RouteError::Constraints(_) => named("constraints"),
            RouteError::Overrides(errors) => named("overrides").with("problems", problems(&errors)),
            RouteError::Session(_) => named("session"),
            RouteError::Freed => named("freed"),
            RouteError::Lost { attempts } => named("lost").with_number("attempts", attempts.into()),
            RouteError::Down(down) => named(reason_of(down)),
        }
    }
}

/// A rejection by the scheduler.
fn rejected(class: &'static str, message: &str, rejection: Rejection) -> Failure {
    let named = |reason| Failure::new(class, reason, message);
    match rejection {
        Rejection::NoRanks => named("no_ranks"),
        Rejection::UnknownRank(rank) => named("unknown_rank").with("rank", Field::Rank(rank)),
        Rejection::NoneEligible { removed } => {
            named("none_eligible").with("removed", counts(|filter| removed.by(filter)))
        }
        Rejection::AllOverloaded { removed } => {
            named("all_overloaded").with("removed", counts(|filter| removed.by(filter)))
        }
        Rejection::Pinned { pin, refused_by } => {
            let filter = refused_by.map_or(Field::Absent, |filter| Field::Text(filter.name().to_owned()));
            let rank = pin.rank.map_or(Field::Absent, |rank| Field::Number(rank.into()));
            named("pinned").with_number("worker", pin.worker.0).with("rank", rank).with("refused_by", filter)
        }
        Rejection::DeadlineExceeded { waited } => named("deadline_exceeded").with("waited_seconds", seconds(waited)),
        Rejection::TargetsMissed(missed) => {
            named("targets_missed").with("retry_after_seconds", missed.retry_after.map_or(Field::Absent, seconds))
        }
        Rejection::Backpressure(limit) => named("backpressure")
            .with("queue_class", Field::Text(limit.class.to_string()))
            .with("limit", Field::Text(limit.limit.to_string()))
            .with_number("current", limit.current)
            .with_number("max", limit.max)
            .with("retry_after_seconds", seconds(limit.retry_after)),
        Rejection::UnknownClass(class) => named("unknown_class").with("queue_class", Field::Text(class.0)),
        Rejection::Policy(error) => named(match error {
            PolicyError::Refused { .. } => "policy_refused",
            PolicyError::OutOfRange { .. } => "policy_out_of_range",
            PolicyError::InvalidCost { .. } => "policy_invalid_cost",
            PolicyError::Panicked => "policy_panicked",
        }),
    }
}

/// Excluded ranks by filter.
fn counts(removed_by: impl Fn(Filter) -> u32) -> Field {
    let by_filter = Filter::ALL.into_iter().map(|filter| (filter.name(), removed_by(filter)));
    Field::Counts(by_filter.filter(|(_, count)| *count > 0).collect())
}

fn reason_of(down: Down) -> &'static str {
    match down {
        Down::Failed => "down_failed",
        Down::Stopped => "down_stopped",
    }
}

fn problems(errors: &ConfigErrors) -> Field {
    Field::Texts(errors.0.iter().map(ToString::to_string).collect())
}

impl From<Down> for Failure {
    fn from(down: Down) -> Self {
        Self::new("Unavailable", reason_of(down), down.to_string())
    }
}

impl From<FlushError> for Failure {
    fn from(error: FlushError) -> Self {
        match error {
            FlushError::Lost => Self::new("Unavailable", "lost", error.to_string()),
            FlushError::Down(down) => down.into(),
        }
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::NotFound(id) => {
                Self::new("NotFound", "no_booking", message).with("request_id", Field::Text(id))
            }
            RequestError::Decay(_) => Self::new("InvalidArgument", "decay", message),
        }
    }
}

impl From<MembershipError> for Failure {
    fn from(error: MembershipError) -> Self {
        let message = error.to_string();
        let (reason, worker) = match error {
            MembershipError::Config { worker, .. } => ("config", worker),
            MembershipError::UnknownWorker(worker) => ("unknown_worker", worker),
            MembershipError::Draining(worker) => ("draining", worker),
            MembershipError::NotDraining(worker) => ("not_draining", worker),
            MembershipError::Undrained(worker) => ("undrained", worker),
            MembershipError::DrainedBySource(worker) => ("drained_by_source", worker),
            MembershipError::Down(down) => return down.into(),
        };
        Self::new("WorkerError", reason, message).with_number("worker", worker.0)
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        let message = error.to_string();
        match error {
            StartError::Config(errors) => {
                Self::new("ConfigError", "config", message).with("problems", problems(&errors))
            }
            StartError::Worker(error) => error.into(),
            StartError::SourceClosed { registered, wanted } => Self::new("StartError", "source_closed", message)
                .with("registered", tokens(registered))
                .with_number("wanted", wanted.into()),
            StartError::NoSource { registered, wanted } => Self::new("StartError", "no_source", message)
                .with("registered", tokens(registered))
                .with_number("wanted", wanted.into()),
            StartError::Snapshot(_) => Self::new("StartError", "snapshot", message),
            StartError::Down(down) => down.into(),
            StartError::Spawn(_) => Self::new("StartError", "spawn", message),
        }
    }
}
