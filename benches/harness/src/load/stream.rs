//! One streamed answer, as its bytes come.
//!
//! Owns what of an answer has come: when its first and last tokens came, the gaps between, and what the endpoint counted.
//! Promises the same facts however the bytes were cut, and bounded memory. Leaves sockets to [`super::client`].
//!
//! A stream is server-sent events whose data is a JSON chunk, and `[DONE]` at last. Chunks that carry text are taken for
//! tokens: an engine that sends several tokens in a chunk shows fewer and longer gaps. Chunks that come in one read have
//! gaps of 0. How many tokens there were is told by the `usage` of the last chunk; where there is none, chunks are
//! counted.

use std::borrow::Cow;

use pointsman_trial::sse::SseReader;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::client::Failure;

/// Most gaps of one answer: more than any model generates.
const GAPS_MAX: usize = 1 << 20;

/// Longest name of an error that is shown, in characters.
const CODE_CHARS_MAX: usize = 64;

/// What has come of an answer. Times are in µs of the caller's clock.
#[derive(Debug, Default)]
pub struct Answer {
    events: SseReader,
    /// When its first token came.
    pub first_token_us: Option<u64>,
    /// When its last one came.
    pub last_token_us: Option<u64>,
    /// From each token to the next, in µs.
    pub gaps_us: Vec<u32>,
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

/// An error in OpenAI's form, as far as it is told: its code, else its type.
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

/// The short name of an error's body, if it has one.
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
    /// Takes the next bytes, which came at `now_us`.
    ///
    /// # Errors
    /// What came is no stream of chunks, or tells of an error.
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

    /// The stream has ended.
    ///
    /// # Errors
    /// It should not have yet.
    pub fn end(&self) -> Result<(), Failure> {
        match (self.done, self.chunks) {
            (false, _) => Err(Failure::Truncated),
            (true, 0) => Err(Failure::NoToken),
            (true, _) => Ok(()),
        }
    }

    /// Tokens of the answer.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.usage.and_then(|usage| usage.completion_tokens).unwrap_or(self.chunks)
    }

    /// Tokens of the prompt, where the endpoint says so.
    #[must_use]
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.usage?.prompt_tokens
    }

    /// Those of them that were found cached, where the endpoint says so.
    #[must_use]
    pub fn cached_tokens(&self) -> Option<u64> {
        self.usage?.prompt_tokens_details?.cached_tokens
    }
}

#[cfg(test)]
mod tests {
    use pointsman_trial::sse::EVENT_BYTES_MAX;

    use super::*;

    const CHAT: &str = ": hello\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\" a\\n\"}}],\"usage\":null,\"error\":null}\r\n\r\n\
        event: x\ndata: {\"choices\":[{\"delta\":\ndata: {\"reasoning_content\":\"b\"}}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":5,\
        \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";

    /// Pieces that come a second apart, the first at 1 s.
    fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Answer, Failure> {
        let mut answer = Answer::default();
        for (piece, second) in pieces.into_iter().zip(1..) {
            answer.push(piece, second * 1_000_000)?;
        }
        answer.end()?;
        Ok(answer)
    }

    #[test]
    fn tokens_and_usage_are_read_wherever_the_stream_is_cut() {
        let seen = |text: &str| CHAT.find(text).expect("it is there") + text.len();
        let (first, second) = (seen("\"error\":null}\r\n\r\n"), seen("\"b\"}}]}\n\n"));
        for cut in 1..CHAT.len() {
            let (begin, rest) = CHAT.as_bytes().split_at(cut);
            let answer = read([begin, rest]).expect("it is whole");
            let at = |end: usize| if cut < end { 2_000_000 } else { 1_000_000 };
            assert_eq!((answer.first_token_us, answer.last_token_us), (Some(at(first)), Some(at(second))), "{cut}");
            assert_eq!(answer.gaps_us, [u32::try_from(at(second) - at(first)).expect("small")]);
            assert_eq!((answer.output_tokens(), answer.prompt_tokens(), answer.cached_tokens()), (5, Some(9), Some(4)));
        }
        assert_eq!(read(CHAT.as_bytes().chunks(1)).expect("it is whole").output_tokens(), 5);
    }

    #[test]
    fn without_usage_chunks_are_counted_and_caches_unknown() {
        let stream =
            b"data: {\"choices\":[{\"text\":\"x\"}]}\n\ndata: {\"choices\":[{\"text\":\"y\"}]}\n\ndata: [DONE]\n\n";
        let answer = read([stream.as_slice()]).expect("it is whole");
        assert_eq!((answer.output_tokens(), answer.prompt_tokens(), answer.cached_tokens()), (2, None, None));
        assert_eq!(answer.gaps_us, [0]);
    }

    #[test]
    fn what_is_not_whole_or_no_stream_has_its_reason() {
        for (stream, expected) in [
            ("data: {\"choices\":[{\"text\":\"x\"}]}\n\n", "the stream ended without [DONE]"),
            ("data: [DONE]", "the stream ended without [DONE]"),
            ("data: [DONE]\n\n", "no token came"),
            ("data: x\n\n", "an event is no chunk of an answer"),
            ("data: {\"error\":{\"code\":\"overloaded\"}}\n\n", "an error in the stream (overloaded)"),
            (
                "data: {\"error\":{\"type\":\"server_error\",\"code\":null}}\n\n",
                "an error in the stream (server_error)",
            ),
            ("data: {\"error\":7}\n\n", "an error in the stream"),
        ] {
            assert_eq!(read([stream.as_bytes()]).expect_err(stream).to_string(), expected);
        }
        let long = vec![b'x'; EVENT_BYTES_MAX + 1];
        assert!(matches!(read([long.as_slice()]), Err(Failure::EventTooLong)));
    }

    #[test]
    fn errors_are_named_by_code_or_type() {
        assert_eq!(error_code(b"{\"error\":{\"code\":503,\"type\":\"x\"}}").as_deref(), Some("503"));
        assert_eq!(error_code(b"{\"error\":{\"type\":\"x\"}}").as_deref(), Some("x"));
        assert_eq!((error_code(b"{}"), error_code(b"no")), (None, None));
    }
}
