//! The live page: static files, and a stream of snapshots for it and for `pointsman top`.
//!
//! A browser cannot send the token with the request for a page. The files contain nothing of the fleet and are served
//! without it; their script has an input for the token, keeps it for the session of its tab, and sends it with the
//! request for the stream. The stream needs the token like every other request.

mod collect;
mod feed;
mod window;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{
    CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderValue, Method};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::Mutex;

use super::Admin;
use crate::formats::openai::ApiError;
use crate::observe::clock::unix_ms;
use crate::pools::latest::Latest;
use crate::pools::serving::Pools;
use collect::Windows;
use feed::{Feed, VIEWERS_MAX};

/// The static files: path, content type, content.
const FILES: [(&str, &str, &str); 4] = [
    ("/admin/page", "text/html; charset=utf-8", include_str!("page.html")),
    ("/admin/page.css", "text/css; charset=utf-8", include_str!("page.css")),
    ("/admin/page.js", "text/javascript; charset=utf-8", include_str!("page.js")),
    ("/admin/page.svg", "image/svg+xml", include_str!("page.svg")),
];

/// Own files only, no frames around the page, no forms to elsewhere.
const POLICY: &str = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Prevents proxies from buffering the stream.
const NO_BUFFER: HeaderName = HeaderName::from_static("x-accel-buffering");

/// The snapshots of one gateway.
pub(super) struct Live {
    feed: Arc<Feed>,
    source: Arc<Source>,
}

/// Computes snapshots.
struct Source {
    pools: Latest<Pools>,
    computed: AtomicU64,
    windows: Mutex<Windows>,
}

impl Live {
    pub(super) fn new(pools: Latest<Pools>) -> Self {
        Self {
            feed: Feed::new(),
            source: Arc::new(Source { pools, computed: AtomicU64::new(0), windows: Mutex::default() }),
        }
    }
}

impl Source {
    /// The next snapshot as a server-sent event; none once the gateway has ended.
    async fn next(&self) -> Option<Bytes> {
        let pools = self.pools.get();
        if has_ended(&pools) {
            return None;
        }
        let number = self.computed.fetch_add(1, Ordering::Relaxed) + 1;
        let snapshot = collect::snapshot(&pools, &mut *self.windows.lock().await, number, unix_ms()).await;
        let mut event = b"event: snapshot\ndata: ".to_vec();
        serde_json::to_writer(&mut event, &snapshot).expect("snapshots serialize to JSON");
        event.extend_from_slice(b"\n\n");
        Some(event.into())
    }
}

/// Whether the gateway drains and has stopped its routers: open streams would delay its end.
fn has_ended(pools: &Pools) -> bool {
    pools.readiness.is_draining() && pools.models.all().iter().all(|model| model.router.health().state.is_err())
}

/// Whether the request is for a static file, which needs no token.
pub(super) fn is_file(request: &Request) -> bool {
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    is_read && FILES.iter().any(|(path, ..)| request.uri().path() == *path)
}

/// Routes of the static files.
pub(super) fn files() -> Router {
    FILES.into_iter().fold(Router::new(), |routes, (path, kind, content)| {
        let headers = [
            (CONTENT_TYPE, kind),
            (CONTENT_SECURITY_POLICY, POLICY),
            (X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (X_FRAME_OPTIONS, "DENY"),
            (REFERRER_POLICY, "no-referrer"),
        ];
        routes.route(path, get((headers, content)))
    })
}

/// The stream of snapshots, as server-sent events.
pub(super) async fn stream(State(admin): State<Arc<Admin>>) -> Result<Response, ApiError> {
    let source = Arc::clone(&admin.live.source);
    let next = move || {
        let source = Arc::clone(&source);
        async move { source.next().await }
    };
    let frames = admin.live.feed.watch(next).map_err(|_| {
        let message = format!("the limit of {VIEWERS_MAX} viewers is reached");
        ApiError::overloaded("viewers_max", message, Duration::from_secs(5))
    })?;
    let mut response = Response::new(Body::from_stream(frames.map(Ok::<_, Infallible>)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(NO_BUFFER, HeaderValue::from_static("no"));
    Ok(response)
}
