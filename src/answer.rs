//! What an engine's answer says of itself while it passes: how much output there is, and the usage it ends with.
//!
//! Owns the reading of answers in OpenAI's shapes, streamed or whole. Promises that how an answer is cut into pieces
//! changes nothing, that memory and work are bounded whatever is fed in, and that nothing panics. Leaves the bytes as
//! they are, and what follows from the numbers to whoever holds the placement.
//!
//! # What is counted
//!
//! - In a stream of events, each line `data: {...}` with output in it (text, reasoning, a tool call) is one token, for
//!   that is how engines send them. Where an engine sends several tokens in one event (speculative decoding, vLLM's
//!   `stream_interval`) that is too low, until an event carries a `usage`: then its count holds. vLLM and SGLang put a
//!   usage into every event with `continuous_usage_stats`.
//! - A JSON answer is read from its end: the last `"usage"` object within the last 16 KiB.
//! - An event is one line, as all engines write it. Of a line longer than 64 KiB only a usage near its end is read.
//! - A compressed body says nothing.
//!
//! # What is an answer
//!
//! - A stream is valid from its first event whose data is a JSON object. Other data before that, `[DONE]` included, makes
//!   the stream invalid; comments, empty data and unknown fields do not.
//! - A stream is complete with `[DONE]`, a finish reason, the last event of the Responses API, or an error event.
//! - A JSON answer is valid if it is one object. Up to 32 KiB its brackets and strings are checked; of a longer one the
//!   first and the last byte.

mod event;

use event::{Event, Step, is_last_response_event, is_object, last_usage};

/// The longest line that is read as a whole.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// How far from the end of what is not read as a whole a usage may begin.
const TAIL_BYTES: usize = 16 * 1024;

/// What is kept allocated between two long lines.
const HELD_BYTES_KEPT: usize = 4 * 1024;

/// How a line begins that carries data.
const DATA: &[u8] = b"data:";

/// How a line begins that names the event whose data follows.
const EVENT: &[u8] = b"event:";

/// The data of the last event of a stream.
const DONE: &[u8] = b"[DONE]";

/// What an answer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// Server-sent events: a line for each step of the engine.
    Events,
    /// One JSON value; anything else may be read as one, and says nothing.
    Json,
}

impl AnswerKind {
    /// By the value of the header `content-type`.
    ///
    /// ```
    /// use pointsman::answer::AnswerKind;
    ///
    /// assert_eq!(AnswerKind::of_content_type(b"text/event-stream; charset=utf-8"), AnswerKind::Events);
    /// assert_eq!(AnswerKind::of_content_type(b"application/json"), AnswerKind::Json);
    /// ```
    #[must_use]
    pub fn of_content_type(value: &[u8]) -> Self {
        let media = value.split(|byte| *byte == b';').next().unwrap_or_default();
        if media.trim_ascii().eq_ignore_ascii_case(b"text/event-stream") { Self::Events } else { Self::Json }
    }

    /// Whether a body with this `content-type` is of this kind.
    ///
    /// ```
    /// use pointsman::answer::AnswerKind;
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

/// What an engine says that a request has cost, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Length of the prompt: `prompt_tokens`, or `input_tokens`.
    pub prompt_tokens: Option<u32>,
    /// Length of the output: `completion_tokens`, or `output_tokens`.
    pub output_tokens: Option<u32>,
    /// How much of the prompt was found in the engine's cache, where engines are told to say so: `cached_tokens` in the
    /// details.
    pub cached_tokens: Option<u32>,
}

/// How far an answer has come, and whether it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AnswerStage {
    /// No content yet.
    Empty,
    /// Valid so far, without output: a role, or the opening events of the Responses API; of JSON, the first byte.
    Opened,
    /// Output, or anything else that an engine sends after the prefill; JSON that has ended.
    Begun,
    /// No answer of its kind.
    Invalid,
}

/// Reads one answer as it passes.
///
/// ```
/// use pointsman::answer::{AnswerKind, AnswerReader};
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
    error_status: Option<u16>,
    /// The event's name says that it is the last of a stream of the Responses API.
    is_last_event: bool,
    has_ended: bool,
    /// The line that is not complete yet, or the end of the value.
    held: Vec<u8>,
    /// Set while the line is too long, of which only its end is held: whether it carries data.
    too_long: Option<bool>,
}

