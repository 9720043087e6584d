//! Bodies of `multipart/form-data` (RFC 7578): the fields `model` and `stream`.

use std::ops::Range;

use aho_corasick::AhoCorasick;
use axum::body::Bytes;
use axum::http::{HeaderMap, header};

use super::body::RequestBody;
use super::endpoint::Endpoint;
use super::error::ApiError;

impl RequestBody {
    /// Reads a form with the boundary in `Content-Type`.
    ///
    /// # Errors
    /// 400 for a body that is no form, or has two models.
    pub fn form(endpoint: Endpoint, headers: &HeaderMap, body: Bytes) -> Result<Self, ApiError> {
        let invalid = || {
            let message = "the body must be multipart/form-data with the boundary of Content-Type";
            ApiError::invalid("invalid_form", None, message)
        };
        let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let boundary = content_type.and_then(boundary).ok_or_else(invalid)?;
        let (mut models, mut stream) = (Vec::new(), false);
        for (name, content) in fields(&body, boundary).ok_or_else(invalid)? {
            let text = str::from_utf8(&body[content.clone()]).unwrap_or_default();
            match name {
                "model" if !text.is_empty() => models.push((text.to_owned(), content)),
                "stream" => stream = matches!(text.to_ascii_lowercase().as_str(), "true" | "1" | "on" | "yes"),
                _ => {}
            }
        }
        let model = models.pop();
        if !models.is_empty() {
            return Err(ApiError::invalid("duplicate_field", Some("model"), "the body has model more than once"));
        }
        Ok(Self::opaque(endpoint, body, model, stream))
    }
}

/// The boundary in a content type of forms.
fn boundary(content_type: &str) -> Option<&str> {
    let mut parts = content_type.split(';').map(str::trim);
    parts.next().filter(|media| media.eq_ignore_ascii_case("multipart/form-data"))?;
    parameter(parts, "boundary").filter(|boundary| (1..=70).contains(&boundary.len()))
}

/// The value of a parameter, without quotes.
fn parameter<'a>(mut parts: impl Iterator<Item = &'a str>, name: &str) -> Option<&'a str> {
    let value = parts.find_map(|part| {
        let (given, value) = part.split_once('=')?;
        given.trim().eq_ignore_ascii_case(name).then(|| value.trim())
    })?;
    Some(value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value))
}

/// The fields that are no files; `None` without a final delimiter.
fn fields<'a>(body: &'a [u8], boundary: &str) -> Option<Vec<(&'a str, Range<usize>)>> {
    let delimiter = AhoCorasick::new([["--", boundary].concat()]).ok()?;
    let is_at_line = |at: usize| at == 0 || body[..at].ends_with(b"\r\n");
    let mut found = delimiter.find_iter(body).filter(|found| is_at_line(found.start())).peekable();
    let mut fields = Vec::new();
    while let Some(start) = found.next() {
        if body[start.end()..].starts_with(b"--") {
            return Some(fields);
        }
        let end = found.peek()?.start() - 2;
        let part = body.get(start.end()..end)?;
        let head = part.windows(4).position(|at| at == b"\r\n\r\n")?;
        if let Some(name) = str::from_utf8(&part[..head]).ok().and_then(field_name) {
            fields.push((name, start.end() + head + 4..end));
        }
    }
    None
}

/// Name of a part that is no file.
fn field_name(head: &str) -> Option<&str> {
    let value = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    })?;
    let parts = || value.split(';').skip(1).map(str::trim);
    parameter(parts(), "name").filter(|_| parameter(parts(), "filename").is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::openai::{ClientPrompt, Edits};

    fn parse(content_type: &str, body: &str) -> Result<RequestBody, &'static str> {
        let headers = [(header::CONTENT_TYPE, content_type.parse().expect("a value"))].into_iter().collect();
        let body = Bytes::copy_from_slice(body.as_bytes());
        RequestBody::form(Endpoint::Audio, &headers, body).map_err(|error| error.code)
    }

    #[test]
    fn the_model_of_a_form_is_read_and_replaced() {
        let body = "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"model\"\r\n\r\nRI--B\r\n\r\nFF\r\n--B\r\n\
                    content-disposition: form-data; name=model\r\n\r\nwhisper\r\n--B\r\nX: y\r\n\
                    Content-Disposition: form-data; name=\"stream\"\r\n\r\ntrue\r\n--B--\r\n";
        for content_type in ["multipart/form-data; boundary=B", "Multipart/Form-Data;charset=x; Boundary=\"B\""] {
            let parsed = parse(content_type, body).expect("a form");
            assert_eq!((parsed.model.as_deref(), parsed.stream), (Some("whisper"), true));
            assert_eq!(parsed.prompt, ClientPrompt::Opaque("audio"));
            assert_eq!(parsed.body(Edits::default()), body);
            let sent = parsed.body(Edits { model: Some("base"), cache_salt: Some("s"), media_names: &[] });
            assert_eq!(sent, body.replace("whisper", "base"));
        }
    }

    #[test]
    fn other_bodies_are_no_forms() {
        let field = |name: &str, value: &str| {
            format!("--B\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
        };
        let twice = [&*field("model", "a"), &*field("model", "b"), "--B--"].concat();
        let form = "multipart/form-data; boundary=B";
        assert_eq!(parse(form, &twice).err(), Some("duplicate_field"));
        let one = [&*field("model", "a"), "--B--"].concat();
        assert!(parse(form, &one).is_ok());
        for (content_type, body) in [
            (form, ""),
            (form, &one[..one.len() - 2]),
            ("multipart/form-data", &one),
            ("text/plain; boundary=B", &one),
            (form, "--B\r\nno head"),
        ] {
            assert_eq!(parse(content_type, body).err(), Some("invalid_form"), "{content_type} {body}");
        }
    }
}
