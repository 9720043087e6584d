//! Abort of a leg in an SGLang engine.
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

/// Time limit of the aborts of one leg.
const ABORT_MAX: Duration = Duration::from_secs(5);

/// Maximum length of a response.
const BYTES_MAX: usize = 64 << 10;

/// Aborts a leg when it is dropped before [`ended`](Self::ended).
#[derive(Default)]
pub(crate) struct EngineAbort(Option<AbortCall>);

struct AbortCall {
    upstream: Upstream,
    url: String,
    authorization: Option<HeaderValue>,
    ids: Vec<String>,
}

impl EngineAbort {
    /// Of a request with these ids at an engine. `headers` has the authorization of the request.
    pub(super) fn new(upstream: &Upstream, endpoint: &str, headers: &HeaderMap, ids: Vec<String>) -> Self {
        let url = format!("{}/abort_request", endpoint.trim_end_matches('/'));
        let authorization = headers.get(AUTHORIZATION).cloned();
        Self(Some(AbortCall { upstream: upstream.clone(), url, authorization, ids }))
    }

    /// Records the end of the leg's response.
    pub(super) fn ended(&mut self) {
        self.0 = None;
    }
}

impl Drop for EngineAbort {
    fn drop(&mut self) {
        if let Some(call) = self.0.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(timeout(ABORT_MAX, call.send()));
        }
    }
}

impl AbortCall {
    /// Sends one abort per id. The engine ends the request on its own if they fail.
    async fn send(self) {
        for id in &self.ids {
            let body = serde_json::json!({ "rid": id }).to_string();
            let mut request = Request::post(&self.url).header(CONTENT_TYPE, "application/json");
            if let Some(authorization) = &self.authorization {
                request = request.header(AUTHORIZATION, authorization);
            }
            let Ok(request) = request.body(Full::new(Bytes::from(body))) else { return };
            match self.upstream.send(request).await {
                // The rest is read, so that the connection is used again.
                Ok(response) => drop(Limited::new(response.into_body(), BYTES_MAX).collect().await),
                Err(error) => {
                    tracing::debug!(url = self.url, id, cause = %error, "abort of a leg failed");
                    return;
                }
            }
        }
    }
}
