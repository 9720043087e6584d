//! Preparation of a request for routing, common to the proxy and the endpoint picker: model, options, tokens and the
//! body for the worker.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Query;
use axum::http::header::EXPECT;
use axum::http::{HeaderMap, Method, Uri};
use pointsman::config::RouterConfigOverride;
use pointsman::error::RouteError;
use pointsman::protocol::{Engine, WorkerId};
use pointsman::{AnswerKind, Pin, PinMode, Prompt, Rejection, RequestOptions, RouteRequest};
use serde::Deserialize;
use tokio::time::Instant;

use super::account::Account;
use super::hints::Hints;
use crate::admission::admit::Admitted;
use crate::admission::coding::Coding;
use crate::admission::intake::{Limits, discard, receive, reserved};
use crate::admission::retry_budget::RetryBudget;
use crate::admission::tenants::Tenant;
use crate::formats::anthropic::{Conversion, Known, Purpose, converted};
use crate::formats::openai::{
    AnsweredModel, ApiError, BodyForm, ChatStyle, ClientPrompt, Edits, Endpoint, RESERVED, RequestBody, Session,
    hashed, request_options,
};
use crate::pools::model::Model;
use crate::pools::readiness::causes::placement_error;
use crate::proxy::context::RequestContext;
use crate::proxy::stored::owner;
use crate::settings::{MessagesMode, Settings};
use crate::tokens::{PromptContext, PromptMedia, PromptTokens};

/// What a client addresses.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) endpoint: Endpoint,
    pub(crate) method: &'a Method,
    /// Path and query.
    pub(crate) uri: &'a Uri,
    /// Whether the gateway forwards the response, and so knows where it is stored.
    pub(crate) is_forwarded: bool,
}

/// The read part of a query.
#[derive(Default, Deserialize)]
struct TargetQuery {
    model: Option<String>,
}

impl Target<'_> {
    /// The model of a request whose body names none: that of the path in the settings, or of the query.
    fn model(&self, settings: &Settings) -> Option<String> {
        let further = settings.gateway.routes.iter().find(|route| route.path == self.uri.path());
        let of_query = || Query::<TargetQuery>::try_from_uri(self.uri).ok().and_then(|Query(query)| query.model);
        further.map(|route| route.model.clone()).or_else(of_query)
    }

    /// Path of the endpoint at the workers, and the query of a request that is forwarded unread.
    fn worker_path(&self, worker_endpoint: Endpoint) -> String {
        if worker_endpoint != self.endpoint {
            return worker_endpoint.path().to_owned();
        }
        let unread = self.uri.path_and_query().filter(|_| self.endpoint.form() == BodyForm::Unread);
        unread.map_or(self.uri.path(), |unread| unread.as_str()).to_owned()
    }
}

/// A request that can be routed.
pub(crate) struct RoutableRequest {
    pub(crate) model: Arc<Model>,
    /// Endpoint at the worker.
    pub(crate) worker_endpoint: Endpoint,
    /// Its path, with the query if the request is forwarded unread.
    pub(crate) worker_path: String,
    pub(crate) method: Method,
    /// Model name from the client, else that at the workers.
    pub(crate) requested_model: String,
    /// Replacement of the model name in the response, if the client requested another one.
    pub(super) answered_model: Option<AnsweredModel>,
    /// Kind of a valid response: events for a streamed request.
    pub(crate) kind: AnswerKind,
    /// The body for the worker.
    pub(crate) body: Bytes,
    /// Whether a stream ends with a usage record.
    pub(crate) include_usage: bool,
    /// Hints for engines.
    pub(super) hints: Hints,
    options: RequestOptions,
    prompt: ClientPrompt,
    /// Tokens of the prompt, unless the client sent them.
    tokens: Option<Vec<u32>>,
    /// Prompt length, if its tokens are known.
    prompt_tokens: Option<u32>,
}

/// Limits of the body of a request with `headers`.
pub(crate) fn body_limits(context: &RequestContext, headers: &HeaderMap) -> Limits {
    let settings = &context.settings.gateway;
    let (bytes_max, frame_timeout) = (settings.body_bytes_max, Duration::from_millis(settings.body_timeout_ms));
    Limits { bytes_max, frame_timeout, expects_continue: headers.contains_key(EXPECT), coding: Coding::of(headers) }
}

