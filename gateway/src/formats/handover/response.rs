//! Response of the prefill leg.

use std::fmt;

use axum::body::Bytes;
use pointsman::{AnswerKind, AnswerReader};
use serde::Deserialize;

use super::object::{ObjectError, ObjectText, elements};
use super::{PromptLogprobs, Protocol, completed};
use crate::formats::openai::Endpoint;

/// Maximum number of characters of a value in an error.
const SHOWN_CHARS_MAX: usize = 40;

/// Reason why a response of the prefill leg is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrefillResponseError {
    /// The body is not UTF-8.
    #[error("the prefill response must be UTF-8, but is not from byte {valid_up_to} on")]
    Utf8 {
        /// Number of valid bytes before the first invalid byte.
        valid_up_to: usize,
    },
    /// The body is not a JSON object, or repeats a field that the handover reads.
    #[error("the prefill response {reason}")]
    Object {
        /// Rule and position.
        reason: String,
    },
    /// A stream that ends with an error, or without its end mark.
    #[error("the stream of the prefill leg must end with [DONE], but ended {}", ended(*status))]
    Stream {
        /// Status in the error event, if there is one.
        status: Option<u16>,
    },
    /// A field has a value of the wrong type.
    #[error("field {field} of the prefill response must be {rule}, but is {value}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Accepted values.
        rule: &'static str,
        /// Start of the value.
        value: String,
    },
}

fn ended(status: Option<u16>) -> String {
    status.map_or_else(|| "early".to_owned(), |status| format!("with status {status}"))
}

/// Response of the prefill leg.
///
/// ```
/// use pointsman_gateway::formats::handover::{PrefillResponse, Protocol};
///
/// let body = r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_port": 5600},
///     "usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}"#;
/// let response = PrefillResponse::parse(Protocol::VllmNixl, body.into())?;
/// assert_eq!(response.parameters.as_deref(), Some(&br#"{"remote_port": 5600}"#[..]));
/// assert_eq!(response.cached_tokens, Some(8));
/// # Ok::<(), pointsman_gateway::formats::handover::PrefillResponseError>(())
/// ```
#[derive(Clone)]
pub struct PrefillResponse {
    /// JSON object for the decode leg: `kv_transfer_params` (NIXL) or `disaggregated_params` of the first choice
    /// (TensorRT-LLM). `None` if the prefill rank holds no blocks; the decode rank then computes the prompt.
    pub parameters: Option<Bytes>,
    /// JSON of the prompt's token ids (TensorRT-LLM).
    pub prompt_token_ids: Option<Bytes>,
    /// Prompt tokens in the cache of the prefill rank, if the engine reports them.
    pub cached_tokens: Option<u32>,
    /// Finish reason of the first choice. For the responses endpoint, `length` or `stop`, or another status.
    pub finish_reason: Option<String>,
    protocol: Protocol,
    body: Bytes,
}

impl PrefillResponse {
    /// Parses the body of a successful response.
    ///
    /// # Errors
    /// A body that is not a JSON object, or parameters that are not an object.
    pub fn parse(protocol: Protocol, body: Bytes) -> Result<Self, PrefillResponseError> {
        // SGLang's prefill leg is streamed if the request is.
        if protocol == Protocol::Sglang && body.trim_ascii_start().starts_with(b"data:") {
            return Self::parse_events(protocol, body);
        }
        let text = std::str::from_utf8(&body)
            .map_err(|error| PrefillResponseError::Utf8 { valid_up_to: error.valid_up_to() })?;
        let known = ["kv_transfer_params", "prompt_token_ids", "choices", "usage", "status", "incomplete_details"];
        let object = ObjectText::parse(text, &known)?;
        let choice = object.json("choices").and_then(elements).and_then(|choices| choices.first().copied());
        let choice = choice.filter(|choice| choice.starts_with('{'));
        let choice =
            choice.map(|choice| ObjectText::parse(choice, &["finish_reason", "disaggregated_params"])).transpose()?;
        let finish_reason = match &choice {
            Some(choice) => choice.json("finish_reason").and_then(string),
            None => object.json("status").and_then(string).map(|status| reason_of_status(status, &object)),
        };
        let parameters = match protocol {
            // Every other end frees the blocks at once. `tool_calls` replaces `stop` and `length` if the output has calls.
            Protocol::VllmNixl => match finish_reason.as_deref() {
                None | Some("length" | "stop" | "tool_calls") => parameters("kv_transfer_params", Some(&object))?,
                Some(_) => None,
            },
            Protocol::TensorrtLlm => parameters("disaggregated_params", choice.as_ref())?,
            Protocol::VllmMooncake | Protocol::VllmP2pNccl | Protocol::Sglang => None,
        };
        let part = |json: &str| body.slice_ref(json.as_bytes());
        let parameters = parameters.map(part);
        let prompt_token_ids = match protocol {
            Protocol::TensorrtLlm => object.json("prompt_token_ids").filter(|ids| ids.starts_with('[')).map(part),
            Protocol::VllmNixl | Protocol::VllmMooncake | Protocol::VllmP2pNccl | Protocol::Sglang => None,
        };
        let cached_tokens = object.json("usage").and_then(cached_tokens);
        Ok(Self { parameters, prompt_token_ids, cached_tokens, finish_reason, protocol, body })
    }

