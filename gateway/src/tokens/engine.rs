//! Tokenization by the workers (`POST /tokenize`).
//!
//! Responses are bounded in size and time, and large JSON is parsed outside the serving threads. While one worker
//! responds, the failure of another costs no prompt its tokens; engines that fail repeatedly are paused. The caller
//! selects the workers.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use hyper::StatusCode;
use minijinja::Value;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout, timeout_at};

use super::AnyWorker;
use super::chat;
use super::engine_breaker::{Breaker, WorkerBreakers};
use super::reason::NoTokens;
use super::threads::{Job, Pool};
use crate::formats::openai::ChatParts;
use crate::net::upstream::{UpstreamError, WorkerAccess};

/// Response bytes per query byte: a token number, and its text if an engine includes it.
const RESPONSE_BYTES_PER_BYTE: usize = 32;

/// Additional response bytes.
const RESPONSE_BYTES_MIN: usize = 64 << 10;

/// Maximum bytes of JSON or text processed on a serving thread; more goes to the pool.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// Input of a tokenization.
#[derive(Clone, Copy)]
pub(super) enum TokenizeInput<'a> {
    Text(&'a str),
    Chat(&'a ChatParts),
}

#[derive(Default, Serialize)]
struct TokenizeRequest<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_template_kwargs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    add_generation_prompt: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    continue_final_message: Option<bool>,
}

#[derive(Deserialize)]
struct TokenizeResponse {
    tokens: Vec<u32>,
}

/// Sends one query to one worker.
pub(super) struct Client {
    workers: WorkerAccess,
    /// Model name at the workers. Adapters share the tokens of their base model.
    model: Arc<str>,
    within: Duration,
    pool: Arc<Pool>,
}

/// Failure of a query.
#[derive(Debug, thiserror::Error)]
pub(super) enum TokenizeError {
    /// No response.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    /// Response without tokens.
    #[error("the response has no list of tokens")]
    Unreadable,
    /// Failure in the gateway, independent of the worker: invalid query, or no free thread.
    #[error("the gateway cannot send the query: {}", .0.name)]
    Local(NoTokens),
}

impl TokenizeError {
    /// Whether the same query may fail at every worker.
    fn is_refusal(&self) -> bool {
        match self {
            Self::Upstream(UpstreamError::Status(status)) => {
                [StatusCode::BAD_REQUEST, StatusCode::UNPROCESSABLE_ENTITY, StatusCode::PAYLOAD_TOO_LARGE]
                    .contains(status)
            }
            Self::Local(_) => true,
            Self::Upstream(_) | Self::Unreadable => false,
        }
    }
}

impl Client {
    /// `pool` encodes large queries and decodes large responses.
    pub(super) fn new(workers: WorkerAccess, model: &str, within: Duration, pool: Arc<Pool>) -> Self {
        Self { workers, model: Arc::from(model), within, pool }
    }

    pub(super) async fn query(&self, endpoint: &str, input: TokenizeInput<'_>) -> Result<Vec<u32>, TokenizeError> {
        self.send(endpoint, self.body(input, None).await.map_err(TokenizeError::Local)?, None).await
    }

    /// Sends a query encoded by [`body`](Self::body).
    async fn send(&self, endpoint: &str, body: Bytes, tenant: Option<&str>) -> Result<Vec<u32>, TokenizeError> {
        let bytes_max = RESPONSE_BYTES_MIN + body.len() * RESPONSE_BYTES_PER_BYTE;
        let response = self.workers.query((endpoint, "/tokenize"), body, self.within, bytes_max).await?;
        let bytes = response.len();
        let read = move || Ok(serde_json::from_slice(&response).ok().map(|TokenizeResponse { tokens }| tokens));
        self.run_work(self.job(bytes, tenant), read)
            .await
            .map_err(TokenizeError::Local)?
            .ok_or(TokenizeError::Unreadable)
    }

