//! Routes of the clients' listener, and layers for all listeners.
//!
//! Assigns request ids and adds them to every response. Unknown paths, unsupported methods and panics produce errors in
//! OpenAI's format. Handlers live in their own modules.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Version};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures_util::FutureExt as _;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout};

use super::cors::AllowedOrigin;
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
    Router::new()
        .route("/v1/models", get(catalog::list))
        .route("/v1/models/{*id}", get(catalog::one))
        .fallback(served)
        .with_state(context.clone())
        .merge(probes)
        .method_not_allowed_fallback(|| async { ApiError::method_not_allowed("GET, HEAD") })
        .layer(from_fn_with_state(context, named))
}

/// Serves the endpoints of the table and the further paths of the settings.
async fn served(State(context): State<Arc<RequestContext>>, request: Request) -> Response {
    let endpoint = endpoint_of(&context, &request);
    let error = match endpoint {
        Some(endpoint) if has_method(endpoint, &request) => return proxy::answer(endpoint, context, request).await,
        Some(endpoint) => ApiError::method_not_allowed(endpoint.methods()),
        None => ApiError::not_found(),
    };
    let id = request_id(request.headers()).unwrap_or_default();
    rendered_error(error, is_anthropic(endpoint, &request), id)
}

fn endpoint_of(context: &RequestContext, request: &Request) -> Option<Endpoint> {
    let path = request.uri().path();
    let is_further = || context.settings.gateway.routes.iter().any(|route| route.path == path);
    Endpoint::of_path(path).or_else(|| is_further().then_some(Endpoint::Further))
}

fn has_method(endpoint: Endpoint, request: &Request) -> bool {
    endpoint.methods().split(", ").any(|method| method == request.method().as_str())
}

/// Whether the client has Anthropic's format: by the endpoint, or by a path or header that only this API has.
fn is_anthropic(endpoint: Option<Endpoint>, request: &Request) -> bool {
    let is_its =
        || request.uri().path().starts_with("/v1/messages/") || request.headers().contains_key("anthropic-version");
    endpoint.map_or_else(is_its, Endpoint::is_anthropic)
}

/// Probes, and the metrics page if `metrics_public` is true.
pub(super) fn probes(pools: Latest<Pools>, metrics: Option<Metrics>) -> Router {
    let current = pools.clone();
    let page = async move || match current.get().settings.is_metrics_public() {
        true => page::respond(metrics.as_ref()).await,
        false => ApiError::not_found().into_response(),
    };
    readiness::routes().with_state(pools).route("/metrics", get(page))
}

/// Routes for connections and requests above a limit: probes only.
pub(super) fn overflow(probes: Router) -> Router {
    probes.fallback(refused)
}

/// Time limit for reading the body of a rejected request.
const REFUSED_BODY_TIME_MAX: Duration = Duration::from_millis(500);

async fn refused(mut request: Request) -> ApiError {
    // The listener adds the error of a request. Otherwise the connection is refused.
    let error = request.extensions_mut().remove().unwrap_or_else(ApiError::too_many_connections);
    if request.version() != Version::HTTP_2 {
        // Otherwise a client that is still sending would see a connection reset instead of the response.
        let mut body = request.into_body();
        let rest = async { while let Some(Ok(_)) = body.frame().await {} };
        let _ = timeout(REFUSED_BODY_TIME_MAX, rest).await;
    }
    error
}

/// Assigns an id to requests without a valid one; the response carries it.
async fn named(State(context): State<Arc<RequestContext>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers()).map_or_else(|| context.ids.public(), str::to_owned);
    let id = HeaderValue::try_from(id).expect("request ids are valid header values");
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let endpoint = endpoint_of(&context, &request);
    let is_anthropic = is_anthropic(endpoint, &request);
    let refused = refused_head(&request);
    // Other requests write their own access log line.
    let is_unrouted = refused.is_some() || !endpoint.is_some_and(|endpoint| has_method(endpoint, &request));
    let unrouted = is_unrouted.then(|| (path_of(&request), Instant::now()));
    let trace_id = unrouted.as_ref().and_then(|_| RequestTrace::of(request.headers()).trace_id());
    let origin = AllowedOrigin::of(&context.settings, request.headers());
    let preflight = origin.as_ref().and_then(|origin| origin.preflight(&request));
    let answer = match (refused, preflight) {
        (Some(error), _) => Err(error),
        (None, Some(preflight)) => Ok(preflight),
        // The panic hook has logged the panic; its message is internal.
        (None, None) => AssertUnwindSafe(next.run(request)).catch_unwind().await.map_err(|_| ApiError::internal()),
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
    if let Some(origin) = origin {
        origin.allow(answer.headers_mut());
    }
    answer
}

/// Truncated path without the query, because clients put keys there.
fn path_of(request: &Request) -> String {
    request.uri().path().chars().take(PATH_CHARS_MAX).collect()
}
