//! Conversion of a complete chat response to a message, and the parts common to streams.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Signature of thinking blocks. Clients require one; it is neither made nor verified by a model.
pub(super) const SIGNATURE: &str = "unsigned";

/// A complete chat response, or a chunk of a streamed one.
#[derive(Deserialize)]
pub(super) struct Chat<'a> {
    #[serde(borrow)]
    pub(super) id: Option<Cow<'a, str>>,
    pub(super) choices: Option<Vec<Choice<'a>>>,
    pub(super) usage: Option<ChatUsage>,
    pub(super) error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    pub(super) index: Option<usize>,
    #[serde(borrow)]
    message: Option<Output<'a>>,
    pub(super) delta: Option<Output<'a>>,
    pub(super) finish_reason: Option<Cow<'a, str>>,
    pub(super) stop_reason: Option<&'a RawValue>,
    pub(super) matched_stop: Option<&'a RawValue>,
}

/// A message, or a part of it.
#[derive(Deserialize)]
pub(super) struct Output<'a> {
    #[serde(borrow)]
    pub(super) content: Option<Cow<'a, str>>,
    pub(super) reasoning: Option<Cow<'a, str>>,
    pub(super) reasoning_content: Option<Cow<'a, str>>,
    pub(super) refusal: Option<Cow<'a, str>>,
    pub(super) tool_calls: Option<Vec<ToolCall<'a>>>,
}

#[derive(Deserialize)]
pub(super) struct ToolCall<'a> {
    pub(super) index: Option<usize>,
    #[serde(borrow)]
    pub(super) id: Option<Cow<'a, str>>,
    pub(super) function: Option<Function<'a>>,
}

#[derive(Default, Deserialize)]
pub(super) struct Function<'a> {
    #[serde(borrow)]
    pub(super) name: Option<Cow<'a, str>>,
    pub(super) arguments: Option<Cow<'a, str>>,
}

/// Token counts of a chat response.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct ChatUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

/// Token counts of a message. Input tokens exclude those read from the cache.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct MessageUsage {
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    output_tokens: u64,
}

impl MessageUsage {
    /// Counts before any output, all input uncached.
    pub(super) fn of_prompt(prompt_tokens: u32) -> Self {
        Self { input_tokens: prompt_tokens.into(), ..Self::default() }
    }
}

impl From<ChatUsage> for MessageUsage {
    fn from(usage: ChatUsage) -> Self {
        let prompt = usage.prompt_tokens.unwrap_or(0);
        let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0).min(prompt);
        Self {
            input_tokens: prompt - cached,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens.unwrap_or(0),
            ..Self::default()
        }
    }
}

#[derive(Serialize)]
struct Message<'a> {
    id: String,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<ContentBlock<'a>>,
    stop_reason: &'static str,
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentBlock<'a> {
    Thinking { thinking: &'a str, signature: &'static str },
    Text { text: &'a str },
    ToolUse { id: Cow<'a, str>, name: &'a str, input: Box<RawValue> },
}

