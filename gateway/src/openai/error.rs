//! Errors as OpenAI's clients read them.
//!
//! Owns the shape, the machine-readable codes, and what the router's errors mean over HTTP. Promises that no error tells
//! of other clients, of workers or of how many there are. Leaves counting to whoever answers.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pointsman::error::{Down, RouteError};
use pointsman::queue::LimitKind;
use pointsman::schedule::Rejection;
use pointsman::select::Filter;
use serde_json::json;

use crate::serve::telemetry::ErrorCode;

use super::headers::{CLASS, PRIORITY_JUMP, SESSION_ID};

/// Characters of a client's own words that an error says back.
const ECHO_CHARS_MAX: usize = 128;

/// OpenAI's coarse kinds of error (`error.type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorType {
    /// The request makes no sense.
    InvalidRequest,
    /// No key, or none that is known.
    Authentication,
    /// What is asked for is not there.
    NotFound,
    /// Too much at once.
    RateLimit,
    /// The gateway, or every worker, is in trouble.
    Server,
}

impl ErrorType {
    /// As `error.type` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::NotFound => "not_found_error",
            Self::RateLimit => "rate_limit_error",
            Self::Server => "server_error",
        }
    }
}

/// An answer that is an error. The codes are those of `docs/headers.md`.
///
/// ```
/// use pointsman_gateway::openai::ApiError;
///
/// let error = ApiError::model_not_found("gpt-9");
/// assert_eq!((error.status.as_u16(), error.code), (404, "model_not_found"));
/// assert_eq!(error.to_string(), "the model \"gpt-9\" does not exist");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// `error.type`.
    pub kind: ErrorType,
    /// `error.code`: the reason, for machines.
    pub code: &'static str,
    /// `error.message`: the reason, for people.
    pub message: String,
    /// `error.param`: the field or header at fault.
    pub param: Option<&'static str>,
    /// `Retry-After`, in seconds.
    pub retry_after_s: Option<u64>,
    /// `Allow`: the methods that there are.
    pub allow: Option<&'static str>,
    /// Whether the connection is of no more use: `Connection: close`.
    pub closes_connection: bool,
}

