//! Joins the event streams of several attempts into one.
//!
//! Events pass whole: an incomplete event is withheld until its end, so that a failure never leaves a part of it at the
//! client. Events of the first attempt pass unchanged, and most of short streams are never read.
//! Memory is bounded by the longest resumable output and one event.

use std::borrow::Cow;
use std::ops::Range;

use axum::body::Bytes;
use pointsman::{AnswerKind, AnswerReader};
use serde_json::value::RawValue;

use super::chunk::{Choice, Chunk, Usage};
use super::request::{ResumableRequest, SentOutput};
use super::unread::UnreadFrames;
use crate::formats::events::{IncompleteEvent, data, first_event_end};
use crate::formats::handover::object::ObjectText;
use crate::formats::json::{position, spliced, with_changed_parts};

/// Maximum size of a withheld event. A longer one passes in parts and ends the resumability.
const EVENT_BYTES_MAX: usize = 4 << 20;

/// Size of the unread events from which they are read: about a thousand tokens.
const UNREAD_BYTES_MAX: usize = 16 << 10;

/// Maximum size of the output so far, per token of its maximum.
const TOKEN_BYTES_MAX: usize = 64;

/// Data of the last event.
const DONE: &str = "[DONE]";

/// Whether a stream can be resumed now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamState {
    /// All output so far is text.
    #[default]
    Resumable,
    /// The output is longer than the maximum.
    TooLong,
    /// The stream has output other than text, several choices, or an unknown format.
    Unsound,
    /// The stream has its finish reason, an error or its end mark.
    Finished,
}

/// Values of the first attempt that all chunks have, as JSON.
#[derive(Clone, Debug, Default)]
struct Identity {
    id: Option<String>,
    created: Option<String>,
    model: Option<String>,
    object: Option<String>,
    prompt_tokens: Option<u32>,
}

/// Joins the streams of the attempts of one request.
///
/// ```
/// use pointsman_gateway::formats::migration::{StreamJoiner, StreamState};
///
/// let mut joiner = StreamJoiner::new(100);
/// let first = "data: {\"id\":\"x\",\"choices\":[{\"text\":\" b\"}]}\n\n";
/// assert_eq!(joiner.push(format!("{first}data: {{").into()), first);
/// assert_eq!(joiner.state(), StreamState::Resumable);
/// assert_eq!(&*joiner.output().text, " b");
/// joiner.resume();
/// let second = joiner.push("data: {\"id\":\"y\",\"choices\":[{\"text\":\" c\"}]}\n\n".into());
/// assert_eq!(second, "data: {\"id\":\"x\",\"choices\":[{\"text\":\" c\"}]}\n\n");
/// ```
#[derive(Clone, Debug, Default)]
pub struct StreamJoiner {
    tokens_max: u32,
    state: StreamState,
    output: SentOutput,
    /// Absent before the first chunk.
    first: Option<Identity>,
    /// Events that have passed and are not read yet.
    unread: UnreadFrames,
    /// Start of an incomplete event.
    held: IncompleteEvent,
    /// Tokens of earlier attempts; `None` in the first one.
    resumed_after: Option<u32>,
    /// Whether the stream passes unchanged from here on.
    passes: bool,
    is_done: bool,
    /// Error event of the engine and the events after it, while the stream can be resumed.
    error: Vec<u8>,
}

impl StreamJoiner {
    /// A joiner for the first attempt. Output of more than `tokens_max` tokens is not resumable.
    pub fn new(tokens_max: u32) -> Self {
        Self { tokens_max, ..Self::default() }
    }

    /// Whether the stream can be resumed now.
    pub fn state(&mut self) -> StreamState {
        self.catch_up();
        self.state
    }

    /// The output so far.
    pub fn output(&mut self) -> &SentOutput {
        self.catch_up();
        &self.output
    }

    /// Accepts a frame and returns the bytes for the client, which may be empty.
    pub fn push(&mut self, frame: Bytes) -> Bytes {
        if self.passes {
            return frame;
        }
        let events = self.held.push(frame);
        let rest = &self.held.0;
        let is_unknown = rest.windows(2).any(|pair| pair[0] == b'\r' && pair[1] != b'\n');
        if rest.len() > EVENT_BYTES_MAX || is_unknown {
            self.end_resumability(StreamState::Unsound);
            self.passes = true;
        }
        let events = self.accept(events);
        self.joined(events)
    }

    /// Records a frame that is one event and equals an earlier event but for the JSON text at this position, which holds a
    /// token. Returns whether the frame passes; another one must be [pushed](Self::push).
    pub fn push_text(&mut self, frame: &[u8], text: Range<usize>) -> bool {
        self.passes || (self.unread.bytes() <= UNREAD_BYTES_MAX && self.unread.repeat(frame, text))
    }

    /// Events of the first attempt pass unread, except for errors. They are read when the output matters, or when there
    /// are many.
    fn accept(&mut self, events: Bytes) -> Bytes {
        if events.is_empty() {
            return events;
        }
        if self.resumed_after.is_some() || self.is_done || !self.unread.push(&events) {
            self.catch_up();
            return self.process(events);
        }
        if self.unread.bytes() > UNREAD_BYTES_MAX {
            self.catch_up();
        }
        events
    }

