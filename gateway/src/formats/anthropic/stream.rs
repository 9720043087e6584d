//! Conversion of a streamed chat response to the events of a message.
//!
//! The output does not depend on the split of the input. Content blocks are never nested, their indices count up from
//! 0, and nothing follows `message_stop` or an error. Memory is at most [`LINE_BYTES_MAX`] and the arguments of calls that
//! engines send at once, which wait for the end of the call before.

use std::collections::VecDeque;
use std::fmt::Display;

use pointsman::{AnswerKind, AnswerReader};
use serde_json::json;

use super::error::{Known, error_body, error_message, in_anthropic_words};
use super::response::{Chat, Choice, Content, MessageUsage, SIGNATURE, Stop, ToolCall, matched, message_id, tool_id};
use crate::formats::json::quoted;

/// Maximum length of an event. A chunk has a few tokens, or one tool call in the engines that do not stream calls.
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
    /// Whether the last line ended with a carriage return, whose line feed belongs to the same end.
    is_after_return: bool,
    /// Data lines of an event that are no complete chunk.
    joined: Vec<u8>,
    /// Id of the message once it has started.
    id: Option<String>,
    /// Index of the next content block.
    next_index: usize,
    open: Option<OpenBlock>,
    tools: Tools,
    finish_reason: Option<String>,
    stop_sequence: Option<String>,
    is_refused: bool,
    usage: Option<MessageUsage>,
    is_over: bool,
    has_failed: bool,
    out: Vec<u8>,
}

/// The content block that receives deltas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    ToolUse,
}

/// Tool calls so far. A new id or name begins a call, whatever its index.
#[derive(Debug, Default)]
struct Tools {
    /// Calls whose blocks have not ended. Only the block of the first can be open.
    calls: VecDeque<Call>,
    /// Index and id of the calls before.
    ended: Vec<(Option<usize>, Option<String>)>,
    /// Whether the arguments of one of these are no complete object.
    has_partial: bool,
}

#[derive(Debug, Default)]
struct Call {
    index: Option<usize>,
    id: Option<String>,
    name: Option<String>,
    /// Arguments that are not written yet.
    arguments: String,
    scan: ObjectScan,
}

/// The call of a delta.
enum CallOf {
    Unended(usize),
    Ended,
    New,
}

impl Tools {
    fn call_of(&self, index: Option<usize>, id: Option<&str>, name: Option<&str>) -> CallOf {
        let fits = |call: &Call| index.is_none() || call.index.is_none() || call.index == index;
        let last = self.calls.iter().rposition(fits).map(|at| (at, &self.calls[at]));
        if let Some(id) = id {
            let of_id = |other: &Option<String>| other.as_deref() == Some(id);
            return match (self.calls.iter().position(|call| of_id(&call.id)), last) {
                (Some(at), _) => CallOf::Unended(at),
                (None, _) if self.ended.iter().any(|(_, other)| of_id(other)) => CallOf::Ended,
                (None, Some((at, call))) if call.id.is_none() && (call.name.is_none() || name.is_none()) => {
                    CallOf::Unended(at)
                }
                (None, _) => CallOf::New,
            };
        }
        match (last, name) {
            (Some((at, call)), Some(name)) => {
                // Some engines repeat the name in each delta.
                let is_repeated = call.name.as_deref() == Some(name) && !call.scan.is_complete();
                if call.name.is_none() || is_repeated { CallOf::Unended(at) } else { CallOf::New }
            }
            (Some((at, _)), None) => CallOf::Unended(at),
            (None, None) if self.ended.iter().any(|(other, _)| index.is_none() || *other == index) => CallOf::Ended,
            (None, _) => CallOf::New,
        }
    }
}

/// Whether the arguments so far are a complete JSON object.
#[derive(Debug, Default)]
struct ObjectScan {
    depth: usize,
    has_begun: bool,
    is_in_string: bool,
    is_escaped: bool,
}

