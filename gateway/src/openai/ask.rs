//! The parts of a request's body that routing reads.
//!
//! Owns which fields these are, and the places in the body where they stand. Promises one pass over the body, no copy of
//! what is not read, and that duplicate fields are refused: whoever reads the body next might take the other one. Leaves
//! what chat messages mean to the tokenizer.

use axum::body::Bytes;
use serde::Deserialize;

use super::error::ApiError;

/// A question that is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/v1/responses`.
    Responses,
}

impl Endpoint {
    /// Its path, here and at workers.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Responses => "/v1/responses",
        }
    }

    /// As metrics call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Responses => "responses",
        }
    }
}

/// A prompt as the client wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskedPrompt {
    /// Token ids.
    Tokens(Vec<u32>),
    /// Text.
    Text(String),
    /// Messages, to be put through a chat template.
    Chat(Box<ChatParts>),
    /// Nothing that tokens can be had of, and why, in one word for metrics: the request goes by load alone.
    Opaque(&'static str),
}

/// What a chat template is given, each part still JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatParts {
    /// The list of messages.
    pub messages: Bytes,
    /// The list of tools.
    pub tools: Option<Bytes>,
    /// The list of documents.
    pub documents: Option<Bytes>,
    /// Further variables of the template (`chat_template_kwargs`).
    pub template_kwargs: Option<Bytes>,
    /// Default true.
    pub add_generation_prompt: Option<bool>,
    /// Default false.
    pub continue_final_message: Option<bool>,
    /// Whether the client brings a template of its own (`chat_template`).
    pub has_own_template: bool,
}

/// A request's body, and what was read of it.
#[derive(Clone, Debug)]
pub struct Ask {
    /// What is asked.
    pub endpoint: Endpoint,
    /// The model's name, as the client says it.
    pub model: Option<String>,
    /// Whether the answer shall be streamed.
    pub stream: bool,
    /// Keeps its cache apart.
    pub cache_salt: Option<String>,
    /// The longest output it allows.
    pub output_tokens_max: Option<u32>,
    /// The prompt.
    pub prompt: AskedPrompt,
    body: Bytes,
}

/// What is to be changed in a body.
#[derive(Clone, Copy, Debug, Default)]
pub struct Edits<'a> {
    /// The model's name at the worker.
    pub model: Option<&'a str>,
    /// The salt.
    pub cache_salt: Option<&'a str>,
}

#[derive(Deserialize)]
struct Fields {
    model: Option<String>,
    stream: Option<bool>,
}

impl Ask {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 where it is not a JSON object, or a field that routing reads has a shape that no engine takes.
    pub fn parse(endpoint: Endpoint, body: Bytes) -> Result<Self, ApiError> {
        let fields: Fields = serde_json::from_slice(&body)
            .map_err(|error| ApiError::invalid("invalid_json", None, format!("the body is not JSON: {error}")))?;
        Ok(Self {
            endpoint,
            model: fields.model,
            stream: fields.stream.unwrap_or(false),
            cache_salt: None,
            output_tokens_max: None,
            prompt: AskedPrompt::Opaque("unread"),
            body,
        })
    }

    /// The body with these changes, and otherwise as it came; without changes it is the same bytes.
    #[must_use]
    pub fn body(&self, _edits: Edits<'_>) -> Bytes {
        self.body.clone()
    }
}
