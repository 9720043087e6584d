//! Changes of the response of the decode leg: cached prompt tokens, probabilities of the prompt's tokens, and parameters
//! for the next turn.
//!
//! The decode rank counts transferred blocks as cached or as computed, depending on the engine. The number of the
//! prefill rank is the number of the request. With bidirectional transfers, the last event has the parameters from which
//! the next turn's prefill rank reads the blocks of this one. They are taken out, because they name engines.

use std::sync::Arc;

use axum::body::Bytes;

use super::PromptLogprobs;
use super::object::ObjectText;
use crate::formats::json::with_changed_parts;

/// Maximum size of a buffered body or event line. Longer ones pass unchanged.
const BUFFERED_BYTES_MAX: usize = 16 << 20;

/// Rewrites the cached tokens in the usage of a response that passes in frames.
///
/// The length of the response changes, so that the caller removes `Content-Length`. Compressed responses pass unchanged.
///
/// Frames may split the response anywhere. An event stream is delayed by at most one incomplete line; a JSON body is
/// returned by [`finish`](Self::finish). Above 16 MiB a line or body passes unchanged. Other bytes never change, and
/// frames without usage are not copied.
///
/// ```
/// use pointsman_gateway::formats::handover::CachedTokensRewriter;
///
/// let mut rewriter = CachedTokensRewriter::new(true);
/// let chunk = "data: {\"choices\":[]}\n\n";
/// assert_eq!(rewriter.push(chunk.into(), Some(8)), chunk);
/// let usage = rewriter.push("data: {\"usage\":{\"prompt_tokens\":9}}\n".into(), Some(8));
/// let expected = "data: {\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n";
/// assert_eq!(usage, expected);
/// ```
#[derive(Debug, Default)]
pub struct CachedTokensRewriter {
    is_events: bool,
    bytes_max: usize,
    /// Incomplete line, or the body up to now.
    pending: Vec<u8>,
    /// Whether the rest of the line or body passes unchanged.
    is_too_long: bool,
    /// Parameters taken from the response, if they are wanted.
    taken: Option<Option<Bytes>>,
    /// Probabilities of the prompt's tokens, if they are wanted.
    logprobs: Option<Logprobs>,
}

/// Probabilities to add.
#[derive(Debug, Default)]
struct Logprobs {
    /// Absent until the prefill leg has ended.
    prompt: Option<Arc<PromptLogprobs>>,
    /// Indices of the choices that have passed with probabilities.
    done: Vec<String>,
}

impl CachedTokensRewriter {
    /// A rewriter for an event stream or for a JSON body.
    pub fn new(is_events: bool) -> Self {
        Self { is_events, bytes_max: BUFFERED_BYTES_MAX, ..Self::default() }
    }

    /// The same, which also adds the probabilities of the prompt's tokens to the first `logprobs` of each choice.
    pub fn adding_logprobs(self) -> Self {
        Self { logprobs: Some(Logprobs::default()), ..self }
    }