impl RoutableRequest {
    /// Admits a request and receives its body. `retries` counts it; a refused body is read to its end.
    ///
    /// # Errors
    /// As [`Self::new`], and those of [`Admission::admit`](crate::admission::admit::Admission::admit) and [`receive`].
    pub(crate) async fn receive(
        context: &RequestContext,
        account: &mut Account,
        target: Target<'_>,
        (headers, body): (&HeaderMap, Body),
        messages: Option<MessagesMode>,
        retries: Option<&RetryBudget>,
    ) -> Result<Self, ApiError> {
        let limits = body_limits(context, headers);
        let Admitted { tenant, quota } = match context.admission.admit(headers) {
            Ok(admitted) => admitted,
            Err(error) => {
                discard(body, limits).await;
                return Err(error);
            }
        };
        account.quota = quota;
        account.access.tenant = tenant.map(|tenant| tenant.name.clone());
        retries.inspect(|budget| budget.requested(account.started()));
        let waits = Instant::now();
        let body = receive(body, limits, &context.admission.budget).await;
        account.waited_since(waits);
        Self::new(context, account, target, (headers, body?), tenant, messages).await
    }

    /// Parses the body and computes the tokens of its prompt. `tenant` is the authenticated client. `messages` overrides
    /// the setting of the model.
    ///
    /// # Errors
    /// 400 for an invalid header or body, 404 for an unknown model.
    async fn new(
        context: &RequestContext,
        account: &mut Account,
        target: Target<'_>,
        (headers, body): (&HeaderMap, Bytes),
        tenant: Option<&Tenant>,
        messages: Option<MessagesMode>,
    ) -> Result<Self, ApiError> {
        let endpoint = target.endpoint;
        let (parsed, original) = parse(context, endpoint, (headers, body), messages).await?;
        let named = parsed.model.clone().or_else(|| target.model(&context.settings));
        let owner = owner_of(context, target, &parsed, tenant).await?;
        let (model, adapter) = model_of(context, named.as_deref(), owner.as_ref())?;
        account.model = Arc::clone(&model.meters);
        let kind = kind_of(account, endpoint, parsed.stream);
        let mut options = options_of(context, account, &model.settings.name, (headers, &parsed, tenant))?;
        options.constraints.pin =
            owner.as_ref().map(|(_, worker)| Pin { worker: *worker, rank: None, mode: PinMode::Hard });
        hold(context, account, model, endpoint, &mut options).await?;
        let tenant_salt = tenant.map(|tenant| tenant.salt(parsed.cache_salt.as_deref()));

        let upstream_name = adapter.unwrap_or_else(|| model.settings.upstream_name());
        let cache_salt = tenant_salt.as_deref().or(parsed.cache_salt.as_deref());
        let tenant_name = tenant.map(|tenant| tenant.name.as_str());
        let prompt = PromptContext { cache_salt, tenant: tenant_name, tokens_max: model.router.max_model_len() };
        let (tokens, further_prompt_tokens) = tokens_of(account, model, &parsed, prompt).await?;
        let PromptMedia { spans: mm_spans, names: media_names, report, .. } = tokens.media;
        account.media_report = report;
        let edited = parsed.model.as_deref().filter(|requested| *requested != upstream_name);
        let edits = Edits {
            model: edited.map(|_| upstream_name),
            // Tokenization uses no cache.
            cache_salt: tenant_salt.as_deref().filter(|_| endpoint.has_engine_work()),
            media_names: &media_names,
        };
        let options = RequestOptions {
            lora_name: adapter.map(Arc::from),
            cache_salt: cache_salt.map(Arc::from),
            mm_spans,
            further_prompt_tokens,
            ..options
        };
        let mode = messages.unwrap_or(model.settings.messages);
        let original = original.map(|original| (original, mode));
        let (body, worker_endpoint) = worker_body(endpoint, &parsed, original, edits)?;
        let hints = Hints::new(worker_endpoint, &parsed, &options);
        Ok(Self {
            model: Arc::clone(model),
            worker_endpoint,
            worker_path: target.worker_path(worker_endpoint),
            method: target.method.clone(),
            requested_model: named.as_deref().unwrap_or(upstream_name).to_owned(),
            answered_model: edited.map(|requested| AnsweredModel::new(upstream_name, requested)),
            kind,
            body,
            include_usage: parsed.include_usage,
            hints,
            options,
            tokens: Some(tokens.ids).filter(|ids| matches!(ids, Cow::Owned(_))).map(Cow::into_owned),
            prompt: parsed.prompt,
            prompt_tokens: account.access.prompt_tokens,
        })
    }

