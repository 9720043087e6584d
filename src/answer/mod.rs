//! Reader of engine responses in transit: output tokens, usage, progress and completeness.
//!
//! Parses responses in OpenAI's and Anthropic's formats, streamed or not. The result is independent of the split of the
//! bytes, memory and work are bounded for any input, and no input causes a panic. The bytes are forwarded unchanged by
//! the caller, which also uses the numbers.
//!
//! # Counting
//!
//! - In an event stream, each line `data: {...}` with output (text, reasoning, a tool call) counts as one token,
//!   because engines send one event per token. With several tokens per event (speculative decoding, vLLM's
//!   `stream_interval`) this is too low until an event contains a `usage`, whose count then applies. vLLM and SGLang
//!   add a usage to every event with `continuous_usage_stats`.
//! - A JSON response is read from its end: the last `"usage"` object within the last 16 KiB.
//! - The data of an event is one line in all known engines, or several lines of at most 64 KiB, which are joined. In a
//!   line longer than 64 KiB, only a usage near its end is read.
//! - A compressed body gives no values.
//!
//! # Validity
//!
//! - A stream is valid from its first event with a JSON object as data. Other data before it, including `[DONE]`, makes
//!   the stream invalid; comments, empty data and unknown fields do not.
//! - A stream is complete after `[DONE]`, a finish reason, the last event of the Responses or Messages API, or an error
//!   event: one with the name or type `error` or `response.failed`, a field `error`, the object `error`, the finish reason
//!   `error`, or an HTTP status of 400 or above.
//! - Comments, events without data and `ping` events are heartbeats, which have no other effect.
//! - A JSON response is valid if it is one object. Up to 32 KiB its brackets and strings are checked; for a longer one
//!   only the first and the last byte.

mod error;
mod event;
mod json;
mod repeated;
mod usage;

use std::ops::Range;

pub use usage::Usage;

use error::status_of_event;
use event::{EventStep, NamedEvent, StreamEvent, last_usage};
use repeated::TokenEvent;

/// Maximum length of a line that is parsed completely.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// Distance from the end of other input within which a usage must start.
const TAIL_BYTES: usize = 16 * 1024;

/// Buffer capacity kept after a long line, and maximum length of a token event that is kept.
const HELD_BYTES_KEPT: usize = 4 * 1024;

/// Prefix of a data line.
const DATA: &[u8] = b"data:";

/// Prefix of a line with the name of the following event.
const EVENT: &[u8] = b"event:";

/// Data of the last event of a stream.
const DONE: &[u8] = b"[DONE]";

/// Format of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// Server-sent events: one line per engine step.
    Events,
    /// One JSON value. Other content may be read as JSON and gives no values.
    Json,
}

impl AnswerKind {
    /// The format for a `content-type` header.
    ///
    /// ```
    /// use pointsman::AnswerKind;
    ///
    /// assert_eq!(AnswerKind::of_content_type(b"text/event-stream; charset=utf-8"), AnswerKind::Events);
    /// assert_eq!(AnswerKind::of_content_type(b"application/json"), AnswerKind::Json);
    /// ```
    #[must_use]
    pub fn of_content_type(value: &[u8]) -> Self {
        let media = value.split(|byte| *byte == b';').next().unwrap_or_default();
        if media.trim_ascii().eq_ignore_ascii_case(b"text/event-stream") { Self::Events } else { Self::Json }
    }

    /// Whether a body with this `content-type` has this format.
    ///
    /// ```
    /// use pointsman::AnswerKind;
    ///
    /// assert!(AnswerKind::Json.accepts(b"application/json; charset=utf-8"));
    /// assert!(!AnswerKind::Json.accepts(b"text/html"));
    /// assert!(!AnswerKind::Events.accepts(b"application/json"));
    /// ```
    #[must_use]
    pub fn accepts(self, content_type: &[u8]) -> bool {
        let media = content_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
        match self {
            Self::Events => media.eq_ignore_ascii_case(b"text/event-stream"),
            Self::Json => {
                let suffix = media.len().checked_sub(b"+json".len()).map(|at| &media[at..]);
                media.eq_ignore_ascii_case(b"application/json")
                    || suffix.is_some_and(|suffix| suffix.eq_ignore_ascii_case(b"+json"))
            }
        }
    }
}

/// Progress and validity of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum AnswerStage {
    /// No content yet.
    Empty,
    /// Valid so far, without output: a role, or the opening events of the Responses API; for JSON, the first byte.
    Opened,
    /// Output, or other content that engines send after the prefill; for JSON, the complete response.
    Begun,
    /// Not a valid response of its format.
    Invalid,
}

