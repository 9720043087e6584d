//! Attempt loop of one request, until a worker starts a valid response.
//!
//! At most `attempts_max` attempts, retries within the retry budget, and none after the start of a valid response:
//! until then the client has received nothing. Unreachable workers count neither as attempts nor against the budget and
//! have their own limit. A retry uses another worker, else another rank of the same worker. It uses the same rank only
//! if it is the only one and sent nothing at all, for example because it closed a kept-alive connection.
//! [`Answer`](super::answer::Answer) streams the response.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, Request, Response, Uri};
use axum::response::IntoResponse as _;
use http_body_util::Full;
use pointsman::answer::AnswerKind;
use pointsman::config::OnTargetMiss;
use pointsman::error::RouteError;
use pointsman::health::Outcome;
use pointsman::protocol::WorkerRank;
use pointsman::schedule::{MissedTarget, Rejection};
use pointsman::{Placement, RouteRequest};
use tokio::time::{Instant, timeout};

use super::begin::ResponseStart;
use super::engine_abort::EngineAbort;
use super::exchange::{Checked, exchange};
use super::failure::{Ending, FailedAttempt, Failure, Failures, counted_failure};
use super::split::{AttemptError, PrefillReport, Split, Started};
use crate::formats::handover::Protocol;
use crate::formats::openai::{ApiError, Authorization, Endpoint, ToWorker, to_worker};
use crate::net::upstream::UpstreamError;
use crate::observe::requests::RetryReason;
use crate::pools::model::Model;
use crate::pools::readiness::causes::placement_error;
use crate::pools::workers::{WorkerMeters, WorkerRequest};
use crate::proxy::account::Account;
use crate::proxy::context::RequestContext;

/// Maximum unreachable workers per request. They count neither as attempts nor against the retry budget, because no
/// engine did any work.
const UNREACHABLE_MAX: u32 = 16;

/// Data sent by every attempt of a request.
pub(super) struct AttemptLoop<'a> {
    pub(super) context: &'a Arc<RequestContext>,
    pub(super) model: &'a Arc<Model>,
    pub(super) endpoint: Endpoint,
    /// Headers of the client.
    pub(super) headers: &'a HeaderMap,
    pub(super) request_id: &'a str,
    pub(super) body: Bytes,
    /// Kind of a valid response: events for a streamed request.
    pub(super) kind: AnswerKind,
    /// Legs of the request, for a model with a prefill pool.
    pub(super) split: Option<Split<'a>>,
    /// Ranks of workers that failed after the start of a response. Not empty for a resumption, whose failures do not
    /// count against another worker.
    pub(super) failed: &'a BTreeSet<WorkerRank>,
}

/// A started response.
pub(crate) struct WorkerResponse<B = ResponseStart> {
    pub(crate) placement: Placement,
    pub(crate) sent: WorkerRequest,
    pub(crate) head: axum::http::response::Parts,
    pub(crate) body: B,
    /// How a successful response was validated; absent for other responses, which are forwarded unchanged.
    pub(crate) checked: Option<AnswerKind>,
    /// Output length expected by the client.
    pub(crate) output_tokens: Option<u32>,
    /// Whether the request already counts against a failed worker.
    pub(crate) is_reported: bool,
    /// Prefill of the request, for a model with a prefill pool.
    pub(crate) prefill: Option<PrefillReport>,
}