    /// Sets the probabilities of the prompt's tokens, once the prefill leg has ended.
    pub fn set_prompt_logprobs(&mut self, prompt: Arc<PromptLogprobs>) {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.prompt = Some(prompt);
        }
    }

    /// The same, which also replaces `kv_transfer_params` by null and keeps them.
    pub fn taking_parameters(self) -> Self {
        Self { taken: Some(None), ..self }
    }

    /// The parameters that were replaced, once.
    pub fn take_parameters(&mut self) -> Option<Bytes> {
        self.taken.as_mut()?.take()
    }

    #[cfg(test)]
    pub(super) fn with_bytes_max(is_events: bool, bytes_max: usize) -> Self {
        Self { bytes_max, ..Self::new(is_events) }
    }

    /// Accepts a frame and returns the bytes to send, which may be empty. The value of `cached_tokens` applies to the
    /// lines that end in this frame; with `None` they remain unchanged.
    pub fn push(&mut self, frame: Bytes, cached_tokens: Option<u32>) -> Bytes {
        let is_line_end = |byte: &u8| *byte == b'\n';
        let Some(last) = frame.iter().rposition(is_line_end).filter(|_| self.is_events) else {
            return self.buffer(frame);
        };
        let (mut passing, mut lines, rest) = (Bytes::new(), frame.slice(..=last), frame.slice(last + 1..));
        if std::mem::take(&mut self.is_too_long) {
            passing = lines.split_to(lines.iter().position(is_line_end).map_or(0, |at| at + 1));
        } else {
            lines = joined(std::mem::take(&mut self.pending).into(), lines);
        }
        if let Some(rewritten) = self.rewrite_lines(&lines, cached_tokens) {
            lines = rewritten.into();
        }
        joined(joined(passing, lines), self.buffer(rest))
    }

    /// Whether [`push`](Self::push) of this frame completes a line that may have usage or probabilities, so that it needs
    /// the values of the prefill leg.
    pub fn needs_prefill(&self, frame: &[u8]) -> bool {
        let has_values = |bytes: &[u8]| {
            let adds_logprobs = self.logprobs.as_ref().is_some_and(|logprobs| logprobs.prompt.is_none());
            contains_object(bytes, USAGE) || (adds_logprobs && contains_object(bytes, LOGPROBS))
        };
        let completes_line = self.is_events && frame.contains(&b'\n');
        completes_line
            && match self.pending.is_empty() {
                true => has_values(frame),
                false => has_values(&[&self.pending, frame].concat()),
            }
    }

    /// The remaining bytes: an incomplete last line, or the body.
    pub fn finish(&mut self, cached_tokens: Option<u32>) -> Bytes {
        let pending = std::mem::take(&mut self.pending);
        if std::mem::take(&mut self.is_too_long) {
            return pending.into();
        }
        let rewritten = match self.is_events {
            true => self.rewritten_line(&pending, cached_tokens),
            false => self.rewritten_json(&pending, cached_tokens),
        };
        rewritten.unwrap_or(pending).into()
    }

    /// Keeps a frame of an incomplete line or body. Returns the bytes that exceed the bound.
    fn buffer(&mut self, frame: Bytes) -> Bytes {
        if self.is_too_long || frame.is_empty() {
            return frame;
        }
        if self.pending.len() + frame.len() <= self.bytes_max {
            self.pending.extend_from_slice(&frame);
            return Bytes::new();
        }
        self.is_too_long = true;
        joined(std::mem::take(&mut self.pending).into(), frame)
    }

    /// Rewrites complete lines; `None` if none of them changes.
    fn rewrite_lines(&mut self, lines: &[u8], cached_tokens: Option<u32>) -> Option<Vec<u8>> {
        let has_usage = cached_tokens.is_some() && contains_object(lines, USAGE);
        let has_parameters = self.taken.is_some() && contains_object(lines, PARAMETERS);
        let has_logprobs = self.logprobs.is_some() && contains_object(lines, LOGPROBS);
        if !(has_usage || has_parameters || has_logprobs) {
            return None;
        }
        let first = |lines: &[u8]| lines.iter().position(|byte| *byte == b'\n').map_or(lines.len(), |at| at + 1);
        with_changed_parts(lines, first, |line| match line.len() <= self.bytes_max {
            true => self.rewritten_line(line, cached_tokens),
            false => None,
        })
    }

    /// Rewrites a line of an event stream; `None` if it does not change.
    fn rewritten_line(&mut self, line: &[u8], tokens: Option<u32>) -> Option<Vec<u8>> {
        let json = line.strip_prefix(b"data:")?;
        self.rewritten_json(json, tokens).map(|json| [b"data:", &json[..]].concat())
    }

    /// Rewrites a JSON response or event; `None` if it does not change.
    fn rewritten_json(&mut self, json: &[u8], tokens: Option<u32>) -> Option<Vec<u8>> {
        let mut rewritten = self.taken.as_mut().and_then(|taken| without_parameters(json, taken));
        let merged = self.logprobs.as_mut().and_then(|logprobs| logprobs.added(rewritten.as_deref().unwrap_or(json)));
        rewritten = merged.or(rewritten);
        let usage = tokens.and_then(|tokens| with_cached_tokens(rewritten.as_deref().unwrap_or(json), tokens));
        usage.or(rewritten)
    }
}

