//! Handlers of completions and chat completions, whole and streamed.
//!
//! A request whose client disconnects is cancelled. A request whose rank stops loses its connection, as with a crashed
//! process. [`super::answer`] defines the response formats.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use crate::engine::{Finish, Output, RequestSpec};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http_body::Frame;
use tokio::sync::mpsc::UnboundedReceiver;

use super::answer::{self, Api, DONE, Head, Usage};
use super::request::{ChatRequest, Common, CompletionRequest, PromptInput, parsed};
use super::{Connection, Shared};
use crate::mock::engine::Engine;
use crate::mock::rank::{NotTaken, RankDriver};
use crate::mock::tokenizer::{chat_text, detokenize, tokenize};

/// Header that selects a rank.
const RANK_HEADER: &str = "x-data-parallel-rank";

/// An early error response.
type Refusal = Box<Response>;

/// `POST /v1/completions`.
pub(super) async fn complete(
    State(engine): Shared,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let request = match parsed::<CompletionRequest>(body) {
        Ok(request) => request,
        Err(refusal) => return *refusal,
    };
    let tokens = match request.prompt {
        PromptInput::Text(text) => tokenize(&text),
        PromptInput::Tokens(tokens) => tokens,
    };
    answer(&engine, &connection, &headers, Api::Completion, &request.common, tokens).await
}

/// `POST /v1/chat/completions`.
pub(super) async fn chat(
    State(engine): Shared,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let request = match parsed::<ChatRequest>(body) {
        Ok(request) => request,
        Err(refusal) => return *refusal,
    };
    let texts: Vec<String> = request.messages.iter().map(super::request::Message::text).collect();
    let messages = request.messages.iter().zip(&texts).map(|(message, text)| (message.role.as_str(), text.as_str()));
    let tokens = tokenize(&chat_text(messages));
    answer(&engine, &connection, &headers, Api::Chat, &request.common, tokens).await
}

async fn answer(
    engine: &Engine,
    connection: &Connection,
    headers: &HeaderMap,
    api: Api,
    common: &Common,
    tokens: Vec<u32>,
) -> Response {
    let (head, run) = match begin(engine, headers, api, common, tokens) {
        Ok(begun) => begun,
        Err(refusal) => return *refusal,
    };
    if common.is_stream() {
        let stream = Stream::new(head, run, common.has_usage_chunk());
        let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
        return (headers, Body::new(stream)).into_response();
    }
    match run.all().await {
        Some((text, finish, usage)) => Json(head.whole(&text, finish, usage)).into_response(),
        None => connection.reset().await,
    }
}

/// Validates a request, selects its rank and submits it.
fn begin(
    engine: &Engine,
    headers: &HeaderMap,
    api: Api,
    common: &Common,
    tokens: Vec<u32>,
) -> Result<(Head, Run), Refusal> {
    let refuse = |status, message: &str| Box::new(answer::error(status, message));
    let bad = |message: String| refuse(StatusCode::BAD_REQUEST, &message);
    common.validate().map_err(bad)?;
    let config = &engine.config;
    let model = common.model.as_ref().unwrap_or(&config.model);
    let lora_name = (*model != config.model).then_some(model);
    if lora_name.is_some_and(|name| !config.loras.contains(name)) {
        return Err(refuse(StatusCode::NOT_FOUND, &format!("the model {model:?} does not exist")));
    }
    let (prompt_tokens, longest) = (tokens.len(), config.model_len_max());
    if prompt_tokens >= longest as usize {
        return Err(bad(format!(
            "this model's maximum context length is {longest} tokens, but the request has {prompt_tokens} input tokens \
             and at least one is generated"
        )));
    }
    let rank = chosen_rank(engine, headers)?;
    let id = engine.request_number();
    let spec = RequestSpec {
        id,
        tokens: tokens.into(),
        output_tokens_max: common.output_tokens(),
        lora_name: lora_name.map(|name| name.as_str().into()),
        cache_salt: common.cache_salt.as_deref().map(Into::into),
    };
    let outputs = rank.submit(spec).map_err(|error| match &error {
        NotTaken::Refused(_) => bad(error.to_string()),
        NotTaken::Full | NotTaken::Stopped => refuse(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()),
    })?;
    let prefix = match api {
        Api::Completion => "cmpl",
        Api::Chat => "chatcmpl",
    };
    let head = Head { api, id: format!("{prefix}-{id}"), created: rank.seconds(), model: model.clone() };
    let usage = Usage { prompt: prompt_tokens as u64, ..Usage::default() };
    Ok((head, Run { guard: Guard { rank, id }, outputs, usage }))
}