impl AttemptLoop<'_> {
    /// Tries ranks until one starts a response.
    ///
    /// # Errors
    /// The error for the client: a worker's own error if any worker sent one.
    pub(super) async fn run(
        &self,
        account: &mut Account,
        mut request: RouteRequest<'_>,
    ) -> Result<WorkerResponse, Response<Body>> {
        let started = account.started();
        let (deadline, ttft_target) = (request.options.deadline, request.options.ttft_target);
        let (mut excluded, mut failures) = (ExcludedRanks::of(self.failed), Failures::default());
        let mut reports = Reports::new(self.model, self.kind);
        reports.has_counted = !self.failed.is_empty();
        request.options.phases = account.trace.wants_phases();
        request.options.routing_hashes |= self.split.as_ref().is_some_and(Split::needs_hashes);
        let attempts_max = self.context.settings.gateway.attempts_max;
        let (mut counted, mut unreachable, mut holds_retry) = (0, 0, false);
        let mut last_worker: Option<Arc<WorkerMeters>> = None;
        for attempt in 1.. {
            let booking_id = self.context.ids.booking(self.request_id);
            request.request_id = Some(booking_id.into());
            request.options.deadline = deadline.map(|deadline| deadline.saturating_sub(started.elapsed()));
            // The target counts from the request head. A target of zero would be invalid.
            let elapsed = started.elapsed();
            request.options.ttft_target =
                ttft_target.map(|target| target.saturating_sub(elapsed).max(Duration::from_nanos(1)));
            if attempt > 1 {
                // The request was admitted: a late response is better than the error of the failed worker.
                request.options.on_target_miss = Some(OnTargetMiss::Serve);
            }
            let routed = Instant::now();
            let placement = match self.place(&mut request, &mut excluded, (ttft_target, elapsed)).await {
                Ok(placement) => placement,
                Err(error) if attempt == 1 => return Err(error.into_response()),
                // No other rank can serve the request, so the collected errors decide.
                Err(_) => {
                    if holds_retry {
                        self.context.admission.retry_budget.give_back(Instant::now());
                    }
                    break;
                }
            };
            account.placed_since(routed, &placement);
            if let Some((reason, worker)) = failures.reasons.last().zip(last_worker.take()) {
                self.model.meters.retried(*reason);
                account.access.retried(reason.name());
                worker.retried(*reason);
            }
            let mut sent = self.model.workers.sent(&placement);
            let started = match &self.split {
                Some(split) => split.attempt(self, account, &request, (&placement, &mut sent)).await,
                None => {
                    let outgoing = Outgoing::new(self.body.clone(), self.request_id);
                    let checked = self.attempt(account, &placement, &mut sent, outgoing).await;
                    let started = checked.map(|checked| Started { checked, prefill: None, served_by: None });
                    started.map_err(AttemptError::Failed)
                }
            };
            let failure = match started {
                Ok(Started { checked: Checked { head, body, kind: checked }, prefill, served_by }) => {
                    let ending = if head.status.is_success() { Ending::Served } else { Ending::ClientError };
                    let is_reported = reports.settle(ending);
                    if let Some(split) = self.split.as_ref().filter(|_| ending == Ending::Served) {
                        split.served(prefill.as_ref());
                    }
                    let output_tokens = request.options.forecast_output_tokens();
                    let (placement, sent) = served_by.unwrap_or((placement, sent));
                    return Ok(WorkerResponse {
                        placement,
                        sent,
                        head,
                        body,
                        checked,
                        output_tokens,
                        is_reported,
                        prefill,
                    });
                }
                Err(AttemptError::Final(response)) => return Err(response),
                Err(AttemptError::Failed(failure)) => failure,
            };
            tracing::debug!(
                request_id = self.request_id,
                worker = placement.endpoint(),
                rank = placement.rank().rank,
                attempt,
                reason = failure.reason().name(),
                cause = failure.cause(),
                "upstream attempt failed"
            );
            account.attempt_failed(failure.reason());
            last_worker = Some(Arc::clone(sent.worker()));
            let may_retry = self.is_worth_a_retry(failure.reason(), &failures.reasons);
            let is_unreachable = failure.is_unreachable();
            excluded.add(&placement, &failure, self.model);
            reports.add(&placement, &failure, sent);
            drop(placement);
            failures.add(failure);
            holds_retry = false;
            if is_unreachable {
                unreachable += 1;
                if unreachable >= UNREACHABLE_MAX {
                    break;
                }
                continue;
            }
            counted += 1;
            if !may_retry || counted >= attempts_max {
                break;
            }
            if !self.takes_retry() {
                break;
            }
            holds_retry = true;
        }
        reports.settle(Ending::Failed);
        Err(failures.answer(self.request_id))
    }

    /// Whether another attempt may succeed after this failure and the earlier ones.
    fn is_worth_a_retry(&self, reason: RetryReason, before: &[RetryReason]) -> bool {
        match reason {
            // A retry repeats the whole work: once after a late first token of a stream, never after a complete
            // response had the time to arrive.
            RetryReason::Timeout => self.kind == AnswerKind::Events && !before.contains(&reason),
            // Two workers with the same result are correct.
            RetryReason::Misconfigured => !before.contains(&reason),
            RetryReason::Connect
            | RetryReason::Broken
            | RetryReason::Busy
            | RetryReason::ServerError
            | RetryReason::InvalidAnswer => true,
        }
    }

    /// A rank for the next attempt: of another worker, else another rank, else possibly the same rank.
    /// `ttft` is the target of the client, and the time since the request head.
    async fn place(
        &self,
        request: &mut RouteRequest<'_>,
        excluded: &mut ExcludedRanks,
        ttft: (Option<Duration>, Duration),
    ) -> Result<Placement, ApiError> {
        let within = Duration::from_millis(self.context.settings.gateway.queue_timeout_ms);
        let mut route = async |excluded_ranks: &BTreeSet<WorkerRank>| {
            request.options.constraints.excluded_ranks.clone_from(excluded_ranks);
            let routed = timeout(within, self.model.router.route(request.clone())).await;
            let failed = |error| placement_error(&self.model.router, since_request_head(error, ttft));
            routed.map_err(|_| ApiError::queue_timeout())?.map_err(failed)
        };
        let none = BTreeSet::new();
        let failing = self.model.workers.failing();
        if excluded.ranks.is_empty() && failing.is_empty() {
            return route(&none).await;
        }
        let other_workers: BTreeSet<WorkerRank> = excluded.workers.union(&failing).copied().collect();
        // After a failed queue wait the request does not queue again.
        let is_refused =
            |placed: &Result<_, ApiError>| placed.as_ref().is_err_and(|error| *error != ApiError::queue_timeout());
        let mut placed = route(&other_workers).await;
        if is_refused(&placed) && other_workers != excluded.ranks {
            placed = route(&excluded.ranks).await;
        }
        if is_refused(&placed) && (excluded.ranks.is_empty() || std::mem::take(&mut excluded.retries_same_rank)) {
            placed = route(&none).await;
        }
        placed
    }

    /// One attempt: response head and body, validated if the status is a success.
    pub(super) async fn attempt(
        &self,
        account: &mut Account,
        placement: &Placement,
        sent: &mut WorkerRequest,
        outgoing: Outgoing<'_>,
    ) -> Result<Checked, Failure> {
        let mut request = self.request_to(self.model, placement, outgoing).map_err(Failure::NoResponse)?;
        account.sent(placement);
        account.trace.inject(request.headers_mut());
        let (upstream, kinds) = (self.context.upstream.clone(), (self.endpoint, self.kind));
        exchange(upstream, request, kinds, self.response_time_max(), |status| sent.answered(status)).await
    }

    /// Longest time until a response is known to be valid.
    pub(super) fn response_time_max(&self) -> Duration {
        let settings = &self.context.settings.gateway;
        Duration::from_millis(match self.kind {
            AnswerKind::Events => settings.first_byte_timeout_ms,
            AnswerKind::Json => settings.answer_timeout_ms,
        })
    }

    /// Takes a retry from the budget.
    pub(super) fn takes_retry(&self) -> bool {
        let takes = self.context.admission.retry_budget.take(Instant::now());
        if !takes {
            self.context.meters.retry_denied();
        }
        takes
    }

    /// The request for the rank of a placement in the pool of `model`.
    pub(super) fn request_to(
        &self,
        model: &Model,
        placement: &Placement,
        outgoing: Outgoing<'_>,
    ) -> Result<Request<Full<Bytes>>, UpstreamError> {
        let endpoint = placement.endpoint();
        let address = || UpstreamError::Address(endpoint.to_owned());
        let url = [endpoint.trim_end_matches('/'), self.endpoint.path()].concat();
        let url = Uri::try_from(url).map_err(|_| address())?;
        let rank = placement.rank_at_worker().filter(|_| outgoing.names_rank);
        let mut request = Request::new(Full::new(outgoing.body));
        *request.method_mut() = axum::http::Method::POST;
        *request.uri_mut() = url;
        let key = model.access.authorization(placement.rank().worker)?;
        let authorization = self.authorization(key.as_ref());
        let own = ToWorker { request_id: outgoing.request_id, data_parallel_rank: rank, authorization };
        *request.headers_mut() = to_worker(self.headers, own);
        Ok(request)
    }

    /// Abort of the leg of a placement by these ids.
    pub(super) fn abort_of(&self, model: &Model, placement: &Placement, ids: Vec<String>) -> EngineAbort {
        let key = model.access.authorization(placement.rank().worker);
        let (false, Ok(key)) = (ids.is_empty(), key) else { return EngineAbort::default() };
        let authorization = self.authorization(key.as_ref());
        let own = ToWorker { request_id: self.request_id, data_parallel_rank: None, authorization };
        EngineAbort::new(&self.context.upstream, placement.endpoint(), &to_worker(self.headers, own), ids)
    }

    /// The client's key is forwarded only without tenants, when it can only be meant for the worker.
    fn authorization<'a>(&self, key: Option<&'a HeaderValue>) -> Authorization<'a> {
        match key {
            Some(key) => Authorization::Key(key),
            None if self.context.admission.tenants.is_empty() => Authorization::Pass,
            None => Authorization::Drop,
        }
    }
}

