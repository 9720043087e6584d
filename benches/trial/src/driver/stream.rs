//! Parser of a streamed answer.
//!
//! Records the times of the first and last token, the gaps between tokens, and the usage reported by the endpoint. The
//! result does not depend on how the bytes are split, and memory is bounded. [`super::client`] reads the socket.
//!
//! A stream consists of server-sent events with a JSON chunk each, and a final `[DONE]`. A chunk with text counts as
//! one token: an engine that sends several tokens per chunk shows fewer and longer gaps. Chunks of one read have gaps
//! of 0. The token count is the `usage` of the last chunk, or the number of chunks if there is none.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::failure::Failure;
use crate::sse::SseReader;

/// Maximum number of gaps per answer, more than any model generates.
const GAPS_MAX: usize = 1 << 20;

/// Maximum length of a displayed error code, in characters.
const CODE_CHARS_MAX: usize = 64;

/// Received part of an answer. Times are in µs of the caller's clock.
#[derive(Debug, Default)]
pub struct Answer {
    events: SseReader,
    /// Time of the first token.
    pub first_token_us: Option<u64>,
    /// Time of the last token.
    pub last_token_us: Option<u64>,
    /// Gaps between consecutive tokens in µs.
    pub gaps_us: Vec<u32>,
    /// Text of a chat so far, if it is collected.
    pub content: Option<String>,
    chunks: u64,
    usage: Option<Usage>,
    done: bool,
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(default, borrow)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    #[serde(borrow)]
    error: Option<&'a serde_json::value::RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning: Option<Cow<'a, str>>,
    tool_calls: Option<IgnoredAny>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Usage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

/// Error body in OpenAI's format.
#[derive(Deserialize)]
struct ErrorBody<'a> {
    #[serde(borrow)]
    error: Option<&'a serde_json::value::RawValue>,
}

#[derive(Deserialize)]
struct ErrorFields {
    code: Option<serde_json::Value>,
    r#type: Option<String>,
}

/// Short name of an error body, if any: its code, otherwise its type.
pub(super) fn error_code(body: &[u8]) -> Option<String> {
    let body: ErrorBody<'_> = serde_json::from_slice(body).ok()?;
    code_of(body.error?.get())
}

fn code_of(error: &str) -> Option<String> {
    let ErrorFields { code, r#type } = serde_json::from_str(error).ok()?;
    let code = match code {
        Some(serde_json::Value::String(code)) => Some(code),
        Some(serde_json::Value::Number(code)) => Some(code.to_string()),
        _other => None,
    };
    code.or(r#type).map(|code| code.chars().take(CODE_CHARS_MAX).collect())
}

impl Choice<'_> {
    fn has_token(&self) -> bool {
        let delta = self.delta.as_ref();
        let texts = [
            self.text.as_ref(),
            delta.and_then(|delta| delta.content.as_ref()),
            delta.and_then(|delta| delta.reasoning_content.as_ref()),
            delta.and_then(|delta| delta.reasoning.as_ref()),
        ];
        texts.into_iter().flatten().any(|text| !text.is_empty())
            || delta.is_some_and(|delta| delta.tool_calls.is_some())
    }
}

impl Answer {
    /// An answer whose text is collected.
    pub fn with_content() -> Self {
        Self { content: Some(String::new()), ..Self::default() }
    }

    /// Parses bytes received at `now_us`.
    ///
    /// # Errors
    /// The bytes are no stream of chunks, or contain an error.
    pub fn push(&mut self, bytes: &[u8], now_us: u64) -> Result<(), Failure> {
        let mut events = std::mem::take(&mut self.events);
        let taken = events.push(bytes, |data| self.event(data, now_us));
        self.events = events;
        taken
    }

    fn event(&mut self, data: &[u8], now_us: u64) -> Result<(), Failure> {
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk<'_> = serde_json::from_slice(data).map_err(|_| Failure::Chunk)?;
        if let Some(error) = chunk.error.filter(|error| error.get() != "null") {
            return Err(Failure::InStream(code_of(error.get())));
        }
        self.usage = chunk.usage.or(self.usage);
        if let Some(content) = &mut self.content {
            let texts = chunk.choices.iter().filter_map(|choice| choice.delta.as_ref()?.content.as_deref());
            content.extend(texts);
        }
        if chunk.choices.iter().any(Choice::has_token) {
            self.chunks += 1;
            self.first_token_us.get_or_insert(now_us);
            if let Some(last_us) = self.last_token_us.replace(now_us) {
                if self.gaps_us.len() == GAPS_MAX {
                    return Err(Failure::Endless);
                }
                self.gaps_us.push(u32::try_from(now_us - last_us).unwrap_or(u32::MAX));
            }
        }
        Ok(())
    }

    /// Checks the state at the end of the stream.
    ///
    /// # Errors
    /// The answer is incomplete.
    pub fn end(&self) -> Result<(), Failure> {
        match (self.done, self.chunks) {
            (false, _) => Err(Failure::Truncated),
            (true, 0) => Err(Failure::NoToken),
            (true, _) => Ok(()),
        }
    }

    /// Number of output tokens.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.usage.and_then(|usage| usage.completion_tokens).unwrap_or(self.chunks)
    }

    /// Number of prompt tokens, if the endpoint reports it.
    #[must_use]
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.usage?.prompt_tokens
    }

    /// Number of cached prompt tokens, if the endpoint reports it.
    #[must_use]
    pub fn cached_tokens(&self) -> Option<u64> {
        self.usage?.prompt_tokens_details?.cached_tokens
    }
}

