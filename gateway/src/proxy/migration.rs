//! Streamed response that moves to another rank when its engine fails.
//!
//! [`MigratingBody`] is the body of the client. Its inner [`Answer`] follows one attempt and returns the failure; the
//! booking of the failed attempt has ended then, and its outcome is reported. The resumption uses the attempt loop with
//! the resume body and excludes the workers that failed. The number of resumptions per response is limited. The budget of
//! retries does not count them: it is a share of the latest requests, and most streams of a failed engine can be older. The
//! client receives nothing meanwhile. Without a successful resumption the response is cut off as any other.
//! [`crate::formats::migration`] has the rules and joins the streams.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Bytes;
use axum::http::HeaderMap;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame};
use pointsman::config::OnTargetMiss;
use pointsman::protocol::{Engine, WorkerRank};
use pointsman::{AnswerKind, Prompt};
use tokio::task::yield_now;

use super::answer::{Answer, Cut};
use super::attempts::{AttemptLoop, WorkerResponse};
use super::begin::ResponseStart;
use super::reports::siblings;
use crate::formats::migration::{ResumableRequest, Resume, StreamJoiner, StreamState};
use crate::formats::openai::Endpoint;
use crate::observe::requests::{MigrationResult, StreamBreak};
use crate::proxy::account::Account;
use crate::proxy::context::RequestContext;
use crate::proxy::routable::RoutableRequest;

/// Longest body that is kept for a resumption.
const BODY_BYTES_MAX: usize = 1 << 20;

/// Whether a stream may be resumed. Its request is read after a failure only.
pub(super) fn is_enabled(context: &RequestContext, account: &mut Account, prepared: &RoutableRequest) -> bool {
    if context.settings.gateway.stream_migrations_max == 0 || prepared.kind != AnswerKind::Events {
        return false;
    }
    account.breaks_as(MigrationResult::Unsound);
    matches!(prepared.worker_endpoint, Endpoint::Chat | Endpoint::Completions) && prepared.body.len() <= BODY_BYTES_MAX
}

/// Whether the engines of the model compute exactly the prompt of the request before this output. SGLang appends it to
/// the prompt. vLLM renders it by the chat template: then the tokens show whether the prompt stays, and templates may
/// drop spaces at its ends.
async fn continues(prepared: &RoutableRequest, text: &str, resume: &Bytes) -> bool {
    let workers = prepared.model.router.workers();
    let all = |engine: Engine| workers.iter().all(|worker| worker.config.engine == Some(engine));
    all(Engine::Sglang) || all(Engine::Vllm) && text.trim() == text && prepared.is_prefix_of(resume).await
}

/// Data of a request for its resumptions.
pub(super) struct Migration {
    pub(super) prepared: RoutableRequest,
    /// Headers of the client.
    pub(super) headers: HeaderMap,
    pub(super) request_id: String,
}

/// Body polled by the client's connection: the joined streams of all attempts.
pub(super) struct MigratingBody {
    /// Absent while the next attempt starts.
    streaming: Option<Box<Migrating>>,
    /// Returns the last bytes as well, for a response that ends without another attempt.
    resuming: Option<BoxFuture<'static, (Box<Migrating>, Bytes)>>,
}

/// State of the response.
pub(super) struct Migrating {
    context: Arc<RequestContext>,
    answer: Answer<ResponseStart>,
    migration: Box<Migration>,
    joiner: StreamJoiner,
    migrations: u32,
    /// Rank of the current attempt.
    rank: WorkerRank,
    /// All ranks of the workers that failed.
    failed: BTreeSet<WorkerRank>,
    has_ended: bool,
}

impl MigratingBody {
    /// The length is unknown, because later attempts change it.
    pub(super) fn new(
        context: &Arc<RequestContext>,
        answer: Answer<ResponseStart>,
        migration: Box<Migration>,
        rank: WorkerRank,
    ) -> Self {
        let tokens_max = context.settings.gateway.stream_migration_tokens_max;
        let streaming = Box::new(Migrating {
            context: Arc::clone(context),
            answer: answer.deferring_cuts(),
            joiner: StreamJoiner::new(tokens_max),
            migration,
            migrations: 0,
            rank,
            failed: BTreeSet::new(),
            has_ended: false,
        });
        Self { streaming: Some(streaming), resuming: None }
    }
}

impl Body for MigratingBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        loop {
            let Some(migrating) = &mut self.streaming else {
                let Some(resuming) = &mut self.resuming else { return Poll::Ready(None) };
                let (migrating, bytes) = ready!(resuming.as_mut().poll(context));
                (self.streaming, self.resuming) = (Some(migrating), None);
                if bytes.is_empty() {
                    continue;
                }
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            };
            let frame = ready!(migrating.poll_frame(context));
            if migrating.has_ended || !matches!(frame, Some(Err(_))) {
                return Poll::Ready(frame);
            }
            if let Some(Err(cut)) = frame {
                self.resume_after(cut);
            }
        }
    }
}

impl MigratingBody {
    /// Starts the resumption. Not inlined: its future would take stack in each poll.
    #[cold]
    #[inline(never)]
    fn resume_after(&mut self, cut: Cut) {
        self.resuming = self.streaming.take().map(|migrating| Box::pin(migrating.failed_with(cut)) as _);
    }
}

