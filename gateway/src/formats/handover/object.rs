//! Edits of one JSON object without changes of the other bytes.
//!
//! [`ObjectText`] stores the positions of known fields only, so that memory does not grow with the number of fields.
//! [`ObjectEdit`] replaces values in place, removes fields and appends fields.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::formats::json::position;

/// Reason why a text cannot be edited as an object.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ObjectError {
    /// Invalid JSON or another type of value.
    #[error("must be a JSON object: {0}")]
    Json(serde_json::Error),
    /// A known field occurs twice. Readers differ in the occurrence that they use.
    #[error("must have field {0} at most once")]
    Repeated(&'static str),
}

/// A JSON object and the positions of its known fields.
#[derive(Clone, Debug)]
pub(crate) struct ObjectText<'a> {
    text: &'a str,
    fields: Positions,
}

/// Positions of the fields in the text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Positions(Vec<Part>);

/// Position of a known field, or of a run of others.
#[derive(Clone, Debug)]
struct Part {
    /// Empty for a run.
    name: &'static str,
    /// From the first key to the end of the last value.
    span: Range<usize>,
    value: Range<usize>,
}

impl Positions {
    /// Scans an object. Repeated known fields are an error, unknown fields may repeat.
    pub(crate) fn find(text: &str, known: &[&'static str]) -> Result<Self, ObjectError> {
        let mut reader = serde_json::Deserializer::from_str(text);
        let found = Scan { text, known }.deserialize(&mut reader).map_err(ObjectError::Json)?;
        reader.end().map_err(ObjectError::Json)?;
        found.map_err(ObjectError::Repeated)
    }

    /// Position of the value of a known field, including null.
    pub(crate) fn value(&self, name: &str) -> Option<Range<usize>> {
        self.0.iter().find(|part| part.name == name).map(|part| part.value.clone())
    }
}

impl<'a> ObjectText<'a> {
    /// Scans an object.
    pub(crate) fn parse(text: &'a str, known: &[&'static str]) -> Result<Self, ObjectError> {
        Ok(Self { text, fields: Positions::find(text, known)? })
    }

    /// An object that has been scanned before.
    pub(crate) fn scanned(text: &'a str, fields: Positions) -> Self {
        Self { text, fields }
    }

    /// JSON of a known field; `None` if the field is absent or null.
    pub(crate) fn json(&self, name: &str) -> Option<&'a str> {
        self.raw(name).filter(|json| *json != "null")
    }

    /// JSON of a known field, including null.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a str> {
        self.fields.value(name).map(|value| &self.text[value])
    }

    /// Starts an edit.
    pub(crate) fn edit(&self) -> ObjectEdit<'_, 'a> {
        ObjectEdit { object: self, changes: Vec::new() }
    }
}

/// Pending changes of an object.
pub(crate) struct ObjectEdit<'o, 'a> {
    object: &'o ObjectText<'a>,
    /// New values by field; `None` for a removed one.
    changes: Vec<(&'static str, Option<Cow<'o, str>>)>,
}

impl<'o> ObjectEdit<'o, '_> {
    /// Replaces the value of a known field in place, or appends the field. At most once for each field.
    pub(crate) fn set(mut self, name: &'static str, json: impl Into<Cow<'o, str>>) -> Self {
        self.changes.push((name, Some(json.into())));
        self
    }

    /// Replaces the value of a known field if the object has this field.
    pub(crate) fn set_present(self, name: &'static str, json: impl Into<Cow<'o, str>>) -> Self {
        if self.object.raw(name).is_some() { self.set(name, json) } else { self }
    }

    /// Removes a known field. The object must not have another change of this field.
    pub(crate) fn remove(mut self, name: &'static str) -> Self {
        self.changes.push((name, None));
        self
    }

    /// The changed object. Without removals, all bytes outside the changed values remain.
    pub(crate) fn finish(self) -> String {
        let (text, parts) = (self.object.text, &self.object.fields.0);
        let opened = text.find('{').map_or(0, |at| at + 1);
        let start = parts.first().map_or(opened, |part| part.span.start);
        let more = self.changes.iter().map(|(name, json)| name.len() + json.as_ref().map_or(0, |json| json.len() + 4));
        let mut edited = String::with_capacity(text.len() + more.sum::<usize>());
        edited.push_str(&text[..start]);
        let mut previous = None;
        for (n, part) in parts.iter().enumerate() {
            let change = self.changes.iter().find(|(name, _)| *name == part.name).map(|(_, json)| json);
            if let Some(None) = change {
                continue;
            }
            match previous.replace(n) {
                Some(before) if before + 1 == n => edited.push_str(&text[parts[before].span.end..part.span.start]),
                Some(_) => edited.push(','),
                None => {}
            }
            match change {
                Some(Some(json)) => edited.extend([&text[part.span.start..part.value.start], &json[..]]),
                _ => edited.push_str(&text[part.span.clone()]),
            }
        }
        let mut is_first = previous.is_none();
        for (name, json) in &self.changes {
            if let Some(json) = json.as_deref().filter(|_| self.object.raw(name).is_none()) {
                edited.extend([if is_first { "\"" } else { ",\"" }, name, "\":", json]);
                is_first = false;
            }
        }
        edited.push_str(&text[parts.last().map_or(opened, |part| part.span.end)..]);
        edited
    }
}

/// Elements of a JSON list; `None` for another type of value.
pub(crate) fn elements(json: &str) -> Option<Vec<&str>> {
    let list: Vec<&RawValue> = serde_json::from_str(json).ok()?;
    Some(list.into_iter().map(RawValue::get).collect())
}

/// A JSON list with changes of its elements; `None` without one, or for another type of value.
pub(crate) fn with_changed_elements(json: &str, mut change: impl FnMut(&str) -> Option<String>) -> Option<String> {
    let mut is_changed = false;
    let changed = elements(json)?.into_iter().map(|element| {
        let changed = change(element);
        is_changed |= changed.is_some();
        changed.unwrap_or_else(|| element.to_owned())
    });
    let list = changed.collect::<Vec<String>>().join(",");
    is_changed.then(|| format!("[{list}]"))
}

/// Scanner for the known fields of one object.
struct Scan<'s> {
    text: &'s str,
    known: &'s [&'static str],
}

impl Scan<'_> {
    /// The known name of a key, or an empty one.
    fn name(&self, key: &str) -> &'static str {
        // Unpaired surrogates do not decode; no known field has them.
        let decoded = key.contains('\\').then(|| serde_json::from_str::<String>(key).unwrap_or_default());
        let key = decoded.as_deref().unwrap_or(key.trim_matches('"'));
        self.known.iter().copied().find(|known| *known == key).unwrap_or_default()
    }
}

impl<'de> DeserializeSeed<'de> for Scan<'_> {
    type Value = Result<Positions, &'static str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Scan<'_> {
    type Value = Result<Positions, &'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut parts, mut repeated) = (Vec::<Part>::new(), None);
        while let Some((key, value)) = map.next_entry::<&RawValue, &RawValue>()? {
            let [key_at, value] = [key, value].map(|part| position(self.text.as_bytes(), part.get()));
            let (name, span) = (self.name(key.get()), key_at.start..value.end);
            if !name.is_empty() && parts.iter().any(|part| part.name == name) {
                repeated = Some(name);
            }
            match parts.last_mut() {
                Some(run) if run.name.is_empty() && name.is_empty() => run.span.end = span.end,
                _ => parts.push(Part { name, span, value }),
            }
        }
        Ok(repeated.map_or(Ok(Positions(parts)), Err))
    }
}
