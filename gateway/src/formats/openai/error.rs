//! Errors in OpenAI's format.
//!
//! Defines format, machine-readable codes, and the mapping of router errors to HTTP. Messages never reveal other
//! clients, workers, or the number of workers.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pointsman::error::{Down, RouteError};
use pointsman::queue::LimitKind;
use pointsman::schedule::{MissedTarget, Rejection, TargetsMissed};
use pointsman::select::Filter;
use serde_json::json;

use crate::admission::quota::Limit;
use crate::observe::access::ErrorCode;

use super::headers::{CLASS, ON_TARGET_MISS, PRIORITY_JUMP, SESSION_ID};

/// Maximum number of characters of client input repeated in an error.
const ECHO_CHARS_MAX: usize = 128;

/// OpenAI's error types (`error.type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorType {
    /// Invalid request.
    InvalidRequest,
    /// Missing or unknown key.
    Authentication,
    /// Unknown resource.
    NotFound,
    /// Too many requests.
    RateLimit,
    /// Failure of the gateway or of all workers.
    Server,
}

impl ErrorType {
    /// Value of `error.type`.
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

/// An error response. `docs/headers.md` lists the codes.
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
    /// `error.code`: stable reason.
    pub code: &'static str,
    /// `error.message`: reason in text.
    pub message: String,
    /// `error.param`: invalid field or header.
    pub param: Option<&'static str>,
    /// `Retry-After`, in seconds.
    pub retry_after_s: Option<u64>,
    /// `Allow`: supported methods.
    pub allow: Option<&'static str>,
    /// Whether the connection must close: `Connection: close`.
    pub closes_connection: bool,
    /// Further headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: ErrorType, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            status,
            kind,
            code,
            message,
            param: None,
            retry_after_s: None,
            allow: None,
            closes_connection: false,
            headers: Vec::new(),
        }
    }

    fn closing(self) -> Self {
        Self { closes_connection: true, ..self }
    }

    /// Invalid request: 400.
    pub fn invalid(code: &'static str, param: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, ErrorType::InvalidRequest, code, message) }
    }

    /// No response from a worker: 502, 503 or 504.
    pub fn unavailable(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { retry_after_s: Some(1), ..Self::new(status, ErrorType::Server, code, message) }
    }

    /// Overload: 429, with a retry time in whole seconds, at least one.
    pub fn overloaded(code: &'static str, message: impl Into<String>, retry_after: Duration) -> Self {
        let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorType::RateLimit, code, message);
        Self { retry_after_s: Some(seconds.max(1)), ..error }
    }

    /// Request above a limit of its tenant or key: 429.
    #[must_use]
    pub fn limit_exceeded(limit: Limit, max: u64, retry_after: Duration) -> Self {
        let (code, unit) = match limit {
            Limit::RequestsPerMinute => ("rate_limit_exceeded", "requests per minute"),
            Limit::TokensPerMinute => ("rate_limit_exceeded", "tokens per minute"),
            Limit::TokensPerDay => ("quota_exceeded", "tokens per day"),
            Limit::RequestsInFlight => ("concurrency_limit_exceeded", "requests in flight"),
        };
        let message = format!("the limit of {max} {unit} is reached");
        Self::overloaded(code, message, retry_after)
    }

    /// Invalid header value: 400. `rule` completes a sentence that starts with the header name.
    #[must_use]
    pub fn header_invalid(name: &'static str, rule: &str) -> Self {
        Self::invalid("invalid_header", Some(name), format!("header {name} {rule}"))
    }

    /// Latency targets that no worker is predicted to meet: 429. `Retry-After` only if a shorter queue suffices.
    #[must_use]
    pub fn targets_missed(missed: &TargetsMissed) -> Self {
        let part = |name: &str, missed: Option<MissedTarget>| {
            let MissedTarget { predicted, target } = missed?;
            let [predicted, target] = [predicted, target].map(|duration| duration.as_secs_f64() * 1e3);
            Some(format!("; {name}: predicted {predicted:.1} ms, target {target:.1} ms"))
        };
        let parts = [part("time to first token", missed.ttft), part("inter-token latency", missed.itl)];
        let parts: String = parts.into_iter().flatten().collect();
        let message = format!("no worker is predicted to meet the latency targets of the request{parts}");
        let error = Self::overloaded("targets_missed", message, missed.retry_after.unwrap_or_default());
        Self { retry_after_s: error.retry_after_s.filter(|_| missed.retry_after.is_some()), ..error }
    }

    /// No worker among the endpoints to which a proxy limits the choice: 503.
    #[must_use]
    pub fn no_endpoint() -> Self {
        let message = "no worker of the model is among the endpoints that the proxy accepts";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, ErrorType::Server, "no_endpoint", message)
    }

    /// No token count for this prompt: 501.
    #[must_use]
    pub fn token_count_unavailable() -> Self {
        let message = "tokens of this prompt cannot be counted: the model has no token source for it";
        Self::new(StatusCode::NOT_IMPLEMENTED, ErrorType::Server, "token_count_unavailable", message)
    }

    /// Queue timeout of the gateway: 429.
    #[must_use]
    pub fn queue_timeout() -> Self {
        Self::overloaded(
            "queue_timeout",
            "the request was not placed in time: all workers are busy",
            Duration::from_secs(1),
        )
    }

    /// Invalid query of `/ready`: 400.
    #[must_use]
    pub fn query_invalid() -> Self {
        Self::invalid("invalid_query", Some("model"), "the query must name at most one model")
    }

    /// Missing or unknown key: 401. The response does not distinguish them.
    #[must_use]
    pub fn unauthorized() -> Self {
        let message = "a valid API key is required: Authorization: Bearer KEY";
        Self::new(StatusCode::UNAUTHORIZED, ErrorType::Authentication, "invalid_api_key", message)
    }

    /// Model not served, or not for this client: 404.
    #[must_use]
    pub fn model_not_found(name: &str) -> Self {
        let shown: String = name.chars().take(ECHO_CHARS_MAX).collect();
        let message = format!("the model {shown:?} does not exist");
        let error = Self::new(StatusCode::NOT_FOUND, ErrorType::InvalidRequest, "model_not_found", message);
        Self { param: Some("model"), ..error }
    }

    /// Unknown path: 404.
    #[must_use]
    pub fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, ErrorType::NotFound, "path_not_found", "this path does not exist")
    }

    /// Unsupported method: 405. `allow` lists the supported methods, as in `GET, HEAD`.
    #[must_use]
    pub fn method_not_allowed(allow: &'static str) -> Self {
        let (status, message) = (StatusCode::METHOD_NOT_ALLOWED, format!("the method must be {allow}"));
        let error = Self::new(status, ErrorType::InvalidRequest, "method_not_allowed", message);
        Self { allow: Some(allow), ..error }
    }

    /// Body above `bytes_max`: 413. The rest of the body is not read.
    #[must_use]
    pub fn too_large(bytes_max: u64) -> Self {
        let message = format!("the body is longer than {bytes_max} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, ErrorType::InvalidRequest, "body_too_large", message).closing()
    }

    /// Connection above `connections_max`: 503.
    #[must_use]
    pub fn too_many_connections() -> Self {
        let message = "the gateway has reached its connection limit";
        Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message).closing()
    }

    /// Exhausted memory budget for bodies: 503.
    #[must_use]
    pub fn body_budget_exhausted() -> Self {
        let message = "the memory budget of request bodies is exhausted";
        Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, "body_budget_exhausted", message).closing()
    }

    /// Body idle timeout: 408.
    #[must_use]
    pub fn body_timeout() -> Self {
        let message = "the body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, ErrorType::InvalidRequest, "body_timeout", message).closing()
    }

    /// Truncated body or invalid HTTP framing: 400.
    #[must_use]
    pub fn body_broken() -> Self {
        Self::invalid("body_broken", None, "the body ended early or has invalid HTTP framing").closing()
    }

    /// Missing or repeated `Host`: 400.
    #[must_use]
    pub fn host_invalid() -> Self {
        Self::invalid("invalid_host", Some("host"), "the request must have one Host header").closing()
    }

    /// Transfer coding other than `chunked`: 501.
    #[must_use]
    pub fn transfer_encoding_unsupported() -> Self {
        let message = "header Transfer-Encoding must be chunked";
        let (status, kind) = (StatusCode::NOT_IMPLEMENTED, ErrorType::InvalidRequest);
        let error = Self::new(status, kind, "transfer_encoding_unsupported", message).closing();
        Self { param: Some("transfer-encoding"), ..error }
    }

    /// All attempts failed or were refused: 502.
    #[must_use]
    pub fn worker_failed() -> Self {
        let message = "no worker returned a response";
        Self::unavailable(StatusCode::BAD_GATEWAY, "worker_failed", message)
    }

    /// Worker timeout: 504.
    #[must_use]
    pub fn worker_timeout() -> Self {
        let message = "the worker did not respond in time";
        Self::unavailable(StatusCode::GATEWAY_TIMEOUT, "worker_timeout", message)
    }

    /// Gateway shutdown: 503. A new connection may reach another gateway.
    #[must_use]
    pub fn draining() -> Self {
        Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, "draining", "the gateway is shutting down").closing()
    }

    /// Defect of the gateway: 500. The log has the cause.
    #[must_use]
    pub fn internal() -> Self {
        let message = "internal error of the gateway";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, ErrorType::Server, "internal", message)
    }
}

