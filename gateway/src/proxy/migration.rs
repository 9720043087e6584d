//! Streamed response that moves to another rank when its engine fails.
//!
//! An [`Answer`](super::answer::Answer) follows one attempt. After a failure, when its booking has ended and its outcome is
//! reported, it runs the resumption, which uses the attempt loop with the resume body and excludes the workers that failed.
//! The number of resumptions per response is limited. The budget of retries does not count them: it is a share of the
//! latest requests, and most streams of a failed engine can be older. The client receives nothing meanwhile. Without a
//! successful resumption the response is cut off as any other. [`crate::formats::migration`] has the rules and joins the
//! streams.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::HeaderMap;
use futures_util::future::BoxFuture;
use pointsman::config::OnTargetMiss;
use pointsman::protocol::{Engine, WorkerRank};
use pointsman::{AnswerKind, Prompt};

use super::attempts::{AttemptLoop, WorkerResponse};
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

/// What follows after a failure of the engine of a response.
#[derive(Default)]
pub(super) enum Recovery {
    /// The response is cut off.
    #[default]
    None,
    /// Another rank continues the stream.
    Possible(Box<Migration>),
    /// The resume request is on its way.
    Running(BoxFuture<'static, (Account, Box<Migration>, Resumed)>),
}

/// Result of a resumption.
pub(super) enum Resumed {
    /// This response continues the stream.
    By(Box<WorkerResponse>),
    /// The stream ends with these bytes.
    Ended(Bytes),
    /// The stream is cut off.
    Failed,
}

/// Data of a stream for its resumptions.
pub(super) struct Migration {
    prepared: RoutableRequest,
    /// Headers of the client.
    headers: HeaderMap,
    request_id: String,
    pub(super) joiner: StreamJoiner,
    migrations: u32,
    /// Rank of the current attempt.
    rank: WorkerRank,
    /// All ranks of the workers that failed.
    failed: BTreeSet<WorkerRank>,
}

impl Migration {
    pub(super) fn new(
        context: &RequestContext,
        prepared: RoutableRequest,
        (headers, request_id): (&HeaderMap, &str),
        rank: WorkerRank,
    ) -> Self {
        Self {
            prepared,
            headers: headers.clone(),
            request_id: request_id.to_owned(),
            joiner: StreamJoiner::new(context.settings.gateway.stream_migration_tokens_max),
            migrations: 0,
            rank,
            failed: BTreeSet::new(),
        }
    }

    /// Resumes or ends the response after the failure of an attempt.
    pub(super) fn resumed(
        mut self: Box<Self>,
        context: Arc<RequestContext>,
        mut account: Account,
    ) -> BoxFuture<'static, (Account, Box<Self>, Resumed)> {
        Box::pin(async move {
            let resumed = match self.resume(&context, &mut account).await {
                Ok(resumed) => resumed,
                Err(result) => {
                    account.breaks_as(result);
                    if self.joiner.has_failed() {
                        account.broke(StreamBreak::Error);
                        Resumed::Ended(self.joiner.error())
                    } else {
                        Resumed::Failed
                    }
                }
            };
            (account, self, resumed)
        })
    }

    /// Places the resume request and waits for the start of its response.
    ///
    /// # Errors
    /// The response is not resumed.
    async fn resume(
        &mut self,
        context: &Arc<RequestContext>,
        account: &mut Account,
    ) -> Result<Resumed, MigrationResult> {
        match self.joiner.state() {
            StreamState::Resumable => {}
            StreamState::TooLong => return Err(MigrationResult::TooLong),
            StreamState::Unsound | StreamState::Finished => return Err(MigrationResult::Unsound),
        }
        let Self { prepared, headers, request_id, joiner, migrations, rank, failed } = self;
        let resumable = ResumableRequest::parse(prepared.worker_endpoint, &prepared.body);
        let resumable = resumable.ok_or(MigrationResult::Unsound)?;
        let body = match resumable.resume(joiner.output()) {
            Resume::Send(body) => body,
            Resume::Complete => {
                account.complete();
                return Ok(Resumed::Ended(joiner.complete(&resumable, prepared.prompt_tokens())));
            }
            Resume::Unknown => return Err(MigrationResult::Unsound),
        };
        let text = &joiner.output().text;
        if resumable.is_chat() && !text.is_empty() && !continues(prepared, text, &body).await {
            return Err(MigrationResult::Unsound);
        }
        if *migrations >= context.settings.gateway.stream_migrations_max {
            return Err(MigrationResult::Failed);
        }
        failed.insert(*rank);
        failed.extend(siblings(&prepared.model, *rank));
        let output = joiner.output();
        let attempts = AttemptLoop::new(context, prepared, (&*headers, &*request_id), body, failed);
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
        match attempts.run(account, request).await {
            Ok(begin) if begin.checked == Some(AnswerKind::Events) => {
                account.resumed();
                Ok(self.continued_by(begin))
            }
            begun => {
                // The engine rejects the resume request, or no rank has started a response.
                begun.into_iter().for_each(|mut begin| begin.sent.ended("client_error"));
                Err(MigrationResult::Failed)
            }
        }
    }

    fn continued_by(&mut self, mut begin: WorkerResponse) -> Resumed {
        // The request counts against the worker that failed first.
        begin.is_reported = true;
        self.rank = begin.placement.rank();
        self.migrations += 1;
        self.joiner.resume();
        tracing::info!(
            request_id = self.request_id,
            worker = begin.placement.endpoint(),
            rank = self.rank.rank,
            output_tokens = self.joiner.output().tokens(),
            "stream resumed"
        );
        Resumed::By(Box::new(begin))
    }
}
