//! Reading of JSON lists element by element, parts of JSON text, and edits of it in place.
//!
//! Elements are not collected, because a list of small objects would take many times the size of its text.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};

/// Calls `visit` with the position and value of each element of a list, up to the first error. `shape` is the error for
/// any other value.
pub(super) fn each<'a, T: Deserialize<'a>, E>(
    list: &'a str,
    shape: impl Fn() -> E,
    visit: impl FnMut(usize, T) -> Result<(), E>,
) -> Result<(), E> {
    let mut elements = Elements { visit, error: None, element: PhantomData };
    let read = (&mut elements).deserialize(&mut serde_json::Deserializer::from_str(list));
    match elements.error {
        Some(error) => Err(error),
        None => read.map_err(|_| shape()),
    }
}

struct Elements<T, E, F> {
    visit: F,
    error: Option<E>,
    element: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>, E, F: FnMut(usize, T) -> Result<(), E>> DeserializeSeed<'de> for &mut Elements<T, E, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>, E, F: FnMut(usize, T) -> Result<(), E>> Visitor<'de> for &mut Elements<T, E, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut position = 0;
        // The rest behind an error is not read: a list of token ids can be long.
        while self.error.is_none()
            && let Some(element) = list.next_element()?
        {
            self.error = (self.visit)(position, element).err();
            position += 1;
        }
        Ok(())
    }
}

/// Content of a JSON string, with its escapes; `None` for another value.
pub(super) fn inner(raw: &str) -> Option<&str> {
    raw.strip_prefix('"')?.strip_suffix('"')
}

/// JSON of a text.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("strings serialize to JSON")
}

/// Whether these `stream_options` request a usage record at the end. Engines check them.
pub(super) fn include_usage(options: Option<&str>) -> bool {
    #[derive(Deserialize)]
    struct StreamOptions {
        include_usage: Option<bool>,
    }
    let options = options.and_then(|options| serde_json::from_str(options).ok());
    options.is_some_and(|StreamOptions { include_usage }| include_usage == Some(true))
}

/// Position of a part in the text that it was borrowed from.
pub(super) fn position(text: &[u8], part: &str) -> Range<usize> {
    let start = part.as_ptr() as usize - text.as_ptr() as usize;
    start..start + part.len()
}

/// The text with these parts replaced, which do not overlap.
pub(super) fn spliced(text: &[u8], mut parts: Vec<(Range<usize>, Cow<'_, str>)>) -> Vec<u8> {
    parts.sort_unstable_by_key(|(span, _)| span.start);
    let more: usize = parts.iter().map(|(_, json)| json.len()).sum();
    let (mut edited, mut at) = (Vec::with_capacity(text.len() + more), 0);
    for (span, json) in &parts {
        edited.extend_from_slice(&text[at..span.start]);
        edited.extend_from_slice(json.as_bytes());
        at = span.end;
    }
    edited.extend_from_slice(&text[at..]);
    edited
}

/// The bytes with changes of their parts; `None` without one. `length` is that of the first part.
pub(super) fn with_changed_parts(
    bytes: &[u8],
    length: impl Fn(&[u8]) -> usize,
    mut change: impl FnMut(&[u8]) -> Option<Vec<u8>>,
) -> Option<Vec<u8>> {
    let (mut edited, mut at): (Option<Vec<u8>>, usize) = (None, 0);
    while at < bytes.len() {
        let part = &bytes[at..at + length(&bytes[at..])];
        match (change(part), &mut edited) {
            (None, None) => {}
            (None, Some(edited)) => edited.extend_from_slice(part),
            (Some(new), Some(edited)) => edited.extend_from_slice(&new),
            (Some(new), edited @ None) => *edited = Some([&bytes[..at], &new].concat()),
        }
        at += part.len();
    }
    edited
}

#[cfg(test)]
pub(super) mod tests;
