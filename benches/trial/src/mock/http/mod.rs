//! HTTP server of the mock engine.
//!
//! Manages connections and applies faults to requests. No connection outlives the engine. Every error response is in
//! OpenAI's format. [`completions`] handles completions, [`info`] the information endpoints.

mod answer;
mod broken;
mod completions;
mod generate;
mod handover;
mod info;
mod legs;
mod request;
mod rules;
mod scores;
mod sleep;

use std::net::TcpListener;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time;

use super::engine::Engine;
use super::faults::{Fault, Scope};
use broken::{Rest, half};

/// Maximum number of open connections; further ones are closed immediately.
const CONNECTIONS_MAX: usize = 8_192;

/// Delay of the listener after a failed accept, for example when file descriptors run out.
const ACCEPT_REST: Duration = Duration::from_millis(20);

/// State of the request handlers.
pub(crate) type Shared = State<Arc<Engine>>;

/// Handle to the connection of a request.
#[derive(Clone, Default)]
pub(crate) struct Connection {
    /// Bytes to send before the connection is closed.
    last: Arc<OnceLock<&'static [u8]>>,
    closed: Arc<Notify>,
}

impl Connection {
    /// Closes the connection without a response. Never returns.
    pub(crate) async fn reset(&self) -> ! {
        self.close_with(&[]).await
    }

    /// Sends these bytes instead of a response and closes the connection. Never returns.
    async fn close_with(&self, bytes: &'static [u8]) -> ! {
        // Fails if the connection is already being closed.
        let _ = self.last.set(bytes);
        self.closed.notify_one();
        std::future::pending().await
    }
}

/// HTTP server that runs until it is shut down or dropped.
pub(crate) struct Server {
    stop: oneshot::Sender<()>,
    handle: JoinHandle<()>,
}

impl Server {
    pub(crate) fn start(routes: Router, listener: TcpListener) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (stop, stopped) = oneshot::channel();
        Ok(Self { stop, handle: tokio::spawn(serve(listener, routes, stopped)) })
    }

    /// Closes all connections and returns when the port is free.
    pub(crate) async fn shutdown(self) {
        // Both fail if the task has already ended.
        let _ = self.stop.send(());
        let _ = self.handle.await;
    }
}

async fn serve(listener: tokio::net::TcpListener, routes: Router, mut stop: oneshot::Receiver<()>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = &mut stop => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if connections.len() < CONNECTIONS_MAX => {
                    connections.spawn(serve_connection(stream, routes.clone()));
                }
                Ok(_) => {}
                Err(_) => time::sleep(ACCEPT_REST).await,
            },
        }
    }
    connections.shutdown().await;
}

async fn serve_connection(stream: TcpStream, routes: Router) {
    // Small token chunks must be sent immediately. The connection also works if this call fails.
    let _ = stream.set_nodelay(true);
    let connection = Connection::default();
    let service = TowerToHyperService::new(routes.layer(Extension(connection.clone())));
    let mut conversation = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        biased;
        () = connection.closed.notified() => {}
        // Errors of a client connection are ignored, here and below.
        _ = &mut conversation => return,
    }
    let mut stream = conversation.into_parts().io.into_inner();
    let _ = stream.write_all(connection.last.get().copied().unwrap_or_default()).await;
}

/// Routes of the engine.
pub(crate) fn routes(engine: Arc<Engine>) -> Router {
    let router = match &engine.handover {
        Some(_) => handover::routes(),
        None => Router::new(),
    };
    router
        .route("/v1/completions", post(generate::complete))
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/models", get(info::models))
        .route("/v1/rerank", post(scores::rerank))
        .route("/v1/score", post(scores::score))
        .route("/tokenize", post(info::tokenize))
        .route("/detokenize", post(info::detokenize))
        .route("/health", get(info::health))
        .route("/server_info", get(info::server_info))
        .route("/get_server_info", get(info::server_info))
        .route("/metrics", get(info::metrics))
        .route("/kv_event_sources", get(info::kv_event_sources))
        .route("/reset_prefix_cache", post(info::reset_prefix_cache))
        .route("/close_session", post(info::close_session))
        .route("/sleep", post(sleep::sleep))
        .route("/wake_up", post(sleep::wake_up))
        .route("/is_sleeping", get(sleep::is_sleeping))
        .route("/faults", get(info::faults).post(info::set_faults))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&engine), authorize))
        .layer(from_fn_with_state(Arc::clone(&engine), suffer))
        .layer(DefaultBodyLimit::max(engine.config.body_bytes_max))
        .with_state(engine)
}

