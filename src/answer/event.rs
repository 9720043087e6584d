//! One event of a streamed response.
//!
//! Classifies events in one pass and without allocation. The reader handles lines, framing and totals.

use super::error;
use super::json::{JsonKey, JsonKeys, number, text_of};
use super::usage::Usage;

/// Progress that an event indicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventStep {
    /// Not a valid event: the data is not one JSON object.
    Invalid,
    /// The stream has started, but the engine may still compute the prompt: a chunk with only a role, a chunk without
    /// choices, `response.created`, `response.queued` or `response.in_progress`; of the Messages API `message_start` or
    /// `content_block_start`.
    Opening,
    /// An event that only keeps the connection alive, such as `ping` of the Messages API.
    Heartbeat,
    /// An event without output: a choice with an empty delta.
    Empty,
    /// At least one output token: content, reasoning, a tool call, a refusal or log probabilities.
    Token,
    /// The end of an output: a finish reason, or the last event of the Responses or Messages API. May also contain a
    /// token.
    End,
    /// An engine error, with its HTTP status.
    Error(u16),
    /// A JSON object of an unknown format.
    Unknown,
}

/// Parsed fields of one event.
#[derive(Default)]
pub(super) struct StreamEvent {
    has_choices: bool,
    has_choice: bool,
    has_role: bool,
    has_content: bool,
    is_finished: bool,
    is_error: bool,
    /// Whether a person decides what follows: the finish reason is `stop` or `end_turn`.
    pub(super) is_stop: bool,
    /// Whether the event contains a tool call.
    pub(super) has_call: bool,
    /// Event type in the Responses and Messages APIs.
    kind: NamedEvent,
    /// Whether the data is one complete JSON object.
    pub(super) is_object: bool,
    pub(super) usage: Option<Usage>,
    /// Number of bytes of the data from the start of a text that is not empty; 0 without one. Its content has no effect.
    text_bytes: usize,
}

/// Meaning of an event type of the Responses or Messages API, or of an event name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum NamedEvent {
    /// Absent, or of another API.
    #[default]
    None,
    Opening,
    Heartbeat,
    Delta,
    End,
    Failed,
    Other,
}

impl NamedEvent {
    pub(super) fn of(name: &[u8]) -> Self {
        match name {
            b"response.created" | b"response.queued" | b"response.in_progress" => Self::Opening,
            b"response.completed" | b"response.incomplete" | b"response.done" | b"response.cancelled" => Self::End,
            b"response.failed" | b"response.error" | b"error" => Self::Failed,
            b"message_start" | b"content_block_start" => Self::Opening,
            b"ping" | b"heartbeat" | b"keepalive" | b"keep-alive" | b"keep_alive" => Self::Heartbeat,
            b"content_block_delta" => Self::Delta,
            b"content_block_stop" | b"message_delta" => Self::Other,
            b"message_stop" => Self::End,
            b"transcript.text.delta" => Self::Delta,
            b"transcript.text.done" => Self::End,
            name if name.starts_with(b"response.") && name.ends_with(b".delta") => Self::Delta,
            name if name.starts_with(b"response.") => Self::Other,
            _ => Self::None,
        }
    }

    /// Whether the event is the last of its stream.
    pub(super) fn is_last(self) -> bool {
        matches!(self, Self::End | Self::Failed)
    }
}

impl StreamEvent {
    pub(super) fn read(data: &[u8]) -> Self {
        let mut event = Self::default();
        let data = data.trim_ascii();
        let mut keys = JsonKeys::of(data);
        for JsonKey { name, depth, value } in &mut keys {
            match name {
                b"choices" if depth == 1 => {
                    event.has_choices = true;
                    let choices = value.strip_prefix(b"[").map(<[u8]>::trim_ascii_start);
                    event.has_choice = choices.is_some_and(|choices| choices.starts_with(b"{"));
                }
                b"type" if depth == 1 => event.kind = text_of(value).map(NamedEvent::of).unwrap_or_default(),
                b"error" if depth == 1 => event.is_error |= error::is_present(value),
                b"object" if depth == 1 => event.is_error |= value.starts_with(b"\"error\""),
                b"code" | b"status" if depth == 1 => event.is_error |= error::status(value).is_some(),
                // SGLang's `/generate` has it in `meta_info.finish_reason`.
                b"status_code" if depth == 1 || depth == 3 => event.is_error |= error::status(value).is_some(),
                // Only the usage of the event itself or of its response is parsed, because each parse is a further
                // pass.
                b"usage" if depth <= 2 && value.starts_with(b"{") => event.usage = usage_of(value).or(event.usage),
                b"role" if depth >= 3 => event.has_role = true,
                b"finish_reason" if depth == 3 => {
                    event.is_finished |= value.starts_with(b"\"");
                    event.is_error |= value.starts_with(b"\"error\"");
                    event.is_stop |= value.starts_with(b"\"stop\"");
                }
                b"stop_reason" if depth == 2 => event.is_stop |= value.starts_with(b"\"end_turn\""),
                b"content" | b"reasoning_content" | b"reasoning" | b"refusal" | b"text"
                    if depth >= 3 && value.starts_with(b"\"") && !value.starts_with(b"\"\"") =>
                {
                    (event.has_content, event.text_bytes) = (true, value.len() - 1);
                }
                b"logprobs" | b"function_call" if depth >= 3 => event.has_content |= value.starts_with(b"{"),
                b"tool_calls" if depth >= 3 => {
                    let calls = value.strip_prefix(b"[").map(<[u8]>::trim_ascii_start);
                    event.has_call |= calls.is_some_and(|calls| calls.starts_with(b"{"));
                    event.has_content |= event.has_call;
                }
                _ => {}
            }
        }
        event.is_error |= event.kind == NamedEvent::Failed;
        event.is_object = data.starts_with(b"{") && keys.is_closed && keys.rest.is_empty();
        event
    }

