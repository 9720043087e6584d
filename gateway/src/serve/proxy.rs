//! Path of one request to a worker and back.
//!
//! Order of steps: authentication, parsing, model lookup, tokenization, placement, attempt. Rejections happen before
//! any booking if possible, the body changes only where routing requires it, and every end of a request ends its
//! booking. [`attempts`] retries, and [`answer`] streams the response.

mod answer;
mod attempts;
mod begin;
mod failure;
mod intake;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, EXPECT};
use axum::http::{HeaderMap, Request, Response};
use axum::response::IntoResponse as _;
use pointsman::answer::AnswerKind;
use pointsman::{Prompt, RequestOptions, RouteRequest};
use tokio::time::Instant;

use super::App;
use super::metrics::Account;
use super::telemetry::ErrorCode;
use super::tenants::Tenant;
use crate::openai::{ApiError, Edits, Endpoint, RequestBody, request_id, request_options, to_client};
use answer::Answer;
use attempts::{AttemptLoop, WorkerResponse};
use intake::Limits;

/// Serves a request to one of the endpoints.
pub(super) async fn answer(endpoint: Endpoint, State(app): State<Arc<App>>, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let mut account = Account::begin(&app.meters, endpoint);
    // The routing layer has set the id and adds it to every response.
    let request_id = request_id(&head.headers).unwrap_or_default();
    account.access.request_id = request_id.to_owned();
    let forwarded = forward(&app, &mut account, endpoint, &head.headers, request_id, body).await;
    let response = match forwarded {
        Ok(begin) => return start_response(&app, account, begin, request_id),
        Err(response) => response,
    };
    account.access.error = response.extensions().get().map(|ErrorCode(code)| *code);
    account.access.is_answered_by_worker = account.access.error.is_none();
    account.answered(response.status());
    account.complete();
    response
}

/// All steps before the first byte of the response. Errors are responses, too.
async fn forward(
    app: &Arc<App>,
    account: &mut Account,
    endpoint: Endpoint,
    headers: &HeaderMap,
    request_id: &str,
    body: Body,
) -> Result<WorkerResponse, Response<Body>> {
    let refused = |error: ApiError| error.into_response();
    let limits = body_limits(app, headers);
    let tenant = match admit(app, headers) {
        Ok(tenant) => tenant,
        Err(error) => {
            intake::discard(body, limits).await;
            return Err(refused(error));
        }
    };
    account.access.tenant = tenant.map(|tenant| tenant.name.clone());
    app.retry_budget.requested(account.started());
    let body = receive(app, account, limits, body).await?;
    let parsed = RequestBody::parse(endpoint, body).map_err(refused)?;
    let (model, adapter) = match parsed.model.as_deref() {
        Some(name) => app.models.find(name).ok_or_else(|| refused(ApiError::model_not_found(name)))?,
        None => (app.models.only().ok_or_else(|| refused(model_missing()))?, None),
    };
    account.is_for(&model.meters);
    let mut options = options_of(headers, tenant).map_err(refused)?;
    options.session_id = options.session_id.or_else(|| parsed.session_id.as_deref().map(Arc::from));
    if let (Some(tenant), Some(session_id)) = (tenant, &mut options.session_id) {
        *session_id = tenant.session(session_id).into();
    }
    let tenant_salt = tenant.map(|tenant| tenant.salt(parsed.cache_salt.as_deref()));

    let upstream_name = adapter.unwrap_or_else(|| model.settings.upstream_name());
    let edits = Edits {
        model: Some(upstream_name).filter(|name| parsed.model.as_deref().is_some_and(|requested| requested != *name)),
        cache_salt: tenant_salt.as_deref(),
    };
    let tokens = model.tokens.of(&parsed.prompt, parsed.model.as_deref().unwrap_or(upstream_name)).await;
    account.access.prompt_tokens = u32::try_from(tokens.ids.len()).ok().filter(|tokens| *tokens > 0);
    let request = RouteRequest {
        options: RequestOptions {
            lora_name: adapter.map(Arc::from),
            cache_salt: tenant_salt.as_deref().or(parsed.cache_salt.as_deref()).map(Arc::from),
            tenant: tenant.map(|tenant| Arc::from(tenant.name.as_str())),
            output_tokens_max: parsed.output_tokens_max,
            not_streamed: !parsed.stream,
            ..options
        },
        ..RouteRequest::query(Prompt::Tokens(&tokens.ids))
    };
    // Embeddings are never streamed, regardless of the request.
    let kind = if parsed.stream && endpoint != Endpoint::Embeddings { AnswerKind::Events } else { AnswerKind::Json };
    let body = parsed.body(edits);
    let attempts = AttemptLoop { app, model, endpoint, headers, request_id, body, kind };
    attempts.run(account, request).await
}

/// Response of a worker that has started one.
fn start_response(app: &Arc<App>, mut account: Account, begin: WorkerResponse, request_id: &str) -> Response<Body> {
    let (status, headers) = (begin.head.status, to_client(&begin.head.headers, request_id));
    // The first token of a stream is recorded as it passes.
    if begin.checked != Some(AnswerKind::Events) {
        account.first_token();
    }
    account.answered(status);
    account.access.is_answered_by_worker = true;
    let (worker, rank) = (begin.placement.endpoint(), begin.placement.rank().rank);
    tracing::debug!(request_id, worker, rank, status = status.as_u16(), "answered");
    let content_type = begin.head.headers.get(CONTENT_TYPE);
    let kind = content_type.map_or(AnswerKind::Json, |value| AnswerKind::of_content_type(value.as_bytes()));
    let answer = Answer::new(app, account, begin, kind);
    let mut response = Response::new(Body::new(answer));
    (*response.status_mut(), *response.headers_mut()) = (status, headers);
    response
}

async fn receive(app: &App, account: &mut Account, limits: Limits, body: Body) -> Result<Bytes, Response<Body>> {
    let waits = Instant::now();
    let taken = intake::receive(body, limits, &app.bodies).await;
    account.waited_since(waits);
    taken.map_err(ApiError::into_response)
}

fn body_limits(app: &App, headers: &HeaderMap) -> Limits {
    let settings = &app.settings.gateway;
    let (bytes_max, frame_timeout) = (settings.body_bytes_max, Duration::from_millis(settings.body_timeout_ms));
    Limits { bytes_max, frame_timeout, expects_continue: headers.contains_key(EXPECT) }
}

/// Authenticates the client, if requests are accepted now.
fn admit<'a>(app: &'a App, headers: &HeaderMap) -> Result<Option<&'a Tenant>, ApiError> {
    if app.is_closing() { Err(ApiError::draining()) } else { app.tenants.identify(headers.get(AUTHORIZATION)) }
}

fn model_missing() -> ApiError {
    ApiError::invalid("missing_field", Some("model"), "the body has no model, and several models are configured")
}

/// Request options from the headers, limited to the permissions of the tenant.
fn options_of(headers: &HeaderMap, tenant: Option<&Tenant>) -> Result<RequestOptions, ApiError> {
    let mut options = request_options(headers)?;
    if let Some(tenant) = tenant {
        options.strict_priority = options.strict_priority.min(tenant.strict_priority_max);
        if tenant.strict_priority_max == 0 {
            options.priority_jump = 0.0; // a jump is also a priority
        }
        options.policy_class = tenant.policy_class.as_deref().map(Arc::from).or(options.policy_class);
    }
    Ok(options)
}
