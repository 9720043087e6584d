//! Errors in Anthropic's format.

use axum::response::Response;
use serde_json::{Value, json};

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
    /// Longest sequence of the model.
    pub max_model_len: u32,
}

/// Names of the limit in context-length errors of vLLM, SGLang, TensorRT-LLM and llama.cpp, most with its value.
const LENGTHS: &str = "context length|context size|context window|model length|sequence length|maximum input length|\
                       maximum allowed length|multimodal tokens|max_model_len|max_num_tokens|max_seq_len";

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
    let message = message.to_ascii_lowercase().replace(['(', '`'], "");
    if !LENGTHS.split('|').any(|words| message.contains(words)) {
        return None;
    }
    let number_in = |rest: &str| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok();
    let number_at_end = |text: &str| text.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
    let following =
        |words: &[&str]| words.iter().find_map(|words| number_in(message.split_once(words)?.1.trim_start()));
    let before = |words: &[&str]| words.iter().find_map(|words| number_at_end(message.split_once(words)?.0));
    let given = |number: u32| Some(number).filter(|number| *number > 0);
    // Between words and number are `is`, `of` or `=`.
    let limit_after = |rest: &str| number_in(rest.trim_start_matches([' ', '=', 'i', 's', 'o', 'f']));
    let limit = LENGTHS
        .split('|')
        .find_map(|words| limit_after(message.split_once(words)?.1))
        .or_else(|| following(&[">="]))
        .or(given(known.max_model_len))?;
    let prompt = before(&[" input tokens", " in the messages", " tokens from the input messages"])
        .or_else(|| following(&["the input", "request", "prompt has", "prompt_len", "=>", "length"]))
        .max(given(known.prompt_tokens));
    let output = before(&[" output tokens", " in the completion", " tokens for the completion"])
        .or_else(|| following(&["too large:", "_tokens="]));
    match (prompt.unwrap_or(0), output) {
        (0, None) => None,
        (prompt, Some(output)) if prompt < limit => (prompt.saturating_add(output) > limit).then(|| {
            format!(
                "input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, decrease input \
                 length or `max_tokens` and try again"
            )
        }),
        // Some engines give a lower bound, or the length without the first output token.
        (prompt, _) => {
            let prompt = prompt.max(limit.saturating_add(1));
            Some(format!("prompt is too long: {prompt} tokens > {limit} maximum"))
        }
    }
}

/// Message of an error in the formats of the gateway and of engines: `error.message`, `error`, `message` or `detail`.
pub fn error_message(body: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let text = ["/error/message", "/error", "/message"].iter().find_map(|path| body.pointer(path)?.as_str());
    // FastAPI sends a text or a list of violations.
    let detail = || body.get("detail").filter(|detail| !detail.is_null());
    text.or_else(|| detail()?.as_str()).map(str::to_owned).or_else(|| detail().map(Value::to_string))
}