/// Reads one response in transit.
///
/// ```
/// use pointsman::{AnswerKind, AnswerReader};
///
/// let mut reader = AnswerReader::new(AnswerKind::Events);
/// reader.read(b"data: {\"choices\":[{\"delta\":{\"content\":\"Hel");
/// assert_eq!(reader.output_tokens(), 0);
/// reader.read(b"lo\"}}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1}}\n\n");
/// reader.end();
/// assert_eq!(reader.output_tokens(), 1);
/// assert_eq!(reader.usage().and_then(|usage| usage.prompt_tokens), Some(9));
/// ```
#[derive(Clone, Debug)]
pub struct AnswerReader {
    kind: AnswerKind,
    bytes_read: u64,
    counted: u64,
    usage: Option<Usage>,
    stage: AnswerStage,
    is_generating: bool,
    is_complete: bool,
    is_stop: bool,
    has_call: bool,
    error_status: Option<u16>,
    /// Events other than heartbeats.
    events: u64,
    /// Name of the current event.
    named: NamedEvent,
    /// Whether the current event has data.
    has_data: bool,
    /// Whether the last line ended an event, or was a comment after one.
    is_between: bool,
    /// Whether the last byte was a carriage return, whose line feed belongs to the same line end.
    is_after_return: bool,
    has_ended: bool,
    /// The incomplete line, or the end of the JSON value.
    held: Vec<u8>,
    /// `Some` while the line is too long and only its end is kept: whether it is a data line.
    too_long: Option<bool>,
    /// Data lines of the current event that are no complete object.
    joined: Vec<u8>,
    /// The last token event whose text was found.
    token: TokenEvent,
    /// Number of bytes from the start of the text to the end of the last line; 0 if it is no such event.
    text_bytes: usize,
    repeated_text: Option<Range<usize>>,
}

impl AnswerReader {
    /// A reader at the start of a response.
    #[must_use]
    pub fn new(kind: AnswerKind) -> Self {
        Self {
            kind,
            bytes_read: 0,
            counted: 0,
            usage: None,
            stage: AnswerStage::Empty,
            is_generating: false,
            is_complete: false,
            is_stop: false,
            has_call: false,
            error_status: None,
            events: 0,
            named: NamedEvent::None,
            has_data: false,
            is_between: true,
            is_after_return: false,
            has_ended: false,
            held: Vec::new(),
            too_long: None,
            joined: Vec::new(),
            token: TokenEvent::default(),
            text_bytes: 0,
            repeated_text: None,
        }
    }

    /// Processes the next bytes in one pass. Events split between calls are copied once.
    pub fn read(&mut self, bytes: &[u8]) {
        self.bytes_read += bytes.len() as u64;
        match self.kind {
            AnswerKind::Events => self.read_lines(bytes),
            AnswerKind::Json => {
                if self.stage == AnswerStage::Empty
                    && let Some(first) = bytes.iter().find(|byte| !byte.is_ascii_whitespace())
                {
                    self.stage = if *first == b'{' { AnswerStage::Opened } else { AnswerStage::Invalid };
                }
                self.hold_end(bytes);
            }
        }
    }

    /// Marks the end of the response. Repeated calls have no effect.
    pub fn end(&mut self) {
        self.repeated_text = None;
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        match self.kind {
            AnswerKind::Events => {
                self.end_line();
                self.end_event();
            }
            AnswerKind::Json => {
                let usage = last_usage(tail(&self.held));
                self.learn(usage);
                let is_whole = if self.bytes_read == self.held.len() as u64 {
                    let body = StreamEvent::read(&self.held);
                    self.error_status = body.is_error().then(|| status_of_event(self.held.trim_ascii()));
                    body.is_object
                } else {
                    self.held.trim_ascii_end().ends_with(b"}")
                };
                self.is_complete = self.stage == AnswerStage::Opened && is_whole;
                self.stage = if self.is_complete { AnswerStage::Begun } else { AnswerStage::Invalid };
                self.held = Vec::new();
            }
        }
    }

