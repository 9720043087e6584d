//! Request bodies.
//!
//! Defines the fields that a mock engine uses and their rules; all other fields are ignored. An invalid body is
//! rejected with a message. The tokenizer produces the tokens, and the handlers select the rank.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::answer;

/// Default number of output tokens, as in OpenAI's completions.
const OUTPUT_TOKENS: u32 = 16;

/// Prompt of `/v1/completions` and `/tokenize`: one per request.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(super) enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
}

/// Fields common to both completion APIs.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Common {
    pub(super) model: Option<String>,
    pub(super) max_tokens: Option<u32>,
    /// Newer name of `max_tokens`, for chats.
    pub(super) max_completion_tokens: Option<u32>,
    /// Exact number of generated tokens, if present.
    pub(super) min_tokens: Option<u32>,
    /// Generates `max_tokens` even if `min_tokens` is present.
    ignore_eos: Option<bool>,
    stream: Option<bool>,
    pub(super) stream_options: Option<StreamOptions>,
    pub(super) cache_salt: Option<String>,
    pub(super) session_id: Option<String>,
    n: Option<u32>,
    /// Adds the token ids of the output to each chunk of a stream, as vLLM.
    return_token_ids: Option<bool>,
    /// The other fields. Those of disaggregated serving have any type until a leg is classified, so that an engine
    /// without it ignores them.
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(super) struct CompletionRequest {
    pub(super) prompt: PromptInput,
    #[serde(flatten)]
    pub(super) common: Common,
}

#[derive(Debug, Deserialize)]
pub(super) struct ChatRequest {
    pub(super) messages: Vec<Message>,
    /// Leaves the last message open.
    pub(super) continue_final_message: Option<bool>,
    #[serde(flatten)]
    pub(super) common: Common,
}

#[derive(Debug, Deserialize)]
pub(super) struct TokenizeRequest {
    pub(super) prompt: Option<PromptInput>,
    pub(super) messages: Option<Vec<Message>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Message {
    pub(super) role: String,
    pub(super) content: Option<Content>,
}

/// Text of a message, as a string or in parts.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
pub(super) struct Part {
    text: String,
}

impl Common {
    /// Rejects values that a mock engine does not support.
    pub(super) fn validate(&self) -> Result<(), String> {
        if self.n.is_some_and(|n| n != 1) {
            return Err(format!("n is {}: only one choice is supported", self.n.unwrap_or_default()));
        }
        if self.output_tokens_max() == 0 {
            return Err("max_tokens is 0: at least one token is generated".to_owned());
        }
        if self.cache_salt.as_ref().is_some_and(String::is_empty) {
            return Err("cache_salt is empty: omit it or set a value".to_owned());
        }
        Ok(())
    }

    /// A field of disaggregated serving.
    pub(super) fn handover(&self, name: &str) -> Option<&Value> {
        self.others.get(name).filter(|value| !value.is_null())
    }

    fn output_tokens_max(&self) -> u32 {
        self.max_completion_tokens.or(self.max_tokens).unwrap_or(OUTPUT_TOKENS)
    }

    /// Number of tokens to generate. A mock engine has no end-of-sequence token. The output ends at `min_tokens`, the
    /// earliest end of a real engine. Without `min_tokens`, or with `ignore_eos`, it ends at the maximum.
    pub(super) fn output_tokens(&self) -> u32 {
        let most = self.output_tokens_max();
        let least = self.min_tokens.filter(|_| self.ignore_eos != Some(true));
        least.map_or(most, |least| least.clamp(1, most))
    }

    pub(super) fn is_stream(&self) -> bool {
        self.stream.unwrap_or_default()
    }

    pub(super) fn returns_token_ids(&self) -> bool {
        self.return_token_ids.unwrap_or_default()
    }

    pub(super) fn has_usage_chunk(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or_default()
    }
}

impl Message {
    pub(super) fn text(&self) -> String {
        match &self.content {
            None => String::new(),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => parts.iter().map(|part| part.text.as_str()).collect(),
        }
    }
}

/// A body as JSON of the expected type.
pub(super) struct Parsed<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Parsed<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let body = Bytes::from_request(request, state).await;
        let body = body.map_err(|error| answer::error(error.status(), &error.body_text()))?;
        serde_json::from_slice(&body).map(Self).map_err(|error| {
            answer::error(StatusCode::BAD_REQUEST, &format!("the body is not the expected JSON: {error}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_defaults_and_rules() {
        let common = |json: &str| serde_json::from_str::<Common>(json).expect("known types");
        let plain = common(r#"{"stream": null, "temperature": 0.5}"#);
        assert_eq!((plain.output_tokens_max(), plain.is_stream(), plain.validate()), (16, false, Ok(())));
        let newer =
            common(r#"{"max_tokens": 3, "max_completion_tokens": 5, "stream_options": {"include_usage": true}}"#);
        assert_eq!((newer.output_tokens_max(), newer.output_tokens(), newer.has_usage_chunk()), (5, 5, true));
        for (fields, generated) in [
            (r#"{"max_tokens": 4096, "min_tokens": 7}"#, 7),
            (r#"{"max_tokens": 4096, "min_tokens": 7, "ignore_eos": true}"#, 4096),
            (r#"{"max_tokens": 4096, "min_tokens": 0}"#, 1),
            (r#"{"max_tokens": 5, "min_tokens": 7}"#, 5),
        ] {
            assert_eq!(common(fields).output_tokens(), generated, "{fields}");
        }
        for wrong in [r#"{"n": 2}"#, r#"{"max_tokens": 0}"#, r#"{"cache_salt": ""}"#] {
            assert!(common(wrong).validate().is_err(), "{wrong}");
        }
    }
}
