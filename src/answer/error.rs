//! HTTP status of an engine error inside a stream.
//!
//! Engines report it as a number, as a number in a string, as a name (`server_error`, `InternalServerError`,
//! `context_length_exceeded`), only in the text, or not at all. An unknown error is one of the server, because requests
//! would otherwise be lost to a broken engine without a retry.

use super::json::{JsonKey, JsonKeys, number, text_of};

/// Status of an error without a known cause.
const UNKNOWN: u16 = 500;

/// Parts of error names in lower case without separators, with their status. The first that occurs in a name applies.
const NAMES: [(&str, u16); 29] = [
    ("internal", 500),
    ("contextlength", 400),
    ("contextwindow", 400),
    ("toolong", 400),
    ("toolarge", 413),
    ("ratelimit", 429),
    ("toomany", 429),
    ("quota", 429),
    ("overload", 503),
    ("unavailable", 503),
    ("busy", 503),
    ("timeout", 504),
    ("notimplemented", 501),
    ("badgateway", 502),
    ("server", 500),
    ("engine", 500),
    ("authentication", 401),
    ("unauthorized", 401),
    ("apikey", 401),
    ("permission", 403),
    ("forbidden", 403),
    ("notfound", 404),
    ("unprocessable", 422),
    ("validation", 400),
    ("badrequest", 400),
    ("invalid", 400),
    ("unsupported", 400),
    ("schema", 400),
    ("content", 400),
];

/// Texts of errors that the request caused, for engines without codes.
const CLIENT_TEXTS: [&str; 7] = [
    "contextlength",
    "contextwindow",
    "promptistoolong",
    "validationerror",
    "invalidrequest",
    "badrequest",
    "jsonschema",
];

/// Maximum number of characters of a name or text that are read.
const TEXT_CHARS_MAX: usize = 512;

/// Whether the value of a field `error` reports one.
pub(super) fn is_present(value: &[u8]) -> bool {
    ![&b"null"[..], b"false", b"\"\"", b"{}", b"[]"].iter().any(|none| value.starts_with(none))
}

/// The status in a number or in a string with a number.
pub(super) fn status(value: &[u8]) -> Option<u16> {
    let status = number(value.strip_prefix(b"\"").unwrap_or(value))?;
    u16::try_from(status).ok().filter(|status| (400..600).contains(status))
}

/// The status of an error event with this data, a JSON object or text.
pub(super) fn status_of_event(data: &[u8]) -> u16 {
    let (mut of_code, mut of_type, mut is_client_text) = (None, None, false);
    for JsonKey { name, value, .. } in JsonKeys::of(data).filter(|key| key.depth <= 3) {
        let by_name = || text_of(value).and_then(status_of_name);
        match name {
            b"code" | b"status" | b"status_code" | b"http_status" => match status(value) {
                Some(status) => return status,
                None => of_code = of_code.or_else(by_name),
            },
            b"type" | b"error_type" => of_type = of_type.or_else(by_name),
            b"error" | b"message" | b"detail" => is_client_text |= text_of(value).is_some_and(is_client_error),
            _ => {}
        }
    }
    is_client_text |= !data.starts_with(b"{") && is_client_error(data);
    let of_text = is_client_text.then_some(400);
    of_code.or(of_type).or(of_text).unwrap_or(UNKNOWN)
}

fn status_of_name(name: &[u8]) -> Option<u16> {
    let name = plain(name);
    NAMES.iter().find(|(part, _)| name.contains(part)).map(|(_, status)| *status)
}

fn is_client_error(text: &[u8]) -> bool {
    let text = plain(text);
    CLIENT_TEXTS.iter().any(|part| text.contains(part))
}

/// The letters of a text in lower case.
fn plain(text: &[u8]) -> String {
    let letters = text.iter().take(TEXT_CHARS_MAX).filter(|byte| byte.is_ascii_alphabetic());
    letters.map(|byte| byte.to_ascii_lowercase() as char).collect()
}