impl ApiError {
    fn new(status: StatusCode, kind: ErrorType, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, kind, code, message, param: None, retry_after_s: None, allow: None, closes_connection: false }
    }

    fn closing(self) -> Self {
        Self { closes_connection: true, ..self }
    }

    /// An error of the request itself: 400.
    pub fn invalid(code: &'static str, param: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, ErrorType::InvalidRequest, code, message) }
    }

    /// No worker has answered: 502, 503 or 504.
    pub fn unavailable(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { retry_after_s: Some(1), ..Self::new(status, ErrorType::Server, code, message) }
    }

    /// Too much at once: 429. Come back after as long, in whole seconds, one at least.
    pub fn overloaded(code: &'static str, message: impl Into<String>, retry_after: Duration) -> Self {
        let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorType::RateLimit, code, message);
        Self { retry_after_s: Some(seconds.max(1)), ..error }
    }

    /// A header with a value that it cannot have: 400. `rule` goes on from the header's name.
    #[must_use]
    pub fn header_invalid(name: &'static str, rule: &str) -> Self {
        Self::invalid("invalid_header", Some(name), format!("header {name} {rule}"))
    }

    /// It has waited in the router's queue for as long as the gateway lets anybody: 429.
    #[must_use]
    pub fn queue_timeout() -> Self {
        Self::overloaded(
            "queue_timeout",
            "the request was not placed in time: all workers are busy",
            Duration::from_secs(1),
        )
    }

    /// A query of `/ready` that makes no sense: 400.
    #[must_use]
    pub fn query_invalid() -> Self {
        Self::invalid("invalid_query", Some("model"), "the query must name one model, or none")
    }

    /// No key, or none that is known: 401. Which of the two is not said.
    #[must_use]
    pub fn unauthorized() -> Self {
        let message = "a known API key is needed: Authorization: Bearer KEY";
        Self::new(StatusCode::UNAUTHORIZED, ErrorType::Authentication, "invalid_api_key", message)
    }

    /// A model that is not served, or not to this client: 404.
    #[must_use]
    pub fn model_not_found(name: &str) -> Self {
        let shown: String = name.chars().take(ECHO_CHARS_MAX).collect();
        let message = format!("the model {shown:?} does not exist");
        let error = Self::new(StatusCode::NOT_FOUND, ErrorType::InvalidRequest, "model_not_found", message);
        Self { param: Some("model"), ..error }
    }

    /// A path that is not there: 404.
    #[must_use]
    pub fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, ErrorType::NotFound, "path_not_found", "there is nothing at this path")
    }

    /// A method that the path has not: 405. `allow` lists those that it has, as in `GET, HEAD`.
    #[must_use]
    pub fn method_not_allowed(allow: &'static str) -> Self {
        let (status, message) = (StatusCode::METHOD_NOT_ALLOWED, format!("the method must be {allow}"));
        let error = Self::new(status, ErrorType::InvalidRequest, "method_not_allowed", message);
        Self { allow: Some(allow), ..error }
    }

    /// A body longer than `bytes_max`: 413. What is left of it is not read.
    #[must_use]
    pub fn too_large(bytes_max: u64) -> Self {
        let message = format!("the body is longer than {bytes_max} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, ErrorType::InvalidRequest, "body_too_large", message).closing()
    }

    /// The connection is beyond `connections_max`: 503.
    #[must_use]
    pub fn too_many_connections() -> Self {
        let message = "the gateway has as many connections as it may";
        Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message).closing()
    }

    /// There is no memory left for this body: 503.
    #[must_use]
    pub fn body_budget_exhausted() -> Self {
        let message = "the request bodies in flight take all the memory there is for them";
        Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, "body_budget_exhausted", message).closing()
    }

    /// A body that was silent for too long: 408.
    #[must_use]
    pub fn body_timeout() -> Self {
        let message = "the body did not come in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, ErrorType::InvalidRequest, "body_timeout", message).closing()
    }

    /// A body that ended before its end, or that is not framed as HTTP wants: 400.
    #[must_use]
    pub fn body_broken() -> Self {
        Self::invalid("body_broken", None, "the body broke off, or is not framed as HTTP wants").closing()
    }

    /// A request without a `Host`, or with two: 400.
    #[must_use]
    pub fn host_invalid() -> Self {
        Self::invalid("invalid_host", Some("host"), "the request must have one Host header").closing()
    }

    /// A body in a transfer coding besides `chunked`: 501.
    #[must_use]
    pub fn transfer_encoding_unsupported() -> Self {
        let message = "header Transfer-Encoding must be chunked";
        let (status, kind) = (StatusCode::NOT_IMPLEMENTED, ErrorType::InvalidRequest);
        let error = Self::new(status, kind, "transfer_encoding_unsupported", message).closing();
        Self { param: Some("transfer-encoding"), ..error }
    }

    /// Every worker that was tried broke off or could not be reached: 502.
    #[must_use]
    pub fn worker_failed() -> Self {
        let message = "no worker could be reached that answers";
        Self::unavailable(StatusCode::BAD_GATEWAY, "worker_failed", message)
    }

    /// The worker took too long: 504.
    #[must_use]
    pub fn worker_timeout() -> Self {
        let message = "the worker did not answer in time";
        Self::unavailable(StatusCode::GATEWAY_TIMEOUT, "worker_timeout", message)
    }

    /// The gateway is on its way out: 503. Another connection may lead to another gateway.
    #[must_use]
    pub fn draining() -> Self {
        Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, "draining", "the gateway is shutting down").closing()
    }

    /// The gateway's own fault: 500. What it was is for the log.
    #[must_use]
    pub fn internal() -> Self {
        let message = "the gateway has failed at this request";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, ErrorType::Server, "internal", message)
    }
}

