//! Content blocks of a Messages body, and their conversion to content parts of a chat.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::formats::json::{each, inner};
use crate::formats::openai::ApiError;

/// Start of a system text that Claude Code adds with a hash per request. It would make every prompt unique.
pub(crate) const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// A field as JSON; `None` if absent or null.
pub(super) type Raw<'a> = Option<&'a RawValue>;

/// A content block of any type.
#[derive(Deserialize)]
pub(super) struct Block<'a> {
    #[serde(borrow, rename = "type")]
    pub(super) kind: Option<Cow<'a, str>>,
    pub(super) text: Raw<'a>,
    pub(super) source: Raw<'a>,
    pub(super) id: Raw<'a>,
    pub(super) name: Raw<'a>,
    pub(super) tool_name: Raw<'a>,
    pub(super) input: Raw<'a>,
    pub(super) tool_use_id: Raw<'a>,
    pub(super) content: Raw<'a>,
    pub(super) thinking: Raw<'a>,
    pub(super) title: Raw<'a>,
}

#[derive(Deserialize)]
struct Source<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    media_type: Raw<'a>,
    data: Raw<'a>,
    url: Raw<'a>,
    content: Raw<'a>,
}

/// Content parts of one message as growing JSON.
#[derive(Default)]
pub(super) struct Parts {
    json: String,
    n_parts: usize,
    /// Start of the string of the first part, if that is text.
    first_text: Option<usize>,
}

impl Parts {
    fn next(&mut self) {
        self.json.push(if self.json.is_empty() { '[' } else { ',' });
        self.n_parts += 1;
    }

    /// Empty text is dropped, as in vLLM.
    pub(super) fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.next();
        self.json.push_str("{\"type\":\"text\",\"text\":");
        if self.n_parts == 1 {
            self.first_text = Some(self.json.len());
        }
        self.json.extend(["\"", text, "\"}"]);
    }

    /// Adds a block of text, an image or a document.
    pub(super) fn block(&mut self, at: &str, block: &Block<'_>) -> Result<(), ApiError> {
        match block.kind.as_deref() {
            Some("text") => self.text(string(block.text, at, "text")?),
            Some("image") => self.image(at, block.source)?,
            Some("document") => self.document(at, block)?,
            kind => return Err(unsupported(at, "block", kind)),
        }
        Ok(())
    }

    fn image(&mut self, at: &str, source: Raw<'_>) -> Result<(), ApiError> {
        let source = source_of(at, source)?;
        let url = match source.kind.as_deref() {
            Some("base64") => {
                let (media_type, data) =
                    (string(source.media_type, at, "source.media_type")?, string(source.data, at, "source.data")?);
                ["data:", media_type, ";base64,", data].concat()
            }
            Some("url") => string(source.url, at, "source.url")?.to_owned(),
            kind => return Err(unsupported(at, "image source", kind)),
        };
        self.next();
        self.json.extend(["{\"type\":\"image_url\",\"image_url\":{\"url\":\"", &url, "\"}}"]);
        Ok(())
    }

    fn document(&mut self, at: &str, block: &Block<'_>) -> Result<(), ApiError> {
        let source = source_of(at, block.source)?;
        let text = match source.kind.as_deref() {
            Some("text") => string(source.data, at, "source.data")?.to_owned(),
            Some("content") => {
                let content = source.content.ok_or_else(|| shape(at))?;
                texts(content.get(), "messages", ("\\n", true))?
            }
            kind => return Err(unsupported(at, "document source", kind)),
        };
        match block.title.map(RawValue::get).and_then(inner) {
            Some(title) => self.text(&[title, "\\n", &text].concat()),
            None => self.text(&text),
        }
        Ok(())
    }

    /// Content of the message: a string for a single text, else a list; `None` without parts.
    pub(super) fn finish(mut self) -> Option<String> {
        match (self.n_parts, self.first_text) {
            (0, _) => None,
            (1, Some(start)) => {
                self.json.pop();
                Some(self.json.split_off(start))
            }
            _ => {
                self.json.push(']');
                Some(self.json)
            }
        }
    }
}

/// Texts of a string or of a list of text blocks, with escapes. Blocks with the billing header of Claude Code are skipped
/// if `skips_billing`.
pub(super) fn texts(
    content: &str,
    field: &'static str,
    (separator, skips_billing): (&str, bool),
) -> Result<String, ApiError> {
    if let Some(text) = inner(content) {
        return Ok(text.to_owned());
    }
    let mut all = String::new();
    let shape = || wrong(field, "a string or a list of text blocks");
    each(content, shape, |_, block: Block<'_>| {
        if block.kind.as_deref() != Some("text") {
            return Err(unsupported(field, "block", block.kind.as_deref()));
        }
        let text = string(block.text, field, "text")?;
        if skips_billing && text.starts_with(BILLING_HEADER) {
            return Ok(());
        }
        if !all.is_empty() {
            all.push_str(separator);
        }
        all.push_str(text);
        Ok(())
    })?;
    Ok(all)
}

fn source_of<'a>(at: &str, source: Raw<'a>) -> Result<Source<'a>, ApiError> {
    let error = || invalid(Some("messages"), format!("{at}.source must be an object"));
    serde_json::from_str(source.ok_or_else(error)?.get()).map_err(|_| error())
}

/// Content of a required string, with escapes.
pub(super) fn string<'a>(value: Raw<'a>, at: &str, name: &str) -> Result<&'a str, ApiError> {
    let text = value.and_then(|value| inner(value.get()));
    text.ok_or_else(|| invalid(None, format!("{at}.{name} must be a string")))
}

/// A field that must be an object of this form.
pub(super) fn object<'a, T: Deserialize<'a>>(
    value: Raw<'a>,
    field: &'static str,
    form: &str,
) -> Result<Option<T>, ApiError> {
    value.map(|value| serde_json::from_str(value.get()).map_err(|_| wrong(field, form))).transpose()
}

/// Visits the blocks of a message's content, each with its position.
pub(super) fn each_block<'a>(
    at: &str,
    content: &'a str,
    mut visit: impl FnMut(&str, Block<'a>) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    each(content, || shape(at), |position, block| visit(&format!("{at}.content[{position}]"), block))
}

fn shape(at: &str) -> ApiError {
    invalid(Some("messages"), format!("{at}.content must be a string or a list of blocks"))
}

pub(super) fn unsupported(at: &str, what: &str, kind: Option<&str>) -> ApiError {
    let message = match kind {
        Some(kind) => format!("{at}: the {what} type {:?} is not supported", kind.chars().take(64).collect::<String>()),
        None => format!("{at} has no type"),
    };
    ApiError::invalid("unsupported_content", None, message)
}

pub(super) fn wrong(field: &'static str, expected: &str) -> ApiError {
    ApiError::invalid("invalid_type", Some(field), format!("{field} must be {expected}"))
}

pub(super) fn missing(field: &'static str) -> ApiError {
    ApiError::invalid("missing_field", Some(field), format!("the body has no {field}"))
}

pub(super) fn invalid(param: Option<&'static str>, message: impl Into<String>) -> ApiError {
    ApiError::invalid("invalid_value", param, message)
}
