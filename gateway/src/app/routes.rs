//! Routes of the clients' listener, and layers for all listeners.
//!
//! Assigns request ids and adds them to every response. Unknown paths, unsupported methods and panics produce errors in
//! OpenAI's format. Handlers live in their own modules.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use futures_util::FutureExt as _;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout};

use crate::formats::openai::ErrorCode;
use crate::formats::openai::{ApiError, Endpoint, request_id};
use crate::net::head::refused_head;
use crate::observe::access::AccessRecord;
use crate::observe::page::{self, Metrics};
use crate::observe::trace::RequestTrace;
use crate::pools::latest::Latest;
use crate::pools::readiness;
use crate::pools::serving::Pools;
use crate::proxy;
use crate::proxy::catalog;
use crate::proxy::context::RequestContext;
use crate::proxy::refusal::rendered_error;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The same in Anthropic's API.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Paths without an access log line, because monitoring polls them every few seconds.
const PROBES: [&str; 4] = ["/live", "/health", "/ready", "/metrics"];

/// Maximum path length in an access log line.
const PATH_CHARS_MAX: usize = 128;

pub(super) fn clients(context: Latest<RequestContext>, probes: Router) -> Router {
    let ask = |endpoint: Endpoint| {
        let refused = move |headers: HeaderMap| async move {
            let id = request_id(&headers).unwrap_or_default();
            rendered_error(ApiError::method_not_allowed("POST"), endpoint.is_anthropic(), id)
        };
        post(move |state, request| proxy::answer(endpoint, state, request)).fallback(refused)
    };
    let mut routes = Router::new();
    for endpoint in Endpoint::ALL {
        routes = routes.route(endpoint.path(), ask(endpoint));
    }
    routes
        .route("/v1/models", get(catalog::list))
        .route("/v1/models/{*id}", get(catalog::one))
        .with_state(context.clone())
        .merge(probes)
        .fallback(|| async { ApiError::not_found() })
        .method_not_allowed_fallback(|| async { ApiError::method_not_allowed("GET, HEAD") })
        .layer(from_fn_with_state(context, named))
}

/// Probes, and the metrics page if `metrics_public` is true.
pub(super) fn probes(pools: Latest<Pools>, metrics: Option<Metrics>) -> Router {
    let current = pools.clone();
    let page = async move || match current.get().settings.gateway.metrics_public {
        true => page::respond(metrics.as_ref()).await,
        false => ApiError::not_found().into_response(),
    };
    readiness::routes().with_state(pools).route("/metrics", get(page))
}

/// Routes for connections above `connections_max`: probes only.
pub(super) fn overflow(probes: Router) -> Router {
    probes.fallback(too_many_connections)
}

/// Time limit for reading the body of a rejected request.
const REFUSED_BODY_TIME_MAX: Duration = Duration::from_millis(500);

async fn too_many_connections(request: Request) -> ApiError {
    // Otherwise a client that is still sending would see a connection reset instead of the response.
    let mut body = request.into_body();
    let rest = async { while let Some(Ok(_)) = body.frame().await {} };
    let _ = timeout(REFUSED_BODY_TIME_MAX, rest).await;
    ApiError::too_many_connections()
}

/// Assigns an id to requests without a valid one; the response carries it.
async fn named(State(context): State<Arc<RequestContext>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers()).map_or_else(|| context.ids.public(), str::to_owned);
    let id = HeaderValue::try_from(id).expect("request ids are valid header values");
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let is_anthropic = Endpoint::of_path(request.uri().path()).is_some_and(Endpoint::is_anthropic);
    let refused = refused_head(&request);
    let is_unrouted = refused.is_some() || !is_routed(&request);
    let unrouted = is_unrouted.then(|| (path_of(&request), Instant::now()));
    let trace_id = unrouted.as_ref().and_then(|_| RequestTrace::of(request.headers()).trace_id());
    let answer = match refused {
        Some(error) => Err(error),
        // The panic hook has logged the panic; its message is internal.
        None => AssertUnwindSafe(next.run(request)).catch_unwind().await.map_err(|_| ApiError::internal()),
    };
    let rendered = |error| rendered_error(error, is_anthropic, id.to_str().unwrap_or_default());
    let mut answer = answer.unwrap_or_else(rendered);
    if let Some((path, started)) = unrouted.filter(|(path, _)| !PROBES.contains(&path.as_str())) {
        let request_id = id.to_str().unwrap_or_default().to_owned();
        let error = answer.extensions().get().map(|ErrorCode(code)| *code);
        let record = AccessRecord::unrouted(request_id, path, error);
        let status = answer.status().as_u16();
        record.write("other", ("", trace_id.as_deref()), status, record.outcome_of(status), started.elapsed());
    }
    if is_anthropic {
        answer.headers_mut().insert(ANTHROPIC_REQUEST_ID, id.clone());
    }
    answer.headers_mut().insert(REQUEST_ID, id);
    answer
}

/// Whether the request goes to an endpoint that writes its own access log line.
fn is_routed(request: &Request) -> bool {
    request.method() == Method::POST && Endpoint::of_path(request.uri().path()).is_some()
}

/// Truncated path without the query, because clients put keys there.
fn path_of(request: &Request) -> String {
    request.uri().path().chars().take(PATH_CHARS_MAX).collect()
}