    /// Encodes a text-only query.
    async fn body(&self, input: TokenizeInput<'_>, tenant: Option<&str>) -> Result<Bytes, NoTokens> {
        let model = Arc::clone(&self.model);
        match input {
            TokenizeInput::Text(text) => {
                let text = text.to_owned();
                self.run_work(self.job(text.len(), tenant), move || {
                    TokenizeRequest { model: &model, prompt: Some(&text), ..TokenizeRequest::default() }.encoded()
                })
                .await
            }
            TokenizeInput::Chat(parts) => {
                let parts = parts.clone();
                self.run_work(self.job(chat::bytes(&parts), tenant), move || {
                    chat::text_only(&parts)?;
                    let variables = chat::variables(&parts)?;
                    let request = TokenizeRequest {
                        model: &model,
                        messages: Some(raw(&parts.messages)?),
                        tools: parts.tools.as_ref().map(raw).transpose()?,
                        chat_template_kwargs: Some(variables).filter(|given| !given.is_empty()).map(Value::from_pairs),
                        add_generation_prompt: parts.add_generation_prompt,
                        continue_final_message: parts.continue_final_message,
                        ..TokenizeRequest::default()
                    };
                    request.encoded()
                })
                .await
            }
        }
    }

    /// Runs small work inline, large work in the pool.
    async fn run_work<T: Send + 'static>(
        &self,
        job: Job<'_>,
        work: impl FnOnce() -> Result<T, NoTokens> + Send + 'static,
    ) -> Result<T, NoTokens> {
        if job.bytes <= INLINE_BYTES_MAX { work() } else { self.pool.run(job, work).await }
    }

    fn job<'a>(&self, bytes: usize, tenant: Option<&'a str>) -> Job<'a> {
        Job { bytes, tenant, wait_max: self.within }
    }
}

impl TokenizeRequest<'_> {
    fn encoded(&self) -> Result<Bytes, NoTokens> {
        serde_json::to_vec(self).map(Bytes::from).map_err(|_| NoTokens::MALFORMED)
    }
}

fn raw(json: &Bytes) -> Result<&RawValue, NoTokens> {
    serde_json::from_slice(json).map_err(|_| NoTokens::MALFORMED)
}

/// The engines of one model as a tokenizer.
pub(super) struct Engine {
    client: Client,
    any_worker: AnyWorker,
    /// Circuit breaker per worker, so that a hanging worker delays few prompts until its ejection.
    workers: WorkerBreakers,
    /// A separate breaker for texts, because an engine may tokenize texts but not chats.
    texts: Mutex<Breaker>,
    chats: Mutex<Breaker>,
}

impl Engine {
    pub(super) fn new(client: Client, any_worker: AnyWorker) -> Self {
        let workers = WorkerBreakers::default();
        Self { client, any_worker, workers, texts: Mutex::default(), chats: Mutex::default() }
    }

    /// Whether any worker has responded so far.
    pub(super) fn is_proven(&self) -> bool {
        [&self.texts, &self.chats].into_iter().any(|breaker| breaker.lock().is_proven)
    }

    /// Tokens within the client's time limit.
    pub(super) async fn tokens(&self, input: TokenizeInput<'_>, tenant: Option<&str>) -> Result<Vec<u32>, NoTokens> {
        let breaker = match input {
            TokenizeInput::Text(text) if text.len() > chat::PROMPT_BYTES_MAX => return Err(NoTokens::TOO_LONG),
            TokenizeInput::Text(_) => &self.texts,
            TokenizeInput::Chat(parts) => {
                chat::refused(parts)?;
                if parts.documents.is_some() {
                    return Err(NoTokens::UNSUPPORTED);
                }
                &self.chats
            }
        };
        let end = Instant::now() + self.client.within;
        let body = timeout_at(end, self.client.body(input, tenant)).await.map_err(|_| NoTokens::BUSY)??;
        let worker = self.worker().ok_or(NoTokens::NO_WORKER)?;
        if !breaker.lock().permit_query(Instant::now()) {
            return Err(NoTokens::ENGINE_PAUSED);
        }
        let response = with_fallback(&self.any_worker, &self.workers, worker, end, |worker| {
            let body = body.clone();
            async move { self.client.send(&worker, body, tenant).await }
        });
        let response = response.await;
        let mut breaker = breaker.lock();
        match response {
            Ok(ids) => {
                breaker.responded();
                Ok(ids)
            }
            Err(error) => {
                breaker.failed(error.is_refusal(), Instant::now());
                Err(NoTokens::ENGINE_FAILED)
            }
        }
    }

