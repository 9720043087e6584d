//! Conversion of a complete chat response to a message, and the parts common to streams.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Signature of thinking blocks. Clients require one; it is neither made nor verified by a model.
pub(super) const SIGNATURE: &str = "unsigned";

#[derive(Deserialize)]
struct Completion<'a> {
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    choices: Vec<Choice<'a>>,
    usage: Option<ChatUsage>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    message: ChatMessage<'a>,
    finish_reason: Option<Cow<'a, str>>,
    stop_reason: Option<&'a RawValue>,
    matched_stop: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ChatMessage<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
    reasoning: Option<Cow<'a, str>>,
    reasoning_content: Option<Cow<'a, str>>,
    refusal: Option<Cow<'a, str>>,
    tool_calls: Option<Vec<ToolCall<'a>>>,
}

#[derive(Deserialize)]
struct ToolCall<'a> {
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    function: Function<'a>,
}

#[derive(Deserialize)]
struct Function<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    arguments: Option<Cow<'a, str>>,
}

/// Token counts of a chat response.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct ChatUsage {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

/// Token counts of a message. Input tokens exclude those read from the cache.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct MessageUsage {
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    output_tokens: u64,
}

impl MessageUsage {
    /// Counts before any output, all input uncached.
    pub(super) fn of_prompt(prompt_tokens: u32) -> Self {
        let input_tokens = u64::from(prompt_tokens);
        Self { input_tokens, cache_creation_input_tokens: 0, cache_read_input_tokens: 0, output_tokens: 0 }
    }
}

impl From<ChatUsage> for MessageUsage {
    fn from(usage: ChatUsage) -> Self {
        let prompt = usage.prompt_tokens.unwrap_or(0);
        let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0).min(prompt);
        Self {
            input_tokens: prompt - cached,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens.unwrap_or(0),
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
    let completion: Completion<'_> = serde_json::from_slice(chat).ok()?;
    let choice = completion.choices.first()?;
    let id = message_id(completion.id.as_deref());
    let given = &choice.message;
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
        let input = input_of(call.function.arguments.as_deref().unwrap_or_default());
        content.push(ContentBlock::ToolUse { id, name: &call.function.name, input });
    }
    let stop = Stop {
        finish_reason: choice.finish_reason.as_deref(),
        matched: matched(choice.stop_reason, choice.matched_stop),
        has_tool_use: !calls.is_empty(),
        is_refused: refusal.is_some(),
    };
    let (stop_reason, stop_sequence) = stop.reason();
    let usage = completion.usage.unwrap_or_default().into();
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