/// Rewrites the messages, because the router's own texts name ranks, settings and queue lengths.
impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        let a_second = Duration::from_secs(1);
        let no_worker = |code, message: &str| Self::unavailable(StatusCode::SERVICE_UNAVAILABLE, code, message);
        match error {
            RouteError::Rejected(rejection) => rejection.into(),
            RouteError::Overloaded { .. } => Self::overloaded("queue_full", "too many requests are waiting", a_second),
            RouteError::DuplicateRequest(_) => {
                let message = "a request with this id is still in flight";
                Self::new(StatusCode::CONFLICT, ErrorType::InvalidRequest, "duplicate_request", message)
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
                    | Filter::Custom
                    | Filter::Unavailable
                    | Filter::Draining
                    | Filter::Unresponsive
                    | Filter::Refusing
                    | Filter::Lora
                    | Filter::Targets,
                )
                | None => none_eligible(),
            },
            Rejection::DeadlineExceeded { .. } => {
                Self::overloaded("deadline_exceeded", "the request was not placed within its deadline", a_second)
            }
            Rejection::TargetsMissed(missed) => Self::targets_missed(&missed),
            Rejection::Backpressure(refused) => {
                let (code, message) = match refused.limit {
                    LimitKind::Requests => ("queue_full", "too many requests are waiting"),
                    LimitKind::RawTokens | LimitKind::CachedTokens => {
                        ("queue_tokens_full", "requests with too many tokens are waiting")
                    }
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

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { status, kind, code, message, param, retry_after_s, allow, closes_connection, headers: further } =
            self;
        let error = json!({ "message": message, "type": kind.name(), "param": param, "code": code });
        let mut response = (status, Json(json!({ "error": error }))).into_response();
        let headers = response.headers_mut();
        headers.extend(further);
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