    /// Parses a streamed response, which has no parameters.
    fn parse_events(protocol: Protocol, body: Bytes) -> Result<Self, PrefillResponseError> {
        let mut reader = AnswerReader::new(AnswerKind::Events);
        reader.read(&body);
        reader.end();
        let status = reader.error_status();
        if status.is_some() || !reader.is_complete() {
            return Err(PrefillResponseError::Stream { status });
        }
        let cached_tokens = reader.usage().and_then(|usage| usage.cached_tokens);
        Ok(Self { parameters: None, prompt_token_ids: None, cached_tokens, finish_reason: None, protocol, body })
    }

    /// Whether the prefill leg has completed the request (TensorRT-LLM). The client then receives
    /// [`complete_response`](Self::complete_response), and the decode leg is not sent.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match self.protocol {
            Protocol::TensorrtLlm => {
                self.finish_reason.as_deref().is_some_and(|reason| !matches!(reason, "length" | "not_finished"))
            }
            Protocol::VllmNixl | Protocol::VllmMooncake | Protocol::VllmP2pNccl | Protocol::Sglang => false,
        }
    }

    /// Response for the client of a request that the prefill leg has completed.
    ///
    /// The response lacks `disaggregated_params` and `prompt_token_ids`. For a streamed request it is an event stream
    /// with one chunk, a usage chunk if `include_usage`, and `[DONE]`.
    #[must_use]
    pub fn complete_response(&self, endpoint: Endpoint, is_stream: bool, include_usage: bool) -> Bytes {
        let text = std::str::from_utf8(&self.body).expect("the body is UTF-8, because it was parsed");
        if is_stream { completed::stream(text, endpoint, include_usage) } else { completed::response(text) }.into()
    }

    /// Probabilities of the prompt's tokens, for a request that [wants them](super::LegBodies::wants_prompt_logprobs).
    #[must_use]
    pub fn prompt_logprobs(&self) -> PromptLogprobs {
        std::str::from_utf8(&self.body).map(PromptLogprobs::read).unwrap_or_default()
    }
}

/// A field with an object, or `None` for null.
fn parameters<'a>(
    field: &'static str,
    object: Option<&ObjectText<'a>>,
) -> Result<Option<&'a str>, PrefillResponseError> {
    match object.and_then(|object| object.json(field)) {
        Some(json) if !json.starts_with('{') => {
            let value = json.chars().take(SHOWN_CHARS_MAX).collect();
            Err(PrefillResponseError::Field { field, rule: "an object or null", value })
        }
        json => Ok(json),
    }
}

fn string(json: &str) -> Option<String> {
    serde_json::from_str(json).ok()
}

/// Finish reason of a response of the responses endpoint, which has a status instead.
fn reason_of_status(status: String, response: &ObjectText<'_>) -> String {
    /// Value of `incomplete_details`.
    #[derive(Deserialize)]
    struct IncompleteDetails {
        reason: String,
    }

    let details = response.json("incomplete_details").and_then(|json| serde_json::from_str(json).ok());
    match (status.as_str(), details) {
        ("completed", _) => "stop".to_owned(),
        ("incomplete", None) => "length".to_owned(),
        ("incomplete", Some(IncompleteDetails { reason })) if reason == "max_output_tokens" => "length".to_owned(),
        ("incomplete", Some(IncompleteDetails { reason })) => reason,
        _ => status,
    }
}

fn cached_tokens(usage: &str) -> Option<u32> {
    /// The fields of a usage that count cached tokens.
    #[derive(Deserialize)]
    struct CachedUsage {
        prompt_tokens_details: Option<CachedDetails>,
        input_tokens_details: Option<CachedDetails>,
    }

    #[derive(Deserialize)]
    struct CachedDetails {
        cached_tokens: Option<u64>,
    }

    let usage: CachedUsage = serde_json::from_str(usage).ok()?;
    let details = usage.prompt_tokens_details.or(usage.input_tokens_details)?;
    details.cached_tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX))
}

impl From<ObjectError> for PrefillResponseError {
    fn from(error: ObjectError) -> Self {
        Self::Object { reason: error.to_string() }
    }
}

/// Omits the output for confidentiality.
impl fmt::Debug for PrefillResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefillResponse")
            .field("has_parameters", &self.parameters.is_some())
            .field("cached_tokens", &self.cached_tokens)
            .field("finish_reason", &self.finish_reason)
            .field("protocol", &self.protocol)
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}
