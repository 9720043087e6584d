//! Response bodies in OpenAI's format.
//!
//! Defines responses, stream chunks and errors. Chats and completions differ only in the format. [`super::completions`]
//! decides the content and its time.

use crate::engine::Finish;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Value, json};

/// An error response.
pub(super) fn error(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": error_body(status, message) }))).into_response()
}

/// Value of the `error` field.
pub(super) fn error_body(status: StatusCode, message: &str) -> Value {
    let kind = match status {
        StatusCode::NOT_FOUND => "NotFoundError",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
        status if status.is_server_error() => "InternalServerError",
        _ => "BadRequestError",
    };
    json!({ "message": message, "type": kind, "param": null, "code": status.as_u16() })
}

/// API of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    Completion,
    Chat,
}

/// Fields common to all responses of one request.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) api: Api,
    pub(super) id: String,
    /// Virtual seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
}

/// Token usage of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) prompt: u64,
    pub(super) completion: u64,
    pub(super) cached: u64,
}

impl Usage {
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": { "cached_tokens": self.cached },
        })
    }
}

impl Head {
    /// Response of a request without streaming.
    pub(super) fn whole(&self, text: &str, reason: Option<&str>, usage: Usage) -> Value {
        let mut choice = json!({ "index": 0, "logprobs": null, "finish_reason": reason });
        let object = match self.api {
            Api::Completion => {
                choice["text"] = text.into();
                "text_completion"
            }
            Api::Chat => {
                choice["message"] = json!({ "role": "assistant", "content": text });
                "chat.completion"
            }
        };
        let mut answer = self.json(object, json!([choice]));
        answer["usage"] = usage.json();
        answer
    }

    /// First chunk of a stream, if the API has one.
    pub(super) fn opening(&self) -> Option<Bytes> {
        let delta = ("delta", json!({ "role": "assistant", "content": "" }));
        (self.api == Api::Chat).then(|| self.chunk(delta, None, None))
    }

    /// Content chunk of a stream, with the id of its token if the client requests it.
    pub(super) fn piece(&self, text: &str, reason: Option<&str>, id: Option<u32>) -> Bytes {
        let content = match self.api {
            Api::Completion => ("text", text.into()),
            Api::Chat => ("delta", json!({ "content": text })),
        };
        self.chunk(content, reason, id)
    }

    /// Usage chunk of a stream, which has no choices.
    pub(super) fn usage(&self, usage: Usage) -> Bytes {
        let mut answer = self.json(self.chunk_object(), json!([]));
        answer["usage"] = usage.json();
        event(&answer)
    }

    fn chunk(&self, (name, content): (&str, Value), reason: Option<&str>, id: Option<u32>) -> Bytes {
        let mut choice = json!({ "index": 0, "logprobs": null, "finish_reason": reason, name: content });
        if let Some(id) = id {
            choice["token_ids"] = json!([id]);
        }
        event(&self.json(self.chunk_object(), json!([choice])))
    }

    fn chunk_object(&self) -> &'static str {
        match self.api {
            Api::Completion => "text_completion",
            Api::Chat => "chat.completion.chunk",
        }
    }

    fn json(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

/// `finish_reason` of a request that was aborted by its id.
pub(super) const ABORT: &str = "abort";

/// End marker of a stream.
pub(super) const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

fn event(data: &Value) -> Bytes {
    format!("data: {data}\n\n").into()
}

/// `finish_reason` of an output.
pub(super) fn reason(finish: Option<Finish>) -> Option<&'static str> {
    // Both ends are length limits: a mock engine has no end-of-sequence token.
    finish.map(|finish| match finish {
        Finish::Complete | Finish::ModelLength => "length",
    })
}