    /// Output tokens so far; for JSON, after the end. Never exceeds the number of bytes, so that callers with work per
    /// token need not trust the engine's count.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.counted.min(self.bytes_read)
    }

    /// The last usage reported by the engine.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Whether the response is valid so far, and has content.
    #[must_use]
    pub fn has_opened(&self) -> bool {
        matches!(self.stage, AnswerStage::Opened | AnswerStage::Begun)
    }

    /// Whether it is known if the response is valid: it is not, or has output or other content that engines send after
    /// the prefill. JSON is known at its end.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.stage >= AnswerStage::Begun
    }

    /// Whether this is not a valid response of its format.
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        self.stage == AnswerStage::Invalid
    }

    /// Whether the prefill of a streamed response is complete: content, reasoning, a tool call, a refusal, log
    /// probabilities or a finish reason was received. A chunk with only a role does not count.
    #[must_use]
    pub fn is_generating(&self) -> bool {
        self.is_generating
    }

    /// Whether the end mark was received; for JSON, whether the response ended as one object.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Whether a stream has ended with the finish reason `stop` or `end_turn`, without tool calls, whose results the program
    /// would send next.
    #[must_use]
    pub fn is_stop(&self) -> bool {
        self.is_stop && !self.has_call
    }

    /// The HTTP status of the last error event of a stream, or, after the end, of a short JSON body that is an error: as
    /// a number or a name, else 500.
    #[must_use]
    pub fn error_status(&self) -> Option<u16> {
        self.error_status
    }

    /// Number of events other than heartbeats.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Whether the bytes so far end between two events of a stream.
    #[must_use]
    pub fn is_between_events(&self) -> bool {
        self.is_between && !self.is_after_return && self.held.is_empty() && self.too_long.is_none()
    }

    /// Position of the token's JSON text in the bytes of the last [`Self::read`], if these are one whole event that equals
    /// the last parsed one outside of this text.
    #[must_use]
    #[inline]
    pub fn repeated_text(&self) -> Option<Range<usize>> {
        self.repeated_text.clone()
    }

    fn read_lines(&mut self, mut bytes: &[u8]) {
        let length = bytes.len();
        self.repeated_text = None;
        if self.is_after_return && !bytes.is_empty() {
            bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
            self.is_after_return = false;
        }
        loop {
            // Most events of a stream are the one before with another text, and have its effects.
            while self.is_between_events()
                && let Some((text, end)) = self.token.repeated_by(bytes)
            {
                self.repeated_text = (end == length).then_some(text);
                (self.events, self.counted) = (self.events + 1, self.counted + 1);
                bytes = &bytes[end..];
            }
            let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else { break };
            let line = &bytes[..end];
            if self.held.is_empty() && self.too_long.is_none() && line.len() <= LINE_BYTES_MAX {
                self.text_bytes = 0;
                self.read_line(line);
                let is_token = self.text_bytes > 0 && end <= HELD_BYTES_KEPT;
                if is_token && line.ends_with(b"}") && bytes[end..].starts_with(b"\n\n") {
                    self.token.set(&bytes[..end + 2], end - self.text_bytes);
                }
            } else {
                self.hold(line);
                self.end_line();
            }
            self.is_after_return = bytes[end..] == *b"\r";
            bytes = bytes[end..].strip_prefix(b"\r\n").unwrap_or(&bytes[end + 1..]);
        }
        self.hold(bytes);
    }

    /// Keeps the start of a line.
    fn hold(&mut self, bytes: &[u8]) {
        if self.too_long.is_none() {
            if self.held.len() + bytes.len() <= LINE_BYTES_MAX {
                self.held.extend_from_slice(bytes);
                return;
            }
            let (head, rest) = bytes.split_at(LINE_BYTES_MAX - self.held.len());
            self.held.extend_from_slice(head);
            self.read_long_head();
            return self.hold_end(rest);
        }
        self.hold_end(bytes);
    }

    /// Parses the start of a line that is too long.
    fn read_long_head(&mut self) {
        self.too_long = Some(self.held.starts_with(DATA));
        let Some(data) = self.held.strip_prefix(DATA) else { return };
        let (event, is_object) = (StreamEvent::read(data), data.trim_ascii_start().starts_with(b"{"));
        self.is_complete |= event.is_end() || self.named.is_last();
        let step = match is_object {
            true if event.is_error() || self.named == NamedEvent::Failed => EventStep::Error(status_of_event(data)),
            true => EventStep::Unknown,
            false => EventStep::Invalid,
        };
        (self.events, self.has_data, self.is_between) = (self.events + 1, true, false);
        self.progress(step);
    }

    /// Keeps at least the last [`TAIL_BYTES`] of the held and the new bytes.
    fn hold_end(&mut self, bytes: &[u8]) {
        let bytes = tail(bytes);
        if self.held.len() + bytes.len() > 2 * TAIL_BYTES {
            let kept = TAIL_BYTES - bytes.len();
            self.held.drain(..self.held.len().saturating_sub(kept));
        }
        self.held.extend_from_slice(bytes);
    }

    fn end_line(&mut self) {
        let mut line = std::mem::take(&mut self.held);
        match self.too_long.take() {
            None => self.read_line(&line),
            Some(false) => {}
            Some(true) => {
                self.counted += 1;
                self.learn(last_usage(tail(&line)));
            }
        }
        line.clear();
        line.shrink_to(HELD_BYTES_KEPT);
        self.held = line;
    }

    fn read_line(&mut self, line: &[u8]) {
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line); // the first may have a byte order mark
        if line.is_empty() {
            return self.end_event();
        }
        if line.starts_with(b":") {
            return;
        }
        self.is_between = false;
        if let Some(name) = line.strip_prefix(EVENT) {
            self.named = NamedEvent::of(name.trim_ascii());
        } else if let Some(data) = line.strip_prefix(DATA).map(<[u8]>::trim_ascii).filter(|data| !data.is_empty()) {
            self.read_data(data);
        }
    }

    /// An error event may have only a name, and its text in a comment.
    fn end_event(&mut self) {
        if !self.joined.is_empty() {
            let data = std::mem::take(&mut self.joined);
            self.read_event(&StreamEvent::read(&data), &data);
        }
        if self.named == NamedEvent::Failed && !self.has_data {
            self.events += 1;
            self.progress(EventStep::Error(status_of_event(b"")));
        }
        (self.named, self.has_data, self.is_between) = (NamedEvent::None, false, true);
    }

    fn read_data(&mut self, data: &[u8]) {
        if self.named == NamedEvent::Heartbeat {
            return;
        }
        if self.joined.is_empty() {
            (self.events, self.has_data) = (self.events + 1, true);
            if data == DONE && self.stage != AnswerStage::Empty {
                self.is_complete = true;
                self.stage = self.stage.max(AnswerStage::Begun);
                return;
            }
            let event = StreamEvent::read(data);
            if event.is_object || self.named == NamedEvent::Failed {
                return self.read_event(&event, data);
            }
        } else if self.joined.len() + data.len() > LINE_BYTES_MAX {
            self.joined.clear();
            self.counted += 1;
            return self.progress(EventStep::Unknown);
        }
        self.joined.extend_from_slice(data);
        self.joined.push(b'\n');
    }

    fn read_event(&mut self, event: &StreamEvent, data: &[u8]) {
        self.counted += u64::from(event.has_output());
        self.learn(event.usage);
        self.is_stop |= event.is_stop;
        self.has_call |= event.has_call;
        self.text_bytes = if self.named == NamedEvent::None { event.token_text_bytes() } else { 0 };
        let step = match self.named == NamedEvent::Failed {
            true => EventStep::Error(status_of_event(data)),
            false => event.step(data),
        };
        self.events -= u64::from(step == EventStep::Heartbeat);
        self.progress(step);
    }

    /// Updates the progress for one event. Invalid data after a valid event is ignored: clients skip it or report it
    /// themselves, and the missing end mark reveals a stream that does not recover.
    fn progress(&mut self, step: EventStep) {
        let reached = match step {
            EventStep::Invalid if self.stage == AnswerStage::Empty => AnswerStage::Invalid,
            EventStep::Invalid | EventStep::Heartbeat => return,
            EventStep::Opening => AnswerStage::Opened,
            EventStep::Empty | EventStep::Token | EventStep::End | EventStep::Error(_) | EventStep::Unknown => {
                AnswerStage::Begun
            }
        };
        self.stage = self.stage.max(reached);
        self.is_generating |= matches!(step, EventStep::Token | EventStep::End | EventStep::Unknown);
        self.is_complete |= matches!(step, EventStep::End | EventStep::Error(_));
        if let EventStep::Error(status) = step {
            self.error_status = Some(status);
        }
    }

    /// Later values replace earlier ones; missing values keep the earlier ones.
    fn learn(&mut self, reported: Option<Usage>) {
        let Some(reported) = reported else { return };
        let known = self.usage.unwrap_or_default();
        self.counted = reported.output_tokens.map_or(self.counted, u64::from);
        self.usage = Some(Usage {
            prompt_tokens: reported.prompt_tokens.or(known.prompt_tokens),
            output_tokens: reported.output_tokens.or(known.output_tokens),
            cached_tokens: reported.cached_tokens.or(known.cached_tokens),
        });
    }
}

/// The last [`TAIL_BYTES`].
fn tail(bytes: &[u8]) -> &[u8] {
    &bytes[bytes.len().saturating_sub(TAIL_BYTES)..]
}

#[cfg(test)]
mod tests;