    /// Whether the event contains output. Also valid for the start of an event.
    pub(super) fn has_output(&self) -> bool {
        self.has_choices && self.has_content || self.kind == NamedEvent::Delta
    }

    /// Whether the event ends an output. Also valid for the start of an event.
    pub(super) fn is_end(&self) -> bool {
        self.has_choices && self.is_finished || self.kind.is_last()
    }

    /// Whether the event reports an error of the engine. Also valid for the start of an event.
    pub(super) fn is_error(&self) -> bool {
        self.is_error
    }

    /// Number of bytes from the start of the text of an event that is a token without usage; 0 for others.
    pub(super) fn token_text_bytes(&self) -> usize {
        let is_other = self.kind != NamedEvent::None || self.is_finished || self.is_error;
        if is_other || !self.is_object || !self.has_choices || self.usage.is_some() { 0 } else { self.text_bytes }
    }

    /// Progress that the event with this data indicates.
    pub(super) fn step(&self, data: &[u8]) -> EventStep {
        if !self.is_object {
            return EventStep::Invalid;
        }
        if self.is_error {
            return EventStep::Error(error::status_of_event(data));
        }
        match self.kind {
            _ if self.is_end() => EventStep::End,
            _ if self.has_output() => EventStep::Token,
            NamedEvent::Heartbeat => EventStep::Heartbeat,
            NamedEvent::Opening => EventStep::Opening,
            _ if self.has_choices && (self.has_role || !self.has_choice) => EventStep::Opening,
            _ if self.has_choices => EventStep::Empty,
            NamedEvent::None | NamedEvent::Delta | NamedEvent::End | NamedEvent::Failed | NamedEvent::Other => {
                EventStep::Unknown
            }
        }
    }
}

/// The last usage near the end of a JSON text. A start inside a string is harmless: quotes inside strings are preceded
/// by a backslash, so no key matches there.
pub(super) fn last_usage(json: &[u8]) -> Option<Usage> {
    const KEY: &[u8] = b"\"usage\"";
    let is_key = |at: &usize| json[*at..].starts_with(KEY) && (*at == 0 || json[*at - 1] != b'\\');
    let value = |at: usize| {
        let rest = json[at + KEY.len()..].trim_ascii_start().strip_prefix(b":")?;
        Some(rest.trim_ascii_start()).filter(|value| value.starts_with(b"{"))
    };
    (0..json.len()).rev().filter(is_key).find_map(value).and_then(usage_of)
}

/// The usage in a complete object; `None` if it has no values.
fn usage_of(object: &[u8]) -> Option<Usage> {
    let (mut keys, mut usage) = (JsonKeys::of(object), Usage::default());
    let (mut cache_read, mut cache_created) = (None, None);
    for JsonKey { name, depth, value } in &mut keys {
        match (name, depth) {
            (b"prompt_tokens" | b"input_tokens", 1) => usage.prompt_tokens = number(value),
            (b"completion_tokens" | b"output_tokens", 1) => usage.output_tokens = number(value),
            (b"cached_tokens", 1 | 2) => usage.cached_tokens = number(value),
            (b"cache_read_input_tokens", 1) => cache_read = number(value),
            (b"cache_creation_input_tokens", 1) => cache_created = number(value),
            _ => {}
        }
    }
    // The input tokens of the Messages API exclude these.
    let others = cache_read.unwrap_or(0).saturating_add(cache_created.unwrap_or(0));
    usage.prompt_tokens = usage.prompt_tokens.map(|tokens| tokens.saturating_add(others));
    usage.cached_tokens = usage.cached_tokens.or(cache_read);
    Some(usage).filter(|usage| keys.is_closed && *usage != Usage::default())
}