/// Body and request id for one worker.
pub(super) struct Outgoing<'a> {
    body: Bytes,
    request_id: &'a str,
    /// Whether a header names the data-parallel rank. SGLang's bodies name it.
    names_rank: bool,
}

impl<'a> Outgoing<'a> {
    pub(super) fn new(body: Bytes, request_id: &'a str) -> Self {
        Self { body, request_id, names_rank: true }
    }

    /// The same for an engine with this transfer protocol.
    pub(super) fn to(self, protocol: Protocol) -> Self {
        Self { names_rank: protocol != Protocol::Sglang, ..self }
    }
}

/// All ranks of the worker of a rank.
pub(super) fn siblings(model: &Model, rank: WorkerRank) -> impl Iterator<Item = WorkerRank> + use<> {
    let workers = model.router.workers();
    let entry = workers.iter().find(|entry| entry.worker == rank.worker).cloned();
    entry.into_iter().flat_map(|entry| entry.ranks)
}

/// The error with times to first token since the request head: the target of the client, and the prediction of the
/// router plus the time that has elapsed before.
fn since_request_head(mut error: RouteError, (target, elapsed): (Option<Duration>, Duration)) -> RouteError {
    if let RouteError::Rejected(Rejection::TargetsMissed(missed)) = &mut error
        && let Some((ttft, target)) = missed.ttft.as_mut().zip(target)
    {
        *ttft = MissedTarget { predicted: ttft.predicted.saturating_add(elapsed), target };
    }
    error
}

