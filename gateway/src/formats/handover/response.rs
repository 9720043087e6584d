//! Response of the prefill leg.

use axum::body::Bytes;
use pointsman::{AnswerKind, AnswerReader};
use serde::Deserialize;

use super::object::{ObjectError, ObjectText, elements};
use super::{Protocol, completed};
use crate::formats::openai::Endpoint;

/// Maximum number of characters of a value in an error.
const SHOWN_CHARS_MAX: usize = 40;

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
/// # Ok::<(), String>(())
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
    pub fn parse(protocol: Protocol, body: Bytes) -> Result<Self, String> {
        // SGLang's prefill leg is streamed if the request is.
        if protocol == Protocol::Sglang && body.trim_ascii_start().starts_with(b"data:") {
            return Self::parse_events(protocol, body);
        }
        let not_utf8 = |at| format!("the prefill response must be UTF-8, but is not from byte {at} on");
        let text = std::str::from_utf8(&body).map_err(|error| not_utf8(error.valid_up_to()))?;
        let invalid = |error: ObjectError| format!("the prefill response {error}");
        let known = ["kv_transfer_params", "prompt_token_ids", "choices", "status", "incomplete_details"];
        let object = ObjectText::parse(text, &known).map_err(invalid)?;
        let choice = object.json("choices").and_then(elements).and_then(|choices| choices.first().copied());
        let choice = choice.filter(|choice| choice.starts_with('{'));
        let choice = choice.map(|choice| ObjectText::parse(choice, &["finish_reason", "disaggregated_params"]));
        let choice = choice.transpose().map_err(invalid)?;
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
        let mut reader = AnswerReader::new(AnswerKind::Json);
        reader.read(&body);
        reader.end();
        let cached_tokens = reader.usage().and_then(|usage| usage.cached_tokens);
        Ok(Self { parameters, prompt_token_ids, cached_tokens, finish_reason, protocol, body })
    }

    /// Parses a streamed response, which has no parameters.
    fn parse_events(protocol: Protocol, body: Bytes) -> Result<Self, String> {
        let mut reader = AnswerReader::new(AnswerKind::Events);
        reader.read(&body);
        reader.end();
        let status = reader.error_status();
        if status.is_some() || !reader.is_complete() {
            let ended = status.map_or("early".to_owned(), |status| format!("with status {status}"));
            return Err(format!("the stream of the prefill leg must end with [DONE], but ended {ended}"));
        }
        let cached_tokens = reader.usage().and_then(|usage| usage.cached_tokens);
        Ok(Self { parameters: None, prompt_token_ids: None, cached_tokens, finish_reason: None, protocol, body })
    }

    /// Whether the prefill leg has completed the request (TensorRT-LLM). The client then receives
    /// [`complete_response`](Self::complete_response), and the decode leg is not sent.
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
    pub fn complete_response(&self, endpoint: Endpoint, is_stream: bool, include_usage: bool) -> Bytes {
        let text = std::str::from_utf8(&self.body).expect("the body is UTF-8, because it was parsed");
        if is_stream { completed::stream(text, endpoint, include_usage) } else { completed::response(text) }.into()
    }
}

/// A field with an object, or `None` for null.
fn parameters<'a>(field: &'static str, object: Option<&ObjectText<'a>>) -> Result<Option<&'a str>, String> {
    match object.and_then(|object| object.json(field)) {
        Some(json) if !json.starts_with('{') => {
            let value: String = json.chars().take(SHOWN_CHARS_MAX).collect();
            Err(format!("field {field} of the prefill response must be an object or null, but is {value}"))
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