impl Migrating {
    /// The next frame, or the failure of the attempt. Frames change in place, because each move copies a map of headers.
    #[inline(always)]
    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        loop {
            if self.joiner.has_failed() && !self.has_ended {
                return Poll::Ready(Some(Err(self.answer.fail())));
            }
            // At the end: the failure, if any.
            let mut frame = ready!(Pin::new(&mut self.answer).poll_frame(context));
            match &mut frame {
                Some(Ok(frame)) if !self.has_ended => {
                    if let Some(data) = frame.data_mut()
                        && !self.answer.repeated_text().is_some_and(|text| self.joiner.push_text(data, text))
                    {
                        *data = self.joiner.push(std::mem::take(data));
                        if data.is_empty() {
                            continue;
                        }
                    }
                }
                None if !self.has_ended => {
                    self.has_ended = true;
                    let rest = self.joiner.finish();
                    if rest.is_empty() {
                        continue;
                    }
                    frame = Some(Ok(Frame::data(rest)));
                }
                _ => {}
            }
            return Poll::Ready(frame);
        }
    }

    /// Resumes or ends the response after the failure of an attempt. Returns the last bytes of one that has ended.
    async fn failed_with(mut self: Box<Self>, cut: Cut) -> (Box<Self>, Bytes) {
        let bytes = match self.resume().await {
            Ok(end) => end,
            Err(result) => self.give_up(result, cut).await,
        };
        (self, bytes)
    }

    /// Places the resume request and waits for the start of its response. Returns the last bytes of a response that is
    /// complete without one.
    ///
    /// # Errors
    /// The response is not resumed.
    async fn resume(&mut self) -> Result<Bytes, MigrationResult> {
        match self.joiner.state() {
            StreamState::Resumable => {}
            StreamState::TooLong => return Err(MigrationResult::TooLong),
            StreamState::Unsound | StreamState::Finished => return Err(MigrationResult::Unsound),
        }
        let Migration { prepared, headers, request_id } = &*self.migration;
        let resumable = ResumableRequest::parse(prepared.worker_endpoint, &prepared.body);
        let resumable = resumable.ok_or(MigrationResult::Unsound)?;
        let body = match resumable.resume(self.joiner.output()) {
            Resume::Send(body) => body,
            Resume::Complete => {
                self.has_ended = true;
                self.answer.account.iter_mut().for_each(Account::complete);
                return Ok(self.joiner.complete(&resumable, prepared.prompt_tokens()));
            }
            Resume::Unknown => return Err(MigrationResult::Unsound),
        };
        let text = &self.joiner.output().text;
        if resumable.is_chat() && !text.is_empty() && !continues(prepared, text, &body).await {
            return Err(MigrationResult::Unsound);
        }
        if self.migrations >= self.context.settings.gateway.stream_migrations_max {
            return Err(MigrationResult::Failed);
        }
        let mut account = self.answer.account.take().ok_or(MigrationResult::Failed)?;
        self.failed.insert(self.rank);
        self.failed.extend(siblings(&prepared.model, self.rank));
        let output = self.joiner.output();
        let attempts = AttemptLoop::new(&self.context, prepared, (headers, request_id), body, &self.failed);
        let tokens: Vec<u32>;
        let mut request = prepared.request();
        let output_ids = output.token_ids().unwrap_or_default();
        if let (Prompt::Tokens(prompt), false) = (&request.prompt, output_ids.is_empty()) {
            tokens = [prompt, output_ids].concat();
            request.prompt = Prompt::Tokens(&tokens);
        }
        let options = &mut request.options;
        // Both limits apply to the first token, which the client has.
        (options.deadline, options.ttft_target) = (None, None);
        options.on_target_miss = Some(OnTargetMiss::Serve);
        for limit in [&mut options.expected_output_tokens, &mut options.output_tokens_max] {
            *limit = limit.map(|tokens| tokens.saturating_sub(output.tokens()).max(1));
        }
        match attempts.run(&mut account, request).await {
            Ok(begin) if begin.checked == Some(AnswerKind::Events) => self.resumed(account, begin),
            begun => {
                // The engine rejects the resume request, or no rank has started a response.
                begun.into_iter().for_each(|mut begin| begin.sent.ended("client_error"));
                self.answer.account = Some(account);
                return Err(MigrationResult::Failed);
            }
        }
        Ok(Bytes::new())
    }

    /// Ends the response with its failure, or with the error of the engine, which is returned.
    async fn give_up(&mut self, result: MigrationResult, cut: Cut) -> Bytes {
        self.has_ended = true;
        if let Some(account) = &mut self.answer.account {
            account.breaks_as(result);
            if self.joiner.has_failed() {
                account.broke(StreamBreak::Error);
                return self.joiner.error();
            }
        }
        self.answer.give_up(cut);
        yield_now().await;
        Bytes::new()
    }

    /// Follows the response of another rank.
    fn resumed(&mut self, mut account: Account, mut begin: WorkerResponse) {
        account.resumed();
        // The request counts against the worker that failed first.
        begin.is_reported = true;
        self.rank = begin.placement.rank();
        self.migrations += 1;
        self.joiner.resume();
        tracing::info!(
            request_id = self.migration.request_id,
            worker = begin.placement.endpoint(),
            rank = self.rank.rank,
            output_tokens = self.joiner.output().tokens(),
            "stream resumed"
        );
        self.answer = Answer::new(&self.context, account, begin, AnswerKind::Events).deferring_cuts();
    }
}
