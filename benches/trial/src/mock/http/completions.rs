//! Runs of completions and chat completions, and their responses, whole and streamed.
//!
//! A request whose client disconnects is cancelled. A request whose rank stops loses its connection, as with a crashed
//! process. [`super::answer`] defines the response formats. [`super::legs`] serves disaggregated requests with the
//! functions of this module.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;

use crate::engine::{Output, RequestSpec, Stage};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use tokio::sync::mpsc::UnboundedReceiver;

use super::Connection;
use super::answer::{self, ABORT, Api, DONE, Head, Usage};
use super::request::Common;
use crate::mock::engine::Engine;
use crate::mock::handover::RunningLeg;
use crate::mock::rank::{NotTaken, RankDriver, RequestGuard};
use crate::mock::tokenizer::detokenize;

/// Header that selects a rank.
const RANK_HEADER: &str = "x-data-parallel-rank";

/// An early error response.
pub(super) type Refusal = Box<Response>;

/// Responds with the output of a request, whole or streamed.
pub(super) async fn respond(connection: &Connection, common: &Common, (head, run): (Head, Run)) -> Response {
    if common.is_stream() {
        let stream = Stream {
            head,
            run: Some(run),
            has_usage_chunk: common.has_usage_chunk(),
            returns_token_ids: common.returns_token_ids(),
            chunks: VecDeque::new(),
            has_opened: false,
        };
        let chunks = unfold(stream, |mut stream| async move { Some((stream.next().await?, stream)) });
        return (stream_headers(), Body::from_stream(chunks)).into_response();
    }
    match run.all().await {
        Some(ended) => Json(head.whole(&ended.text(), ended.reason, ended.usage)).into_response(),
        None => connection.reset().await,
    }
}

