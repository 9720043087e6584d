//! Responses in Anthropic's format: translated chats, and errors.
//!
//! The translation is outside of [`Answer`](super::Answer), so that bookings, usage and timeouts follow the response of
//! the engine. A stream that breaks off ends with an error event. Dropping a translated response drops the response of
//! the engine.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::{Body, Bytes};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::response::Parts;
use axum::http::{HeaderValue, Response};
use futures_util::stream::unfold;
use http_body::Body as _;
use http_body_util::{BodyExt as _, Limited};
use pointsman::AnswerKind;

use crate::formats::anthropic::{
    Known, StreamTranslator, error_body, error_message, error_response, in_anthropic_words, message,
};
use crate::formats::openai::ApiError;

/// Maximum length of a response that is not streamed.
const CHAT_BYTES_MAX: usize = 64 << 20;

/// Maximum length of an error that is converted. The message of a longer one is dropped.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// Translation of a chat response to a message.
pub(super) struct Translation {
    /// Model name from the client.
    pub(super) model: String,
    /// Prompt length, an estimate if unknown.
    pub(super) prompt_tokens: u32,
    /// Lengths for the messages of errors.
    pub(super) known: Known,
    /// Set if the client receives an error in place of the end.
    pub(super) is_cut_short: Arc<AtomicBool>,
}

impl Translation {
    /// The translated response of a worker.
    pub(super) async fn of(self, response: Response<Body>, request_id: &str) -> Response<Body> {
        if !response.status().is_success() {
            return converted_error(response, request_id, self.known).await;
        }
        let (head, mut body) = response.into_parts();
        let content_type = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        if content_type.map(AnswerKind::of_content_type) == Some(AnswerKind::Events) {
            let translator = StreamTranslator::new(&self.model, self.prompt_tokens);
            let translated =
                Box::new(Translated { body, translator, is_cut_short: self.is_cut_short, has_ended: false });
            let next = |mut translated: Box<Translated>| async move { Some((translated.next().await?, translated)) };
            return Response::from_parts(head, Body::from_stream(unfold(translated, next)));
        }
        let chat = Limited::new(&mut body, CHAT_BYTES_MAX).collect().await.ok();
        let message = chat.and_then(|chat| message(&chat.to_bytes(), &self.model));
        self.is_cut_short.store(message.is_none(), Ordering::Relaxed);
        match message {
            Some(message) => Response::from_parts(head, Body::from(message)),
            None => error_response(ApiError::worker_failed(), request_id),
        }
    }
}

/// A stream of chunks as the events of a message.
struct Translated {
    body: Body,
    translator: StreamTranslator,
    is_cut_short: Arc<AtomicBool>,
    has_ended: bool,
}

impl Translated {
    /// The next events; `None` after the last ones.
    async fn next(&mut self) -> Option<Result<Bytes, Infallible>> {
        while !self.has_ended {
            let frame = self.body.frame().await;
            // Bodies of known length are not polled after their last byte.
            self.has_ended = !matches!(frame, Some(Ok(_))) || self.body.is_end_stream();
            let mut events = match frame {
                Some(Ok(frame)) => frame.data_ref().map(|data| self.translator.read(data)).unwrap_or_default(),
                Some(Err(_)) => self.translator.fail(502, "the response of the worker was cut off"),
                None => Vec::new(),
            };
            if self.has_ended {
                events.extend(self.translator.end());
            }
            self.is_cut_short.store(self.translator.has_failed(), Ordering::Relaxed);
            if !events.is_empty() {
                return Some(Ok(events.into()));
            }
        }
        None
    }
}

/// A worker's error in Anthropic's format: with its status, headers and message.
pub(super) async fn converted_error(response: Response<Body>, request_id: &str, known: Known) -> Response<Body> {
    let (head, body) = response.into_parts();
    let body = axum::body::to_bytes(body, ERROR_BYTES_MAX).await.unwrap_or_default();
    error_of(head, &body, request_id, known)
}

/// The same for a complete body.
pub(super) fn error_of(mut head: Parts, body: &[u8], request_id: &str, known: Known) -> Response<Body> {
    let reason = head.status.canonical_reason().unwrap_or("error").to_lowercase();
    let message = Some(body).filter(|body| body.len() <= ERROR_BYTES_MAX).and_then(error_message).unwrap_or(reason);
    let message = in_anthropic_words(&message, known).unwrap_or(message);
    head.headers.remove(CONTENT_LENGTH);
    head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let body = error_body(head.status.as_u16(), &message, Some(request_id));
    Response::from_parts(head, Body::from(body))
}