impl ObjectScan {
    fn read(&mut self, json: &str) {
        for byte in json.bytes() {
            match byte {
                _ if std::mem::take(&mut self.is_escaped) => {}
                b'\\' if self.is_in_string => self.is_escaped = true,
                b'"' => self.is_in_string = !self.is_in_string,
                _ if self.is_in_string => {}
                b'{' | b'[' => (self.depth, self.has_begun) = (self.depth + 1, true),
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.has_begun && self.depth == 0
    }
}

impl StreamTranslator {
    /// A translator at the start of a response. `model` is the name that the client requested; `prompt_tokens` is the
    /// prompt length for `message_start`, 0 if unknown. The last usage has the counts of the engine.
    pub fn new(model: &str, prompt_tokens: u32) -> Self {
        Self { model: model.to_owned(), prompt_tokens, ..Self::default() }
    }

    /// Events for the next bytes of the response.
    pub fn read(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        while let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.hold(&bytes[..end]);
            let is_return = bytes[end] == b'\r';
            let is_after_return = std::mem::replace(&mut self.is_after_return, is_return);
            if is_return || !is_after_return || !self.line.is_empty() {
                let line = std::mem::take(&mut self.line);
                self.read_line(&line);
            }
            bytes = &bytes[end + 1..];
        }
        self.hold(bytes);
        std::mem::take(&mut self.out)
    }

    /// Events for the end of the response.
    pub fn end(&mut self) -> Vec<u8> {
        let line = std::mem::take(&mut self.line);
        self.read_line(&line);
        self.read_line(b"");
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

    /// Whether the last event is an error.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    fn hold(&mut self, bytes: &[u8]) {
        if self.is_over {
            return;
        }
        if self.joined.len() + self.line.len() + bytes.len() > LINE_BYTES_MAX {
            self.line = Vec::new();
            return self.error(502, "the worker sent an event that is too long");
        }
        self.line.extend_from_slice(bytes);
    }

    fn read_line(&mut self, line: &[u8]) {
        if self.is_over {
            return;
        }
        if line.is_empty() && !self.joined.is_empty() {
            let data = std::mem::take(&mut self.joined);
            if !self.read_data(&data) {
                self.error(502, "the worker sent an event of an unknown form");
            }
        }
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line); // the first may have a byte order mark
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return };
        if !data.is_empty() && (!self.joined.is_empty() || !self.read_data(data)) {
            self.joined.extend_from_slice(data);
            self.joined.push(b'\n');
        }
    }

    /// Returns whether the data is a complete chunk.
    fn read_data(&mut self, data: &[u8]) -> bool {
        if data == b"[DONE]" {
            if self.id.is_some() {
                self.stop();
            }
            return true;
        }
        let chunk = serde_json::from_slice::<Chat<'_>>(data).map(|chunk| self.chunk(chunk, data));
        chunk.is_ok()
    }

    fn chunk(&mut self, chunk: Chat<'_>, data: &[u8]) {
        let is_error = chunk.error.is_some() || chunk.object.as_deref() == Some("error");
        let status = || error_status(data).or_else(|| chunk.choices.is_none().then_some(500));
        if let Some(status) = is_error.then(status).flatten() {
            let message = error_message(data).unwrap_or_else(|| "the worker reported an error".to_owned());
            let known = Known { prompt_tokens: self.prompt_tokens, ..Known::default() };
            return self.error(status, &in_anthropic_words(&message, known).unwrap_or(message));
        }
        let Some(choices) = chunk.choices else { return };
        self.start(chunk.id.as_deref());
        self.usage = MessageUsage::of_chat(chunk.usage).or(self.usage);
        for choice in choices.into_iter().filter(Choice::is_first) {
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
            let Content { thinking, text, refusal, calls } = delta.content();
            if let Some(thinking) = thinking {
                self.thinking(&thinking);
            }
            self.is_refused |= refusal.is_some();
            for text in [text, refusal].into_iter().flatten() {
                self.text(&text);
            }
            for call in calls {
                self.call(&call);
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

    fn text(&mut self, text: &str) {
        if self.open != Some(OpenBlock::Text) {
            self.begin(OpenBlock::Text, r#"{"type":"text","text":""}"#);
        }
        self.delta("text_delta", "text", text);
    }

    fn call(&mut self, call: &ToolCall<'_>) {
        let (index, id, name, arguments) = (call.index(), call.id(), call.name(), call.arguments());
        let calls = &self.tools.calls;
        let at = match self.tools.call_of(index, id.as_deref(), name.as_deref()) {
            CallOf::Ended if arguments.is_empty() => return,
            CallOf::Ended => return self.error(502, "the worker continued a tool call after its end"),
            CallOf::Unended(at) => at,
            CallOf::New => calls.len(),
        };
        if calls.iter().map(|call| call.arguments.len()).sum::<usize>() + arguments.len() > LINE_BYTES_MAX {
            return self.error(502, "the worker sent too many tool calls at once");
        }
        if at == calls.len() {
            self.tools.calls.push_back(Call::default());
        }
        let call = &mut self.tools.calls[at];
        call.index = call.index.or(index);
        call.id = call.id.take().or(id);
        call.name = call.name.take().or(name);
        call.scan.read(&arguments);
        call.arguments.push_str(&arguments);
        // A call ends with its arguments once another follows.
        while self.write_call() && self.tools.calls.len() > 1 && self.tools.calls[0].scan.is_complete() {
            self.end_call();
        }
    }

    /// Writes the received part of the first call. Returns false without one, or before its name.
    fn write_call(&mut self) -> bool {
        let Some(call) = self.tools.calls.front_mut().filter(|_| !self.is_over) else { return false };
        let Some(name) = &call.name else { return false };
        let arguments = std::mem::take(&mut call.arguments);
        if self.open != Some(OpenBlock::ToolUse) {
            let message_id = self.id.as_deref().unwrap_or_default();
            let id = call.id.clone().unwrap_or_else(|| tool_id(message_id, self.tools.ended.len()));
            let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} }).to_string();
            self.open_block(OpenBlock::ToolUse, &block);
        }
        if !arguments.is_empty() {
            self.delta("input_json_delta", "partial_json", &arguments);
        }
        true
    }

    fn end_call(&mut self) {
        if let Some(Call { index, id, scan, .. }) = self.tools.calls.pop_front() {
            self.tools.has_partial |= scan.has_begun && !scan.is_complete();
            self.tools.ended.push((index, id));
            self.close();
        }
    }

    /// Ends all calls.
    fn end_calls(&mut self) {
        while self.write_call() {
            self.end_call();
        }
        if !self.tools.calls.is_empty() {
            self.error(502, "the worker sent a tool call without a name");
        }
    }

    /// Begins a block other than a call.
    fn begin(&mut self, kind: OpenBlock, block: &str) {
        self.end_calls();
        self.open_block(kind, block);
    }

    fn open_block(&mut self, kind: OpenBlock, block: &str) {
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
        self.end_calls();
        if self.is_over {
            return;
        }
        self.close();
        let stop = Stop {
            finish_reason: self.finish_reason.as_deref(),
            matched: self.stop_sequence.take(),
            has_tool_use: !self.tools.ended.is_empty(),
            are_calls_whole: !self.tools.has_partial,
            is_refused: self.is_refused,
        };
        let Some((stop_reason, stop_sequence)) = stop.reason() else {
            let reason = self.finish_reason.as_deref().unwrap_or("no finish reason");
            return self.error(502, &format!("the worker ended the response early: {reason}"));
        };
        let delta = json!({ "stop_reason": stop_reason, "stop_sequence": stop_sequence });
        let usage = self.usage.unwrap_or_else(|| MessageUsage::of_prompt(self.prompt_tokens));
        let usage = json!(usage);
        self.event("message_delta", format_args!("\"delta\":{delta},\"usage\":{usage}"));
        self.write("message_stop", r#"{"type":"message_stop"}"#);
        self.is_over = true;
    }

    fn error(&mut self, status: u16, message: &str) {
        if !self.is_over {
            self.write("error", &error_body(status, message, None));
            (self.is_over, self.has_failed) = (true, true);
        }
    }

    /// Writes an event with these fields after its type.
    fn event(&mut self, name: &str, fields: impl Display) {
        if self.is_over {
            return;
        }
        self.write(name, &format!("{{\"type\":\"{name}\",{fields}}}"));
    }

    fn write(&mut self, name: &str, data: &str) {
        for part in ["event: ", name, "\ndata: ", data, "\n\n"] {
            self.out.extend_from_slice(part.as_bytes());
        }
    }
}

/// Status of an event with this data, if it is an error.
fn error_status(data: &[u8]) -> Option<u16> {
    let mut reader = AnswerReader::new(AnswerKind::Events);
    reader.read(format!("data: {}", String::from_utf8_lossy(data).replace('\n', " ")).as_bytes());
    reader.end();
    reader.error_status()
}