    /// Prompt length, if its tokens are known.
    pub(crate) fn prompt_tokens(&self) -> Option<u32> {
        self.prompt_tokens
    }

    /// Whether only one worker has the state of the request.
    pub(crate) fn is_pinned(&self) -> bool {
        self.options.constraints.pin.is_some()
    }

    /// What the gateway knows of the length of the request.
    pub(crate) fn known_lengths(&self) -> Known {
        Known {
            prompt_tokens: self.prompt_tokens.unwrap_or(0),
            max_model_len: self.model.router.max_model_len().unwrap_or(0),
        }
    }

    /// Whether the tokens of another chat begin with those of this one. `false` if either is unknown.
    pub(super) async fn is_prefix_of(&self, chat: &Bytes) -> bool {
        let Prompt::Tokens(prompt) = self.request().prompt else { return false };
        let Ok(chat) = RequestBody::parse(Endpoint::Chat, chat.clone()) else { return false };
        let cache_salt = self.options.cache_salt.as_deref();
        let context = PromptContext { cache_salt, tenant: None, tokens_max: None };
        !prompt.is_empty() && self.model.tokens.of(&chat.prompt, context).await.ids.starts_with(prompt)
    }

    /// The request for the router, without an id.
    pub(crate) fn request(&self) -> RouteRequest<'_> {
        let tokens = match (&self.tokens, &self.prompt) {
            (Some(tokens), _) | (None, ClientPrompt::Tokens(tokens)) => tokens.as_slice(),
            (None, _) => &[],
        };
        RouteRequest { options: self.options.clone(), ..RouteRequest::query(Prompt::Tokens(tokens)) }
    }
}

/// Kind of a valid response. The client of a stream may receive heartbeats from now on.
fn kind_of(account: &Account, endpoint: Endpoint, is_streamed: bool) -> AnswerKind {
    // Other responses are never streamed, regardless of the request.
    if !is_streamed || !endpoint.generates() {
        return AnswerKind::Json;
    }
    account.heartbeats.iter().for_each(|heartbeats| heartbeats.begin());
    AnswerKind::Events
}

/// Parses a body. For a request in Anthropic's format, the result is that of the converted chat, with the original body. A
/// passed body that cannot be converted is not read.
///
/// # Errors
/// 400 for an invalid body, 503 without memory for a second one.
async fn parse(
    context: &RequestContext,
    endpoint: Endpoint,
    (headers, body): (&HeaderMap, Bytes),
    messages: Option<MessagesMode>,
) -> Result<(RequestBody, Option<Bytes>), ApiError> {
    let model = |name: Option<&str>| match name {
        Some(name) => context.models.find(name).map(|(model, _)| model),
        None => context.models.only(),
    };
    let style = |name: Option<&str>| model(name).map(|model| style_of(model).0).unwrap_or_default();
    if !endpoint.is_anthropic() {
        let parsed = match endpoint.form() {
            BodyForm::Json => RequestBody::parse_for(endpoint, body, style),
            BodyForm::Form => RequestBody::form(endpoint, headers, body),
            BodyForm::Unread => Ok(RequestBody::unread(endpoint, body)),
        };
        return Ok((parsed?, None));
    }
    let conversion = |name: Option<&str>| {
        let Some(model) = model(name) else { return Conversion::default() };
        // Counts are those of the requests that clients send.
        let mode = messages.filter(|_| endpoint != Endpoint::CountTokens).unwrap_or(model.settings.messages);
        let (style, engine) = style_of(model);
        Conversion { style, is_vllm: engine == Some(Engine::Vllm), is_passed: mode == MessagesMode::Pass }
    };
    let purpose = if endpoint == Endpoint::CountTokens { Purpose::Count } else { Purpose::Generate };
    loop {
        let chat = match converted(&body, purpose, conversion) {
            Ok(chat) => chat,
            Err(error) => {
                let original = RequestBody::parse(endpoint, body)?;
                let is_passed = conversion(original.model.as_deref()).is_passed;
                return if is_passed { Ok((original, None)) } else { Err(error) };
            }
        };
        let json = reserved(chat.json, &context.admission.budget).await?;
        let parsed = RequestBody::parse_for(Endpoint::Chat, json, style)?;
        let tokens = model(parsed.model.as_deref()).map(|model| &model.tokens);
        // The chat has another form once the template is known to refuse it, which another request may have found out
        // since the conversion.
        match tokens.filter(|_| chat.has_inline_system) {
            Some(tokens) if tokens.try_inline_system().await == Some(false) => {}
            _ => return Ok((parsed, Some(body))),
        }
    }
}

