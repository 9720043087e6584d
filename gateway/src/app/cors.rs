//! Cross-origin requests of browsers (CORS).
//!
//! As in the engines, every origin is allowed by default, but none with tenants. Requests have no credentials besides their
//! headers, so that no page can use a key that its user has not given it.

use axum::extract::Request;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::response::{IntoResponse as _, Response};

use crate::settings::Settings;

/// Time for which browsers keep the answer to a preflight request, as at the engines.
const MAX_AGE_S: HeaderValue = HeaderValue::from_static("600");

const ANY: HeaderValue = HeaderValue::from_static("*");

/// The origin of a request that is allowed, as browsers read it.
pub(super) struct AllowedOrigin(HeaderValue);

impl AllowedOrigin {
    /// `None` for requests of the same origin or of other programs, and for origins that are not allowed.
    pub(super) fn of(settings: &Settings, headers: &HeaderMap) -> Option<Self> {
        let origin = headers.get(ORIGIN)?;
        let Some(allowed) = &settings.gateway.allow_origins else {
            return settings.tenants.is_empty().then_some(Self(ANY));
        };
        if allowed.iter().any(|allowed| allowed == "*") {
            return Some(Self(ANY));
        }
        allowed.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then(|| Self(origin.clone()))
    }

    /// Response to a preflight request; `None` for another request.
    pub(super) fn preflight(&self, request: &Request) -> Option<Response> {
        let asked = request.headers();
        let method = asked.get(ACCESS_CONTROL_REQUEST_METHOD).filter(|_| request.method() == Method::OPTIONS)?;
        let mut response = ().into_response();
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, method.clone());
        headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE_S);
        if let Some(names) = asked.get(ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        Some(response)
    }

    /// Allows the page to read a response. Headers of a worker give way.
    pub(super) fn allow(self, headers: &mut HeaderMap) {
        if self.0 != ANY {
            headers.append(VARY, HeaderValue::from_static("origin"));
        }
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, self.0);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, ANY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::TenantSettings;

    #[test]
    fn origins_are_allowed_by_the_settings_and_by_default_without_tenants() {
        let allowed = |settings: &Settings, origin: &'static str| {
            let headers = [(ORIGIN, HeaderValue::from_static(origin))].into_iter().collect();
            AllowedOrigin::of(settings, &headers).map(|AllowedOrigin(origin)| origin)
        };
        let mut settings = Settings::default();
        assert_eq!(allowed(&settings, "https://a"), Some(ANY));
        assert!(AllowedOrigin::of(&settings, &HeaderMap::new()).is_none(), "no browser");
        settings.tenants = vec![TenantSettings::default()];
        assert_eq!(allowed(&settings, "https://a"), None);
        settings.gateway.allow_origins = Some(vec!["https://a".to_owned()]);
        assert_eq!(allowed(&settings, "https://a"), Some(HeaderValue::from_static("https://a")));
        assert_eq!(allowed(&settings, "https://a.b"), None);
        settings.gateway.allow_origins = Some(vec!["*".to_owned()]);
        assert_eq!(allowed(&settings, "null"), Some(ANY));
        settings.gateway.allow_origins = Some(Vec::new());
        assert_eq!(allowed(&settings, "https://a"), None);
    }
}
