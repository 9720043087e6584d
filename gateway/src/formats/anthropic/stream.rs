//! Conversion of a streamed chat response to the events of a message.
//!
//! The output does not depend on the split of the input. Content blocks are never nested, their indices count up from
//! 0, and nothing follows `message_stop` or an error. Memory is at most [`LINE_BYTES_MAX`] and the output of one call.

use std::borrow::Cow;
use std::fmt::Display;

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::error::error_body;
use super::response::{
    Chat, ChatUsage, Choice, Function, MessageUsage, SIGNATURE, Stop, ToolCall, matched, message_id, tool_id,
};
use crate::formats::json::quoted;

/// Maximum length of a line. A chunk has a few tokens, or one tool call in the engines that do not stream calls.
const LINE_BYTES_MAX: usize = 4 << 20;

/// Converts one streamed response.
///
/// ```
/// use pointsman_gateway::formats::anthropic::StreamTranslator;
///
/// let mut translator = StreamTranslator::new("m", 9);
/// let chunk = br#"data: {"id":"1","choices":[{"delta":{"content":"Hi"},"finish_reason":"stop"}]}"#;
/// let mut events = translator.read(chunk);
/// events.extend(translator.read(b"\n\ndata: [DONE]\n\n"));
/// let events = String::from_utf8(events)?;
/// let names: Vec<_> = events.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
/// let expected = "message_start content_block_start content_block_delta content_block_stop message_delta message_stop";
/// assert_eq!(names.join(" "), expected);
/// # Ok::<(), std::string::FromUtf8Error>(())
/// ```
#[derive(Debug, Default)]
pub struct StreamTranslator {
    model: String,
    prompt_tokens: u32,
    line: Vec<u8>,
    /// Id of the message once it has started.
    id: Option<String>,
    /// Index of the next content block.
    next_index: usize,
    open: Option<OpenBlock>,
    tools: Tools,
    finish_reason: Option<String>,
    stop_sequence: Option<String>,
    is_refused: bool,
    usage: Option<ChatUsage>,
    is_over: bool,
    out: Vec<u8>,
}

/// The content block that receives deltas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    /// With the index of its tool call.
    ToolUse(usize),
}

/// Tool calls so far.
#[derive(Debug, Default)]
struct Tools {
    /// Number of started blocks.
    n_started: usize,
    /// Lowest index that a new call may have. Engines send calls in order.
    next_call: usize,
    /// A call without a name yet.
    unnamed: Option<UnnamedCall>,
}

#[derive(Debug)]
struct UnnamedCall {
    index: usize,
    id: Option<String>,
    arguments: String,
}

impl StreamTranslator {
    /// A translator at the start of a response. `model` is the name that the client requested; `prompt_tokens` is the
    /// prompt length for `message_start`, 0 if unknown. The last usage has the counts of the engine.
    #[must_use]
    pub fn new(model: &str, prompt_tokens: u32) -> Self {
        Self { model: model.to_owned(), prompt_tokens, ..Self::default() }
    }