/// Converts a complete chat response; `None` if it is none. `model` is the name that the client requested.
///
/// ```
/// use pointsman_gateway::formats::anthropic::message;
///
/// let chat = br#"{"id":"chatcmpl-1","choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}"#;
/// let message = String::from_utf8(message(chat, "m").expect("a chat response")).expect("text");
/// assert!(message.starts_with(r#"{"id":"msg_1","type":"message","role":"assistant","model":"m","#));
/// assert!(message.contains(r#""content":[{"type":"text","text":"Hi"}],"stop_reason":"end_turn""#));
/// ```
#[must_use]
pub fn message(chat: &[u8], model: &str) -> Option<Vec<u8>> {
    let chat: Chat<'_> = serde_json::from_slice(chat).ok()?;
    let choice = chat.choices.as_deref()?.first()?;
    let id = message_id(chat.id.as_deref());
    let given = choice.message.as_ref()?;
    let mut content = Vec::new();
    let text = |text: &'_ Option<Cow<'_, str>>| text.as_ref().is_some_and(|text| !text.is_empty());
    let reasoning = [&given.reasoning_content, &given.reasoning].into_iter().find(|reasoning| text(reasoning));
    if let Some(Some(thinking)) = reasoning {
        content.push(ContentBlock::Thinking { thinking, signature: SIGNATURE });
    }
    let refusal = Some(&given.refusal).filter(|refusal| text(refusal));
    for text in [Some(&given.content).filter(|content| text(content)), refusal].into_iter().flatten().flatten() {
        content.push(ContentBlock::Text { text });
    }
    let calls = given.tool_calls.as_deref().unwrap_or_default();
    for (position, call) in calls.iter().enumerate() {
        let id = match call.id.as_deref().filter(|id| !id.is_empty()) {
            Some(id) => Cow::Borrowed(id),
            None => Cow::Owned(tool_id(&id, position)),
        };
        let Function { name, arguments } = call.function.as_ref()?;
        let input = input_of(arguments.as_deref().unwrap_or_default());
        content.push(ContentBlock::ToolUse { id, name: name.as_deref()?, input });
    }
    let stop = Stop {
        finish_reason: choice.finish_reason.as_deref(),
        matched: matched(choice.stop_reason, choice.matched_stop),
        has_tool_use: !calls.is_empty(),
        is_refused: refusal.is_some(),
    };
    let (stop_reason, stop_sequence) = stop.reason();
    let usage = chat.usage.unwrap_or_default().into();
    let (r#type, role) = ("message", "assistant");
    serde_json::to_vec(&Message { id, r#type, role, model, content, stop_reason, stop_sequence, usage }).ok()
}

/// End of a choice.
pub(super) struct Stop<'a> {
    pub(super) finish_reason: Option<&'a str>,
    /// Stop sequence that ended it.
    pub(super) matched: Option<String>,
    pub(super) has_tool_use: bool,
    pub(super) is_refused: bool,
}

impl Stop<'_> {
    /// `stop_reason` and `stop_sequence`.
    pub(super) fn reason(self) -> (&'static str, Option<String>) {
        match self.finish_reason {
            Some("length") => ("max_tokens", None),
            Some("content_filter") => ("refusal", None),
            // With a required tool, engines finish with `stop`.
            _ if self.has_tool_use => ("tool_use", None),
            Some("tool_calls" | "function_call") => ("tool_use", None),
            _ if self.is_refused => ("refusal", None),
            _ if self.matched.is_some() => ("stop_sequence", self.matched),
            _ => ("end_turn", None),
        }
    }
}

/// The stop sequence in vLLM's `stop_reason` or SGLang's `matched_stop`, which are numbers for stop tokens.
pub(super) fn matched(stop_reason: Option<&RawValue>, matched_stop: Option<&RawValue>) -> Option<String> {
    [stop_reason, matched_stop].into_iter().flatten().find_map(|value| serde_json::from_str(value.get()).ok())
}

/// Message id for the id of a chat response.
pub(super) fn message_id(chat_id: Option<&str>) -> String {
    let id = chat_id.unwrap_or_default();
    format!("msg_{}", id.strip_prefix("chatcmpl-").unwrap_or(id))
}

/// Id of a tool call without one.
pub(super) fn tool_id(message_id: &str, position: usize) -> String {
    format!("toolu_{}_{position}", message_id.strip_prefix("msg_").unwrap_or(message_id))
}

/// Input of a tool call. Arguments that are no JSON object become the text of a field `arguments`.
fn input_of(arguments: &str) -> Box<RawValue> {
    let arguments = arguments.trim();
    let given = if arguments.is_empty() { "{}" } else { arguments };
    let object = Some(given).filter(|given| given.starts_with('{')).and_then(|given| serde_json::from_str(given).ok());
    object.unwrap_or_else(|| {
        let wrapped = serde_json::json!({ "arguments": arguments }).to_string();
        RawValue::from_string(wrapped).expect("a JSON object")
    })
}