    fn catch_up(&mut self) {
        for events in self.unread.take() {
            self.process(events.into());
        }
    }

    /// Whether the engine ended the attempt with a server error after which the stream can be resumed. The error is
    /// withheld.
    pub fn has_failed(&self) -> bool {
        !self.error.is_empty()
    }

    /// The withheld error, for a stream that is not resumed.
    pub fn error(&mut self) -> Bytes {
        self.end_resumability(StreamState::Finished);
        std::mem::take(&mut self.error).into()
    }

    /// Accepts the regular end of an attempt and returns the last bytes for the client.
    pub fn finish(&mut self) -> Bytes {
        let rest = std::mem::take(&mut self.held.0);
        self.accept(rest.into())
    }

    /// Starts the stream of the next attempt. The incomplete event of the previous one is dropped.
    pub fn resume(&mut self) {
        self.catch_up();
        self.held.0.clear();
        self.error.clear();
        // Without a chunk, the next attempt is the first one for the client.
        self.resumed_after = self.first.is_some().then_some(self.output.tokens);
    }

    /// The end of a stream whose output has its maximum length, by the gateway. `prompt_tokens` is the length of the
    /// prompt; without it the usage is omitted.
    pub fn complete(&mut self, request: &ResumableRequest, prompt_tokens: Option<u32>) -> Bytes {
        self.catch_up();
        self.held.0.clear();
        self.error.clear();
        (self.state, self.is_done) = (StreamState::Finished, true);
        let default_object = if request.is_chat { "\"chat.completion.chunk\"" } else { "\"text_completion\"" };
        let Identity { id, created, model, object, prompt_tokens: engine_tokens } =
            self.first.take().unwrap_or_default();
        let or_null = |json: &Option<String>| json.clone().unwrap_or_else(|| "null".to_owned());
        let head = format!(
            "\"id\":{},\"object\":{},\"created\":{},\"model\":{}",
            or_null(&id),
            object.as_deref().unwrap_or(default_object),
            or_null(&created),
            or_null(&model)
        );
        let content = if request.is_chat { "\"delta\":{}" } else { "\"text\":\"\"" };
        let mut end = format!(
            "data: {{{head},\"choices\":[{{\"index\":0,{content},\"logprobs\":null,\"finish_reason\":\"length\"}}]}}\n\n"
        );
        let output = self.output.tokens;
        if let Some(prompt) = engine_tokens.or(prompt_tokens).filter(|_| request.includes_usage) {
            let total = prompt.saturating_add(output);
            end += &format!(
                "data: {{{head},\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\
                 \"completion_tokens\":{output}}}}}\n\n"
            );
        }
        end += "data: [DONE]\n\n";
        end.into()
    }

    /// The events, and the withheld bytes once the stream passes unchanged.
    fn joined(&mut self, events: Bytes) -> Bytes {
        let is_read = self.state == StreamState::Resumable || self.resumed_after.is_some();
        self.passes |= !is_read;
        if !self.passes || self.held.0.is_empty() {
            return events;
        }
        [&events[..], &std::mem::take(&mut self.held.0)].concat().into()
    }

    fn end_resumability(&mut self, state: StreamState) {
        if self.state == StreamState::Resumable {
            self.state = state;
            self.output.clear();
        }
    }

    /// Reads whole events. Without changes, the result is the input.
    fn process(&mut self, events: Bytes) -> Bytes {
        with_changed_parts(&events, first_event_end, |event| self.step(event)).map_or(events, Bytes::from)
    }

