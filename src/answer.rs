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

/// The longest line that is read as a whole.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// How far from the end of what is not read as a whole a usage may begin.
const TAIL_BYTES: usize = 16 * 1024;

/// What is kept allocated between two long lines.
const HELD_BYTES_KEPT: usize = 4 * 1024;

/// How a line begins that carries data.
const DATA: &[u8] = b"data:";

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
    /// The line that is not complete yet, or the end of the value.
    held: Vec<u8>,
    /// Set while the line is too long, of which only its end is held: whether it carries data.
    too_long: Option<bool>,
}

impl AnswerReader {
    /// Before the first byte.
    #[must_use]
    pub fn new(kind: AnswerKind) -> Self {
        Self { kind, bytes_read: 0, counted: 0, usage: None, held: Vec::new(), too_long: None }
    }

    /// Reads on. Costs a pass over the bytes; what an event does not carry in one piece is copied once.
    pub fn read(&mut self, bytes: &[u8]) {
        self.bytes_read += bytes.len() as u64;
        match self.kind {
            AnswerKind::Events => self.read_lines(bytes),
            AnswerKind::Json => self.hold_end(bytes),
        }
    }

    /// There is no more. Again is harmless.
    pub fn end(&mut self) {
        match self.kind {
            AnswerKind::Events => self.end_line(),
            AnswerKind::Json => {
                let usage = last_usage(tail(&self.held));
                self.learn(usage);
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
            self.too_long = Some(self.held.iter().chain(bytes).take(DATA.len()).eq(DATA));
        }
        self.hold_end(bytes);
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
        // The stream's last word, `[DONE]`, has no key, and so says nothing.
        let Some(data) = line.strip_prefix(DATA) else { return };
        let event = Event::read(data);
        self.counted += u64::from(event.has_output());
        self.learn(event.usage);
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

/// What one event says.
#[derive(Default)]
struct Event {
    has_choices: bool,
    has_content: bool,
    /// Of the responses API: a piece of output.
    is_delta: bool,
    usage: Option<Usage>,
}

impl Event {
    fn read(data: &[u8]) -> Self {
        let mut event = Self::default();
        for Key { name, depth, value } in Keys::of(data) {
            match name {
                b"choices" if depth == 1 => event.has_choices = true,
                b"type" if depth == 1 => {
                    let kind = value.strip_prefix(b"\"").and_then(|rest| rest.split(|byte| *byte == b'"').next());
                    event.is_delta =
                        kind.is_some_and(|kind| kind.starts_with(b"response.") && kind.ends_with(b".delta"));
                }
                // Of the event itself, or of the response in it. Deeper ones are not looked into: each look is a pass.
                b"usage" if depth <= 2 && value.starts_with(b"{") => event.usage = usage_of(value).or(event.usage),
                b"content" | b"reasoning_content" | b"reasoning" | b"refusal" | b"text" if depth >= 3 => {
                    event.has_content |= value.starts_with(b"\"") && !value.starts_with(b"\"\"");
                }
                b"tool_calls" if depth >= 3 => {
                    let calls = value.strip_prefix(b"[").map(<[u8]>::trim_ascii_start);
                    event.has_content |= calls.is_some_and(|calls| calls.starts_with(b"{"));
                }
                _ => {}
            }
        }
        event
    }

    fn has_output(&self) -> bool {
        self.has_choices && self.has_content || self.is_delta
    }
}

/// The last usage in the end of a JSON text. Where that end begins in the middle of a string nothing is lost: within one
/// every quote has a backslash before it, so that no key can be found there.
fn last_usage(json: &[u8]) -> Option<Usage> {
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

#[cfg(test)]
mod tests;