    /// The next worker without a recent failure, or the next worker if all have failed.
    fn worker(&self) -> Option<String> {
        let now = Instant::now();
        let worker = (self.any_worker)(None, &|endpoint| self.workers.is_available(endpoint, now));
        worker.or_else(|| (self.any_worker)(None, &|_| true))
    }
}

/// Queries one worker and, after a failure, one other worker, until `end`. With two workers the first has half of the
/// time, so a hanging worker costs no tokens. A rejection is final, because every worker would give it.
async fn with_fallback<T, Response: Future<Output = Result<T, TokenizeError>>>(
    any_worker: &AnyWorker,
    workers: &WorkerBreakers,
    worker: String,
    end: Instant,
    query: impl Fn(String) -> Response,
) -> Result<T, TokenizeError> {
    let try_worker = async |worker: String, within: Duration| {
        workers.query_started(&worker, Instant::now());
        let response = timeout(within, query(worker.clone())).await;
        let response = response.unwrap_or(Err(TokenizeError::Upstream(UpstreamError::Timeout(within))));
        match &response {
            Err(TokenizeError::Upstream(UpstreamError::Timeout(_) | UpstreamError::Connect(_))) => {
                workers.failed(&worker, Instant::now());
            }
            Ok(_) | Err(_) => workers.responded(&worker),
        }
        response.inspect_err(|error| tracing::debug!(worker, %error, "tokenization by a worker failed"))
    };
    let left = end.saturating_duration_since(Instant::now());
    let now = Instant::now();
    let other = any_worker(Some(&worker), &|endpoint| workers.is_available(endpoint, now));
    let Some(other) = other else { return try_worker(worker, left).await };
    match try_worker(worker, left / 2).await {
        Err(error) if !error.is_refusal() => try_worker(other, end.saturating_duration_since(Instant::now())).await,
        response => response,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_secs(10);

    /// Workers that are not excluded, in order.
    fn workers(names: &'static [&'static str]) -> AnyWorker {
        Arc::new(|but, is_available| {
            let found = names.iter().find(|name| Some(**name) != but && is_available(name));
            found.map(|name| (*name).to_owned())
        })
    }

    /// Result and queried workers if `a` is the first of `names`; `of_a` is the behavior of `a`.
    async fn first_a<Response: Future<Output = Result<u32, TokenizeError>>>(
        names: &'static [&'static str],
        of_a: impl Fn() -> Response,
    ) -> (Result<u32, TokenizeError>, Vec<String>) {
        let (workers, breakers, queried) = (workers(names), WorkerBreakers::default(), Mutex::new(Vec::new()));
        let response =
            with_fallback(&workers, &breakers, "a".to_owned(), Instant::now() + PAUSE, async |worker: String| {
                queried.lock().push(worker.clone());
                if worker == "a" { of_a().await } else { Ok(7) }
            });
        let response = response.await;
        (response, queried.into_inner())
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_worker_leaves_time_for_a_second_query() {
        let begun = Instant::now();
        let (response, queried) = first_a(&["a", "b"], std::future::pending).await;
        assert_eq!((response.unwrap(), queried), (7, vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(begun.elapsed(), PAUSE / 2);
        // A single worker has the whole time, and the total is bounded for two.
        let begun = Instant::now();
        let (response, _) = first_a(&["a"], std::future::pending).await;
        assert!(matches!(response, Err(TokenizeError::Upstream(UpstreamError::Timeout(within))) if within == PAUSE));
        assert_eq!(begun.elapsed(), PAUSE);
        let begun = Instant::now();
        let (two, breakers) = (workers(&["a", "b"]), WorkerBreakers::default());
        let hanging = with_fallback(&two, &breakers, "a".to_owned(), Instant::now() + PAUSE, |_| {
            std::future::pending::<Result<u32, TokenizeError>>()
        });
        assert!(hanging.await.is_err() && begun.elapsed() == PAUSE);
    }
}