impl AnswerReader {
    /// Before the first byte.
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
            error_status: None,
            is_last_event: false,
            has_ended: false,
            held: Vec::new(),
            too_long: None,
        }
    }

    /// Reads on. Costs a pass over the bytes; what an event does not carry in one piece is copied once.
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

    /// There is no more. Again is harmless.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        match self.kind {
            AnswerKind::Events => self.end_line(),
            AnswerKind::Json => {
                let usage = last_usage(tail(&self.held));
                self.learn(usage);
                let is_whole = if self.bytes_read == self.held.len() as u64 {
                    is_object(&self.held)
                } else {
                    self.held.trim_ascii_end().ends_with(b"}")
                };
                self.is_complete = self.stage == AnswerStage::Opened && is_whole;
                self.stage = if self.is_complete { AnswerStage::Begun } else { AnswerStage::Invalid };
                self.held = Vec::new();
            }
        }
    }

    /// Tokens of output so far; of JSON, once it has ended. Never more than there are bytes, so that whoever does
    /// something for each token does not have to trust the number.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.counted.min(self.bytes_read)
    }

    /// What the engine has said of the whole request, as it last said it.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// How far the answer has come.
    #[must_use]
    pub fn stage(&self) -> AnswerStage {
        self.stage
    }

    /// Whether the prefill of a streamed answer is over: the first content, reasoning, tool call, refusal or log
    /// probabilities have come, or a finish reason. A chunk with only a role does not count.
    #[must_use]
    pub fn is_generating(&self) -> bool {
        self.is_generating
    }

    /// Whether the answer has come to its end mark; of JSON, whether it has ended as one object.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The HTTP status of the last error event in a stream, where the engine states one.
    #[must_use]
    pub fn error_status(&self) -> Option<u16> {
        self.error_status
    }

    fn read_lines(&mut self, mut bytes: &[u8]) {
        while let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            let line = &bytes[..end];
            if self.held.is_empty() && self.too_long.is_none() && line.len() <= LINE_BYTES_MAX {
                self.read_line(line);
            } else {
                self.hold(line);
                self.end_line();
            }
            bytes = &bytes[end + 1..];
        }
        self.hold(bytes);
    }

    /// Keeps the beginning of a line.
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

    /// Reads the beginning of a line that is too long to be read as a whole.
    fn read_long_head(&mut self) {
        self.too_long = Some(self.held.starts_with(DATA));
        let Some(data) = self.held.strip_prefix(DATA) else { return };
        let (event, is_object) = (Event::read(data), data.trim_ascii_start().starts_with(b"{"));
        self.is_complete |= event.is_end() || self.is_last_event;
        self.progress(if is_object { Step::Unknown } else { Step::Invalid });
    }

    /// Keeps at least the last [`TAIL_BYTES`] of what is held and these bytes.
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
        if let Some(name) = line.strip_prefix(EVENT) {
            self.is_last_event = is_last_response_event(name.trim_ascii());
            return;
        }
        let Some(data) = line.strip_prefix(DATA).map(<[u8]>::trim_ascii).filter(|data| !data.is_empty()) else {
            return;
        };
        if data == DONE && self.stage != AnswerStage::Empty {
            self.is_complete = true;
            self.stage = self.stage.max(AnswerStage::Begun);
            return;
        }
        let event = Event::read(data);
        self.counted += u64::from(event.has_output());
        self.learn(event.usage);
        self.progress(event.step());
    }

    /// Follows one event. Invalid data after a valid event changes nothing: clients skip it or report it themselves, and
    /// the missing end mark shows a stream that does not recover.
    fn progress(&mut self, step: Step) {
        let reached = match step {
            Step::Invalid if self.stage == AnswerStage::Empty => AnswerStage::Invalid,
            Step::Invalid => return,
            Step::Opening => AnswerStage::Opened,
            Step::Empty | Step::Token | Step::End | Step::Error(_) | Step::Unknown => AnswerStage::Begun,
        };
        self.stage = self.stage.max(reached);
        self.is_generating |= matches!(step, Step::Token | Step::End | Step::Unknown);
        self.is_complete |= matches!(step, Step::End | Step::Error(_));
        if let Step::Error(status) = step {
            self.error_status = status;
        }
    }

    /// What is said later holds; what is not said again stays.
    fn learn(&mut self, said: Option<Usage>) {
        let Some(said) = said else { return };
        let known = self.usage.unwrap_or_default();
        self.counted = said.output_tokens.map_or(self.counted, u64::from);
        self.usage = Some(Usage {
            prompt_tokens: said.prompt_tokens.or(known.prompt_tokens),
            output_tokens: said.output_tokens.or(known.output_tokens),
            cached_tokens: said.cached_tokens.or(known.cached_tokens),
        });
    }
}

/// The last [`TAIL_BYTES`].
fn tail(bytes: &[u8]) -> &[u8] {
    &bytes[bytes.len().saturating_sub(TAIL_BYTES)..]
}

#[cfg(test)]
mod tests;
