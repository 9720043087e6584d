//! Streamed response that moves to another rank when its engine fails.
//!
//! [`Migrating`] is the body of the client. Its inner [`Answer`] follows one attempt and returns the failure; the booking of
//! the failed attempt has ended then, and its outcome is reported. The resumption uses the attempt loop with the resume
//! body, excludes the workers that failed, and takes one retry from the budget. The client receives nothing meanwhile.
//! Without a successful resumption the response is cut off as any other. [`crate::formats::migration`] has the rules and joins the
//! streams.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Bytes;
use axum::http::HeaderMap;
use http_body::{Body, Frame};
use pointsman::config::OnTargetMiss;
use pointsman::protocol::WorkerRank;
use pointsman::{AnswerKind, Prompt};
use tokio::time::Instant;

use super::answer::{Answer, Cut};
use super::attempts::{AttemptLoop, WorkerResponse};
use super::begin::ResponseStart;
use super::reports::siblings;
use crate::formats::migration::{ResumableRequest, Resume, StreamJoiner, StreamState};
use crate::observe::requests::MigrationResult;
use crate::proxy::account::Account;
use crate::proxy::context::RequestContext;
use crate::proxy::routable::RoutableRequest;

/// The resumable form of a request, if migrations are enabled. Its body replaces the prepared one.
pub(super) fn resumable(
    context: &RequestContext,
    account: &mut Account,
    prepared: &mut RoutableRequest,
) -> Option<ResumableRequest> {
    if context.settings.gateway.stream_migrations_max == 0 || prepared.kind != AnswerKind::Events {
        return None;
    }
    account.breaks_as(MigrationResult::Unsound);
    let request = ResumableRequest::parse(prepared.worker_endpoint, &prepared.body)?;
    prepared.body = request.body().clone();
    Some(request)
}

/// Data of a request for its resumptions.
pub(super) struct Migration {
    pub(super) prepared: RoutableRequest,
    pub(super) request: ResumableRequest,
    /// Headers of the client.
    pub(super) headers: HeaderMap,
    pub(super) request_id: String,
}

impl Migration {
    /// Places the resume request and waits for the start of its response. Returns the account of the request in any case.
    async fn resume(
        self: Arc<Self>,
        context: Arc<RequestContext>,
        mut account: Account,
        body: Bytes,
        output: (u32, Vec<u32>),
        failed: BTreeSet<WorkerRank>,
    ) -> Resumption {
        let (output_tokens, output_ids) = output;
        let head = (&self.headers, self.request_id.as_str());
        let attempts = AttemptLoop::new(&context, &self.prepared, head, body, &failed);
        let mut request = self.prepared.request();
        let tokens: Vec<u32>;
        if let (Prompt::Tokens(prompt), false) = (&request.prompt, output_ids.is_empty()) {
            tokens = [prompt, &output_ids[..]].concat();
            request.prompt = Prompt::Tokens(&tokens);
        }
        let options = &mut request.options;
        // Both limits apply to the first token, which the client has.
        (options.deadline, options.ttft_target) = (None, None);
        options.on_target_miss = Some(OnTargetMiss::Serve);
        for limit in [&mut options.expected_output_tokens, &mut options.output_tokens_max] {
            *limit = limit.map(|tokens| tokens.saturating_sub(output_tokens).max(1));
        }
        let begun = attempts.run(&mut account, request).await.ok();
        let begin = begun.and_then(|mut begin| {
            if begin.checked == Some(AnswerKind::Events) {
                return Some(begin);
            }
            // The engine rejects the resume request.
            begin.sent.ended("client_error");
            None
        });
        (account, begin)
    }
}

/// End of a resumption: the account of the request, and a started response unless no rank started one.
type Resumption = (Account, Option<WorkerResponse>);

/// Body polled by the client's connection: the joined streams of all attempts.
pub(super) struct Migrating {
    context: Arc<RequestContext>,
    answer: Answer<ResponseStart>,
    migration: Arc<Migration>,
    joiner: StreamJoiner,
    resuming: Option<Pin<Box<dyn Future<Output = Resumption> + Send>>>,
    /// Failure of the last attempt.
    failure: Option<Cut>,
    migrations: u32,
    /// Rank of the current attempt.
    rank: WorkerRank,
    /// All ranks of the workers that failed.
    failed: BTreeSet<WorkerRank>,
    has_ended: bool,
}

