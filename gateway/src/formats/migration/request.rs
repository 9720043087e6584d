//! Requests that can be resumed, and the bodies of their resume requests.

use std::borrow::Cow;

use axum::body::Bytes;
use serde::Deserialize;

use crate::formats::handover::object::{ObjectEdit, ObjectText, Positions, elements};
use crate::formats::json::{include_usage, quoted};
use crate::formats::openai::Endpoint;

/// Default of `max_tokens` in the completions API.
const COMPLETION_TOKENS: u64 = 16;

/// Fields with an effect that the prompt and the output so far do not carry. Only null is resumable.
const UNRESUMABLE: &[&str] = names![
    seed top_logprobs prompt_logprobs suffix functions function_call response_format guided_json guided_regex
    guided_choice guided_grammar structured_outputs structural_tag grammar regex ebnf json_schema prompt_embeds
    input_embeds truncate_prompt_tokens session_params thinking_token_budget audio
];

/// Flags that must be absent or false.
const FALSE_ONLY: &[&str] = &["logprobs", "echo", "use_beam_search", "continue_final_message", "return_hidden_states"];

/// Penalties for output tokens. In the resume request the output so far is a part of the prompt, which they ignore.
const ZERO_ONLY: &[&str] = &["frequency_penalty", "presence_penalty"];

/// Other fields that the rules read or the resume request changes.
const READ: &[&str] = names![
    stream stream_options n best_of tools tool_choice add_generation_prompt messages prompt stop return_token_ids
    max_tokens max_completion_tokens min_tokens
];

/// Form of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PromptForm {
    Chat,
    Text,
    TokenIds,
}

/// A streamed request with a sound resumption.
///
/// ```
/// use pointsman_gateway::formats::migration::{ResumableRequest, Resume, StreamJoiner};
/// use pointsman_gateway::formats::openai::Endpoint;
///
/// let body = r#"{"prompt": "a b", "stream": true, "max_tokens": 9}"#;
/// let request = ResumableRequest::parse(Endpoint::Completions, &body.into()).ok_or("not resumable")?;
/// let mut joiner = StreamJoiner::new(100);
/// joiner.push("data: {\"choices\":[{\"index\":0,\"text\":\" c\"}]}\n\n".into());
/// let resume = request.resume(joiner.output());
/// assert_eq!(resume, Resume::Send(r#"{"prompt": "a b c", "stream": true, "max_tokens": 8}"#.into()));
/// # Ok::<(), &str>(())
/// ```
#[derive(Clone)]
pub struct ResumableRequest {
    body: Bytes,
    fields: Positions,
    form: PromptForm,
    pub(super) is_chat: bool,
    pub(super) includes_usage: bool,
}

/// Output that the client has received.
#[derive(Clone, Debug, Default)]
pub struct SentOutput {
    /// The text.
    pub text: String,
    /// Ids of the tokens of the text, then of tokens without text yet.
    pub(super) ids: Vec<u32>,
    /// Length of the first part of the ids.
    pub(super) ids_sent: usize,
    /// Whether an event with text had no ids.
    pub(super) lacks_ids: bool,
    pub(super) tokens: u32,
}

impl SentOutput {
    /// Token ids of the text; `None` if not all are known, or if the client has ids of text that is generated again.
    pub fn token_ids(&self) -> Option<&[u32]> {
        (!self.lacks_ids && self.ids.len() == self.ids_sent).then_some(&*self.ids)
    }

    /// Number of tokens: by token ids or by the engine's usage if the stream has them, otherwise the number of events.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    pub(super) fn clear(&mut self) {
        *self = Self { tokens: self.tokens, lacks_ids: true, ..Self::default() };
    }
}

/// How to continue after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Sends this body.
    Send(Bytes),
    /// The output has the maximum length of the request: the stream ends without another engine.
    Complete,
    /// The output so far is not known as token ids.
    Unknown,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Option<Cow<'a, str>>,
}

impl ResumableRequest {
    /// Parses the body for the worker; `None` for a request without a sound resumption.
    pub fn parse(endpoint: Endpoint, body: &Bytes) -> Option<Self> {
        let text = str::from_utf8(body).ok()?;
        let known: Vec<&'static str> = [UNRESUMABLE, FALSE_ONLY, ZERO_ONLY, READ].concat();
        let fields = Positions::find(text, &known).ok()?;
        let object = ObjectText::scanned(text, fields.clone());
        let form = form_of(endpoint, &object)?;
        if !is_sound(&object, form) {
            return None;
        }
        let includes_usage = include_usage(object.json("stream_options"));
        Some(Self { body: body.clone(), fields, form, is_chat: endpoint == Endpoint::Chat, includes_usage })
    }

    /// Whether engines open the output by the chat template.
    pub fn is_chat(&self) -> bool {
        self.is_chat
    }

