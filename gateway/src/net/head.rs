//! Check of request heads that proxies may interpret differently.

use axum::extract::Request;
use axum::http::Version;
use axum::http::header::{HOST, TRANSFER_ENCODING};

use crate::formats::openai::ApiError;

/// Reason to reject a head that proxies may interpret differently: RFC 9112, sections 3.2 and 6.1.
pub(crate) fn refused_head(request: &Request) -> Option<ApiError> {
    let hosts = request.headers().get_all(HOST).iter().count();
    // HTTP/2 has the authority in the URI.
    if hosts > 1 || hosts == 0 && request.version() == Version::HTTP_11 {
        return Some(ApiError::host_invalid());
    }
    let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
    let is_known = codings.next().is_none_or(|coding| coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"));
    (!is_known || codings.next().is_some()).then(ApiError::transfer_encoding_unsupported)
}
