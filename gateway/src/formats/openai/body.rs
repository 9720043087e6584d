//! Request body fields used for routing.
//!
//! One pass over the body, no copies of the other fields, memory within a small multiple of the body. Repeated fields
//! are rejected, because the next reader of the body might use the other occurrence. The tokenizer interprets chat
//! messages.

use std::borrow::Cow;
use std::ops::Range;

use axum::body::Bytes;
use pointsman::SessionId;
use serde::Deserialize;

use super::client_prompt::{ChatStyle, ClientPrompt, MediaName};
use super::endpoint::{BodyForm, Endpoint};
use super::error::ApiError;
use super::fields::{Fields, Given};
use super::prompt;
use super::session::Session;
use super::work::FurtherWork;
use crate::formats::json::{include_usage, quoted, spliced};

/// A request body and its parsed routing fields.
///
/// ```
/// use pointsman_gateway::formats::openai::{ClientPrompt, Edits, Endpoint, RequestBody};
///
/// let body = r#"{"model": "chat", "prompt": [1, 2, 3], "max_tokens": 5}"#;
/// let parsed = RequestBody::parse(Endpoint::Completions, body.into())?;
/// assert_eq!(parsed.model.as_deref(), Some("chat"));
/// assert_eq!(parsed.prompt, ClientPrompt::Tokens(vec![1, 2, 3]));
/// assert_eq!(parsed.body(Edits::default()), body);
/// let sent = parsed.body(Edits { model: Some("base"), ..Edits::default() });
/// assert_eq!(sent, r#"{"model": "base", "prompt": [1, 2, 3], "max_tokens": 5}"#);
/// # Ok::<(), pointsman_gateway::formats::openai::ApiError>(())
/// ```
#[derive(Clone)]
pub struct RequestBody {
    /// Requested endpoint.
    pub endpoint: Endpoint,
    /// Model name from the client; not empty.
    pub model: Option<String>,
    /// Whether the response is streamed.
    pub stream: bool,
    /// Whether a stream ends with a usage record (`stream_options.include_usage`).
    pub include_usage: bool,
    /// Cache salt of the client.
    pub cache_salt: Option<String>,
    /// Session from the body (`session_id`); the header takes precedence.
    pub session_id: Option<String>,
    /// Session that another field names.
    pub session: Option<Session<'static>>,
    /// Whether the gateway may name a session to the engine: the request may end with a call of a tool, and names none.
    pub takes_session: bool,
    /// Whether the request has no priority for the engine.
    pub takes_priority: bool,
    /// Stored response that the request continues.
    pub previous_response_id: Option<String>,
    /// Maximum output tokens of one choice. Values above `u32` saturate.
    pub output_tokens_max: Option<u32>,
    /// The prompt, the first one of several.
    pub prompt: ClientPrompt,
    /// Work beside that of the prompt.
    pub further: FurtherWork,
    body: Bytes,
    spans: Spans,
}

/// Output limit in the sampling parameters of one prompt: vLLM's name and SGLang's.
fn sampling_tokens_max(sampling_params: Given<'_>) -> Option<u32> {
    #[derive(Deserialize)]
    struct Sampling {
        max_tokens: Option<u32>,
        max_new_tokens: Option<u32>,
    }
    let sampling: Sampling = serde_json::from_str(sampling_params.json()?).ok()?;
    sampling.max_new_tokens.or(sampling.max_tokens)
}

/// Positions of body values that may have to change.
#[derive(Clone)]
struct Spans {
    /// Position after the opening brace.
    start: usize,
    model: Option<Range<usize>>,
    cache_salt: Option<Range<usize>>,
    /// Fields that select a rank or a cache source. Only the gateway may set them.
    places: Vec<Range<usize>>,
}

/// Changes of a body.
#[derive(Clone, Copy, Default)]
pub struct Edits<'a> {
    /// Model name at the worker.
    pub model: Option<&'a str>,
    /// Cache salt.
    pub cache_salt: Option<&'a str>,
    /// Names of media parts. Ignored for prompts whose messages are not part of the body.
    pub media_names: &'a [MediaName],
}

impl RequestBody {
    /// Parses a body.
    ///
    /// # Errors
    /// 400 for a body that is not a JSON object, is nested too deeply, or has a field of a shape that no engine
    /// accepts.
    pub fn parse(endpoint: Endpoint, body: Bytes) -> Result<Self, ApiError> {
        Self::parse_for(endpoint, body, |_| ChatStyle::default())
    }