    /// What replaces an event, nothing for a dropped one; `None` if it passes.
    fn step(&mut self, event: &[u8]) -> Option<Vec<u8>> {
        if self.has_failed() {
            self.error.extend_from_slice(event);
            return Some(Vec::new());
        }
        let Ok(text) = str::from_utf8(event) else {
            self.end_resumability(StreamState::Unsound);
            return None;
        };
        let data = match data(text)? {
            Cow::Borrowed(data) => data.trim(),
            Cow::Owned(data) => return self.step(format!("data: {}\n\n", data.replace('\n', " ")).as_bytes()),
        };
        if data.is_empty() {
            return None;
        }
        if data == DONE {
            self.end_resumability(StreamState::Finished);
            return if std::mem::replace(&mut self.is_done, true) { Some(Vec::new()) } else { None };
        }
        let Ok(chunk) = serde_json::from_str::<Chunk<'_>>(data) else {
            self.end_resumability(StreamState::Unsound);
            return None;
        };
        let may_fail = chunk.is_error() || chunk.choices.is_none();
        if may_fail && self.state == StreamState::Resumable && is_server_error(event) {
            self.error = event.to_vec();
            return Some(Vec::new());
        }
        self.read(&chunk);
        let choices = chunk.choices.as_deref().unwrap_or_default();
        if self.resumed_after.is_some() && matches!(choices, [choice] if choice.is_opening()) {
            return Some(Vec::new());
        }
        let json = self.rewritten(data, &chunk)?;
        let at = position(event, data);
        Some([&event[..at.start], &json, &event[at.end..]].concat())
    }

    /// Records the output of a chunk.
    fn read(&mut self, chunk: &Chunk<'_>) {
        let usage = chunk.usage.and_then(|usage| serde_json::from_str::<Usage>(usage.get()).ok());
        if self.first.is_none() {
            let json = |value: Option<&RawValue>| value.map(|value| value.get().to_owned());
            self.first = Some(Identity {
                id: json(chunk.id),
                created: json(chunk.created),
                model: json(chunk.model),
                object: json(chunk.object),
                prompt_tokens: None,
            });
        }
        if let Some(first) = self.first.as_mut().filter(|_| self.resumed_after.is_none()) {
            first.prompt_tokens = usage.and_then(|usage| usage.prompt_tokens).or(first.prompt_tokens);
        }
        if chunk.is_error() {
            return self.end_resumability(StreamState::Finished);
        }
        match chunk.choices.as_deref().unwrap_or_default() {
            [] => {}
            [choice] if choice.index == 0 && !choice.has_other_output() => self.read_choice(choice, usage),
            _ => self.end_resumability(StreamState::Unsound),
        }
    }

    fn read_choice(&mut self, choice: &Choice<'_>, usage: Option<Usage>) {
        if choice.finish_reason.is_some() {
            return self.end_resumability(StreamState::Finished);
        }
        if self.state != StreamState::Resumable {
            return;
        }
        let ids: Option<Vec<u32>> = choice.token_ids.and_then(|ids| serde_json::from_str(ids.get()).ok());
        let (text, output) = (choice.text(), &mut self.output);
        let has_ids = ids.as_ref().is_some_and(|ids| !ids.is_empty());
        output.ids.extend(ids.unwrap_or_default());
        if text.is_empty() {
            return;
        }
        output.text.push_str(text);
        let new_ids = u32::try_from(output.ids.len() - output.ids_sent).unwrap_or(u32::MAX);
        output.lacks_ids |= !has_ids;
        output.ids_sent = output.ids.len();
        output.tokens = output.tokens.saturating_add(if has_ids { new_ids } else { 1 });
        if let Some(tokens) = usage.and_then(|usage| usage.completion_tokens) {
            output.tokens = self.resumed_after.unwrap_or(0).saturating_add(tokens);
        }
        let bytes_max = TOKEN_BYTES_MAX.saturating_mul(self.tokens_max as usize);
        if output.tokens > self.tokens_max || output.text.len() > bytes_max {
            self.end_resumability(StreamState::TooLong);
        }
    }

    /// The chunk for the client; `None` if it does not change.
    fn rewritten(&self, data: &str, chunk: &Chunk<'_>) -> Option<Vec<u8>> {
        self.resumed_after?;
        let usage = self.resumed_after.and_then(|tokens| self.whole_usage(chunk.usage?.get(), tokens));
        let mut values: Vec<(Option<&RawValue>, Cow<'_, str>)> = vec![(chunk.prompt_token_ids, "null".into())];
        for choice in chunk.choices.as_deref().unwrap_or_default() {
            values.push((choice.prompt_token_ids, "null".into()));
        }
        if let Some(Identity { id, created, model, .. }) = &self.first {
            for (value, first) in [(chunk.id, id), (chunk.created, created), (chunk.model, model)] {
                values.extend(first.as_deref().map(|first| (value, first.into())));
            }
            values.extend(usage.map(|usage| (chunk.usage, usage.into())));
        }
        let given = values.into_iter().filter_map(|(value, json)| Some((value?.get(), json)));
        let changed =
            given.filter(|(value, json)| value != json).map(|(value, json)| (position(data.as_bytes(), value), json));
        let changed: Vec<_> = changed.collect();
        (!changed.is_empty()).then(|| spliced(data.as_bytes(), changed))
    }

    /// Usage of the request in place of that of the attempt.
    fn whole_usage(&self, usage: &str, tokens_before: u32) -> Option<String> {
        let Usage { prompt_tokens, completion_tokens } = serde_json::from_str(usage).ok()?;
        let first = self.first.as_ref().and_then(|first| first.prompt_tokens);
        let prompt = first.or(prompt_tokens.map(|tokens| tokens.saturating_sub(tokens_before)))?;
        let completion = completion_tokens?.saturating_add(tokens_before);
        let object = ObjectText::parse(usage, &["prompt_tokens", "completion_tokens", "total_tokens"]).ok()?;
        let edit = object.edit().set_present("prompt_tokens", prompt.to_string());
        let edit = edit.set_present("completion_tokens", completion.to_string());
        Some(edit.set_present("total_tokens", prompt.saturating_add(completion).to_string()).finish())
    }
}

/// Whether the event is an error that the request did not cause.
fn is_server_error(event: &[u8]) -> bool {
    let mut reader = AnswerReader::new(AnswerKind::Events);
    reader.read(event);
    matches!(reader.error_status(), Some(429 | 500..))
}
