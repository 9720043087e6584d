//! Token events that differ from an earlier one in their text only, found without parsing.

use std::ops::Range;

/// A token event and the position of its text.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenEvent {
    /// The line with its end and the empty line; empty without an event.
    bytes: Vec<u8>,
    /// Start of the text.
    head: usize,
    /// Position of its closing quote.
    tail: usize,
}

impl TokenEvent {
    /// Replaces the event by another one, whose text begins at this position.
    pub(super) fn set(&mut self, bytes: &[u8], text_at: usize) {
        let Some(text) = text_end(&bytes[text_at..]) else { return };
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
        (self.head, self.tail) = (text_at, text_at + text);
    }

    /// Position of the text if the bytes start with this event and any text, and the end of the event; `None` for an empty
    /// text, which is no token.
    pub(super) fn repeated_by(&self, bytes: &[u8]) -> Option<(Range<usize>, usize)> {
        let (head, tail) = (&self.bytes[..self.head], &self.bytes[self.tail..]);
        let text = bytes.strip_prefix(head).filter(|_| !head.is_empty())?;
        let length = text_end(text).filter(|length| *length > 0)?;
        let end = head.len() + length;
        text[length..].starts_with(tail).then_some((head.len()..end, end + tail.len()))
    }
}

/// Length of a text up to its closing quote; `None` if the line ends before.
fn text_end(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        at += match bytes.get(at)? {
            b'"' => return Some(at),
            b'\n' | b'\r' => return None,
            b'\\' if matches!(bytes.get(at + 1)?, b'"' | b'\\') => 2,
            _ => 1,
        };
    }
}
