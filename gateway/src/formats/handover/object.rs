//! Edits of one JSON object without changes of the other bytes.
//!
//! [`ObjectText`] stores the positions of known fields only, so that memory does not grow with the number of fields.
//! [`ObjectEdit`] replaces values in place, removes fields and appends fields.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

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
pub(crate) struct Positions {
    known: Vec<KnownField>,
    /// Start of the first key and end of the last value; `None` for an object without fields.
    span: Option<Range<usize>>,
}

/// Position of a known field.
#[derive(Clone, Debug)]
struct KnownField {
    name: &'static str,
    key_start: usize,
    value: Range<usize>,
    previous_end: usize,
    next_start: Option<usize>,
}

impl Positions {
    /// Scans an object. Repeated known fields are an error, unknown fields may repeat.
    pub(crate) fn find(text: &str, known: &[&'static str]) -> Result<Self, ObjectError> {
        let mut reader = serde_json::Deserializer::from_str(text);
        let found = Scan { text, known }.deserialize(&mut reader).map_err(ObjectError::Json)?;
        reader.end().map_err(ObjectError::Json)?;
        found.map_err(ObjectError::Repeated)
    }

    fn get(&self, name: &str) -> Option<&KnownField> {
        self.known.iter().find(|field| field.name == name)
    }

    /// Position of the value of a known field, including null.
    pub(crate) fn value(&self, name: &str) -> Option<Range<usize>> {
        self.get(name).map(|field| field.value.clone())
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
        ObjectEdit { object: self, replaced: Vec::new(), removed: Vec::new(), appended: Vec::new() }
    }
}

/// Pending changes of an object.
pub(crate) struct ObjectEdit<'o, 'a> {
    object: &'o ObjectText<'a>,
    replaced: Vec<(Range<usize>, Cow<'o, str>)>,
    removed: Vec<&'o KnownField>,
    appended: Vec<(&'static str, Cow<'o, str>)>,
}

impl<'o> ObjectEdit<'o, '_> {
    /// Replaces the value of a known field in place, or appends the field. At most once for each field.
    pub(crate) fn set(mut self, name: &'static str, json: impl Into<Cow<'o, str>>) -> Self {
        match self.object.fields.get(name) {
            Some(field) => self.replaced.push((field.value.clone(), json.into())),
            None => self.appended.push((name, json.into())),
        }
        self
    }

    /// Replaces the value of a known field if the object has this field.
    pub(crate) fn set_present(self, name: &'static str, json: impl Into<Cow<'o, str>>) -> Self {
        if self.object.fields.get(name).is_some() { self.set(name, json) } else { self }
    }

    /// Removes a known field. The object must not have another change of this field.
    pub(crate) fn remove(mut self, name: &'static str) -> Self {
        self.removed.extend(self.object.fields.get(name));
        self
    }

    /// The changed object. Without removals, all bytes outside the changed values remain.
    pub(crate) fn finish(mut self) -> String {
        let text = self.object.text;
        let opened = text.find('{').map_or(0, |at| at + 1);
        let (mut start, span) = match self.object.fields.span.clone() {
            Some(span) => (Some(span.start), span),
            None => (None, opened..opened),
        };
        self.removed.sort_unstable_by_key(|field| field.key_start);
        self.replaced.sort_unstable_by_key(|(value, _)| value.start);
        let more: usize = self.replaced.iter().map(|(_, json)| json.len()).sum();
        let appended: usize = self.appended.iter().map(|(name, json)| name.len() + json.len() + 4).sum();
        let mut edited = String::with_capacity(text.len() + more + appended);
        edited.push_str(&text[..span.start]);
        let (mut is_first, mut replaced) = (true, self.replaced.iter().peekable());
        let mut push_run = |edited: &mut String, run: Range<usize>| {
            if !std::mem::take(&mut is_first) {
                edited.push(',');
            }
            let mut at = run.start;
            while let Some((value, json)) = replaced.next_if(|(value, _)| value.start < run.end) {
                edited.push_str(&text[at..value.start]);
                edited.push_str(json);
                at = value.end;
            }
            edited.push_str(&text[at..run.end]);
        };
        for field in &self.removed {
            if let Some(start) = start.filter(|start| *start < field.key_start) {
                push_run(&mut edited, start..field.previous_end);
            }
            start = field.next_start;
        }
        if let Some(start) = start {
            push_run(&mut edited, start..span.end);
        }
        for (name, json) in &self.appended {
            if !std::mem::take(&mut is_first) {
                edited.push(',');
            }
            for part in ["\"", name, "\":", json] {
                edited.push_str(part);
            }
        }
        edited.push_str(&text[span.end..]);
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
    fn position(&self, part: &RawValue) -> Range<usize> {
        let start = part.get().as_ptr() as usize - self.text.as_ptr() as usize;
        start..start + part.get().len()
    }

    fn known(&self, key: &RawValue) -> Option<&'static str> {
        let key = key.get();
        // Unpaired surrogates do not decode; no known field has them.
        let name: Cow<'_, str> =
            if key.contains('\\') { serde_json::from_str(key).ok()? } else { Cow::Borrowed(key.trim_matches('"')) };
        self.known.iter().copied().find(|known| *known == name)
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
        let mut found = Positions::default();
        let mut repeated = None;
        let mut was_known = false;
        while let Some((key, value)) = map.next_entry::<&RawValue, &RawValue>()? {
            let (key_at, value_at) = (self.position(key), self.position(value));
            if was_known && let Some(previous) = found.known.last_mut() {
                previous.next_start = Some(key_at.start);
            }
            let span = found.span.get_or_insert(key_at.start..key_at.start);
            let previous_end = span.end;
            span.end = value_at.end;
            let name = self.known(key);
            was_known = name.is_some();
            match name {
                Some(name) if found.get(name).is_some() => repeated = Some(name),
                Some(name) => found.known.push(KnownField {
                    name,
                    key_start: key_at.start,
                    value: value_at,
                    previous_end,
                    next_start: None,
                }),
                None => {}
            }
        }
        Ok(repeated.map_or(Ok(found), Err))
    }
}
