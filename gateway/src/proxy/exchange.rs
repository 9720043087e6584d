//! One exchange with a worker: from the request to a valid start of the response.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE, UPGRADE};
use axum::http::response::Parts;
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Collected, Full, Limited};
use hyper::body::Incoming;
use pointsman::AnswerKind;

use super::begin::{ResponseStart, TimeLimit};
use super::failure::{Failure, is_retried};
use super::heartbeats::Heartbeats;
use crate::formats::openai::{BodyForm, Endpoint};
use crate::net::upstream::{Upstream, UpstreamError};

/// Maximum length of a stored worker error, in case no worker succeeds.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// A started response, or an error that concerns the request itself.
pub(super) struct Checked {
    pub(super) head: Parts,
    pub(super) body: ResponseStart,
    /// Kind of validation of a successful response; `None` if its content cannot be read.
    pub(super) kind: Option<AnswerKind>,
}

/// Sends a request and validates the start of its response. `on_head` receives the status, and `heartbeats` those of the
/// engine.
///
/// # Errors
/// No response within the time, an invalid one, or a status that another worker may not have.
pub(super) async fn exchange(
    upstream: Upstream,
    request: Request<Full<Bytes>>,
    (endpoint, kind): (Endpoint, AnswerKind),
    (mut limit, heartbeats): (TimeLimit, Option<Arc<Heartbeats>>),
    on_head: impl FnOnce(StatusCode),
) -> Result<Checked, Failure> {
    let (head, body) = limit.of(send(&upstream, request, on_head)).await??;
    let checked = match head.status.is_success() {
        true => checked_kind(endpoint, kind, &head.headers).map_err(Failure::Invalid)?,
        false => None,
    };
    let body = match checked {
        Some(kind) => ResponseStart::valid(body, kind, limit, heartbeats.as_deref()).await?,
        None => limit.of(ResponseStart::any(body)).await??,
    };
    Ok(Checked { head, body, kind: checked })
}

/// As [`exchange`], for a complete response of at most `bytes_max`. Its status may be one of an error.
pub(super) async fn exchange_whole(
    upstream: Upstream,
    request: Request<Full<Bytes>>,
    bytes_max: usize,
    mut limit: TimeLimit,
    on_head: impl FnOnce(StatusCode),
) -> Result<(Parts, Bytes), Failure> {
    let received = async {
        let (head, body) = send(&upstream, request, on_head).await?;
        let body = Limited::new(body, bytes_max).collect().await;
        let body = body.map(Collected::to_bytes).map_err(|error| {
            Failure::NoResponse(match error.is::<http_body_util::LengthLimitError>() {
                true => UpstreamError::TooLong(bytes_max),
                false => UpstreamError::Broken(error.to_string()),
            })
        });
        Ok((head, body?))
    };
    limit.of(received).await?
}

/// The head of a response with a status of success or of a client error.
async fn send(
    upstream: &Upstream,
    request: Request<Full<Bytes>>,
    on_head: impl FnOnce(StatusCode),
) -> Result<(Parts, Incoming), Failure> {
    let may_switch = request.headers().contains_key(UPGRADE);
    let (head, body) = upstream.send(request).await.map_err(Failure::NoResponse)?.into_parts();
    on_head(head.status);
    if is_retried(head.status) {
        let body = Limited::new(body, ERROR_BYTES_MAX).collect().await.ok();
        let body = body.map(Collected::to_bytes);
        return Err(Failure::Status { status: head.status, headers: head.headers, body });
    }
    let is_switched = may_switch && head.status == StatusCode::SWITCHING_PROTOCOLS;
    if !is_switched && !head.status.is_success() && !head.status.is_client_error() {
        // Internal statuses would redirect clients or switch their protocol.
        return Err(Failure::NoResponse(UpstreamError::Status(head.status)));
    }
    Ok((head, body))
}

/// How to validate the body of a successful response, by its headers; `None` if its content cannot be read. `kind` is
/// that of a valid response.
pub(crate) fn checked_kind(
    endpoint: Endpoint,
    kind: AnswerKind,
    headers: &HeaderMap,
) -> Result<Option<AnswerKind>, String> {
    let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    // vLLM sends embeddings in this form for `encoding_format: bytes`.
    let is_binary = !endpoint.generates() && content_type.starts_with(b"application/octet-stream");
    let is_encoded = headers.get(CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity");
    let is_expected = kind.accepts(content_type);
    if is_binary || is_encoded || !is_expected && endpoint.form() != BodyForm::Json {
        return Ok(None);
    }
    if is_expected {
        return Ok(Some(kind).filter(|_| endpoint.has_known_response(kind == AnswerKind::Events)));
    }
    Err(format!("content type {:?}", String::from_utf8_lossy(content_type)))
}