/// The tokens of a prompt and the estimate of those of further ones, for log and quota.
async fn tokens_of<'a>(
    account: &mut Account,
    model: &Model,
    parsed: &'a RequestBody,
    context: PromptContext<'_>,
) -> Result<(PromptTokens<'a>, u32), ApiError> {
    let len_max = context.tokens_max;
    let tokens = model.tokens.of(&parsed.prompt, context).await.with_estimate_up_to(len_max);
    (account.access.token_source, account.access.no_tokens) = (Some(tokens.source.name()), tokens.missing);
    if let (Some(prompt_tokens), Some(max_model_len)) = (tokens.tokens_min, len_max) {
        return Err(RouteError::ContextLength { prompt_tokens: prompt_tokens as usize, max_model_len }.into());
    }
    let further = parsed.further.prompts.estimate(tokens.ids.len());
    account.access.prompt_tokens = known_length(tokens.ids.len(), further);
    if parsed.endpoint.has_engine_work() {
        account.charge_prompt(parsed.body_bytes(), len_max)?;
    }
    Ok((tokens, further))
}

/// How the engines of a model prepare chats, and their type if it is known.
fn style_of(model: &Model) -> (ChatStyle, Option<Engine>) {
    let engine = model.router.workers().iter().find_map(|worker| worker.config.engine);
    let takes_inline_system = model.tokens.takes_inline_system();
    (ChatStyle { is_sglang: engine == Some(Engine::Sglang), takes_inline_system }, engine)
}

/// The worker that stores a response, and its model.
type Owner = (Arc<Model>, WorkerId);

/// The owner of the stored response that a request addresses or continues.
///
/// # Errors
/// 404 for an unknown response.
async fn owner_of(
    context: &RequestContext,
    target: Target<'_>,
    parsed: &RequestBody,
    tenant: Option<&Tenant>,
) -> Result<Option<Owner>, ApiError> {
    let addressed = target.endpoint.response_id(target.uri.path());
    let id = addressed.or(parsed.previous_response_id.as_deref()).filter(|_| target.is_forwarded);
    let Some(id) = id else { return Ok(None) };
    owner(&context.models, tenant.map(|tenant| tenant.name.as_str()), id).await.map(Some)
}

/// The model of a request, and the adapter.
///
/// # Errors
/// 404 for an unknown model, or without a stored response at the named one.
fn model_of<'a>(
    context: &'a RequestContext,
    named: Option<&'a str>,
    owner: Option<&'a Owner>,
) -> Result<(&'a Arc<Model>, Option<&'a str>), ApiError> {
    match (named, owner) {
        (Some(name), owner) => {
            let found = context.models.find(name).ok_or_else(|| ApiError::model_not_found(name))?;
            let is_its = |(of, _): &Owner| of.settings.name == found.0.settings.name;
            if owner.is_none_or(is_its) { Ok(found) } else { Err(ApiError::response_not_found("of another model")) }
        }
        (None, Some((model, _))) => Ok((model, None)),
        (None, None) => Ok((context.models.only().ok_or_else(model_missing)?, None)),
    }
}

/// Waits while an operator pauses the engines, and for a first worker if the settings allow it, at most until the deadline
/// of the request.
///
/// # Errors
/// 503 after that time. Without the setting, placement reports a lack of workers.
async fn hold(
    context: &RequestContext,
    account: &mut Account,
    model: &Model,
    endpoint: Endpoint,
    options: &mut RequestOptions,
) -> Result<(), ApiError> {
    let (settings, deadline, since) = (&context.settings.gateway, options.deadline, Instant::now());
    let within = |ms| deadline.map_or(Duration::from_millis(ms), |deadline| deadline.min(Duration::from_millis(ms)));
    if endpoint.has_engine_work() && !model.gate.is_open(within(settings.queue_timeout_ms)).await {
        return Err(ApiError::engines_paused());
    }
    let for_worker = within(settings.hold_without_endpoints_ms);
    if endpoint != Endpoint::CountTokens && !for_worker.is_zero() && !model.has_worker(for_worker).await {
        return Err(placement_error(&model.router, Rejection::NoRanks.into()));
    }
    account.waited_since(since);
    options.deadline = deadline.map(|deadline| deadline.saturating_sub(since.elapsed()));
    Ok(())
}

