//! The engine's HTTP front.
//!
//! Owns connections and the faults that fall on requests. Promises that no connection outlives the engine, and that
//! every refusal is in OpenAI's form. Leaves completions to [`completions`], everything that only tells to [`info`].

mod answer;
mod completions;
mod info;
mod request;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use super::engine::Engine;
use super::faults::{Fault, Scope};

/// Connections that may be open; what comes then is closed at once.
const CONNECTIONS_MAX: usize = 8_192;

/// How long the listener rests when the system has no descriptor for another connection.
const ACCEPT_REST: Duration = Duration::from_millis(20);

/// What requests are served with.
pub(crate) type Shared = State<Arc<Engine>>;

/// The connection that a request came on.
#[derive(Clone, Default)]
pub(crate) struct Connection(Arc<Notify>);

impl Connection {
    /// Closes it, without an answer to what is under way. Never comes back.
    pub(crate) async fn reset(&self) -> ! {
        self.0.notify_one();
        std::future::pending().await
    }
}

/// Listens until it is shut down or dropped.
pub(crate) struct Server {
    stop: oneshot::Sender<()>,
    handle: JoinHandle<()>,
}

impl Server {
    pub(crate) fn start(engine: Arc<Engine>, listener: TcpListener) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (stop, stopped) = oneshot::channel();
        Ok(Self { stop, handle: tokio::spawn(serve(listener, routes(engine), stopped)) })
    }

    /// Closes all connections, and comes back when the port is free.
    pub(crate) async fn shutdown(self) {
        // Either is gone if the task ended by itself.
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
                    connections.spawn(converse(stream, routes.clone()));
                }
                Ok(_) => {}
                Err(_) => sleep(ACCEPT_REST).await,
            },
        }
    }
    connections.shutdown().await;
}

async fn converse(stream: TcpStream, routes: Router) {
    // Tokens are small and wanted at once; a connection works without it too.
    let _ = stream.set_nodelay(true);
    let connection = Connection::default();
    let service = TowerToHyperService::new(routes.layer(Extension(connection.clone())));
    let conversation = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        biased;
        () = connection.0.notified() => {}
        // How a client goes is its own affair.
        _ = conversation => {}
    }
}

fn routes(engine: Arc<Engine>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::complete))
        .route("/v1/chat/completions", post(completions::chat))
        .route("/v1/models", get(info::models))
        .route("/tokenize", post(info::tokenize))
        .route("/health", get(info::health))
        .route("/server_info", get(info::server_info))
        .route("/get_server_info", get(info::server_info))
        .route("/metrics", get(info::metrics))
        .route("/reset_prefix_cache", post(info::reset_prefix_cache))
        .route("/faults", get(info::faults).post(info::set_faults))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&engine), suffer))
        .layer(DefaultBodyLimit::max(engine.config.body_bytes_max))
        .with_state(engine)
}

async fn unknown(request: Request) -> Response {
    answer::error(StatusCode::NOT_FOUND, &format!("there is no {}", request.uri().path()))
}

async fn wrong_method(method: Method, request: Request) -> Response {
    answer::error(StatusCode::METHOD_NOT_ALLOWED, &format!("{} does not take {method}", request.uri().path()))
}

/// Lets the faults in force fall on a request.
async fn suffer(State(engine): Shared, connection: Extension<Connection>, request: Request, next: Next) -> Response {
    let set = engine.faults.get();
    let path = request.uri().path();
    let is_spared = path == "/faults"
        || match set.scope {
            Scope::All => false,
            Scope::Generation => !matches!(path, "/v1/completions" | "/v1/chat/completions"),
        };
    if is_spared {
        return next.run(request).await;
    }
    let number = engine.request_number();
    let strikes = |fault, share| engine.faults.strikes(fault, share, 0, number);
    if strikes(Fault::Hang, set.hang_share) {
        return std::future::pending().await;
    }
    if set.delay_ms > 0 {
        engine.faults.count(Fault::Delay);
        sleep(Duration::from_millis(set.delay_ms)).await;
    }
    if strikes(Fault::Reset, set.reset_share) {
        connection.reset().await;
    }
    if strikes(Fault::Status, set.status_share) {
        let status = StatusCode::from_u16(set.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        return (status, axum::Json(json!({ "error": answer::error_body(status, "a fault on demand") })))
            .into_response();
    }
    next.run(request).await
}
