//! Errors in Anthropic's format.

use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::formats::openai::ApiError;

/// Error type of a status (`error.type`).
///
/// ```
/// use pointsman_gateway::formats::anthropic::error_type;
///
/// assert_eq!(error_type(429), "rate_limit_error");
/// assert_eq!(error_type(418), "invalid_request_error");
/// ```
#[must_use]
pub fn error_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        409 => "conflict_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

/// Body of an error response. `request_id` is absent in event streams.
///
/// ```
/// use pointsman_gateway::formats::anthropic::error_body;
///
/// let body = error_body(503, "the model has no workers now", None);
/// assert_eq!(
///     body,
///     r#"{"error":{"message":"the model has no workers now","type":"overloaded_error"},"type":"error"}"#
/// );
/// ```
#[must_use]
pub fn error_body(status: u16, message: &str, request_id: Option<&str>) -> String {
    let mut body = json!({ "type": "error", "error": { "type": error_type(status), "message": message } });
    if let Some(id) = request_id {
        body["request_id"] = id.into();
    }
    body.to_string()
}

/// An error of the gateway as a response, with its headers.
pub(crate) fn error_response(error: ApiError, request_id: &str) -> Response {
    let body = error_body(error.status.as_u16(), &error.message, Some(request_id));
    error.with_body(body)
}

/// Message of an error in the formats of the gateway and of engines: `error.message`, `error`, `message` or `detail`.
#[must_use]
pub fn error_message(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Text {
        Plain(String),
        Object { message: String },
    }
    #[derive(Deserialize)]
    struct ErrorBody {
        error: Option<Text>,
        message: Option<String>,
        detail: Option<serde_json::Value>,
    }
    let body: ErrorBody = serde_json::from_slice(body).ok()?;
    let error = body.error.map(|(Text::Plain(message) | Text::Object { message })| message);
    // FastAPI sends a text or a list of violations.
    let detail = || match body.detail? {
        serde_json::Value::String(detail) => Some(detail),
        detail => Some(detail.to_string()),
    };
    error.or(body.message).or_else(detail)
}