/// Selects the rank named by the header, otherwise the rank with the fewest requests; ties go to the first.
fn chosen_rank(engine: &Engine, headers: &HeaderMap) -> Result<Arc<RankDriver>, Refusal> {
    let ranks = engine.ranks();
    let bad = |message: String| Box::new(answer::error(StatusCode::BAD_REQUEST, &message));
    let least_loaded = || {
        let busy = |rank: &&Arc<RankDriver>| {
            let load = rank.load();
            u64::from(load.running) + u64::from(load.waiting)
        };
        Arc::clone(ranks.iter().min_by_key(busy).expect("an engine has at least one rank"))
    };
    let Some(value) = headers.get(RANK_HEADER) else { return Ok(least_loaded()) };
    match value.to_str().ok().and_then(|text| text.trim().parse::<usize>().ok()) {
        Some(rank) => {
            let found = ranks.get(rank).cloned();
            found.ok_or_else(|| bad(format!("data-parallel rank {rank} is not below {}", ranks.len())))
        }
        // vLLM ignores an unreadable header, SGLang rejects it.
        None if engine.format().dialect.is_sglang() => Err(bad(format!("{RANK_HEADER} {value:?} is not a rank"))),
        None => Ok(least_loaded()),
    }
}

/// Cancels its request on drop. Has no effect on a request that has ended.
struct Guard {
    rank: Arc<RankDriver>,
    id: u64,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.rank.cancel(self.id);
    }
}

/// A running request.
struct Run {
    outputs: UnboundedReceiver<Output>,
    usage: Usage,
    #[expect(dead_code, reason = "held for its drop")]
    guard: Guard,
}

impl Run {
    fn count(&mut self, output: &Output) {
        self.usage.completion += 1;
        self.usage.cached = output.cached_tokens.into();
    }

    /// Collects the whole output; none if the rank stopped.
    async fn all(mut self) -> Option<(String, Option<Finish>, Usage)> {
        let mut tokens = Vec::new();
        loop {
            let output = self.outputs.recv().await?;
            self.count(&output);
            tokens.push(output.token);
            if output.finished.is_some() {
                return Some((detokenize(&tokens), output.finished, self.usage));
            }
        }
    }
}

/// Response body of server-sent events.
struct Stream {
    head: Head,
    /// None after the end.
    run: Option<Run>,
    has_usage_chunk: bool,
    /// Chunks that are encoded but not yet polled.
    chunks: VecDeque<Bytes>,
    has_opened: bool,
}

impl Stream {
    fn new(head: Head, run: Run, has_usage_chunk: bool) -> Self {
        Self { head, run: Some(run), has_usage_chunk, chunks: VecDeque::new(), has_opened: false }
    }
}

/// The rank stopped during a stream. The connection closes before the end of the body.
#[derive(Debug, thiserror::Error)]
#[error("the engine restarts")]
struct Stopped;

impl http_body::Body for Stream {
    type Data = Bytes;
    type Error = Stopped;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Stopped>>> {
        let this = &mut *self;
        if let Some(chunk) = this.chunks.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        let Some(run) = &mut this.run else { return Poll::Ready(None) };
        let Some(output) = ready!(run.outputs.poll_recv(context)) else {
            this.run = None;
            return Poll::Ready(Some(Err(Stopped)));
        };
        run.count(&output);
        let usage = run.usage;
        // Same as vLLM: the chunk with the role is sent with the first output of the engine, immediately before it.
        if !std::mem::replace(&mut this.has_opened, true) {
            this.chunks.extend(this.head.opening());
        }
        this.chunks.push_back(this.head.piece(&detokenize(&[output.token]), output.finished));
        if output.finished.is_some() {
            this.run = None;
            this.chunks.extend(this.has_usage_chunk.then(|| this.head.usage(usage)));
            this.chunks.push_back(DONE);
        }
        Poll::Ready(this.chunks.pop_front().map(|chunk| Ok(Frame::data(chunk))))
    }
}