/// In words of their own: the router's name ranks, settings and how much others have waiting.
impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        let a_second = Duration::from_secs(1);
        let no_worker = |code, message: &str| Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, code, message);
        match error {
            RouteError::Rejected(rejection) => rejection.into(),
            RouteError::Overloaded { .. } => Self::overloaded("queue_full", "too many requests are waiting", a_second),
            RouteError::DuplicateRequest(_) => {
                let message = "a request with this id has not ended yet";
                Self::new(StatusCode::CONFLICT, ErrorType::InvalidRequest, "duplicate_request", message)
            }
            RouteError::PromptTooLong { isl_tokens } => {
                let message = format!("the prompt has {isl_tokens} tokens, must be at most {}", u32::MAX);
                Self::invalid("prompt_too_long", None, message)
            }
            RouteError::ContextLength { isl_tokens, max_model_len } => {
                let message = format!(
                    "the prompt has {isl_tokens} tokens, but the model's maximum context length is {max_model_len} tokens"
                );
                Self::invalid("context_length_exceeded", None, message)
            }
            RouteError::PriorityJump(_) => Self::header_invalid(PRIORITY_JUMP, "must be a number of seconds"),
            RouteError::Session(error) => Self::invalid("invalid_session_id", Some(SESSION_ID), error.to_string()),
            RouteError::Freed => no_worker("cancelled", "the request was cancelled before it was placed"),
            RouteError::Lost { .. } => no_worker("router_restarted", "the request was lost by a part that restarted"),
            RouteError::Down(Down::Stopped) => Self::draining(),
            RouteError::Down(Down::Failed) => no_worker("router_failed", "the model's router has failed"),
            // Operators say these, clients cannot.
            RouteError::Constraints(error) => Self::invalid("invalid_request", None, error.to_string()),
            RouteError::Overrides(error) => Self::invalid("invalid_request", None, error.to_string()),
            // The gateway says all of these, not the client.
            RouteError::MissingRequestId | RouteError::Hashes(_) | RouteError::Multimodal(_) => Self::internal(),
        }
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> Self {
        let a_second = Duration::from_secs(1);
        let no_worker = |code, message: &str| Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, code, message);
        let overloaded = || Self::overloaded("overloaded", "all workers are busy", a_second);
        let none_eligible = || no_worker("no_eligible_worker", "no worker can serve this request now");
        match rejection {
            Rejection::NoRanks => no_worker("no_workers", "the model has no workers now"),
            Rejection::NoneEligible { .. } | Rejection::UnknownRank(_) => none_eligible(),
            Rejection::AllOverloaded { .. } => overloaded(),
            Rejection::Pinned { refused_by, .. } => match refused_by {
                Some(Filter::Overloaded | Filter::Busy) => overloaded(),
                Some(
                    Filter::Allowed
                    | Filter::Excluded
                    | Filter::Pin
                    | Filter::RequiredTaints
                    | Filter::Unavailable
                    | Filter::Draining
                    | Filter::Unresponsive
                    | Filter::Refusing
                    | Filter::Lora,
                )
                | None => none_eligible(),
            },
            Rejection::DeadlineExceeded { .. } => {
                Self::overloaded("deadline_exceeded", "the request was not placed within its deadline", a_second)
            }
            Rejection::Backpressure(refused) => {
                let (code, message) = match refused.limit {
                    LimitKind::Requests => ("queue_full", "too many requests are waiting"),
                    LimitKind::RawTokens | LimitKind::CachedTokens => {
                        ("queue_tokens_full", "requests with too many tokens are waiting")
                    }
                    LimitKind::DoNotQueue => ("would_queue", "the request would have to wait, and asks not to"),
                };
                Self::overloaded(code, message, refused.retry_after)
            }
            Rejection::UnknownClass(_) => {
                Self::invalid("unknown_class", Some(CLASS), format!("header {CLASS} names no class that there is"))
            }
            Rejection::Selector(_) => Self::internal(),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { status, kind, code, message, param, retry_after_s, allow, closes_connection } = self;
        let error = json!({ "message": message, "type": kind.name(), "param": param, "code": code });
        let mut response = (status, Json(json!({ "error": error }))).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(methods) = allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(methods));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if closes_connection {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(ErrorCode(code));
        response
    }
}
