//! Reading of JSON lists element by element, and parts of JSON text.
//!
//! Elements are not collected, because a list of small objects would take many times the size of its text.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, SeqAccess, Visitor};

use crate::formats::openai::ApiError;

/// Calls `visit` with the position and value of each element of a list. `shape` is the error for any other value.
pub(super) fn each<'a, T: Deserialize<'a>>(
    list: &'a str,
    shape: impl Fn() -> ApiError,
    visit: impl FnMut(usize, T) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    let mut elements = Elements { visit, error: None, element: PhantomData };
    let read = (&mut elements).deserialize(&mut serde_json::Deserializer::from_str(list));
    match elements.error {
        Some(error) => Err(error),
        None => read.map_err(|_| shape()),
    }
}

struct Elements<T, F> {
    visit: F,
    error: Option<ApiError>,
    element: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>, F: FnMut(usize, T) -> Result<(), ApiError>> DeserializeSeed<'de>
    for &mut Elements<T, F>
{
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>, F: FnMut(usize, T) -> Result<(), ApiError>> Visitor<'de> for &mut Elements<T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut position = 0;
        while self.error.is_none() {
            let Some(element) = list.next_element()? else { return Ok(()) };
            self.error = (self.visit)(position, element).err();
            position += 1;
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
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
