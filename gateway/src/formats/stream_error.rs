//! Errors of engines and of the gateway as JSON bodies and as events of a stream.
//!
//! An error event before the first token becomes the body of a response with an HTTP status, and an error after the head
//! of a stream becomes its last events.

use std::borrow::Cow;

use axum::body::Bytes;
use serde_json::{Value, json};

use crate::formats::anthropic::{error_body, error_message};
use crate::formats::events::each_data;
use crate::formats::openai::{Endpoint, ErrorType};

/// The last error event of a stream, or a whole response that is an error, as the body of a response with this status.
///
/// ```
/// use pointsman_gateway::formats::stream_error::body_of;
///
/// let body = body_of(b"event: error\ndata: {\"error\":{\"message\":\"dead\",\"code\":\"500\"}}\n\ndata: [DONE]\n\n", 500);
/// assert_eq!(body, r#"{"error":{"code":"500","message":"dead","param":null,"type":"server_error"}}"#);
/// ```
pub fn body_of(stream: &[u8], status: u16) -> Bytes {
    let stream = String::from_utf8_lossy(stream).replace("\r\n", "\n").replace('\r', "\n");
    let data = each_data(&stream).filter(|data| !matches!(data.trim(), "" | "[DONE]")).last();
    let whole = || Some(Cow::from(&*stream)).filter(|whole| whole.trim_start().starts_with('{'));
    let data = data.or_else(whole).unwrap_or_default();
    json!({ "error": error_object(data.trim().as_bytes(), status) }).to_string().into()
}

/// The last events of a stream of the endpoint that ends with an error: this status and body of a response.
pub fn events_of(endpoint: Endpoint, status: u16, body: &[u8]) -> String {
    let error = error_object(body, status);
    if endpoint.is_anthropic() {
        let message = error["message"].as_str().unwrap_or_default();
        return format!("event: error\ndata: {}\n\n", error_body(status, message, None));
    }
    if endpoint != Endpoint::Responses {
        return format!("data: {}\n\ndata: [DONE]\n\n", json!({ "error": error }));
    }
    let (code, message) = (&error["code"], &error["message"]);
    let failed = json!({ "object": "response", "status": "failed", "error": { "code": code, "message": message } });
    let failed = json!({ "type": "response.failed", "sequence_number": 1, "response": failed });
    let event = json!({
        "type": "error", "sequence_number": 0, "code": code, "message": message, "param": null, "error": error,
    });
    format!("event: error\ndata: {event}\n\nevent: response.failed\ndata: {failed}\n\n")
}

/// The error in JSON or text, with all fields of OpenAI's format.
fn error_object(data: &[u8], status: u16) -> Value {
    let value: Value = serde_json::from_slice(data).unwrap_or_default();
    let inner = ["/error", "/response/error", "/meta_info/finish_reason", ""];
    let inner = inner.into_iter().find_map(|path| value.pointer(path)?.as_object());
    let field = |name: &str| inner?.get(name).filter(|value| !value.is_null() && *value != "error").cloned();
    let text = || Some(String::from_utf8_lossy(data).into_owned()).filter(|text| value.is_null() && !text.is_empty());
    let message = || error_message(data).or_else(text).unwrap_or_else(|| "the worker reported an error".to_owned());
    let kind = match status {
        429 => ErrorType::RateLimit,
        400..=499 => ErrorType::InvalidRequest,
        _ => ErrorType::Server,
    };
    json!({
        "message": field("message").unwrap_or_else(|| message().into()),
        "type": field("type").unwrap_or_else(|| kind.name().into()),
        "param": field("param"),
        "code": field("code").unwrap_or_else(|| status.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_becomes_a_body() {
        for (stream, message, code) in [
            ("\u{feff}data: {\"error\":\"dead\"}\n\n", "dead", json!(502)),
            ("data: {\"object\":\"error\",\"message\":\"dead\",\"code\":500}\r\n\r\n", "dead", json!(500)),
            (
                "data: {\"response\":{\"error\":{\"code\":\"server_error\",\"message\":\"dead\"}}}",
                "dead",
                json!("server_error"),
            ),
            ("event: error\ndata: dead\n\n", "dead", json!(502)),
            ("data: {\"error\":\r\ndata: \"dead\"}\r\n\r\ndata: [DONE]\r\n\r\n", "dead", json!(502)),
            ("event: error\n\n", "the worker reported an error", json!(502)),
            (" {\"error\":\r\n{\"message\":\"dead\"}}", "dead", json!(502)),
            (
                "data: {\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"dead\"}}}\n\n",
                "dead",
                json!(502),
            ),
        ] {
            let body: Value = serde_json::from_slice(&body_of(stream.as_bytes(), 502)).expect("JSON");
            assert_eq!((&body["error"]["message"], &body["error"]["code"]), (&message.into(), &code), "{stream}");
            assert!(body["error"]["type"].is_string(), "{body}");
        }
    }

    #[test]
    fn a_body_becomes_the_end_of_a_stream() {
        let body = br#"{"error":{"message":"busy","type":"rate_limit_error","param":null,"code":"queue_full"}}"#;
        let chat = events_of(Endpoint::Chat, 429, body);
        let error: Value = serde_json::from_slice(body).expect("JSON");
        assert_eq!(chat, format!("data: {error}\n\ndata: [DONE]\n\n"));
        let responses = events_of(Endpoint::Responses, 429, body);
        assert!(responses.starts_with("event: error\ndata: {\"code\":\"queue_full\","), "{responses}");
        assert!(responses.contains("\nevent: response.failed\ndata: {"), "{responses}");
        let messages = events_of(Endpoint::Messages, 503, br#"{"type":"error","error":{"message":"busy"}}"#);
        let error = "event: error\ndata: {\"error\":{\"message\":\"busy\",\"type\":\"overloaded_error\"},\"type\":\"error\"}\n\n";
        assert_eq!(messages, error);
        let detail = events_of(Endpoint::Completions, 422, br#"{"detail":"no"}"#);
        assert!(detail.starts_with("data: {\"error\":{") && detail.contains("\"message\":\"no\""), "{detail}");
    }
}
