//! Conversion of a complete chat response to a message, and the parts common to streams.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::blocks::Raw;

/// Signature of thinking blocks. Clients require one; it is neither made nor verified by a model.
pub(super) const SIGNATURE: &str = "unsigned";

/// A complete chat response, or a chunk of a streamed one. Engines differ in types: numbers as strings, arguments as objects,
/// absent and null fields.
#[derive(Deserialize)]
pub(super) struct Chat<'a> {
    #[serde(borrow)]
    pub(super) id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(super) object: Option<Cow<'a, str>>,
    pub(super) choices: Option<Vec<Choice<'a>>>,
    pub(super) usage: Raw<'a>,
    pub(super) error: Raw<'a>,
}

#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    pub(super) index: Raw<'a>,
    #[serde(borrow)]
    message: Option<Output<'a>>,
    pub(super) delta: Option<Output<'a>>,
    pub(super) finish_reason: Option<Cow<'a, str>>,
    pub(super) stop_reason: Raw<'a>,
    pub(super) matched_stop: Raw<'a>,
}

impl Choice<'_> {
    pub(super) fn is_first(&self) -> bool {
        count_of(self.index).unwrap_or(0) == 0
    }
}

/// A message, or a part of it.
#[derive(Deserialize)]
pub(super) struct Output<'a> {
    #[serde(borrow)]
    content: Raw<'a>,
    reasoning: Raw<'a>,
    reasoning_content: Raw<'a>,
    refusal: Raw<'a>,
    tool_calls: Option<Vec<ToolCall<'a>>>,
}

/// The texts of a message, none of them empty, and its calls.
pub(super) struct Content<'a> {
    pub(super) thinking: Option<String>,
    pub(super) text: Option<String>,
    pub(super) refusal: Option<String>,
    pub(super) calls: Vec<ToolCall<'a>>,
}

impl<'a> Output<'a> {
    pub(super) fn content(self) -> Content<'a> {
        Content {
            thinking: text_of(self.reasoning_content).or_else(|| text_of(self.reasoning)),
            text: text_of(self.content),
            refusal: text_of(self.refusal),
            calls: self.tool_calls.unwrap_or_default(),
        }
    }
}

#[derive(Deserialize)]
pub(super) struct ToolCall<'a> {
    #[serde(borrow)]
    index: Raw<'a>,
    id: Raw<'a>,
    function: Option<Function<'a>>,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct Function<'a> {
    #[serde(borrow)]
    name: Raw<'a>,
    arguments: Raw<'a>,
}

impl ToolCall<'_> {
    pub(super) fn index(&self) -> Option<usize> {
        count_of(self.index).and_then(|index| usize::try_from(index).ok())
    }

    pub(super) fn id(&self) -> Option<String> {
        text_of(self.id)
    }

    pub(super) fn name(&self) -> Option<String> {
        text_of(self.function?.name)
    }

    /// The arguments as JSON text.
    pub(super) fn arguments(&self) -> String {
        text_of(self.function.and_then(|function| function.arguments)).unwrap_or_default()
    }
}

/// Text of a string, or of the parts of a list, or the JSON of another value. `None` without text.
fn text_of(value: Raw<'_>) -> Option<String> {
    #[derive(Deserialize)]
    struct Part<'a> {
        #[serde(borrow)]
        text: Cow<'a, str>,
    }
    let json = value?.get();
    let text = if json.starts_with('"') {
        serde_json::from_str(json).ok()
    } else if let Ok(parts) = serde_json::from_str::<Vec<Part<'_>>>(json) {
        Some(parts.iter().map(|part| &*part.text).collect())
    } else {
        Some(json.to_owned())
    };
    text.filter(|text: &String| !text.is_empty())
}

/// A whole number, also in a string.
fn count_of(value: Raw<'_>) -> Option<u64> {
    let number: f64 = value?.get().trim_matches('"').parse().ok()?;
    (number >= 0.0).then_some(number as u64)
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

    /// The counts in the field `usage` of a chat response, if it has any.
    pub(super) fn of_chat(usage: Raw<'_>) -> Option<Self> {
        #[derive(Deserialize)]
        struct Usage<'a> {
            #[serde(borrow)]
            prompt_tokens: Raw<'a>,
            completion_tokens: Raw<'a>,
            prompt_tokens_details: Raw<'a>,
        }
        #[derive(Deserialize)]
        struct Details<'a> {
            #[serde(borrow)]
            cached_tokens: Raw<'a>,
        }
        let usage: Usage<'_> = serde_json::from_str(usage?.get()).ok()?;
        let details = usage.prompt_tokens_details.and_then(|details| serde_json::from_str(details.get()).ok());
        let cached = details.and_then(|Details { cached_tokens }| count_of(cached_tokens)).unwrap_or(0);
        let prompt = count_of(usage.prompt_tokens).unwrap_or(0);
        Some(Self {
            input_tokens: prompt.saturating_sub(cached),
            cache_read_input_tokens: cached.min(prompt),
            output_tokens: count_of(usage.completion_tokens).unwrap_or(0),
            ..Self::default()
        })
    }
}