impl Migrating {
    pub(super) fn new(
        context: &Arc<RequestContext>,
        answer: Answer<ResponseStart>,
        migration: Box<Migration>,
        rank: WorkerRank,
    ) -> Self {
        let tokens_max = context.settings.gateway.stream_migration_tokens_max;
        Self {
            context: Arc::clone(context),
            answer: answer.deferring_cuts(),
            joiner: StreamJoiner::new(&migration.request, tokens_max),
            migration: migration.into(),
            resuming: None,
            failure: None,
            migrations: 0,
            rank,
            failed: BTreeSet::new(),
            has_ended: false,
        }
    }

    /// Starts the resumption after a failure. Returns the last bytes of a response that needs none.
    ///
    /// # Errors
    /// The response is not resumable now.
    fn start(&mut self) -> Result<Option<Bytes>, MigrationResult> {
        match self.joiner.state() {
            StreamState::Resumable => {}
            StreamState::TooLong => return Err(MigrationResult::TooLong),
            StreamState::Unsound | StreamState::Finished => return Err(MigrationResult::Unsound),
        }
        let output = self.joiner.output();
        let body = match self.migration.request.resume(output) {
            Resume::Send(body) => body,
            Resume::Complete => return Ok(Some(self.joiner.complete(self.migration.prepared.prompt_tokens()))),
            Resume::Unknown => return Err(MigrationResult::Unsound),
        };
        if self.migrations >= self.context.settings.gateway.stream_migrations_max {
            return Err(MigrationResult::Failed);
        }
        if !self.context.admission.retry_budget.take(Instant::now()) {
            self.context.meters.retry_denied();
            return Err(MigrationResult::Failed);
        }
        let account = self.answer.account().take().ok_or(MigrationResult::Failed)?;
        self.failed.insert(self.rank);
        self.failed.extend(siblings(&self.migration.prepared.model, self.rank));
        let output = (output.tokens(), output.token_ids().unwrap_or_default().to_vec());
        let (migration, context) = (Arc::clone(&self.migration), Arc::clone(&self.context));
        self.resuming = Some(Box::pin(migration.resume(context, account, body, output, self.failed.clone())));
        Ok(None)
    }

    /// Ends the response with its failure.
    fn give_up(&mut self, result: MigrationResult, context: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if let Some(account) = self.answer.account() {
            account.breaks_as(result);
            if self.joiner.has_failed() {
                // The client receives the error of the engine.
                account.not_resumed();
                account.complete();
                self.has_ended = true;
                return Poll::Ready(Some(Ok(Frame::data(self.joiner.error()))));
            }
        }
        let Some(cut) = self.failure.take() else { return Poll::Ready(None) };
        self.has_ended = true;
        self.answer.give_up(cut, context)
    }

    /// Follows the response of another rank.
    fn resumed(&mut self, account: Account, mut begin: WorkerResponse) {
        let mut account = account;
        account.resumed();
        // The request counts against the worker that failed first.
        begin.is_reported = true;
        (self.rank, self.failure) = (begin.placement.rank(), None);
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

impl Body for Migrating {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let this = &mut *self;
        loop {
            if this.has_ended {
                // The failure, if any.
                return Pin::new(&mut this.answer).poll_frame(context);
            }
            if let Some(resuming) = &mut this.resuming {
                let (account, begin) = ready!(resuming.as_mut().poll(context));
                this.resuming = None;
                match begin {
                    Some(begin) => this.resumed(account, begin),
                    None => {
                        *this.answer.account() = Some(account);
                        return this.give_up(MigrationResult::Failed, context);
                    }
                }
            }
            let polled = if this.joiner.has_failed() {
                Some(Err(this.answer.fail()))
            } else {
                ready!(Pin::new(&mut this.answer).poll_frame(context))
            };
            let bytes = match polled {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.joiner.push(data),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                None => {
                    this.has_ended = true;
                    this.joiner.finish()
                }
                Some(Err(cut)) => {
                    this.failure = Some(cut);
                    match this.start() {
                        Ok(None) => continue,
                        Ok(Some(end)) => {
                            this.has_ended = true;
                            if let Some(account) = this.answer.account() {
                                account.complete();
                            }
                            end
                        }
                        Err(result) => return this.give_up(result, context),
                    }
                }
            };
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
        }
    }

    // The length is unknown, because later attempts change it.
    fn is_end_stream(&self) -> bool {
        false
    }
}
