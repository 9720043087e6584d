//! Error for the client, in its dialect.

use axum::body::{Body, Bytes};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use axum::response::IntoResponse as _;

use super::messages::error_of;
use crate::formats::anthropic::{Known, error_response};
use crate::formats::openai::{ApiError, to_client};

/// Error for the client: of the gateway, or of a worker.
pub(crate) enum Refusal {
    /// Of the gateway.
    Own(ApiError),
    /// Of a worker.
    Worker(WorkerError),
}

/// A complete error response of a worker.
pub(crate) struct WorkerError {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self::Own(error)
    }
}

impl Refusal {
    /// Code of an error of the gateway.
    pub(super) fn code(&self) -> Option<&'static str> {
        match self {
            Self::Own(error) => Some(error.code),
            Self::Worker(_) => None,
        }
    }

    /// The response in the format of OpenAI or of Anthropic.
    pub(super) fn rendered(self, is_anthropic: bool, request_id: &str) -> Response<Body> {
        match self {
            Self::Own(error) => rendered_error(error, is_anthropic, request_id),
            Self::Worker(WorkerError { status, mut headers, body }) => {
                if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
                    headers.entry(RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
                }
                let mut response = Response::new(());
                (*response.status_mut(), *response.headers_mut()) = (status, to_client(&headers, request_id));
                let (head, ()) = response.into_parts();
                if is_anthropic {
                    error_of(head, &body, request_id, Known::default())
                } else {
                    Response::from_parts(head, body.into())
                }
            }
        }
    }
}

/// An error of the gateway in the format of OpenAI or of Anthropic.
pub(crate) fn rendered_error(error: ApiError, is_anthropic: bool, request_id: &str) -> Response<Body> {
    if is_anthropic { error_response(error, request_id) } else { error.into_response() }
}
