//! What is answered on the clients' listener, and what on every one.
//!
//! Owns paths and methods, and that requests have names. Promises an answer in OpenAI's shape for every other path and
//! method, and for a handler that panics, and that clients find a request's name in each answer. Leaves the answers to
//! the modules they belong to.

use std::any::Any;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use tower_http::catch_panic::CatchPanicLayer;

use super::App;
use super::current::Current;
use super::{catalog, proxy, ready};
use crate::openai::{ApiError, Endpoint, request_id};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

pub(super) fn clients(current: Current) -> Router {
    let ask = |endpoint: Endpoint| {
        post(move |state, request| proxy::answer(endpoint, state, request))
            .fallback(|| async { ApiError::method_not_allowed("POST") })
    };
    let mut routes = Router::new();
    for endpoint in [Endpoint::Chat, Endpoint::Completions, Endpoint::Embeddings, Endpoint::Responses] {
        routes = routes.route(endpoint.path(), ask(endpoint));
    }
    routes
        .route("/v1/models", get(catalog::list))
        .route("/v1/models/{*id}", get(catalog::one))
        .route("/metrics", get(ready::public_metrics))
        .merge(ready::routes())
        .with_state(current.clone())
        .fallback(|| async { ApiError::not_found() })
        .method_not_allowed_fallback(|| async { ApiError::method_not_allowed("GET, HEAD") })
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(current, named))
}

/// Gives a request that has no name, or none that is fit, one; its answer bears the same.
async fn named(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers()).map_or_else(|| app.ids.public(), str::to_owned);
    let id = HeaderValue::try_from(id).expect("it was a header, or is hexadecimal");
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let mut answer = next.run(request).await;
    answer.headers_mut().insert(REQUEST_ID, id);
    answer
}

/// The panic itself has been told by the hook; what it says is nobody else's business.
fn panicked(_: Box<dyn Any + Send>) -> Response {
    ApiError::internal().into_response()
}
