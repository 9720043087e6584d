//! Errors as OpenAI's clients read them.
//!
//! Owns the shape, and what the router's errors mean over HTTP. Promises that no error tells of other clients or of
//! workers. Leaves counting to whoever answers.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pointsman::error::{ErrorKind, RouteError};
use serde_json::json;

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
    fn name(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::NotFound => "not_found_error",
            Self::RateLimit => "rate_limit_error",
            Self::Server => "server_error",
        }
    }
}

/// An answer that is an error.
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
    /// `error.param`: the field at fault.
    pub param: Option<&'static str>,
    /// `Retry-After`, in seconds.
    pub retry_after_s: Option<u64>,
}

impl ApiError {
    /// An error of the request itself: 400.
    pub fn invalid(code: &'static str, param: Option<&'static str>, message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::BAD_REQUEST, ErrorType::InvalidRequest);
        Self { status, kind, code, message: message.into(), param, retry_after_s: None }
    }

    /// No worker has answered: 502, 503 or 504.
    pub fn unavailable(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind: ErrorType::Server, code, message: message.into(), param: None, retry_after_s: Some(1) }
    }
}

impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        let (status, kind, code) = match error.kind() {
            ErrorKind::InvalidArgument => (StatusCode::BAD_REQUEST, ErrorType::InvalidRequest, "invalid_request"),
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, ErrorType::NotFound, "not_found"),
            ErrorKind::AlreadyExists => (StatusCode::CONFLICT, ErrorType::InvalidRequest, "duplicate_request"),
            ErrorKind::ResourceExhausted => (StatusCode::TOO_MANY_REQUESTS, ErrorType::RateLimit, "overloaded"),
            ErrorKind::DeadlineExceeded => (StatusCode::TOO_MANY_REQUESTS, ErrorType::RateLimit, "deadline_exceeded"),
            ErrorKind::Cancelled | ErrorKind::Unavailable => {
                (StatusCode::SERVICE_UNAVAILABLE, ErrorType::Server, "no_worker")
            }
            ErrorKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, ErrorType::Server, "internal"),
        };
        let retry_after_s =
            (status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE).then_some(1);
        Self { status, kind, code, message: error.to_string(), param: None, retry_after_s }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { status, kind, code, message, param, retry_after_s } = self;
        let error = json!({ "message": message, "type": kind.name(), "param": param, "code": code });
        let mut response = (status, Json(json!({ "error": error }))).into_response();
        if let Some(seconds) = retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