/// Headers of a streamed response.
pub(super) fn stream_headers() -> [(header::HeaderName, &'static str); 2] {
    [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")]
}

/// A parsed request.
pub(super) struct Incoming {
    pub(super) api: Api,
    pub(super) common: Common,
    pub(super) tokens: Vec<u32>,
    /// Whether the client sent `tokens` as token ids.
    pub(super) has_token_prompt: bool,
    pub(super) headers: HeaderMap,
}

/// A valid request with its rank, not yet submitted.
pub(super) struct Prepared {
    pub(super) head: Head,
    pub(super) spec: RequestSpec,
    pub(super) rank_idx: u16,
    rank: Arc<RankDriver>,
}

impl Prepared {
    /// Validates a request and selects its rank: `rank` if given, otherwise by header and load.
    pub(super) fn new(engine: &Engine, request: &Incoming, rank: Option<u16>) -> Result<Self, Refusal> {
        let refuse = |status, message: &str| Box::new(answer::error(status, message));
        let bad = |message: String| refuse(StatusCode::BAD_REQUEST, &message);
        let common = &request.common;
        common.validate().map_err(bad)?;
        let config = &engine.config;
        let model = common.model.as_ref().unwrap_or(&config.model);
        let lora_name = (*model != config.model).then_some(model);
        if lora_name.is_some_and(|name| !config.loras.contains(name)) {
            return Err(refuse(StatusCode::NOT_FOUND, &format!("the model {model:?} does not exist")));
        }
        let (prompt_tokens, longest) = (request.tokens.len(), config.model_len_max());
        if prompt_tokens >= longest as usize {
            return Err(bad(format!(
                "this model's maximum context length is {longest} tokens, but the request has {prompt_tokens} input \
                 tokens and at least one is generated"
            )));
        }
        let (rank_idx, rank) = match rank {
            Some(rank_idx) => (rank_idx, Arc::clone(&engine.ranks()[usize::from(rank_idx)])),
            None => chosen_rank(engine, &request.headers)?,
        };
        let id = engine.request_number();
        let spec = RequestSpec {
            id,
            tokens: request.tokens.as_slice().into(),
            output_tokens_max: common.output_tokens(),
            lora_name: lora_name.map(|name| name.as_str().into()),
            cache_salt: common.cache_salt.as_deref().map(Into::into),
            session_id: common.session_id.as_deref().map(Into::into),
        };
        let prefix = match request.api {
            Api::Completion => "cmpl",
            Api::Chat => "chatcmpl",
        };
        let head =
            Head { api: request.api, id: format!("{prefix}-{id}"), created: rank.seconds(), model: model.clone() };
        Ok(Self { head, spec, rank_idx, rank })
    }

    /// Submits one stage of the request.
    pub(super) fn submit(self, stage: Stage, leg: Option<RunningLeg>) -> Result<(Head, Run), Refusal> {
        let Self { head, spec, rank, .. } = self;
        let (id, prompt) = (spec.id, spec.tokens.len() as u64);
        let outputs = rank.submit(spec, stage).map_err(|error| {
            let status = match &error {
                NotTaken::Refused(_) => StatusCode::BAD_REQUEST,
                NotTaken::Full => StatusCode::SERVICE_UNAVAILABLE,
            };
            Box::new(answer::error(status, &error.to_string()))
        })?;
        let usage = Usage { prompt, ..Usage::default() };
        Ok((head, Run { outputs, usage, guard: RequestGuard { rank, id }, leg }))
    }
}

/// Selects the rank named by the header, otherwise the rank with the fewest requests; ties go to the first.
fn chosen_rank(engine: &Engine, headers: &HeaderMap) -> Result<(u16, Arc<RankDriver>), Refusal> {
    let ranks = engine.ranks();
    let numbered = |rank_idx: usize| (u16::try_from(rank_idx).expect("ranks are few"), Arc::clone(&ranks[rank_idx]));
    let bad = |message: String| Box::new(answer::error(StatusCode::BAD_REQUEST, &message));
    let least_loaded = || {
        let busy = |rank_idx: &usize| {
            let load = ranks[*rank_idx].load();
            u64::from(load.running) + u64::from(load.waiting)
        };
        numbered((0..ranks.len()).min_by_key(busy).expect("an engine has at least one rank"))
    };
    let Some(value) = headers.get(RANK_HEADER) else { return Ok(least_loaded()) };
    match value.to_str().ok().and_then(|text| text.trim().parse::<usize>().ok()) {
        Some(rank) if rank < ranks.len() => Ok(numbered(rank)),
        Some(rank) => Err(bad(format!("data-parallel rank {rank} is not below {}", ranks.len()))),
        // vLLM ignores an unreadable header, SGLang rejects it.
        None if engine.format().dialect.is_sglang() => Err(bad(format!("{RANK_HEADER} {value:?} is not a rank"))),
        None => Ok(least_loaded()),
    }
}

/// Whether the request names its rank by header.
pub(super) fn has_rank_header(headers: &HeaderMap) -> bool {
    headers.contains_key(RANK_HEADER)
}

/// Value of the header `X-Request-Id`.
pub(super) fn request_id(request: &Incoming) -> Option<&str> {
    request.headers.get("x-request-id").and_then(|id| id.to_str().ok())
}

/// A running request.
pub(super) struct Run {
    outputs: UnboundedReceiver<Output>,
    usage: Usage,
    guard: RequestGuard,
    /// Registration of the request, with disaggregated serving.
    leg: Option<RunningLeg>,
}

/// The output of a request that has ended.
pub(super) struct Ended {
    pub(super) tokens: Vec<u32>,
    pub(super) reason: Option<&'static str>,
    pub(super) usage: Usage,
    pub(super) guard: RequestGuard,
}

impl Ended {
    pub(super) fn text(&self) -> String {
        detokenize(&self.tokens)
    }
}

/// Next result of a running request.
enum Next {
    Output(Output),
    Aborted,
    Stopped,
}

impl Run {
    async fn next(&mut self) -> Next {
        let aborted = self.leg.as_ref().map(RunningLeg::aborted);
        let output = tokio::select! {
            biased;
            () = async { match aborted { Some(aborted) => aborted.await, None => pending().await } } => return Next::Aborted,
            output = self.outputs.recv() => output,
        };
        if let Some(leg) = &mut self.leg {
            leg.end_transfer();
        }
        let Some(output) = output else { return Next::Stopped };
        self.usage.completion += 1;
        self.usage.cached = output.cached_tokens.into();
        Next::Output(output)
    }

    /// Collects the whole output; none if the rank stopped.
    pub(super) async fn all(mut self) -> Option<Ended> {
        let mut tokens = Vec::new();
        let reason = loop {
            match self.next().await {
                Next::Output(output) => {
                    tokens.push(output.token);
                    if output.finished.is_some() {
                        break answer::reason(output.finished);
                    }
                }
                Next::Aborted => break Some(ABORT),
                Next::Stopped => return None,
            }
        };
        Some(Ended { tokens, reason, usage: self.usage, guard: self.guard })
    }
}

/// Response body of server-sent events.
struct Stream {
    head: Head,
    /// None after the end.
    run: Option<Run>,
    has_usage_chunk: bool,
    returns_token_ids: bool,
    /// Chunks that are encoded but not yet polled.
    chunks: VecDeque<Bytes>,
    has_opened: bool,
}

/// The rank stopped during a stream. The connection closes before the end of the body.
#[derive(Debug, thiserror::Error)]
#[error("the engine restarts")]
struct Stopped;

impl Stream {
    /// Next chunk; none after the end.
    async fn next(&mut self) -> Option<Result<Bytes, Stopped>> {
        if let Some(chunk) = self.chunks.pop_front() {
            return Some(Ok(chunk));
        }
        let run = self.run.as_mut()?;
        let (token, reason, is_end) = match run.next().await {
            Next::Output(output) => (Some(output.token), answer::reason(output.finished), output.finished.is_some()),
            Next::Aborted => (None, Some(ABORT), true),
            Next::Stopped => {
                self.run = None;
                return Some(Err(Stopped));
            }
        };
        let usage = run.usage;
        // Same as vLLM: the chunk with the role is sent with the first output of the engine, immediately before it.
        if !std::mem::replace(&mut self.has_opened, true) {
            self.chunks.extend(self.head.opening());
        }
        let (text, ids) = (detokenize(token.as_slice()), token.filter(|_| self.returns_token_ids));
        self.chunks.push_back(self.head.piece(&text, reason, ids));
        if is_end {
            self.run = None;
            self.chunks.extend(self.has_usage_chunk.then(|| self.head.usage(usage)));
            self.chunks.push_back(DONE);
        }
        self.chunks.pop_front().map(Ok)
    }
}
