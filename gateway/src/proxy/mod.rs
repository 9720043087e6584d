//! Path of one request to a worker and back.
//!
//! Order of steps: authentication, parsing, model lookup, tokenization, placement, attempt. Rejections happen before
//! any booking if possible, the body changes only where routing requires it, and every end of a request ends its
//! booking. `attempts` retries, and `answer` streams the response.

pub(crate) mod account;
mod answer;
mod attempts;
mod begin;
pub(crate) mod catalog;
pub(crate) mod context;
mod engine_calls;
mod exchange;
mod failure;
mod heartbeats;
mod hints;
pub(crate) mod ids;
mod leg;
mod messages;
mod migration;
mod outbound;
mod prefill_leg;
mod prefill_report;
mod realtime;
pub(crate) mod refusal;
mod reports;
mod rewritten;
pub(crate) mod routable;
mod split;
mod stored;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use axum::response::IntoResponse as _;
use http_body::Body as _;
use hyper::upgrade::OnUpgrade;
use pointsman::AnswerKind;
use serde_json::json;

use crate::formats::anthropic::Known;
use crate::formats::openai::{AnsweredModel, ApiError, Endpoint, request_id, to_client};
use crate::net::cores;
use crate::pools::disaggregation::PrefillResult;
use crate::proxy::account::Account;
use crate::proxy::context::RequestContext;
use crate::proxy::routable::{RoutableRequest, Target};
use crate::settings::MessagesMode;
pub(crate) use answer::Answer;
use attempts::AttemptLoop;
pub(crate) use attempts::WorkerResponse;
use begin::ResponseStart;
pub(crate) use exchange::checked_kind;
pub(crate) use failure::failure_outcome;
use heartbeats::{Heartbeats, Serving, kept_alive};
use leg::Leg;
use messages::{Translation, converted_error};
use migration::Migration;
use refusal::Refusal;
use rewritten::rewritten;

/// Place of the prefill, in responses of models with a prefill pool.
const PREFILL: HeaderName = HeaderName::from_static("x-pointsman-prefill");

/// Longest body of a request that is served on the core of its connection.
const SHORT_BYTES_MAX: u64 = 64 << 10;

/// Serves a request to one of the endpoints.
pub(crate) fn answer(
    endpoint: Endpoint,
    context: Arc<RequestContext>,
    request: Request<Body>,
) -> impl Future<Output = Response<Body>> {
    let interval = Duration::from_millis(context.settings.gateway.heartbeat_after_ms);
    let heartbeats = Heartbeats::new(endpoint, interval);
    let shared = occupies_core(&request).then(cores::shared).flatten();
    let served = serve(endpoint, context, request, Arc::clone(&heartbeats));
    let serving: Serving = match shared {
        None => Box::pin(served),
        Some(shared) => Box::pin(async move { Leg::start(&shared, served).end().await }),
    };
    kept_alive(heartbeats, serving)
}

/// Whether the body may take a core so long that its other requests notice.
fn occupies_core(request: &Request<Body>) -> bool {
    request.body().size_hint().upper().is_none_or(|bytes| bytes > SHORT_BYTES_MAX)
        || request.headers().contains_key(CONTENT_ENCODING)
}

/// Serves a request whose client may receive heartbeats meanwhile.
async fn serve(
    endpoint: Endpoint,
    context: Arc<RequestContext>,
    request: Request<Body>,
    heartbeats: Arc<Heartbeats>,
) -> Response<Body> {
    let (mut head, body) = request.into_parts();
    let client = head.extensions.remove::<OnUpgrade>();
    // The routing layer has set the id and adds it to every response.
    let request_id = request_id(&head.headers).unwrap_or_default();
    let mut account = Account::begin(&context, endpoint, &head.headers, request_id);
    account.heartbeats = Some(heartbeats);
    let target = Target { endpoint, method: &head.method, uri: &head.uri, is_forwarded: true };
    let reply = forward(&context, &mut account, target, &head.headers, request_id, body).await;
    let is_anthropic = endpoint.is_anthropic();
    let (response, error) = match reply {
        Ok(Reply::Started(Forwarded { begin, .. })) if begin.head.status == StatusCode::SWITCHING_PROTOCOLS => {
            return realtime::switch(account, begin, client, request_id);
        }
        Ok(Reply::Started(Forwarded { begin, translation, known, renamed, migration })) => {
            let response = start_response(&context, account, begin, (request_id, renamed), migration);
            return match translation {
                Some(translation) => translation.of(response, request_id).await,
                None if is_anthropic && !response.status().is_success() => {
                    converted_error(response, request_id, known).await
                }
                None => response,
            };
        }
        Ok(Reply::Count(input_tokens)) => (Json(json!({ "input_tokens": input_tokens })).into_response(), None),
        Err(refusal) => {
            let code = refusal.code();
            (refusal.rendered(is_anthropic, request_id), code)
        }
    };
    account.complete_with(error, response)
}

/// Outcome of a request before its rendering, beside a [`Refusal`].
#[expect(clippy::large_enum_variant, reason = "one exists per request; a box would be one allocation more")]
enum Reply {
    /// A worker has started a response.
    Started(Forwarded),
    /// Number of prompt tokens, known without a worker.
    Count(u32),
}