    /// The resume request after this output.
    ///
    /// # Panics
    /// Never: the body has been parsed.
    pub fn resume(&self, output: &SentOutput) -> Resume {
        if output.tokens() == 0 {
            return Resume::Send(self.body.clone());
        }
        let text = str::from_utf8(&self.body).expect("the body was parsed as text");
        let object = ObjectText::scanned(text, self.fields.clone());
        let edit = object.edit();
        let edit = match self.form {
            PromptForm::Chat => {
                let message = format!(",{{\"role\":\"assistant\",\"content\":{}}}]", quoted(&output.text));
                edit.set("messages", extended(&object, "messages", &message))
                    .set("continue_final_message", "true")
                    .set("add_generation_prompt", "false")
            }
            PromptForm::Text => edit.set("prompt", extended(&object, "prompt", &quoted(&output.text)[1..])),
            PromptForm::TokenIds => {
                let Some(ids) = output.token_ids() else { return Resume::Unknown };
                let ids: String = ids.iter().map(|id| format!(",{id}")).collect();
                edit.set("prompt", extended(&object, "prompt", &(ids + "]")))
            }
        };
        match self.with_limits(&object, edit, output.tokens().into()) {
            Some(edit) => Resume::Send(edit.finish().into()),
            None => Resume::Complete,
        }
    }

    /// Reduces the length limits; `None` if nothing is left.
    fn with_limits<'o, 'a>(
        &self,
        object: &ObjectText<'_>,
        mut edit: ObjectEdit<'o, 'a>,
        tokens: u64,
    ) -> Option<ObjectEdit<'o, 'a>> {
        let limit = |name: &str| count(object, name);
        let effective = match self.is_chat {
            true => limit("max_completion_tokens").or_else(|| limit("max_tokens")),
            false => Some(limit("max_tokens").unwrap_or(COMPLETION_TOKENS)),
        };
        if effective.is_some_and(|most| most <= tokens) {
            return None;
        }
        for name in ["max_tokens", "max_completion_tokens"] {
            if let Some(most) = limit(name) {
                edit = edit.set(name, most.saturating_sub(tokens).max(1).to_string());
            }
        }
        if !self.is_chat && limit("max_tokens").is_none() {
            edit = edit.set("max_tokens", (COMPLETION_TOKENS - tokens).to_string());
        }
        if let Some(least) = limit("min_tokens") {
            edit = edit.set("min_tokens", least.saturating_sub(tokens).to_string());
        }
        Some(edit)
    }
}

/// A value without its last character, followed by `more`.
fn extended(object: &ObjectText<'_>, name: &str, more: &str) -> String {
    let json = object.json(name).expect("the field was found");
    [&json[..json.len() - 1], more].concat()
}

fn count(object: &ObjectText<'_>, name: &str) -> Option<u64> {
    object.json(name).and_then(|json| json.parse().ok())
}

/// Form of the prompt; `None` if it has no continuation.
fn form_of(endpoint: Endpoint, object: &ObjectText<'_>) -> Option<PromptForm> {
    match endpoint {
        Endpoint::Chat => {
            let messages = elements(object.json("messages")?)?;
            let last: Message<'_> = serde_json::from_str(messages.last()?).ok()?;
            // The output would follow an open message of the client.
            last.role.is_some_and(|role| role != "assistant").then_some(PromptForm::Chat)
        }
        Endpoint::Completions => {
            let prompt = object.json("prompt")?;
            let first_id = prompt.strip_prefix('[').and_then(|list| list.trim_start().chars().next());
            match (prompt.starts_with('"'), first_id) {
                (true, _) => Some(PromptForm::Text),
                (false, Some('0'..='9')) => Some(PromptForm::TokenIds),
                (false, _) => None,
            }
        }
        _ => None,
    }
}

fn is_sound(object: &ObjectText<'_>, form: PromptForm) -> bool {
    let is = |name: &str, allowed: &[&str]| object.json(name).is_none_or(|json| allowed.contains(&json));
    let is_zero = |name: &&str| object.json(name).is_none_or(|json| json.parse() == Ok(0.0));
    let is_count = |name: &str| object.json(name).is_none() || count(object, name).is_some();
    let is_empty_list =
        |name: &str| object.json(name).is_none_or(|json| elements(json).is_some_and(|list| list.is_empty()));
    object.json("stream") == Some("true")
        && UNRESUMABLE.iter().all(|name| object.json(name).is_none())
        && FALSE_ONLY.iter().all(|name| is(name, &["false"]))
        && ZERO_ONLY.iter().all(is_zero)
        && is("n", &["1"])
        && is("best_of", &["1"])
        && is("add_generation_prompt", &["true"])
        && (is_empty_list("tools") || object.json("tool_choice") == Some("\"none\""))
        && ["max_tokens", "max_completion_tokens", "min_tokens"].into_iter().all(is_count)
        // Engines withhold text that may start a stop string, but not its token ids.
        && (form != PromptForm::TokenIds || is_empty_list("stop") && object.json("return_token_ids") == Some("true"))
}