    /// Parses a body for the engines of the named model.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn parse_for(
        endpoint: Endpoint,
        body: Bytes,
        style: impl FnOnce(Option<&str>) -> ChatStyle,
    ) -> Result<Self, ApiError> {
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
            Endpoint::Completions | Endpoint::Messages => fields.max_tokens.count()?,
            Endpoint::Responses => fields.max_output_tokens.count()?,
            Endpoint::Generate => sampling_tokens_max(fields.sampling_params),
            _ => None,
        };
        let previous = fields.previous_response_id.text().ok().flatten();
        let previous_response_id = previous.filter(|_| endpoint == Endpoint::Responses);
        let (stream, cache_salt) = (fields.stream.flag()?.unwrap_or(false), fields.cache_salt.text()?);
        let prompt = prompt::read(endpoint, &fields, &body, style(model.as_deref()))?;
        let further = FurtherWork::read(endpoint, &fields)?;
        let session = Session::of_body(&fields);
        let spans = Spans::of(&fields, &body);
        Ok(Self {
            include_usage: include_usage(fields.stream_options.json()),
            endpoint,
            model,
            stream,
            cache_salt,
            session_id,
            session,
            takes_session: fields.tools.json().is_some()
                && [fields.session_id, fields.session_params].iter().all(|given| given.json().is_none()),
            takes_priority: fields.priority.json().is_none(),
            previous_response_id,
            output_tokens_max,
            prompt,
            further,
            body,
            spans,
        })
    }

    /// A body that is forwarded as it is.
    pub fn unread(endpoint: Endpoint, body: Bytes) -> Self {
        Self::opaque(endpoint, body, None, false)
    }

    /// A body without a readable prompt, with the name of its model and the position of that name.
    pub(super) fn opaque(endpoint: Endpoint, body: Bytes, model: Option<(String, Range<usize>)>, stream: bool) -> Self {
        let (model, at) = model.unzip();
        Self {
            endpoint,
            model,
            stream,
            include_usage: false,
            cache_salt: None,
            session_id: None,
            session: None,
            takes_session: false,
            takes_priority: false,
            previous_response_id: None,
            output_tokens_max: None,
            prompt: ClientPrompt::Opaque(endpoint.name()),
            further: FurtherWork::default(),
            body,
            spans: Spans { start: 0, model: at, cache_salt: None, places: Vec::new() },
        }
    }

    /// Length of the body.
    pub fn body_bytes(&self) -> usize {
        self.body.len()
    }

    /// The body with these changes; without changes, the same bytes. Fields that select a rank or a cache source are
    /// always set to null.
    pub fn body(&self, edits: Edits<'_>) -> Bytes {
        let model = edits.model.filter(|model| self.model.as_deref() != Some(model));
        if self.endpoint.form() != BodyForm::Json {
            let Some((model, span)) = model.zip(self.spans.model.clone()) else { return self.body.clone() };
            return spliced(&self.body, vec![(span, model.into())]).into();
        }
        let cache_salt = edits.cache_salt.filter(|salt| self.cache_salt.as_deref() != Some(salt));
        let (mut inserted, mut replaced) = (String::new(), Vec::<(Range<usize>, Cow<'_, str>)>::new());
        let texts = [("model", model, &self.spans.model), ("cache_salt", cache_salt, &self.spans.cache_salt)];
        for (name, text, span) in texts {
            let Some(text) = text else { continue };
            let text = quoted(text);
            match span {
                Some(span) => replaced.push((span.clone(), text.into())),
                None => inserted.push_str(&format!("\"{name}\":{text},")),
            }
        }
        replaced.extend(self.spans.places.iter().map(|span| (span.clone(), "null".into())));
        if let Some(start) = self.messages_start() {
            let names = edits.media_names.iter();
            replaced.extend(names.map(|MediaName { at, json }| (start + at.start..start + at.end, json.into())));
        }
        if inserted.is_empty() && replaced.is_empty() {
            return self.body.clone();
        }
        let start = self.spans.start;
        if self.body[start..].trim_ascii_start().starts_with(b"}") {
            inserted.pop();
        }
        replaced.push((start..start, inserted.into()));
        spliced(&self.body, replaced).into()
    }

    /// Position of the messages in the body; `None` if they are not part of it.
    fn messages_start(&self) -> Option<usize> {
        let ClientPrompt::Chat(parts) = &self.prompt else { return None };
        let start = (parts.messages.as_ptr() as usize).checked_sub(self.body.as_ptr() as usize)?;
        (start + parts.messages.len() <= self.body.len()).then_some(start)
    }
}

impl Spans {
    fn of(fields: &Fields<'_>, body: &[u8]) -> Self {
        let opens = body.iter().position(|byte| *byte == b'{').expect("the body is a JSON object");
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
            fields.disaggregated_params,
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