impl Logprobs {
    fn added(&mut self, json: &[u8]) -> Option<Vec<u8>> {
        let prompt = self.prompt.as_ref().filter(|prompt| !prompt.is_empty() && contains_object(json, LOGPROBS))?;
        prompt.merged(std::str::from_utf8(json).ok()?, &mut self.done).map(String::into_bytes)
    }
}

fn joined(first: Bytes, second: Bytes) -> Bytes {
    match (first.is_empty(), second.is_empty()) {
        (_, true) => first,
        (true, false) => second,
        (false, false) => [first, second].concat().into(),
    }
}

/// Takes the parameters out of a response or event; `None` without parameters.
fn without_parameters(json: &[u8], taken: &mut Option<Bytes>) -> Option<Vec<u8>> {
    if !contains_object(json, PARAMETERS) {
        return None;
    }
    let object = ObjectText::parse(std::str::from_utf8(json).ok()?, &["kv_transfer_params"]).ok()?;
    let parameters = object.json("kv_transfer_params").filter(|parameters| parameters.starts_with('{'))?;
    *taken = Some(Bytes::copy_from_slice(parameters.as_bytes()));
    Some(object.edit().set("kv_transfer_params", "null").finish().into_bytes())
}

/// Sets the cached tokens in the usage of a JSON response or event; `None` without usage.
fn with_cached_tokens(json: &[u8], tokens: u32) -> Option<Vec<u8>> {
    if !contains_object(json, USAGE) {
        return None;
    }
    let object = ObjectText::parse(std::str::from_utf8(json).ok()?, &["usage", "response"]).ok()?;
    if let Some(usage) = object.json("usage") {
        let usage = rewritten_usage(usage, tokens)?;
        return Some(object.edit().set("usage", usage).finish().into_bytes());
    }
    // Events of the responses endpoint contain the response.
    let response = ObjectText::parse(object.json("response")?, &["usage"]).ok()?;
    let usage = rewritten_usage(response.json("usage")?, tokens)?;
    let response = response.edit().set("usage", usage).finish();
    Some(object.edit().set("response", response).finish().into_bytes())
}

fn rewritten_usage(usage: &str, tokens: u32) -> Option<String> {
    let known = ["prompt_tokens", "prompt_tokens_details", "input_tokens", "input_tokens_details"];
    let usage = ObjectText::parse(usage, &known).ok()?;
    let is_responses = match (usage.raw("prompt_tokens_details"), usage.raw("input_tokens_details")) {
        (Some(_), _) => false,
        (None, Some(_)) => true,
        (None, None) => usage.raw("prompt_tokens").is_none() && usage.raw("input_tokens").is_some(),
    };
    let field = if is_responses { "input_tokens_details" } else { "prompt_tokens_details" };
    let details = match usage.json(field) {
        None => format!(r#"{{"cached_tokens":{tokens}}}"#),
        Some(details) => ObjectText::parse(details, &["cached_tokens"])
            .ok()?
            .edit()
            .set("cached_tokens", tokens.to_string())
            .finish(),
    };
    Some(usage.edit().set(field, details).finish())
}

const USAGE: &[u8] = b"\"usage\"";
const PARAMETERS: &[u8] = b"\"kv_transfer_params\"";
const LOGPROBS: &[u8] = b"\"logprobs\"";

/// Whether the bytes contain this field with an object. Quotes inside JSON strings are escaped, so that text content
/// does not match.
fn contains_object(mut bytes: &[u8], field: &[u8]) -> bool {
    while let Some(at) = bytes.windows(field.len()).position(|window| window == field) {
        bytes = &bytes[at + field.len()..];
        let value = bytes.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        if value.is_some_and(|value| value.starts_with(b"{")) {
            return true;
        }
    }
    false
}
