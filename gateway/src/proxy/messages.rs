//! Responses in Anthropic's format: translated chats, and errors.
//!
//! The translation is outside of [`Answer`](super::Answer), so that bookings, usage and timeouts follow the response of
//! the engine. A stream that breaks off ends with an error event. Dropping a translated response drops the response of
//! the engine.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::response::Parts;
use axum::http::{HeaderValue, Response};
use http_body::Frame;
use pointsman::AnswerKind;

use crate::formats::anthropic::{StreamTranslator, error_body, error_message, error_response, message};
use crate::formats::openai::ApiError;

/// Maximum length of a response that is not streamed.
const CHAT_BYTES_MAX: usize = 64 << 20;

/// Maximum length of an error that is converted. The message of a longer one is dropped.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// Translation of a chat response to a message.
pub(super) struct Translation {
    /// Model name from the client.
    pub(super) model: String,
    /// Prompt length, 0 if unknown.
    pub(super) prompt_tokens: u32,
}

impl Translation {
    /// The translated response of a worker.
    pub(super) async fn of(self, response: Response<Body>, request_id: &str) -> Response<Body> {
        if !response.status().is_success() {
            return converted_error(response, request_id).await;
        }
        let (head, body) = response.into_parts();
        let content_type = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        if content_type.map(AnswerKind::of_content_type) == Some(AnswerKind::Events) {
            let translator = StreamTranslator::new(&self.model, self.prompt_tokens);
            return Response::from_parts(head, Body::new(TranslatedBody { body, translator, has_ended: false }));
        }
        let chat = axum::body::to_bytes(body, CHAT_BYTES_MAX).await.ok();
        match chat.and_then(|chat| message(&chat, &self.model)) {
            Some(message) => Response::from_parts(head, Body::from(message)),
            None => error_response(ApiError::worker_failed(), request_id),
        }
    }
}

/// Body with the events of a message.
struct TranslatedBody {
    body: Body,
    translator: StreamTranslator,
    has_ended: bool,
}

impl http_body::Body for TranslatedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        while !self.has_ended {
            let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
            let mut events = match frame {
                Some(Ok(frame)) => {
                    // Bodies of known length are not polled after their last byte.
                    self.has_ended = self.body.is_end_stream();
                    frame.data_ref().map(|data| self.translator.read(data)).unwrap_or_default()
                }
                Some(Err(_)) => {
                    self.has_ended = true;
                    self.translator.fail(502, "the response of the worker was cut off")
                }
                None => {
                    self.has_ended = true;
                    Vec::new()
                }
            };
            if self.has_ended {
                events.extend(self.translator.end());
            }
            if !events.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from(events)))));
            }
        }
        Poll::Ready(None)
    }
}

/// A worker's error in Anthropic's format: with its status, headers and message.
pub(super) async fn converted_error(response: Response<Body>, request_id: &str) -> Response<Body> {
    let (head, body) = response.into_parts();
    let body = axum::body::to_bytes(body, ERROR_BYTES_MAX).await.unwrap_or_default();
    error_of(head, &body, request_id)
}

/// The same for a complete body.
pub(super) fn error_of(mut head: Parts, body: &[u8], request_id: &str) -> Response<Body> {
    let reason = head.status.canonical_reason().unwrap_or("error").to_lowercase();
    let message = Some(body).filter(|body| body.len() <= ERROR_BYTES_MAX).and_then(error_message).unwrap_or(reason);
    head.headers.remove(CONTENT_LENGTH);
    head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let body = error_body(head.status.as_u16(), &message, Some(request_id));
    Response::from_parts(head, Body::from(body))
}
