//! One event of a streamed answer, and the JSON scanner behind it.
//!
//! Owns the classification of events and the search for keys in JSON text. Promises one pass over the text and no
//! allocation. Leaves lines, framing and totals to the reader.

use super::Usage;

/// What an event says about the progress of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// No valid event: the data is not one JSON object.
    Invalid,
    /// The stream has opened, and the engine may still compute the prompt: a chunk with only a role, a chunk without
    /// choices, `response.created`, `response.queued` or `response.in_progress`.
    Opening,
    /// An event without output: a choice whose delta is empty.
    Empty,
    /// At least one token of output: content, reasoning, a tool call, a refusal or log probabilities.
    Token,
    /// The end of an output: a finish reason, or the last event of the Responses API. It may carry a token, too.
    End,
    /// An error of the engine, with its HTTP status where it gives one.
    Error(Option<u16>),
    /// A JSON object of an unknown form.
    Unknown,
}

/// What one event says.
#[derive(Default)]
pub(super) struct Event {
    has_choices: bool,
    has_choice: bool,
    has_role: bool,
    has_content: bool,
    is_finished: bool,
    error: Option<Option<u16>>,
    /// Of the Responses API.
    kind: ResponseEvent,
    is_object: bool,
    pub(super) usage: Option<Usage>,
}

/// The type of an event of the Responses API.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum ResponseEvent {
    /// None, or one of another API.
    #[default]
    None,
    Opening,
    Delta,
    End,
    Failed,
    Other,
}

impl ResponseEvent {
    fn of(name: &[u8]) -> Self {
        match name {
            b"response.created" | b"response.queued" | b"response.in_progress" => Self::Opening,
            b"response.completed" | b"response.incomplete" | b"response.done" | b"response.cancelled" => Self::End,
            b"response.failed" | b"error" => Self::Failed,
            name if name.starts_with(b"response.") && name.ends_with(b".delta") => Self::Delta,
            name if name.starts_with(b"response.") => Self::Other,
            _ => Self::None,
        }
    }
}

/// Whether an event of the Responses API with this name is the last of its stream.
pub(super) fn is_last_response_event(name: &[u8]) -> bool {
    matches!(ResponseEvent::of(name), ResponseEvent::End | ResponseEvent::Failed)
}

impl Event {
    pub(super) fn read(data: &[u8]) -> Self {
        let mut event = Self::default();
        let data = data.trim_ascii();
        let mut keys = Keys::of(data);
        for Key { name, depth, value } in &mut keys {
            match name {
                b"choices" if depth == 1 => {
                    event.has_choices = true;
                    let choices = value.strip_prefix(b"[").map(<[u8]>::trim_ascii_start);
                    event.has_choice = choices.is_some_and(|choices| choices.starts_with(b"{"));
                }
                b"type" if depth == 1 => event.kind = text_of(value).map(ResponseEvent::of).unwrap_or_default(),
                b"error" if depth == 1 && (value.starts_with(b"{") || value.starts_with(b"\"")) => {
                    event.error = Some(event.error.flatten());
                }
                b"code" if depth == 2 && event.error == Some(None) => {
                    event.error = Some(number(value).and_then(|code| u16::try_from(code).ok()));
                }
                // Of the event itself, or of the response in it. Deeper ones are not looked into: each look is a pass.
                b"usage" if depth <= 2 && value.starts_with(b"{") => event.usage = usage_of(value).or(event.usage),
                b"role" if depth >= 3 => event.has_role = true,
                b"finish_reason" if depth == 3 => event.is_finished |= value.starts_with(b"\""),
                b"content" | b"reasoning_content" | b"reasoning" | b"refusal" | b"text" if depth >= 3 => {
                    event.has_content |= value.starts_with(b"\"") && !value.starts_with(b"\"\"");
                }
                b"logprobs" | b"function_call" if depth >= 3 => event.has_content |= value.starts_with(b"{"),
                b"tool_calls" if depth >= 3 => {
                    let calls = value.strip_prefix(b"[").map(<[u8]>::trim_ascii_start);
                    event.has_content |= calls.is_some_and(|calls| calls.starts_with(b"{"));
                }
                _ => {}
            }
        }
        event.is_object = data.starts_with(b"{") && keys.is_closed && keys.rest.is_empty();
        event
    }

    /// Whether it carries output. Known for the beginning of an event, too.
    pub(super) fn has_output(&self) -> bool {
        self.has_choices && self.has_content || self.kind == ResponseEvent::Delta
    }

    /// Whether it ends an output. Known for the beginning of an event, too.
    pub(super) fn is_end(&self) -> bool {
        self.has_choices && self.is_finished || matches!(self.kind, ResponseEvent::End | ResponseEvent::Failed)
    }

