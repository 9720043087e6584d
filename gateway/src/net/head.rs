//! Check of request heads that proxies may interpret differently.

use axum::extract::Request;
use axum::http::header::{AUTHORIZATION, HOST, TRANSFER_ENCODING};
use axum::http::{HeaderName, Version};

use crate::formats::openai::{API_KEY, ApiError};

/// Reason to reject a head that proxies may interpret differently: RFC 9112, sections 3.2 and 6.1; RFC 9110, section 5.3
/// for keys.
pub(crate) fn refused_head(request: &Request) -> Option<ApiError> {
    let hosts = request.headers().get_all(HOST).iter().count();
    // HTTP/2 has the authority in the URI.
    if hosts > 1 || hosts == 0 && request.version() == Version::HTTP_11 {
        return Some(ApiError::host_invalid());
    }
    let is_repeated = |name: &HeaderName| request.headers().get_all(name).iter().nth(1).is_some();
    if is_repeated(&AUTHORIZATION) || is_repeated(&API_KEY) {
        return Some(ApiError::key_repeated());
    }
    let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
    let is_known = codings.next().is_none_or(|coding| coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"));
    (!is_known || codings.next().is_some()).then(ApiError::transfer_encoding_unsupported)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn repeated_keys_are_refused() {
        let code = |keys: &[&str]| {
            let mut request = Request::get("/").header(HOST, "h");
            for key in keys {
                request = request.header(*key, "Bearer a");
            }
            refused_head(&request.body(Body::empty()).expect("a request")).map(|error| error.code)
        };
        assert_eq!((code(&[]), code(&["authorization"]), code(&["authorization", "x-api-key"])), (None, None, None));
        assert_eq!(code(&["authorization", "authorization"]), Some("repeated_key"));
        assert_eq!(code(&["x-api-key", "x-api-key"]), Some("repeated_key"));
    }
}
