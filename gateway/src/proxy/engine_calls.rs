//! Calls to an SGLang engine at the end of a leg or of a session.
//!
//! SGLang detects a closed connection two seconds (streams) or up to four seconds (whole responses) later (reference:
//! SGLang, `TokenizerManager`). `POST /abort_request` with the id of the request ends it at once.

use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Request};
use http_body_util::{BodyExt as _, Full, Limited};
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::net::upstream::Upstream;

/// Time limit of the calls of one leg.
const TIME_MAX: Duration = Duration::from_secs(5);

/// Maximum length of a response.
const BYTES_MAX: usize = 64 << 10;

/// Calls that are sent when this is dropped before [`ended`](Self::ended).
#[derive(Default)]
pub(crate) struct EngineCalls(Option<Calls>);

struct Calls {
    upstream: Upstream,
    url: String,
    authorization: Option<HeaderValue>,
    bodies: Vec<String>,
}

impl EngineCalls {
    /// One call for each body. `headers` has the authorization of the request.
    pub(super) fn new(upstream: &Upstream, url: String, headers: &HeaderMap, bodies: Vec<String>) -> Self {
        let authorization = headers.get(AUTHORIZATION).cloned();
        Self(Some(Calls { upstream: upstream.clone(), url, authorization, bodies }))
    }

    /// Records the end of the leg's response.
    pub(super) fn ended(&mut self) {
        self.0 = None;
    }
}

impl Drop for EngineCalls {
    fn drop(&mut self) {
        if let Some(call) = self.0.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(timeout(TIME_MAX, call.send()));
        }
    }
}

impl Calls {
    /// Sends them. The engine ends a request on its own if they fail.
    async fn send(self) {
        for body in self.bodies {
            let mut request = Request::post(&self.url).header(CONTENT_TYPE, "application/json");
            if let Some(authorization) = &self.authorization {
                request = request.header(AUTHORIZATION, authorization);
            }
            let Ok(request) = request.body(Full::new(Bytes::from(body))) else { return };
            match self.upstream.send(request).await {
                // The rest is read, so that the connection is used again.
                Ok(response) => drop(Limited::new(response.into_body(), BYTES_MAX).collect().await),
                Err(error) => {
                    tracing::debug!(url = self.url, cause = %error, "call of an engine failed");
                    return;
                }
            }
        }
    }
}
