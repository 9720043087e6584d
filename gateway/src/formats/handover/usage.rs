//! Change of the response of the decode leg: cached prompt tokens.
//!
//! The decode rank counts transferred blocks as cached or as computed, depending on the engine. The number of the
//! prefill rank is the number of the request.

use axum::body::Bytes;

use super::object::ObjectText;
use crate::formats::events::{END_BYTES_MAX, IncompleteEvent, data, first_event_end, with_data};
use crate::formats::json::with_changed_parts;

/// Maximum size of a buffered body or event. Longer ones pass unchanged.
const BUFFERED_BYTES_MAX: usize = 16 << 20;

/// Rewrites the cached tokens in the usage of a response that passes in frames.
///
/// The length of the response changes, so that the caller removes `Content-Length`. Compressed responses pass unchanged.
///
/// Frames may split the response anywhere. An event stream is delayed by at most one incomplete event; a JSON body is
/// returned by [`finish`](Self::finish). Above 16 MiB an event or body passes unchanged. Other bytes never change, and
/// frames without usage are not copied.
///
/// ```
/// use pointsman_gateway::formats::handover::CachedTokensRewriter;
///
/// let mut rewriter = CachedTokensRewriter::new(true);
/// let chunk = "data: {\"choices\":[]}\n\n";
/// assert_eq!(rewriter.push(chunk.into(), Some(8)), chunk);
/// let usage = rewriter.push("data: {\"usage\":{\"prompt_tokens\":9}}\n\n".into(), Some(8));
/// let expected = "data: {\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n";
/// assert_eq!(usage, expected);
/// ```
#[derive(Debug, Default)]
pub struct CachedTokensRewriter {
    is_events: bool,
    bytes_max: usize,
    /// Incomplete event, or the body up to now.
    pending: IncompleteEvent,
    /// Whether the rest of the event or body passes unchanged.
    is_too_long: bool,
}

impl CachedTokensRewriter {
    /// A rewriter for an event stream or for a JSON body.
    pub fn new(is_events: bool) -> Self {
        Self { is_events, bytes_max: BUFFERED_BYTES_MAX, ..Self::default() }
    }

    #[cfg(test)]
    pub(super) fn with_bytes_max(is_events: bool, bytes_max: usize) -> Self {
        Self { bytes_max, ..Self::new(is_events) }
    }

    /// Accepts a frame and returns the bytes to send, which may be empty. The value of `cached_tokens` applies to the
    /// events that end in this frame; with `None` they remain unchanged.
    pub fn push(&mut self, frame: Bytes, cached_tokens: Option<u32>) -> Bytes {
        let mut events = Bytes::new();
        match self.is_events {
            true => events = self.pending.push(frame),
            false => self.pending.0.extend_from_slice(&frame),
        }
        let mut passing = Bytes::new();
        if self.is_too_long && !events.is_empty() {
            passing = events.split_to(first_event_end(&events));
            self.is_too_long = false;
        }
        if let Some(rewritten) = self.rewrite_events(&events, cached_tokens) {
            events = rewritten.into();
        }
        joined(joined(passing, events), self.excess())
    }

    /// Whether [`push`](Self::push) of this frame completes an event that may have usage, so that it needs the
    /// value of the prefill leg.
    pub fn needs_prefill(&self, frame: &[u8]) -> bool {
        self.is_events
            && match self.pending.0.is_empty() {
                true => contains_usage(frame),
                false => self.pending.ends_with(frame) && contains_usage(&[&self.pending.0, frame].concat()),
            }
    }

    /// The remaining bytes: an incomplete last event, or the body.
    pub fn finish(&mut self, cached_tokens: Option<u32>) -> Bytes {
        let pending = std::mem::take(&mut self.pending.0);
        if std::mem::take(&mut self.is_too_long) {
            return pending.into();
        }
        let rewritten = match self.is_events {
            true => rewritten_event(&pending, cached_tokens),
            false => cached_tokens.and_then(|tokens| with_cached_tokens(&pending, tokens)),
        };
        rewritten.unwrap_or(pending).into()
    }

    /// Removes what exceeds the bound. The end of an event remains visible.
    fn excess(&mut self) -> Bytes {
        let pending = &mut self.pending.0;
        self.is_too_long |= pending.len() > self.bytes_max;
        if !self.is_too_long {
            return Bytes::new();
        }
        let rest = pending.split_off(pending.len().saturating_sub(END_BYTES_MAX));
        std::mem::replace(pending, rest).into()
    }

    /// Rewrites whole events; `None` if none of them changes.
    fn rewrite_events(&self, events: &[u8], cached_tokens: Option<u32>) -> Option<Vec<u8>> {
        if cached_tokens.is_none() || !contains_usage(events) {
            return None;
        }
        with_changed_parts(events, first_event_end, |event| match event.len() <= self.bytes_max {
            true => rewritten_event(event, cached_tokens),
            false => None,
        })
    }
}

/// Rewrites the data of an event; `None` if it does not change.
fn rewritten_event(event: &[u8], tokens: Option<u32>) -> Option<Vec<u8>> {
    let event = str::from_utf8(event).ok()?;
    let json = with_cached_tokens(data(event)?.as_bytes(), tokens?)?;
    Some(with_data(event, str::from_utf8(&json).ok()?).into_bytes())
}

fn joined(first: Bytes, second: Bytes) -> Bytes {
    match (first.is_empty(), second.is_empty()) {
        (_, true) => first,
        (true, false) => second,
        (false, false) => [first, second].concat().into(),
    }
}

/// Sets the cached tokens in the usage of a JSON response or event; `None` without usage.
fn with_cached_tokens(json: &[u8], tokens: u32) -> Option<Vec<u8>> {
    if !contains_usage(json) {
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

/// Whether the bytes contain `usage` with an object. Quotes inside JSON strings are escaped, so that text content
/// does not match. Several lines of data may lie between.
fn contains_usage(mut bytes: &[u8]) -> bool {
    fn value(bytes: &[u8]) -> &[u8] {
        let bytes = bytes.trim_ascii_start();
        bytes.strip_prefix(b"data:").map_or(bytes, value)
    }
    while let Some(at) = bytes.windows(USAGE.len()).position(|window| window == USAGE) {
        bytes = &bytes[at + USAGE.len()..];
        if value(bytes).strip_prefix(b":").is_some_and(|bytes| value(bytes).starts_with(b"{")) {
            return true;
        }
    }
    false
}