    pub(super) fn step(&self) -> Step {
        if !self.is_object {
            return Step::Invalid;
        }
        if let Some(status) = self.error.filter(|_| !self.has_choices && self.kind == ResponseEvent::None) {
            return Step::Error(status);
        }
        match self.kind {
            ResponseEvent::Failed => Step::Error(None),
            _ if self.is_end() => Step::End,
            _ if self.has_output() => Step::Token,
            ResponseEvent::Opening => Step::Opening,
            _ if self.has_choices && (self.has_role || !self.has_choice) => Step::Opening,
            _ if self.has_choices => Step::Empty,
            ResponseEvent::None | ResponseEvent::Delta | ResponseEvent::End | ResponseEvent::Other => Step::Unknown,
        }
    }
}

/// The text that a value begins with, as it is written.
fn text_of(value: &[u8]) -> Option<&[u8]> {
    value.strip_prefix(b"\"")?.split(|byte| *byte == b'"').next()
}

/// Whether the text is one JSON object as far as its brackets and strings go.
pub(super) fn is_object(json: &[u8]) -> bool {
    let json = json.trim_ascii();
    let mut keys = Keys::of(json);
    keys.by_ref().for_each(drop);
    json.starts_with(b"{") && keys.is_closed && keys.rest.is_empty()
}

/// The last usage in the end of a JSON text. Where that end begins in the middle of a string nothing is lost: within one
/// every quote has a backslash before it, so that no key can be found there.
pub(super) fn last_usage(json: &[u8]) -> Option<Usage> {
    const KEY: &[u8] = b"\"usage\"";
    let is_key = |at: &usize| json[*at..].starts_with(KEY) && (*at == 0 || json[*at - 1] != b'\\');
    let value = |at: usize| {
        let rest = json[at + KEY.len()..].trim_ascii_start().strip_prefix(b":")?;
        Some(rest.trim_ascii_start()).filter(|value| value.starts_with(b"{"))
    };
    (0..json.len()).rev().filter(is_key).find_map(value).and_then(usage_of)
}

/// What an object says, if it is complete and says anything.
fn usage_of(object: &[u8]) -> Option<Usage> {
    let (mut keys, mut usage) = (Keys::of(object), Usage::default());
    for Key { name, depth, value } in &mut keys {
        match (name, depth) {
            (b"prompt_tokens" | b"input_tokens", 1) => usage.prompt_tokens = number(value),
            (b"completion_tokens" | b"output_tokens", 1) => usage.output_tokens = number(value),
            (b"cached_tokens", 1 | 2) => usage.cached_tokens = number(value),
            _ => {}
        }
    }
    Some(usage).filter(|usage| keys.is_closed && *usage != Usage::default())
}

/// The count that a value begins with, if it is one.
fn number(value: &[u8]) -> Option<u32> {
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit());
    let add = |sum: u32, digit: &u8| sum.saturating_mul(10).saturating_add(u32::from(digit - b'0'));
    value.first().filter(|first| first.is_ascii_digit()).map(|_| digits.fold(0, add))
}

/// A key of some object.
struct Key<'a> {
    /// As it is written.
    name: &'a [u8],
    /// How many objects and lists it stands in.
    depth: usize,
    /// From where its value begins.
    value: &'a [u8],
}

/// The keys of a JSON text, at every depth, in order. Of what is no JSON, something.
struct Keys<'a> {
    rest: &'a [u8],
    depth: usize,
    /// Whether what was opened first has ended; nothing is read behind it.
    is_closed: bool,
}

impl<'a> Keys<'a> {
    fn of(json: &'a [u8]) -> Self {
        Self { rest: json, depth: 0, is_closed: false }
    }

    /// Steps behind the next byte that is a bracket or a quote.
    fn mark(&mut self) -> Option<u8> {
        let at = self.rest.iter().position(|byte| matches!(byte, b'{' | b'[' | b'}' | b']' | b'"'))?;
        let mark = self.rest[at];
        self.rest = &self.rest[at + 1..];
        Some(mark)
    }

    /// Steps behind the end of a string whose quote has been read.
    fn string(&mut self) -> Option<&'a [u8]> {
        let (text, mut at) = (self.rest, 0);
        loop {
            at += text.get(at..)?.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
            if text[at] == b'"' {
                self.rest = &text[at + 1..];
                return Some(&text[..at]);
            }
            at += 2; // whatever is escaped
        }
    }
}

impl<'a> Iterator for Keys<'a> {
    type Item = Key<'a>;

    fn next(&mut self) -> Option<Key<'a>> {
        while !self.is_closed {
            match self.mark()? {
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.is_closed = self.depth == 0;
                }
                _ => {
                    let name = self.string()?;
                    if let Some(value) = self.rest.trim_ascii_start().strip_prefix(b":") {
                        return Some(Key { name, depth: self.depth, value: value.trim_ascii_start() });
                    }
                }
            }
        }
        None
    }
}
