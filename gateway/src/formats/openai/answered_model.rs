//! Name of the model in responses: the one that the client requested, in place of that at the worker.

use std::ops::Range;

use axum::body::Bytes;

use crate::formats::json::quoted;

/// Key of the name, in responses, chunks and events.
const KEY: &[u8] = b"\"model\"";

/// Replaces the name at the worker in the bytes of a response as they pass. Holds back at most an incomplete name. Other
/// bytes are unchanged: inside a JSON string, quotes are escaped, so that a key never matches there.
///
/// ```
/// use pointsman_gateway::formats::openai::AnsweredModel;
///
/// let mut model = AnsweredModel::new("served", "alias");
/// assert_eq!(model.push("data: {\"id\":1,\"model\":\"served\",\"text\":\"a\"}\n\n".into()),
///     "data: {\"id\":1,\"model\":\"alias\",\"text\":\"a\"}\n\n");
/// ```
#[derive(Clone, Debug)]
pub struct AnsweredModel {
    /// Both as JSON.
    at_worker: String,
    requested: String,
    held: Vec<u8>,
}

/// What follows a key.
enum Value {
    /// The name, which ends here.
    Name(Range<usize>),
    /// Possibly the name.
    Incomplete,
    Other,
}

impl AnsweredModel {
    /// For a model with this name at the worker, which the client requested by another one.
    pub fn new(at_worker: &str, requested: &str) -> Self {
        Self { at_worker: quoted(at_worker), requested: quoted(requested), held: Vec::new() }
    }

    /// Accepts bytes of the response and returns those for the client, which may be empty.
    pub fn push(&mut self, bytes: Bytes) -> Bytes {
        let text = match self.held.is_empty() {
            true => bytes,
            false => [&std::mem::take(&mut self.held), &bytes[..]].concat().into(),
        };
        let (mut changed, mut sent, mut at, mut end) = (Vec::new(), 0, 0, text.len());
        while let Some(key) = text[at..].windows(KEY.len()).position(|part| part == KEY) {
            at += key + KEY.len();
            match self.value_at(&text, at) {
                Value::Name(Range { start, end }) => {
                    changed.extend_from_slice(&text[sent..start]);
                    changed.extend_from_slice(self.requested.as_bytes());
                    (sent, at) = (end, end);
                }
                Value::Incomplete => {
                    end = at - KEY.len();
                    break;
                }
                Value::Other => {}
            }
        }
        let is_start = |length: &usize| text[at.min(end)..end].ends_with(&KEY[..*length]);
        end -= (1..KEY.len()).rev().find(is_start).unwrap_or(0);
        self.held.extend_from_slice(&text[end..]);
        if changed.is_empty() {
            return text.slice(..end);
        }
        changed.extend_from_slice(&text[sent..end]);
        changed.into()
    }

    /// The last bytes.
    pub fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).into()
    }

    fn value_at(&self, text: &[u8], at: usize) -> Value {
        let rest = text[at..].trim_ascii_start();
        let Some(rest) = rest.strip_prefix(b":").map(<[u8]>::trim_ascii_start) else {
            return if rest.is_empty() { Value::Incomplete } else { Value::Other };
        };
        let (name, start) = (self.at_worker.as_bytes(), text.len() - rest.len());
        if rest.starts_with(name) {
            Value::Name(start..start + name.len())
        } else if name.starts_with(rest) {
            Value::Incomplete
        } else {
            Value::Other
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_replaced_for_every_split_of_the_bytes() {
        for (text, expected) in [
            (r#"{"id":"x","model":"a/b","choices":[]}"#, r#"{"id":"x","model":"c\"d","choices":[]}"#),
            (r#"{"model" : "a/b"}{"model": "a/b"}"#, r#"{"model" : "c\"d"}{"model": "c\"d"}"#),
            (r#"{"response":{"model":"a/b"}} "mod"#, r#"{"response":{"model":"c\"d"}} "mod"#),
            (
                r#"{"text":"\"model\":\"a/b\"","model":7,"model":"a/bc"}"#,
                r#"{"text":"\"model\":\"a/b\"","model":7,"model":"a/bc"}"#,
            ),
            (r#"["model","a/b","model":"#, r#"["model","a/b","model":"#),
        ] {
            for split in 0..=text.len() {
                let mut model = AnsweredModel::new("a/b", "c\"d");
                let parts = [model.push(text[..split].to_owned().into()), model.push(text[split..].to_owned().into())];
                let whole = [&parts[0][..], &parts[1][..], &model.finish()[..]].concat();
                assert_eq!(String::from_utf8_lossy(&whole), expected, "{split}");
            }
        }
    }
}