/// A started response and its treatment on the way to the client.
struct Forwarded {
    begin: WorkerResponse,
    translation: Option<Translation>,
    /// Lengths for the messages of errors.
    known: Known,
    /// Present if the client requested the model by another name than that at the worker.
    renamed: Option<AnsweredModel>,
    /// Present if the stream can be resumed after a failure.
    migration: Option<Box<Migration>>,
}

/// All steps before the first byte of the response.
async fn forward(
    context: &Arc<RequestContext>,
    account: &mut Account,
    target: Target<'_>,
    headers: &HeaderMap,
    request_id: &str,
    body: Body,
) -> Result<Reply, Refusal> {
    let endpoint = target.endpoint;
    // A count is computed here if possible. Otherwise an engine with this endpoint computes it.
    let messages = Some(MessagesMode::Pass).filter(|_| endpoint == Endpoint::CountTokens);
    let retries = Some(&*context.admission.retry_budget);
    let prepared = RoutableRequest::receive(context, account, target, (headers, body), messages, retries).await?;
    if endpoint == Endpoint::CountTokens {
        if let Some(input_tokens) = prepared.prompt_tokens() {
            return Ok(Reply::Count(input_tokens));
        }
        if prepared.model.settings.messages != MessagesMode::Pass {
            let mut error = ApiError::token_count_unavailable();
            error.message = format!("{}: {}", error.message, account.access.no_tokens.unwrap_or("no tokens"));
            return Err(error.into());
        }
    }
    let known = prepared.known_lengths();
    let is_translated = prepared.worker_endpoint != endpoint;
    let translation = is_translated.then(|| Translation {
        model: prepared.requested_model.clone(),
        // At the usual four bytes each.
        prompt_tokens: prepared
            .prompt_tokens()
            .unwrap_or_else(|| (prepared.body.len() / 4).try_into().unwrap_or(u32::MAX)),
        known,
        is_cut_short: Arc::clone(account.is_cut_short.insert(Arc::default())),
    });
    let renamed = prepared.answered_model.clone().filter(|_| !is_translated);
    let may_migrate = migration::is_enabled(context, account, &prepared);
    let (body, none) = (prepared.body.clone(), BTreeSet::new());
    let attempts = AttemptLoop::new(context, &prepared, (headers, request_id), body, &none);
    let begin = attempts.run(account, prepared.request()).await?;
    if endpoint == Endpoint::Responses && begin.head.status.is_success() {
        let tenant = account.access.tenant.as_deref();
        stored::record(tenant, &begin.body.held_bytes(), &prepared.model, begin.placement.rank());
    }
    let migration = (may_migrate && begin.checked == Some(AnswerKind::Events)).then(|| {
        let rank = begin.placement.rank();
        Box::new(Migration::new(context, prepared, (headers, request_id), rank))
    });
    Ok(Reply::Started(Forwarded { begin, translation, known, renamed, migration }))
}

/// Response of a worker that has started one.
fn start_response(
    context: &Arc<RequestContext>,
    account: Account,
    begin: WorkerResponse,
    (request_id, model): (&str, Option<AnsweredModel>),
    migration: Option<Box<Migration>>,
) -> Response<Body> {
    let (status, mut headers) = (begin.head.status, to_client(&begin.head.headers, request_id));
    let prefill = begin.prefill.as_ref().map(|prefill| (prefill.result, prefill.tokens.clone()));
    let is_events = begin.checked == Some(AnswerKind::Events);
    let limits = account.quota_headers();
    let mut answer: Answer<ResponseStart> = follow(context, account, begin, request_id);
    if let Some(migration) = migration {
        // The length changes with the events of other attempts.
        headers.remove(CONTENT_LENGTH);
        answer = answer.resumable(migration);
    }
    let tokens = prefill.as_ref().filter(|(result, _)| *result == PrefillResult::Remote).map(|(_, tokens)| tokens);
    let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let is_text = [AnswerKind::Json, AnswerKind::Events].iter().any(|kind| kind.accepts(content_type));
    let model = model.filter(|_| status.is_success() && is_text && !headers.contains_key(CONTENT_ENCODING));
    let body = rewritten(answer, is_events, tokens, model);
    headers.extend(limits);
    if let Some((result, _)) = prefill {
        headers.insert(PREFILL, HeaderValue::from_static(result.name()));
    }
    let mut response = Response::new(body);
    (*response.status_mut(), *response.headers_mut()) = (status, headers);
    response
}

/// Follows a started response to its end.
pub(crate) fn follow<B>(
    context: &Arc<RequestContext>,
    mut account: Account,
    begin: WorkerResponse<impl Into<B>>,
    request_id: &str,
) -> Answer<B>
where
    B: http_body::Body<Data = Bytes, Error: Display> + From<ResponseStart> + Unpin,
{
    let status = begin.head.status;
    // The first token of a stream is recorded as it passes.
    if begin.checked != Some(AnswerKind::Events) {
        account.first_token(false);
    }
    account.answered(status);
    account.access.is_answered_by_worker = true;
    let (worker, rank) = (begin.placement.endpoint(), begin.placement.rank().rank);
    tracing::debug!(request_id, worker, rank, status = status.as_u16(), "answered");
    let content_type = begin.head.headers.get(CONTENT_TYPE);
    let kind = content_type.map_or(AnswerKind::Json, |value| AnswerKind::of_content_type(value.as_bytes()));
    Answer::new(context, account, begin, kind)
}