#[derive(Serialize)]
struct Message<'a> {
    id: String,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<ContentBlock>,
    stop_reason: &'static str,
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentBlock {
    Thinking { thinking: String, signature: &'static str },
    Text { text: String },
    ToolUse { id: String, name: String, input: Box<RawValue> },
}

/// Converts a complete chat response; `None` if it is none, or an engine broke it off. `model` is the name that the client
/// requested.
///
/// ```
/// use pointsman_gateway::formats::anthropic::message;
///
/// let chat = br#"{"id":"chatcmpl-1","choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}"#;
/// let message = String::from_utf8(message(chat, "m").expect("a chat response")).expect("text");
/// assert!(message.starts_with(r#"{"id":"msg_1","type":"message","role":"assistant","model":"m","#));
/// assert!(message.contains(r#""content":[{"type":"text","text":"Hi"}],"stop_reason":"end_turn""#));
/// ```
pub fn message(chat: &[u8], model: &str) -> Option<Vec<u8>> {
    let chat: Chat<'_> = serde_json::from_slice(chat).ok()?;
    let choice = chat.choices?.into_iter().next()?;
    let id = message_id(chat.id.as_deref());
    let Content { thinking, text, refusal, calls } = choice.message?.content();
    let is_refused = refusal.is_some();
    let mut content: Vec<ContentBlock> =
        thinking.map(|thinking| ContentBlock::Thinking { thinking, signature: SIGNATURE }).into_iter().collect();
    content.extend([text, refusal].into_iter().flatten().map(|text| ContentBlock::Text { text }));
    let (has_tool_use, mut are_calls_whole) = (!calls.is_empty(), true);
    for (position, call) in calls.iter().enumerate() {
        let (id, arguments) = (call.id().unwrap_or_else(|| tool_id(&id, position)), call.arguments());
        are_calls_whole &= arguments.is_empty() || is_object(&arguments);
        content.push(ContentBlock::ToolUse { id, name: call.name()?, input: input_of(&arguments) });
    }
    let stop = Stop {
        finish_reason: choice.finish_reason.as_deref(),
        matched: matched(choice.stop_reason, choice.matched_stop),
        has_tool_use,
        are_calls_whole,
        is_refused,
    };
    let (stop_reason, stop_sequence) = stop.reason()?;
    let usage = MessageUsage::of_chat(chat.usage).unwrap_or_default();
    let (r#type, role) = ("message", "assistant");
    serde_json::to_vec(&Message { id, r#type, role, model, content, stop_reason, stop_sequence, usage }).ok()
}

/// End of a choice.
pub(super) struct Stop<'a> {
    pub(super) finish_reason: Option<&'a str>,
    /// Stop sequence that ended it.
    pub(super) matched: Option<String>,
    pub(super) has_tool_use: bool,
    /// Whether no stop sequence cut a call short.
    pub(super) are_calls_whole: bool,
    pub(super) is_refused: bool,
}

impl Stop<'_> {
    /// `stop_reason` and `stop_sequence`; `None` if the engine broke the choice off, or for a reason that is unknown.
    pub(super) fn reason(self) -> Option<(&'static str, Option<String>)> {
        let is_cut = self.matched.is_some() && !self.are_calls_whole;
        match self.finish_reason {
            // `repetition`: vLLM ends an output that repeats itself.
            Some("length" | "max_tokens" | "model_length" | "repetition") => Some(("max_tokens", None)),
            Some("content_filter" | "refusal") => Some(("refusal", None)),
            Some("stop" | "tool_calls" | "function_call" | "eos" | "eos_token" | "stop_sequence" | "end_turn") => {
                Some(match self.finish_reason {
                    // With a required tool, engines finish with `stop`.
                    _ if self.has_tool_use && !is_cut => ("tool_use", None),
                    Some("tool_calls" | "function_call") => ("tool_use", None),
                    _ if self.is_refused => ("refusal", None),
                    _ if self.matched.is_some() => ("stop_sequence", self.matched),
                    _ => ("end_turn", None),
                })
            }
            // Without a reason, the engine or a proxy may have broken off the response.
            Some(_) | None => None,
        }
    }
}

/// The stop sequence in vLLM's `stop_reason` or SGLang's `matched_stop`, which are numbers for stop tokens.
pub(super) fn matched(stop_reason: Raw<'_>, matched_stop: Raw<'_>) -> Option<String> {
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
    let object = Some(given).filter(|given| is_object(given)).and_then(|given| serde_json::from_str(given).ok());
    object.unwrap_or_else(|| {
        let wrapped = serde_json::json!({ "arguments": arguments }).to_string();
        RawValue::from_string(wrapped).expect("a JSON object")
    })
}

fn is_object(json: &str) -> bool {
    json.trim_start().starts_with('{') && serde_json::from_str::<serde::de::IgnoredAny>(json).is_ok()
}