/// Ranks excluded after failures.
#[derive(Default)]
struct ExcludedRanks {
    /// Ranks of failed attempts.
    ranks: BTreeSet<WorkerRank>,
    /// These ranks, and all ranks of workers that did not respond.
    workers: BTreeSet<WorkerRank>,
    /// Whether the same rank may be tried again if no other is available.
    retries_same_rank: bool,
}

impl ExcludedRanks {
    fn of(failed: &BTreeSet<WorkerRank>) -> Self {
        Self { ranks: failed.clone(), workers: failed.clone(), retries_same_rank: false }
    }

    fn add(&mut self, placement: &Placement, failure: &Failure, model: &Model) {
        let rank = placement.rank();
        self.retries_same_rank = failure.is_without_response() && self.ranks.is_empty();
        self.ranks.insert(rank);
        self.workers.insert(rank);
        match failure.reason() {
            RetryReason::Busy | RetryReason::ServerError => {}
            RetryReason::Connect | RetryReason::Timeout | RetryReason::Broken | RetryReason::InvalidAnswer => {
                self.workers.extend(siblings(model, rank));
            }
            // All ranks of this engine would respond equally.
            RetryReason::Misconfigured => {
                self.workers.extend(siblings(model, rank));
                self.ranks.extend(siblings(model, rank));
            }
        }
    }
}

/// Outcomes of failed attempts, reported at the end of their request. A drop before means a client disconnect: they
/// count as if no worker had responded.
pub(super) struct Reports<'a> {
    model: &'a Model,
    /// Kind of a valid response.
    kind: AnswerKind,
    failed_attempts: Vec<FailedAttempt>,
    /// Whether the request already counts against a failed worker.
    has_counted: bool,
}

impl<'a> Reports<'a> {
    pub(super) fn new(model: &'a Model, kind: AnswerKind) -> Self {
        Self { model, kind, failed_attempts: Vec::new(), has_counted: false }
    }

    pub(super) fn add(&mut self, placement: &Placement, failure: &Failure, mut sent: WorkerRequest) {
        let (rank, outcome) = (placement.rank(), failure.outcome());
        // A long complete response may be late on a rank that serves other requests.
        let is_long_answer = outcome == Outcome::Timeout && self.kind == AnswerKind::Json && sent.has_rank_sent();
        let sent = if outcome == Outcome::Misconfigured {
            Some(sent)
        } else {
            sent.ended(outcome.label());
            None
        };
        if failure.is_local() {
            return;
        }
        if outcome == Outcome::ConnectFailed {
            // A fact about the endpoint, and so about all its ranks.
            placement.outcome(outcome);
            self.report_siblings(rank, outcome);
        } else if !is_long_answer {
            let unsettled = Some(self.model.workers.failed(rank));
            self.failed_attempts.push(FailedAttempt { rank, outcome, sent, unsettled });
        }
    }

    /// Reports the outcomes that count. Returns whether any does.
    pub(super) fn settle(&mut self, ending: Ending) -> bool {
        let counted_failure = counted_failure(&self.failed_attempts, ending);
        let outcome = if ending == Ending::Served { Outcome::Misconfigured.label() } else { "client_error" };
        for sent in self.failed_attempts.drain(..).filter_map(|attempt| attempt.sent) {
            { sent }.ended(outcome);
        }
        if self.has_counted {
            return true;
        }
        let Some((rank, outcome)) = counted_failure else { return false };
        self.model.router.report_outcome(rank, outcome);
        if outcome == Outcome::Misconfigured {
            // Key and model belong to the engine, and so to all its ranks.
            self.report_siblings(rank, outcome);
        }
        true
    }

    fn report_siblings(&self, rank: WorkerRank, outcome: Outcome) {
        for sibling in siblings(self.model, rank).filter(|sibling| *sibling != rank) {
            self.model.router.report_outcome(sibling, outcome);
        }
    }
}

impl Drop for Reports<'_> {
    fn drop(&mut self) {
        self.settle(Ending::Failed);
    }
}