/// Length of all prompts, if the tokens of the first are known.
fn known_length(first_tokens: usize, further_tokens: u32) -> Option<u32> {
    let first = u32::try_from(first_tokens).ok().filter(|tokens| *tokens > 0)?;
    Some(first.saturating_add(further_tokens))
}

/// Overrides for a request that reads no cached block.
fn without_cache(overrides: RouterConfigOverride) -> RouterConfigOverride {
    RouterConfigOverride { overlap_score_credit: Some(0.0), assume_kv_reuse: Some(false), ..overrides }
}

fn model_missing() -> ApiError {
    ApiError::invalid("missing_field", Some("model"), "the body has no model, and several models are configured")
}

/// Session id and program for the router: `X-Session-Id`, that of another client's header, `session_id` of the body, or of
/// another field. Sessions of different tenants differ, and each model has its own.
fn session_of(
    context: &RequestContext,
    account: &mut Account,
    model: &str,
    (headers, parsed, tenant): (&HeaderMap, &RequestBody, Option<&Tenant>),
    explicit: Option<Arc<str>>,
) -> Option<(Arc<str>, Arc<str>)> {
    let of_tenant = |name: &str| tenant.map_or_else(|| Arc::from(name), |tenant| Arc::from(tenant.session(name)));
    let given = parsed.session_id.as_deref().filter(|id| !id.starts_with(RESERVED));
    let of_body = || given.map(|id| Session::explicit(headers, id));
    let session = match &explicit {
        Some(id) => Some(Session::explicit(headers, id)),
        None => Session::of_headers(headers, &context.settings.gateway.session_headers).or_else(of_body),
    };
    let session = session.or_else(|| parsed.session.clone())?;
    let (id, program) = (of_tenant(&session.id), of_tenant(&session.program));
    (account.access.session, account.access.program) = (Some(hashed(&id)), Some(hashed(&program)));
    if !session.may_be_shared {
        return Some((id, program));
    }
    let (call, is_of_one_agent) = context.admission.shared_sessions.begin([model, "/", &id].concat());
    account.shared_call = Some(call);
    is_of_one_agent.then_some((id, program))
}

/// Request options from headers and body, limited to the permissions of the tenant.
fn options_of(
    context: &RequestContext,
    account: &mut Account,
    model: &str,
    request: (&HeaderMap, &RequestBody, Option<&Tenant>),
) -> Result<RequestOptions, ApiError> {
    let (headers, parsed, tenant) = request;
    let mut options = request_options(headers)?;
    (options.session_id, options.program) = session_of(context, account, model, request, options.session_id).unzip();
    if let Some(tenant) = tenant {
        options.strict_priority = options.strict_priority.min(tenant.strict_priority_max);
        if tenant.strict_priority_max == 0 {
            options.priority_jump = 0.0; // a jump is also a priority
        }
        options.policy_class = tenant.policy_class.as_deref().map(Arc::from).or(options.policy_class);
        options.tenant = Some(Arc::from(tenant.name.as_str()));
    }
    Ok(RequestOptions {
        output_tokens_max: parsed.output_tokens_max,
        further_outputs: parsed.further.outputs,
        not_streamed: !parsed.stream,
        overrides: if parsed.further.skips_cache { without_cache(options.overrides) } else { options.overrides },
        ..options
    })
}

/// The body of the request to the worker, and its endpoint. `original` is the body in another format than `parsed`, with
/// the mode of its endpoint.
///
/// # Errors
/// 400 for an invalid original body.
fn worker_body(
    endpoint: Endpoint,
    parsed: &RequestBody,
    original: Option<(Bytes, MessagesMode)>,
    edits: Edits<'_>,
) -> Result<(Bytes, Endpoint), ApiError> {
    match original {
        None => Ok((parsed.body(edits), endpoint)),
        Some((_, MessagesMode::Translate)) => Ok((parsed.body(edits), Endpoint::Chat)),
        Some((original, MessagesMode::Pass)) => {
            // Names of media are those of the chat, and engines choose their own in another format.
            let own_names = Edits { media_names: &[], ..edits };
            Ok((RequestBody::parse(endpoint, original)?.body(own_names), endpoint))
        }
    }
}
