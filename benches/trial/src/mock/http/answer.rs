//! What clients are told, in OpenAI's form.
//!
//! Owns the shapes of answers, chunks and errors. Promises that a chat and a completion differ in nothing but that
//! shape. Leaves when to say what to [`super::completions`].

use crate::engine::Finish;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Value, json};

/// A refusal.
pub(super) fn error(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": error_body(status, message) }))).into_response()
}

/// What stands under `error`.
pub(super) fn error_body(status: StatusCode, message: &str) -> Value {
    let kind = match status {
        StatusCode::NOT_FOUND => "NotFoundError",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
        status if status.is_server_error() => "InternalServerError",
        _ => "BadRequestError",
    };
    json!({ "message": message, "type": kind, "param": null, "code": status.as_u16() })
}

/// Which of the two APIs answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    Completion,
    Chat,
}

/// What all answers to one request share.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) api: Api,
    pub(super) id: String,
    /// Virtual seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
}

/// What a request used, in tokens.
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
    /// The answer to a request that did not ask for a stream.
    pub(super) fn whole(&self, text: &str, finish: Option<Finish>, usage: Usage) -> Value {
        let mut choice = json!({ "index": 0, "logprobs": null, "finish_reason": reason(finish) });
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

    /// What a stream begins with, if with anything.
    pub(super) fn opening(&self) -> Option<Bytes> {
        match self.api {
            Api::Completion => None,
            Api::Chat => Some(self.delta(json!({ "role": "assistant", "content": "" }), None)),
        }
    }

    /// A piece of a stream.
    pub(super) fn piece(&self, text: &str, finish: Option<Finish>) -> Bytes {
        match self.api {
            Api::Completion => {
                let choice = json!({ "index": 0, "text": text, "logprobs": null, "finish_reason": reason(finish) });
                event(&self.json("text_completion", json!([choice])))
            }
            Api::Chat => self.delta(json!({ "content": text }), finish),
        }
    }

    /// The chunk of a stream that has the usage and no choice.
    pub(super) fn usage(&self, usage: Usage) -> Bytes {
        let mut answer = self.json(self.chunk_object(), json!([]));
        answer["usage"] = usage.json();
        event(&answer)
    }

    fn delta(&self, delta: Value, finish: Option<Finish>) -> Bytes {
        let choice = json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": reason(finish) });
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

/// What a stream ends with.
pub(super) const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

fn event(data: &Value) -> Bytes {
    format!("data: {data}\n\n").into()
}

fn reason(finish: Option<Finish>) -> Option<&'static str> {
    // Both ends are ends of length: a mock never runs out of things to say.
    finish.map(|finish| match finish {
        Finish::Complete | Finish::ModelLength => "length",
    })
}
