//! Preparation of a request for routing, common to the proxy and the endpoint picker: model, options, tokens and the
//! body for the worker.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use pointsman::answer::AnswerKind;

use pointsman::schedule::Rejection;
use pointsman::{Prompt, RequestOptions, RouteRequest};
use tokio::time::Instant;

use super::App;
use super::metrics::Account;
use super::models::Model;
use super::tenants::Tenant;
use crate::openai::{ApiError, ClientPrompt, Edits, Endpoint, RequestBody, request_options};

/// A request that can be routed.
pub(super) struct Prepared {
    pub(super) model: Arc<Model>,
    /// Kind of a valid response: events for a streamed request.
    pub(super) kind: AnswerKind,
    /// The body for the worker.
    pub(super) body: Bytes,
    /// Whether a stream ends with a usage record.
    pub(super) include_usage: bool,
    options: RequestOptions,
    prompt: ClientPrompt,
    /// Tokens of the prompt, unless the client sent them.
    tokens: Option<Vec<u32>>,
}

impl Prepared {
    /// Parses the body and computes the tokens of its prompt. `tenant` is the authenticated client.
    ///
    /// # Errors
    /// 400 for an invalid header or body, 404 for an unknown model.
    pub(super) async fn new(
        app: &App,
        account: &mut Account,
        endpoint: Endpoint,
        (headers, body): (&HeaderMap, Bytes),
        tenant: Option<&Tenant>,
    ) -> Result<Self, ApiError> {
        let parsed = RequestBody::parse(endpoint, body)?;
        let (model, adapter) = match parsed.model.as_deref() {
            Some(name) => app.models.find(name).ok_or_else(|| ApiError::model_not_found(name))?,
            None => (app.models.only().ok_or_else(model_missing)?, None),
        };
        account.is_for(&model.meters);
        let mut options = options_of(headers, tenant)?;
        options.session_id = options.session_id.or_else(|| parsed.session_id.as_deref().map(Arc::from));
        if let (Some(tenant), Some(session_id)) = (tenant, &mut options.session_id) {
            *session_id = tenant.session(session_id).into();
        }
        hold(app, account, model, &mut options).await?;
        let tenant_salt = tenant.map(|tenant| tenant.salt(parsed.cache_salt.as_deref()));

        let upstream_name = adapter.unwrap_or_else(|| model.settings.upstream_name());
        let edits = Edits {
            model: Some(upstream_name)
                .filter(|name| parsed.model.as_deref().is_some_and(|requested| requested != *name)),
            cache_salt: tenant_salt.as_deref(),
        };
        let tokens = model.tokens.of(&parsed.prompt, parsed.model.as_deref().unwrap_or(upstream_name)).await;
        account.access.prompt_tokens = u32::try_from(tokens.ids.len()).ok().filter(|tokens| *tokens > 0);
        let options = RequestOptions {
            lora_name: adapter.map(Arc::from),
            cache_salt: tenant_salt.as_deref().or(parsed.cache_salt.as_deref()).map(Arc::from),
            tenant: tenant.map(|tenant| Arc::from(tenant.name.as_str())),
            output_tokens_max: parsed.output_tokens_max,
            not_streamed: !parsed.stream,
            ..options
        };
        let tokens = match tokens.ids {
            std::borrow::Cow::Owned(ids) => Some(ids),
            std::borrow::Cow::Borrowed(_) => None,
        };
        // Embeddings are never streamed, regardless of the request.
        let kind =
            if parsed.stream && endpoint != Endpoint::Embeddings { AnswerKind::Events } else { AnswerKind::Json };
        let (body, include_usage) = (parsed.body(edits), parsed.include_usage);
        Ok(Self { model: Arc::clone(model), kind, body, include_usage, options, prompt: parsed.prompt, tokens })
    }

    /// The request for the router, without an id.
    pub(super) fn request(&self) -> RouteRequest<'_> {
        let tokens = match (&self.tokens, &self.prompt) {
            (Some(tokens), _) | (None, ClientPrompt::Tokens(tokens)) => tokens.as_slice(),
            (None, _) => &[],
        };
        RouteRequest { options: self.options.clone(), ..RouteRequest::query(Prompt::Tokens(tokens)) }
    }
}

/// Waits for a first worker, if the settings allow it, at most until the deadline of the request.
///
/// # Errors
/// 503 without a worker after that time. Without the setting, placement reports it.
async fn hold(app: &App, account: &mut Account, model: &Model, options: &mut RequestOptions) -> Result<(), ApiError> {
    let within = Duration::from_millis(app.settings.gateway.hold_without_endpoints_ms);
    if within.is_zero() {
        return Ok(());
    }
    let since = Instant::now();
    let within = options.deadline.map_or(within, |deadline| within.min(deadline));
    if !model.has_worker(within).await {
        return Err(Rejection::NoRanks.into());
    }
    account.waited_since(since);
    options.deadline = options.deadline.map(|deadline| deadline.saturating_sub(since.elapsed()));
    Ok(())
}

/// Authenticates the client, if requests are accepted now.
///
/// # Errors
/// 503 during a drain, 401 for an unknown client.
pub(super) fn admit<'a>(app: &'a App, headers: &HeaderMap) -> Result<Option<&'a Tenant>, ApiError> {
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
