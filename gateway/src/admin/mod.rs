//! Administration listener: workers, drains, loads, explanations, settings, and the served index.
//!
//! Every request except for the files of the live page needs the token (`auth`), and an unambiguous path. The index
//! has a token of its own as well, and a read-only token gives access to `GET`, which has no side effects. Changes run
//! one at a time and to completion, each with an audit line. [`listener`](crate::net::listener) accepts connections; the
//! router performs changes. `docs/admin.md` documents all paths with examples.

mod audit;
mod auth;
mod control;
mod decisions;
mod dump;
mod extract;
mod index_api;
mod live;
mod queries;
mod reports;
mod views;
mod workers;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::CACHE_CONTROL;
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post, put};
use tokio::sync::{Mutex, Semaphore};

use crate::formats::openai::ApiError;
use crate::net::head::refused_head;
use crate::observe::page::{self, Metrics};
use crate::pools::latest::Latest;
use crate::pools::readiness;
use crate::pools::serving::Pools;
pub(crate) use auth::Tokens;
use auth::{Access, Denials, client_address};
pub(crate) use extract::ClientAddress;

/// Maximum body length.
const BODY_BYTES_MAX: usize = 8 << 20;

/// Beginning of the paths of the served index.
const INDEX_PATHS: &str = "/v1/index/";

/// The only path with a query.
const DUMP_PATH: &str = "/v1/index/dump";

/// Maximum path length.
const PATH_BYTES_MAX: usize = 2048;

/// Maximum concurrent dumps, because each is held in memory while it is sent.
const DUMPS_MAX: usize = 2;

/// State of operator requests.
struct Admin {
    pools: Latest<Pools>,
    tokens: Latest<Tokens>,
    denials: Denials,
    /// Locked during changes of workers, so that a patch cannot restore a removed worker.
    changes: Mutex<()>,
    dumps: Arc<Semaphore>,
    index_queries: Semaphore,
    live: live::Live,
}

/// Routes of the administration listener. Paths shared with the clients' listener also need the token here. `further` are
/// routes of the same listener that their owner provides.
pub(crate) fn routes(
    pools: Latest<Pools>,
    tokens: Latest<Tokens>,
    metrics: Option<Metrics>,
    further: Router,
) -> Router {
    let common = readiness::routes().with_state(pools.clone());
    let metrics = get(async move || page::respond(metrics.as_ref()).await);
    let (changes, dumps) = (Mutex::new(()), Arc::new(Semaphore::new(DUMPS_MAX)));
    let index_queries = Semaphore::new(index_api::INDEX_QUERIES_MAX);
    let live = live::Live::new(pools.clone());
    let admin = Arc::new(Admin { pools, tokens, denials: Denials::new(), changes, dumps, index_queries, live });
    Router::new()
        .route("/admin/config", get(reports::settings))
        .route("/admin/decisions", get(decisions::last))
        .route("/admin/decisions/{id}", get(decisions::of_request))
        .route("/admin/live", get(live::stream))
        .route("/admin/models", get(reports::models))
        .route("/admin/models/{model}/config", get(reports::config))
        .route("/admin/models/{model}/control/{action}", post(control::control))
        .route("/admin/models/{model}/dump", get(dump::dump))
        .route("/admin/models/{model}/explain", post(queries::explain))
        .route("/admin/models/{model}/health", get(reports::health))
        .route("/admin/models/{model}/loads", get(reports::loads))
        .route("/admin/models/{model}/overlap", post(queries::overlap))
        .route("/admin/models/{model}/workers", get(workers::list).post(workers::add))
        .route("/admin/models/{model}/workers/{id}", put(workers::put).patch(workers::patch).delete(workers::remove))
        .route("/admin/models/{model}/workers/{id}/drain", post(workers::drain))
        .route(
            "/admin/models/{model}/workers/{id}/undrain",
            workers::state_change("undrain", |router, id| async move { router.undrain_worker(id).await }),
        )
        .route(
            "/admin/models/{model}/workers/{id}/cordon",
            workers::state_change("cordon", |router, id| async move { router.cordon_worker(id).await }),
        )
        .route(
            "/admin/models/{model}/workers/{id}/uncordon",
            workers::state_change("uncordon", |router, id| async move { router.uncordon_worker(id).await }),
        )
        .route(DUMP_PATH, get(dump::contents))
        .route("/v1/index/loads", post(index_api::loads))
        .route("/v1/index/overlaps", post(index_api::overlaps))
        .with_state(Arc::clone(&admin))
        .merge(common)
        .route("/metrics", metrics)
        .merge(further)
        .merge(live::files())
        .fallback(async || no_route())
        .method_not_allowed_fallback(async || wrong_method())
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn_with_state(admin, guard))
}

/// Rejects requests without the token and with ambiguous paths.
async fn guard(State(admin): State<Arc<Admin>>, request: Request, next: Next) -> Response {
    let is_index = request.uri().path().starts_with(INDEX_PATHS);
    let access = admin.tokens.get().access(request.headers(), is_index);
    let mut answer = if !live::is_file(&request) && access == Access::Denied {
        admin.denials.count(client_address(request.extensions()));
        auth::denied()
    } else if access == Access::ReadOnly && !request.method().is_safe() {
        read_only().into_response()
    } else if let Some(error) = refused_head(&request).or_else(|| refused_address(request.uri())) {
        error.into_response()
    } else {
        next.run(request).await
    };
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

/// Reason to reject a path before its lookup.
fn refused_address(uri: &Uri) -> Option<ApiError> {
    if uri.scheme().is_some() || uri.authority().is_some() || uri.path().len() > PATH_BYTES_MAX {
        return Some(no_route());
    }
    let is_without = uri.path().starts_with("/admin") || uri.path().starts_with(INDEX_PATHS) && uri.path() != DUMP_PATH;
    let has_query = uri.query().is_some() && is_without;
    has_query.then(|| ApiError::invalid("unknown_query", None, "this path does not accept a query"))
}

fn internal(cause: impl std::fmt::Display) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", cause.to_string())
}

fn read_only() -> ApiError {
    let message = "this token permits GET only";
    ApiError::new(StatusCode::FORBIDDEN, "read_only_token", message)
}

fn no_route() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", "this path does not exist")
}

fn wrong_method() -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this path does not support this method")
}
