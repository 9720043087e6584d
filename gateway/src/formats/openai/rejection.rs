//! Errors of the router as responses.

use std::time::Duration;

use axum::http::StatusCode;
use pointsman::error::{Down, RouteError};
use pointsman::{Filter, LimitKind, Rejection};

use super::error::ApiError;
use super::headers::{CLASS, ON_TARGET_MISS, PRIORITY_JUMP, SESSION_ID};

const A_SECOND: Duration = Duration::from_secs(1);

fn no_worker(code: &'static str, message: &str) -> ApiError {
    ApiError::unavailable(StatusCode::SERVICE_UNAVAILABLE, code, message)
}

/// Rewrites the messages, because the router's own texts name ranks, settings and queue lengths.
impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        match error {
            RouteError::Rejected(rejection) => rejection.into(),
            RouteError::Overloaded { .. } => Self::overloaded("queue_full", "too many requests are waiting", A_SECOND),
            RouteError::DuplicateRequest(_) => {
                let message = "a request with this id is still in flight";
                Self::new(StatusCode::CONFLICT, "duplicate_request", message)
            }
            RouteError::PromptTooLong { prompt_tokens } => {
                let message = format!("the prompt has {prompt_tokens} tokens, must be at most {}", u32::MAX);
                Self::invalid("prompt_too_long", None, message)
            }
            RouteError::ContextLength { prompt_tokens, max_model_len } => {
                let message = format!(
                    "the prompt has {prompt_tokens} tokens, but the model's maximum context length is {max_model_len} tokens"
                );
                Self::invalid("context_length_exceeded", None, message)
            }
            RouteError::PriorityJump(_) => Self::header_invalid(PRIORITY_JUMP, "must be a number of seconds"),
            RouteError::TargetsNotPredicted { .. } => {
                let rule = "must be serve, because the model's router learns no prefill speeds";
                Self::header_invalid(ON_TARGET_MISS, rule)
            }
            RouteError::Session(error) => Self::invalid("invalid_session_id", Some(SESSION_ID), error.to_string()),
            RouteError::Freed => no_worker("cancelled", "the request was cancelled before it was placed"),
            RouteError::Lost { .. } => {
                no_worker("router_restarted", "the request was lost in a restart of a router component")
            }
            RouteError::Down(Down::Stopped) => Self::draining(),
            RouteError::Down(Down::Failed) => no_worker("router_failed", "the model's router has failed"),
            // Only operators can set these.
            RouteError::Constraints(error) => Self::invalid("invalid_request", None, error.to_string()),
            RouteError::Overrides(error) => Self::invalid("invalid_request", None, error.to_string()),
            // Causes inside the gateway, not in the request.
            RouteError::MissingRequestId
            | RouteError::ZeroTarget(_)
            | RouteError::Hashes(_)
            | RouteError::Multimodal(_) => Self::internal(),
        }
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> Self {
        let overloaded = || Self::overloaded("overloaded", "all workers are busy", A_SECOND);
        let none_eligible = || no_worker("no_eligible_worker", "no worker can serve this request now");
        match rejection {
            Rejection::NoRanks => no_worker("no_workers", "the model has no workers now"),
            Rejection::NoneEligible { removed } if removed.by(Filter::Asleep) > 0 => {
                no_worker("no_eligible_worker", "no worker can serve this request now: engines sleep")
            }
            Rejection::NoneEligible { .. } | Rejection::UnknownRank(_) => none_eligible(),
            Rejection::AllOverloaded { .. } => overloaded(),
            Rejection::Pinned { refused_by, .. } => match refused_by {
                Some(Filter::Overloaded | Filter::Busy | Filter::Full) => overloaded(),
                _ => none_eligible(),
            },
            Rejection::DeadlineExceeded { .. } => {
                Self::overloaded("deadline_exceeded", "the request was not placed within its deadline", A_SECOND)
            }
            Rejection::TargetsMissed(missed) => {
                let ttft = missed.ttft.map(|ttft| missed_text("time to first token", ttft.predicted, ttft.target));
                let itl = missed.itl.map(|itl| missed_text("inter-token latency", itl.predicted, itl.target));
                let parts: String = ttft.into_iter().chain(itl).collect();
                let message = format!("no worker is predicted to meet the latency targets of the request{parts}");
                // `Retry-After` only if a shorter queue suffices.
                let error = Self::overloaded("targets_missed", message, missed.retry_after.unwrap_or_default());
                Self { retry_after_s: error.retry_after_s.filter(|_| missed.retry_after.is_some()), ..error }
            }
            Rejection::Backpressure(refused) => {
                let (code, message) = match refused.limit {
                    LimitKind::Requests => ("queue_full", "too many requests are waiting"),
                    LimitKind::RawTokens | LimitKind::CachedTokens => {
                        ("queue_tokens_full", "requests with too many tokens are waiting")
                    }
                    LimitKind::ProgramStarts => ("programs_full", "the contexts of other programs fill the caches"),
                    LimitKind::DoNotQueue => ("would_queue", "the request would have to wait but disallows queueing"),
                };
                Self::overloaded(code, message, refused.retry_after)
            }
            Rejection::UnknownClass(_) => {
                Self::invalid("unknown_class", Some(CLASS), format!("header {CLASS} names an unknown class"))
            }
            Rejection::Policy(_) => Self::internal(),
        }
    }
}

fn missed_text(name: &str, predicted: Duration, target: Duration) -> String {
    let [predicted, target] = [predicted, target].map(|duration| duration.as_secs_f64() * 1e3);
    format!("; {name}: predicted {predicted:.1} ms, target {target:.1} ms")
}