#[cfg(test)]
mod tests {
    use crate::sse::EVENT_BYTES_MAX;

    use super::*;

    const CHAT: &str = ": hello\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\" a\\n\"}}],\"usage\":null,\"error\":null}\r\n\r\n\
        event: x\ndata: {\"choices\":[{\"delta\":\ndata: {\"reasoning_content\":\"b\"}}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":5,\
        \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";

    /// Parses pieces that arrive one second apart, the first at 1 s.
    fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Answer, Failure> {
        let mut answer = Answer::default();
        for (piece, second) in pieces.into_iter().zip(1..) {
            answer.push(piece, second * 1_000_000)?;
        }
        answer.end()?;
        Ok(answer)
    }

    #[test]
    fn tokens_and_usage_do_not_depend_on_how_the_stream_is_split() {
        let seen = |text: &str| CHAT.find(text).expect("present") + text.len();
        let (first, second) = (seen("\"error\":null}\r\n\r\n"), seen("\"b\"}}]}\n\n"));
        for cut in 1..CHAT.len() {
            let (begin, rest) = CHAT.as_bytes().split_at(cut);
            let answer = read([begin, rest]).expect("complete");
            let at = |end: usize| if cut < end { 2_000_000 } else { 1_000_000 };
            assert_eq!((answer.first_token_us, answer.last_token_us), (Some(at(first)), Some(at(second))), "{cut}");
            assert_eq!(answer.gaps_us, [u32::try_from(at(second) - at(first)).expect("small")]);
            assert_eq!((answer.output_tokens(), answer.prompt_tokens(), answer.cached_tokens()), (5, Some(9), Some(4)));
        }
        assert_eq!(read(CHAT.as_bytes().chunks(1)).expect("complete").output_tokens(), 5);
    }

    #[test]
    fn without_usage_chunks_are_counted_and_cached_tokens_unknown() {
        let stream =
            b"data: {\"choices\":[{\"text\":\"x\"}]}\n\ndata: {\"choices\":[{\"text\":\"y\"}]}\n\ndata: [DONE]\n\n";
        let answer = read([stream.as_slice()]).expect("complete");
        assert_eq!((answer.output_tokens(), answer.prompt_tokens(), answer.cached_tokens()), (2, None, None));
        assert_eq!(answer.gaps_us, [0]);
    }

    #[test]
    fn incomplete_and_invalid_streams_have_a_reason() {
        for (stream, expected) in [
            ("data: {\"choices\":[{\"text\":\"x\"}]}\n\n", "the stream ended without [DONE]"),
            ("data: [DONE]", "the stream ended without [DONE]"),
            ("data: [DONE]\n\n", "the stream contained no token"),
            ("data: x\n\n", "an event is not a valid chunk"),
            ("data: {\"error\":{\"code\":\"overloaded\"}}\n\n", "error in the stream (overloaded)"),
            ("data: {\"error\":{\"type\":\"server_error\",\"code\":null}}\n\n", "error in the stream (server_error)"),
            ("data: {\"error\":7}\n\n", "error in the stream"),
        ] {
            assert_eq!(read([stream.as_bytes()]).expect_err(stream).to_string(), expected);
        }
        let long = vec![b'x'; EVENT_BYTES_MAX + 1];
        assert!(matches!(read([long.as_slice()]), Err(Failure::EventTooLong)));
    }
}
