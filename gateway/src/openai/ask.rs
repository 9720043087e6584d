//! The parts of a request's body that routing reads.
//!
//! Owns what they are, and the few changes that a body needs on its way. Promises one pass over the body, no copy of
//! what is only carried, memory within a small multiple of the body, and that fields which are there twice are refused:
//! whoever reads the body next might take the other one. Leaves what chat messages mean to the tokenizer.

use std::fmt;
use std::ops::Range;

use axum::body::Bytes;
use pointsman::session::SessionId;

use super::error::ApiError;
use super::fields::Fields;
use super::prompt;

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
    /// A variable of the template, too (`reasoning_effort`), which engines hand over beside `template_kwargs`.
    pub reasoning_effort: Option<Bytes>,
    /// Whether the template opens the answer. Default true.
    pub add_generation_prompt: Option<bool>,
    /// Whether the last message is left open, to be gone on with. Default false.
    pub continue_final_message: Option<bool>,
    /// Whether the client brings a template of its own (`chat_template`).
    pub has_own_template: bool,
}

/// A request's body, and what was read of it.
///
/// ```
/// use pointsman_gateway::openai::{Ask, AskedPrompt, Edits, Endpoint};
///
/// let body = r#"{"model": "chat", "prompt": [1, 2, 3], "max_tokens": 5}"#;
/// let ask = Ask::parse(Endpoint::Completions, body.into())?;
/// assert_eq!(ask.model.as_deref(), Some("chat"));
/// assert_eq!(ask.prompt, AskedPrompt::Tokens(vec![1, 2, 3]));
/// assert_eq!(ask.body(Edits::default()), body);
/// let sent = ask.body(Edits { model: Some("base"), ..Edits::default() });
/// assert_eq!(sent, r#"{"model": "base", "prompt": [1, 2, 3], "max_tokens": 5}"#);
/// # Ok::<(), pointsman_gateway::openai::ApiError>(())
/// ```
#[derive(Clone)]
pub struct Ask {
    /// What is asked.
    pub endpoint: Endpoint,
    /// The model's name, as the client says it; not empty.
    pub model: Option<String>,
    /// Whether the answer shall be streamed.
    pub stream: bool,
    /// Keeps its cache apart.
    pub cache_salt: Option<String>,
    /// Its session, where the body names one (`session_id`); the header goes before it.
    pub session_id: Option<String>,
    /// The longest output it allows: of one answer, where it asks for several. More than `u32` counts as its largest.
    pub output_tokens_max: Option<u32>,
    /// The prompt.
    pub prompt: AskedPrompt,
    body: Bytes,
    spans: Spans,
}

/// Where values stand in the body that may have to be others.
#[derive(Clone)]
struct Spans {
    /// Behind the brace that opens it.
    start: usize,
    model: Option<Range<usize>>,
    cache_salt: Option<Range<usize>>,
    /// Of fields that say which rank serves, or where it gets its cache from: nobody's but the gateway's to say.
    places: Vec<Range<usize>>,
}

/// What is to be changed in a body.
#[derive(Clone, Copy, Default)]
pub struct Edits<'a> {
    /// The model's name at the worker.
    pub model: Option<&'a str>,
    /// The salt.
    pub cache_salt: Option<&'a str>,
}

impl Ask {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 where it is not a JSON object, nested too deep, or a field that is read has a shape that no engine takes.
    pub fn parse(endpoint: Endpoint, body: Bytes) -> Result<Self, ApiError> {
        let fields = Fields::find(&body)?;
        let model = fields.model.text()?;
        if model.as_ref().is_some_and(String::is_empty) {
            return Err(ApiError::invalid("invalid_value", Some("model"), "model must not be empty"));
        }
        let session_id = fields.session_id.text()?;
        if let Some(Err(error)) = session_id.as_deref().map(SessionId::new) {
            return Err(ApiError::invalid("invalid_session_id", Some("session_id"), error.to_string()));
        }
        let output_tokens_max = match endpoint {
            Endpoint::Chat => fields.max_completion_tokens.count()?.or(fields.max_tokens.count()?),
            Endpoint::Completions => fields.max_tokens.count()?,
            Endpoint::Responses => fields.max_output_tokens.count()?,
            Endpoint::Embeddings => None,
        };
        let (stream, cache_salt) = (fields.stream.flag()?.unwrap_or(false), fields.cache_salt.text()?);
        let prompt = prompt::read(endpoint, &fields, &body)?;
        let spans = Spans::of(&fields, &body);
        Ok(Self { endpoint, model, stream, cache_salt, session_id, output_tokens_max, prompt, body, spans })
    }

    /// The body with these changes, and otherwise as it came: where nothing changes it is the same bytes. Fields by
    /// which a client would choose the rank, or where a rank fetches its cache from, are always null.
    #[must_use]
    pub fn body(&self, edits: Edits<'_>) -> Bytes {
        let model = edits.model.filter(|model| self.model.as_deref() != Some(model));
        let cache_salt = edits.cache_salt.filter(|salt| self.cache_salt.as_deref() != Some(salt));
        let (mut inserted, mut replaced) = (String::new(), Vec::new());
        let texts = [("model", model, &self.spans.model), ("cache_salt", cache_salt, &self.spans.cache_salt)];
        for (name, text, span) in texts {
            let Some(text) = text else { continue };
            let text = quoted(text);
            match span {
                Some(span) => replaced.push((span.clone(), text)),
                None => inserted.push_str(&format!("\"{name}\":{text},")),
            }
        }
        replaced.extend(self.spans.places.iter().map(|span| (span.clone(), "null".to_owned())));
        if inserted.is_empty() && replaced.is_empty() {
            return self.body.clone();
        }
        replaced.sort_unstable_by_key(|(span, _)| span.start);
        let more: usize = replaced.iter().map(|(_, text)| text.len()).sum();
        let mut edited = Vec::with_capacity(self.body.len() + inserted.len() + more);
        edited.extend_from_slice(&self.body[..self.spans.start]);
        // Every endpoint has a field that must be there: one follows the comma.
        edited.extend_from_slice(inserted.as_bytes());
        let mut at = self.spans.start;
        for (span, text) in replaced {
            edited.extend_from_slice(&self.body[at..span.start]);
            edited.extend_from_slice(text.as_bytes());
            at = span.end;
        }
        edited.extend_from_slice(&self.body[at..]);
        Bytes::from(edited)
    }
}

impl Spans {
    fn of(fields: &Fields<'_>, body: &[u8]) -> Self {
        let opens = body.iter().position(|byte| *byte == b'{').expect("the body is an object");
        let places = [
            fields.routed_dp_rank,
            fields.data_parallel_rank,
            fields.disagg_prefill_dp_rank,
            fields.bootstrap_host,
            fields.bootstrap_port,
            fields.bootstrap_room,
            fields.bootstrap_pair_key,
            fields.kv_transfer_params,
            fields.ec_transfer_params,
        ];
        let given = places.iter().filter(|given| given.json().is_some());
        Self {
            start: opens + 1,
            model: fields.model.span(body),
            cache_salt: fields.cache_salt.span(body),
            places: given.filter_map(|given| given.span(body)).collect(),
        }
    }
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("text is written to memory")
}

/// Without prompt and salt, which are nobody else's business.
impl fmt::Debug for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ask")
            .field("endpoint", &self.endpoint)
            .field("model", &self.model)
            .field("stream", &self.stream)
            .field("output_tokens_max", &self.output_tokens_max)
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

/// Without the salt.
impl fmt::Debug for Edits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Edits").field("model", &self.model).finish_non_exhaustive()
    }
}