    /// Events for the next bytes of the response.
    pub fn read(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        while let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.hold(&bytes[..end]);
            let line = std::mem::take(&mut self.line);
            self.read_line(&line);
            bytes = &bytes[end + 1..];
        }
        self.hold(bytes);
        std::mem::take(&mut self.out)
    }

    /// Events for the end of the response.
    pub fn end(&mut self) -> Vec<u8> {
        let line = std::mem::take(&mut self.line);
        self.read_line(&line);
        if self.finish_reason.is_some() {
            self.stop();
        }
        self.error(502, "the response of the worker ended early");
        std::mem::take(&mut self.out)
    }

    /// Events for a response that was cut off: an error, unless the message is complete.
    pub fn fail(&mut self, status: u16, message: &str) -> Vec<u8> {
        self.error(status, message);
        std::mem::take(&mut self.out)
    }

    /// Whether the last event has been sent.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    fn hold(&mut self, bytes: &[u8]) {
        if self.is_over {
            return;
        }
        if self.line.len() + bytes.len() > LINE_BYTES_MAX {
            self.line = Vec::new();
            return self.error(502, "the worker sent an event that is too long");
        }
        self.line.extend_from_slice(bytes);
    }

    fn read_line(&mut self, line: &[u8]) {
        if self.is_over {
            return;
        }
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return };
        if data == b"[DONE]" {
            if self.id.is_some() {
                self.stop();
            }
            return;
        }
        // Clients of the chat endpoint skip invalid events, too.
        let Ok(chunk) = serde_json::from_slice::<Chat<'_>>(data) else { return };
        if let Some(error) = chunk.error {
            let (status, message) = error_of(error);
            return self.error(status, &message);
        }
        let Some(choices) = chunk.choices else { return };
        self.start(chunk.id.as_deref());
        self.usage = chunk.usage.or(self.usage);
        for choice in choices.into_iter().filter(|choice| choice.index.unwrap_or(0) == 0) {
            self.choice(choice);
        }
    }

    fn start(&mut self, chat_id: Option<&str>) {
        if self.id.is_some() {
            return;
        }
        let id = message_id(chat_id);
        let message = json!({
            "id": id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": MessageUsage::of_prompt(self.prompt_tokens),
        });
        self.event("message_start", format_args!("\"message\":{message}"));
        self.id = Some(id);
    }

    fn choice(&mut self, choice: Choice<'_>) {
        if let Some(delta) = choice.delta {
            if let Some(thinking) = some(delta.reasoning_content).or_else(|| some(delta.reasoning)) {
                self.thinking(&thinking);
            }
            self.text(some(delta.content));
            let refusal = some(delta.refusal);
            self.is_refused |= refusal.is_some();
            self.text(refusal);
            for call in delta.tool_calls.into_iter().flatten() {
                self.call(call);
            }
        }
        if let Some(reason) = choice.finish_reason {
            self.finish_reason = Some(reason.into_owned());
            self.stop_sequence = matched(choice.stop_reason, choice.matched_stop);
        }
    }

    fn thinking(&mut self, thinking: &str) {
        if self.open != Some(OpenBlock::Thinking) {
            self.begin(OpenBlock::Thinking, r#"{"type":"thinking","thinking":"","signature":""}"#);
        }
        self.delta("thinking_delta", "thinking", thinking);
    }

    fn text(&mut self, text: Option<String>) {
        let Some(text) = text else { return };
        if self.open != Some(OpenBlock::Text) {
            self.begin(OpenBlock::Text, r#"{"type":"text","text":""}"#);
        }
        self.delta("text_delta", "text", &text);
    }

    fn call(&mut self, ToolCall { index, id, function }: ToolCall<'_>) {
        if self.is_over {
            return;
        }
        let Function { name, arguments } = function.unwrap_or_default();
        let (index, id, name, arguments) = (index.unwrap_or(0), some(id), some(name), arguments.unwrap_or_default());
        if self.open == Some(OpenBlock::ToolUse(index)) {
            return self.arguments(&arguments);
        }
        if index < self.tools.next_call {
            return self.error(502, "the worker interleaved the arguments of several tool calls");
        }
        let mut call = match self.tools.unnamed.take() {
            Some(call) if call.index == index => call,
            // A call that never got a name cannot be executed.
            Some(_) | None => UnnamedCall { index, id: None, arguments: String::new() },
        };
        call.id = id.or(call.id);
        call.arguments.push_str(&arguments);
        let Some(name) = name else {
            if call.arguments.len() > LINE_BYTES_MAX {
                return self.error(502, "the worker sent a tool call without a name");
            }
            self.tools.unnamed = Some(call);
            return;
        };
        let message_id = self.id.clone().unwrap_or_default();
        let id = call.id.unwrap_or_else(|| tool_id(&message_id, self.tools.n_started));
        let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
        self.begin(OpenBlock::ToolUse(index), &block.to_string());
        self.tools.n_started += 1;
        self.tools.next_call = index.saturating_add(1);
        self.arguments(&call.arguments);
    }

    fn arguments(&mut self, arguments: &str) {
        if !arguments.is_empty() {
            self.delta("input_json_delta", "partial_json", arguments);
        }
    }

    fn begin(&mut self, kind: OpenBlock, block: &str) {
        self.close();
        self.open = Some(kind);
        let index = self.next_index;
        self.event("content_block_start", format_args!("\"index\":{index},\"content_block\":{block}"));
    }

    fn delta(&mut self, kind: &str, field: &str, text: &str) {
        let (index, text) = (self.next_index, quoted(text));
        let fields = format_args!("\"index\":{index},\"delta\":{{\"type\":\"{kind}\",\"{field}\":{text}}}");
        self.event("content_block_delta", fields);
    }

    fn close(&mut self) {
        let Some(open) = self.open else { return };
        if open == OpenBlock::Thinking {
            self.delta("signature_delta", "signature", SIGNATURE);
        }
        self.open = None;
        let index = self.next_index;
        self.event("content_block_stop", format_args!("\"index\":{index}"));
        self.next_index += 1;
    }

    fn stop(&mut self) {
        if self.is_over {
            return;
        }
        self.close();
        let stop = Stop {
            finish_reason: self.finish_reason.as_deref(),
            matched: self.stop_sequence.take(),
            has_tool_use: self.tools.n_started > 0,
            is_refused: self.is_refused,
        };
        let (stop_reason, stop_sequence) = stop.reason();
        let delta = json!({ "stop_reason": stop_reason, "stop_sequence": stop_sequence });
        let usage = self.usage.map_or_else(|| MessageUsage::of_prompt(self.prompt_tokens), MessageUsage::from);
        let usage = json!(usage);
        self.event("message_delta", format_args!("\"delta\":{delta},\"usage\":{usage}"));
        self.write("message_stop", r#"{"type":"message_stop"}"#);
        self.is_over = true;
    }

    fn error(&mut self, status: u16, message: &str) {
        if !self.is_over {
            self.write("error", &error_body(status, message, None));
            self.is_over = true;
        }
    }

    /// Writes an event with these fields after its type.
    fn event(&mut self, name: &str, fields: impl Display) {
        self.write(name, &format!("{{\"type\":\"{name}\",{fields}}}"));
    }

    fn write(&mut self, name: &str, data: &str) {
        for part in ["event: ", name, "\ndata: ", data, "\n\n"] {
            self.out.extend_from_slice(part.as_bytes());
        }
    }
}

/// A text that is not empty.
fn some(text: Option<Cow<'_, str>>) -> Option<String> {
    text.filter(|text| !text.is_empty()).map(Cow::into_owned)
}

/// Status and message of an error event.
fn error_of(error: &RawValue) -> (u16, String) {
    #[derive(Deserialize)]
    struct ErrorObject {
        message: Option<String>,
        code: Option<serde_json::Value>,
    }
    let unnamed = || "the worker reported an error".to_owned();
    if let Ok(message) = serde_json::from_str(error.get()) {
        return (500, message);
    }
    let Ok(error) = serde_json::from_str::<ErrorObject>(error.get()) else { return (500, unnamed()) };
    let code = error.code.and_then(|code| code.as_u64()).and_then(|code| u16::try_from(code).ok());
    let status = code.filter(|code| (400..600).contains(code)).unwrap_or(500);
    (status, error.message.unwrap_or_else(unnamed))
}
