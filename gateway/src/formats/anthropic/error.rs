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
pub fn error_body(status: u16, message: &str, request_id: Option<&str>) -> String {
    let mut body = json!({ "type": "error", "error": { "type": error_type(status), "message": message } });
    if let Some(id) = request_id {
        body["request_id"] = id.into();
    }
    body.to_string()
}

/// An error of the gateway as a response, with its headers.
pub(crate) fn error_response(error: ApiError, request_id: &str) -> Response {
    let words = in_anthropic_words(&error.message, Known::default());
    let body = error_body(error.status.as_u16(), words.as_ref().unwrap_or(&error.message), Some(request_id));
    error.with_body(body)
}

/// Numbers of a request that the gateway knows; 0 if unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Limit of the output.
    pub max_tokens: u32,
    /// Longest sequence of the model.
    pub max_model_len: u32,
}

/// Message of a context-length error in Anthropic's words, which makes agents compact or shorten the output; `None` for
/// another error.
///
/// ```
/// use pointsman_gateway::formats::anthropic::{Known, in_anthropic_words};
///
/// let of_vllm = "This model's maximum context length is 64 tokens. However, your prompt contains at least 100 input tokens.";
/// let words = in_anthropic_words(of_vllm, Known::default());
/// assert_eq!(words.as_deref(), Some("prompt is too long: 100 tokens > 64 maximum"));
/// assert_eq!(in_anthropic_words("temperature must be at least 0", Known::default()), None);
/// ```
pub fn in_anthropic_words(message: &str, known: Known) -> Option<String> {
    let message = message.to_ascii_lowercase();
    let is_about_length = ["context length", "context size", "context window", "model length", "max_model_len"];
    if !is_about_length.iter().any(|words| message.contains(words)) {
        return None;
    }
    let after = |words: &[&str]| words.iter().find_map(|words| number_at(message.split_once(words)?.1));
    let before = |words: &[&str]| words.iter().find_map(|words| number_before(message.split_once(words)?.0));
    let given = |number: u32| Some(u64::from(number)).filter(|number| *number > 0);
    let limit = after(&[
        "context length is ",
        "context length of ",
        "context length (",
        "context length ",
        "context size (",
        "model length of ",
        "max_model_len ",
    ])
    .or(given(known.max_model_len))?;
    let prompt = before(&[" input tokens", " in the messages", " tokens from the input messages"])
        .or_else(|| after(&["the input (", "prompt length ", "total length ", "(length ", "prompt has "]))
        .max(given(known.prompt_tokens))?;
    let output = before(&[" output tokens", " in the completion", " tokens for the completion"])
        .or_else(|| after(&["too large: "]))
        .or(given(known.max_tokens))
        .unwrap_or(0);
    match prompt {
        _ if prompt >= limit || output == 0 => Some(format!("prompt is too long: {prompt} tokens > {limit} maximum")),
        _ if prompt.saturating_add(output) > limit => Some(format!(
            "input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, decrease input length or \
             `max_tokens` and try again"
        )),
        _ => None,
    }
}

/// The number at the beginning of a text.
fn number_at(text: &str) -> Option<u64> {
    text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// The number at the end of a text.
fn number_before(text: &str) -> Option<u64> {
    text.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Message of an error in the formats of the gateway and of engines: `error.message`, `error`, `message` or `detail`.
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