/// Routes of the bootstrap server of a prefill engine.
pub(crate) fn bootstrap_routes(engine: Arc<Engine>) -> Router {
    Router::new()
        .route("/health", get(info::health))
        .route("/query", get(handover::query))
        .route("/handover/claim", post(handover::claim))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(engine)
}

async fn unknown(request: Request) -> Response {
    answer::error(StatusCode::NOT_FOUND, &format!("{} does not exist", request.uri().path()))
}

async fn wrong_method(method: Method, request: Request) -> Response {
    answer::error(StatusCode::METHOD_NOT_ALLOWED, &format!("{} does not support {method}", request.uri().path()))
}

/// Rejects requests without the API key, if the engine has one.
async fn authorize(State(engine): Shared, request: Request, next: Next) -> Response {
    let Some(key) = &engine.config.api_key else { return next.run(request).await };
    let path = request.uri().path();
    let is_guarded = if engine.config.dialect.is_sglang() {
        // The last two are paths of the mock engine only.
        !["/health", "/metrics", "/faults", "/handover"].iter().any(|free| path.starts_with(free))
    } else {
        path.starts_with("/v1")
    };
    let shown = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes);
    if is_guarded && shown.and_then(|shown| shown.strip_prefix(b"Bearer ")) != Some(key.as_bytes()) {
        return answer::error(StatusCode::UNAUTHORIZED, "Unauthorized");
    }
    next.run(request).await
}

/// Applies disabled and slow pages, and the current faults, to a request.
async fn suffer(State(engine): Shared, connection: Extension<Connection>, request: Request, next: Next) -> Response {
    let set = engine.faults.get();
    let path = request.uri().path();
    if engine.config.no_pages.iter().any(|page| page == path) {
        return answer::error(StatusCode::NOT_FOUND, &format!("{path} is disabled"));
    }
    if let Some(page) = engine.config.slow_pages.iter().find(|page| page.path == path) {
        time::sleep(page.delay).await;
    }
    let is_spared = matches!(path, "/faults" | "/handover")
        || match set.scope {
            Scope::All => false,
            Scope::Generation => !matches!(path, "/v1/completions" | "/v1/chat/completions"),
        };
    if is_spared {
        return next.run(request).await;
    }
    if path.starts_with("/v1/") && path != "/v1/models" {
        // Requests wait in the engine, which ends only with the mock.
        let _ = engine.sleep.subscribe().wait_for(Option::is_none).await;
    }
    let number = engine.request_number();
    let strikes = |fault, share| engine.faults.strikes(fault, share, 0, number);
    if strikes(Fault::Hang, set.hang_share) {
        return std::future::pending().await;
    }
    if set.delay_ms > 0 {
        engine.faults.count(Fault::Delay);
        time::sleep(Duration::from_millis(set.delay_ms)).await;
    }
    if strikes(Fault::Reset, set.reset_share) {
        connection.reset().await;
    }
    if strikes(Fault::Status, set.status_share) {
        let status = StatusCode::from_u16(set.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        return (status, axum::Json(json!({ "error": answer::error_body(status, "injected fault") }))).into_response();
    }
    if strikes(Fault::Garbage, set.garbage_share) {
        connection.close_with(broken::garbage(engine.faults.draw(Fault::Garbage, 1, number))).await;
    }
    let (is_cut, is_stalled) = (strikes(Fault::Cut, set.cut_share), strikes(Fault::Stall, set.stall_share));
    let response = next.run(request).await;
    match (is_cut, is_stalled) {
        (true, _) => response.map(|body| half(body, Rest::Closed)),
        (false, true) => response.map(|body| half(body, Rest::Never)),
        (false, false) => response,
    }
}
