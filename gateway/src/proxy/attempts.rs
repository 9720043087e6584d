//! Attempt loop of one request, until a worker starts a valid response.
//!
//! At most `attempts_max` attempts, retries within the retry budget, and none after the start of a valid response:
//! until then the client has received at most heartbeats. Unreachable workers and kept connections that an engine closes
//! count neither as attempts nor against the budget and have their own limit. A retry uses another worker, else another
//! rank of the same worker. It uses the same rank if that closed a kept connection, which is no fault, and otherwise only
//! if it is the only one and sent nothing at all.
//! [`Answer`](super::answer::Answer) streams the response.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::HeaderMap;
use pointsman::config::OnTargetMiss;
use pointsman::error::RouteError;
use pointsman::protocol::WorkerRank;
use pointsman::{AnswerKind, Pin, PinMode, Placement, Rejection, RouteRequest};
use tokio::time::{Instant, timeout};

use super::account::Account;
use super::begin::ResponseStart;
use super::context::RequestContext;
use super::exchange::Checked;
use super::failure::{Ending, Failure};
use super::outbound::{Attempt, AttemptError, Outbound, Started};
use super::prefill_report::PrefillReport;
use super::refusal::Refusal;
use super::reports::{Reports, siblings};
use super::routable::RoutableRequest;
use super::split::Split;
use crate::formats::openai::ApiError;
use crate::observe::requests::RetryReason;
use crate::pools::model::Model;
use crate::pools::readiness::causes::placement_error;
use crate::pools::workers::{WorkerMeters, WorkerRequest};

/// Maximum unreachable workers and closed connections per request. They count neither as attempts nor against the retry
/// budget, because no engine did any work.
const UNREACHABLE_MAX: u32 = 16;

/// Attempts of a request.
pub(super) struct AttemptLoop<'a> {
    outbound: Outbound<'a>,
    /// Legs of the request, for a model with a prefill pool.
    split: Option<Split<'a>>,
    /// Ranks of workers that failed after the start of a response. Not empty for a resumption, whose failures do not
    /// count against another worker.
    failed: &'a BTreeSet<WorkerRank>,
    /// Whether only one worker has the state of the request.
    is_pinned: bool,
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

/// State between the attempts of a request.
struct Progress<'a> {
    excluded: ExcludedRanks,
    reports: Reports<'a>,
    /// Worker of the last attempt.
    last_worker: Option<Arc<WorkerMeters>>,
    /// Attempts that count against the limit.
    counted: u32,
    unreachable: u32,
    holds_retry: bool,
}

impl<'a> AttemptLoop<'a> {
    /// Attempts of a request with this body, which avoid the ranks that have failed.
    pub(super) fn new(
        context: &'a Arc<RequestContext>,
        request: &'a RoutableRequest,
        (headers, request_id): (&'a HeaderMap, &'a str),
        body: Bytes,
        failed: &'a BTreeSet<WorkerRank>,
    ) -> Self {
        let (model, endpoint, kind) = (&request.model, request.worker_endpoint, request.kind);
        let split = model.prefill.as_ref().map(|side| Split::new(side, endpoint, body.clone(), request.include_usage));
        let call = (&request.method, &*request.worker_path);
        let outbound =
            Outbound { context, model, endpoint, call, headers, request_id, body, hints: &request.hints, kind };
        Self { outbound, split, failed, is_pinned: request.is_pinned() }
    }

    /// Tries ranks until one starts a response.
    ///
    /// # Errors
    /// The error for the client: a worker's own error if any worker sent one.
    pub(super) async fn run(
        &self,
        account: &mut Account,
        mut request: RouteRequest<'_>,
    ) -> Result<WorkerResponse, Refusal> {
        let Outbound { context, model, .. } = self.outbound;
        let started = account.started();
        let (deadline, ttft_target) = (request.options.deadline, request.options.ttft_target);
        let mut progress = self.progress();
        request.options.phases = account.trace.wants_phases();
        request.options.routing_hashes |= self.split.as_ref().is_some_and(Split::needs_hashes);
        for attempt in 1.. {
            request.request_id = Some(context.ids.booking(self.outbound.request_id).into());
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
            let placement = match self.place(&mut request, &mut progress.excluded, (ttft_target, elapsed)).await {
                Ok(placement) => placement,
                Err(error) if attempt == 1 || progress.reports.failures.is_asleep => return Err(error.into()),
                // No other rank can serve the request, so the collected errors decide.
                Err(_) => {
                    if progress.holds_retry {
                        context.admission.retry_budget.give_back(Instant::now());
                    }
                    break;
                }
            };
            account.placed_since(routed, &placement);
            progress.retried(model, account);
            let mut sent = model.workers.sent(&placement);
            let mut decode = Attempt { outbound: &self.outbound, account, placement: &placement, sent: &mut sent };
            let started = match &self.split {
                // Large, and rare: other requests would carry its bytes.
                Some(split) => Box::pin(split.attempt(&mut decode, &request)).await,
                None => decode.whole().await,
            };
            let failure = match started {
                Ok(started) => {
                    let output_tokens = request.options.forecast_output_tokens();
                    return Ok(self.started(started, (placement, sent), output_tokens, progress.reports));
                }
                Err(AttemptError::Final(refusal)) => return Err(refusal),
                Err(AttemptError::Failed(failure)) => failure,
            };
            account.attempt_failed(failure.reason());
            if !self.may_continue(&mut progress, attempt, (placement, sent), failure) {
                break;
            }
        }
        progress.reports.settle(Ending::Failed);
        Err(std::mem::take(&mut progress.reports.failures).refusal())
    }

    fn progress(&self) -> Progress<'_> {
        let mut reports = Reports::new(self.outbound.model, self.outbound.kind);
        reports.has_counted = !self.failed.is_empty();
        Progress {
            excluded: ExcludedRanks::of(self.failed),
            reports,
            last_worker: None,
            counted: 0,
            unreachable: 0,
            holds_retry: false,
        }
    }

    /// Response of the attempt with this placement.
    fn started(
        &self,
        Started { checked: Checked { head, body, kind: checked }, prefill, served_by }: Started,
        booked: (Placement, WorkerRequest),
        output_tokens: Option<u32>,
        mut reports: Reports<'_>,
    ) -> WorkerResponse {
        let ending = if head.status.is_success() { Ending::Served } else { Ending::ClientError };
        let is_reported = reports.settle(ending);
        if let (Some(split), Some(prefill), Ending::Served) = (&self.split, &prefill, ending) {
            split.side.pool.legs.served(prefill.result);
        }
        let (placement, sent) = served_by.unwrap_or(booked);
        WorkerResponse { placement, sent, head, body, checked, output_tokens, is_reported, prefill }
    }

    /// Records a failed attempt. Returns whether another one follows.
    fn may_continue(
        &self,
        progress: &mut Progress<'_>,
        attempt: u32,
        (placement, sent): (Placement, WorkerRequest),
        failure: Failure,
    ) -> bool {
        tracing::debug!(
            request_id = self.outbound.request_id,
            worker = placement.endpoint(),
            rank = placement.rank().rank,
            attempt,
            reason = failure.reason().name(),
            cause = failure.cause(),
            "upstream attempt failed"
        );
        progress.last_worker = Some(Arc::clone(sent.worker()));
        let may_retry = self.is_worth_a_retry(failure.reason(), &progress.reports.failures.reasons);
        let is_without_work = failure.is_unreachable() || failure.is_closed();
        if failure.is_closed() {
            progress.excluded.again = Some(placement.rank());
            { sent }.ended(failure.outcome().label());
            progress.reports.failures.add(failure);
        } else {
            progress.excluded.add(&placement, &failure, self.outbound.model);
            progress.reports.add(&placement, failure, sent);
        }
        drop(placement);
        progress.holds_retry = false;
        if is_without_work {
            progress.unreachable += 1;
            return progress.unreachable < UNREACHABLE_MAX;
        }
        progress.counted += 1;
        let attempts_max = self.outbound.context.settings.gateway.attempts_max;
        progress.holds_retry = may_retry && progress.counted < attempts_max && self.outbound.takes_retry();
        progress.holds_retry
    }

    /// Whether another attempt may succeed after this failure and the earlier ones.
    fn is_worth_a_retry(&self, reason: RetryReason, before: &[RetryReason]) -> bool {
        match reason {
            // A retry repeats the whole work: once after a late first token of a stream, never after a complete
            // response had the time to arrive.
            RetryReason::Timeout => self.outbound.kind == AnswerKind::Events && !before.contains(&reason),
            // Two workers with the same result are correct.
            RetryReason::Misconfigured => !self.is_pinned && !before.contains(&reason),
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
        let within = self.outbound.context.placement_timeout(&self.outbound.model.router, &request.options);
        let own_pin = request.options.constraints.pin;
        let mut route = async |excluded_ranks: &BTreeSet<WorkerRank>, again: Option<WorkerRank>| {
            request.options.constraints.excluded_ranks.clone_from(excluded_ranks);
            let pin = |rank: WorkerRank| Pin { worker: rank.worker, rank: Some(rank.rank), mode: PinMode::Hard };
            request.options.constraints.pin = again.map(pin).or(own_pin);
            let routed = timeout(within, self.outbound.model.router.route(request.clone())).await;
            request.options.constraints.pin = own_pin;
            let failed = |error| placement_error(&self.outbound.model.router, since_request_head(error, ttft));
            routed.map_err(|_| ApiError::queue_timeout())?.map_err(failed)
        };
        // Another worker could fail like one that has died, so that a fatal request would spread.
        if let Some(rank) = excluded.again.take()
            && let Ok(placement) = route(&excluded.ranks, Some(rank)).await
        {
            return Ok(placement);
        }
        let none = BTreeSet::new();
        let failing = self.outbound.model.workers.failing();
        if excluded.ranks.is_empty() && failing.is_empty() {
            return route(&none, None).await;
        }
        let other_workers: BTreeSet<WorkerRank> = excluded.workers.union(&failing).copied().collect();
        // After a failed queue wait the request does not queue again, and no failing worker serves a refused program.
        let is_final = |error: &ApiError| *error == ApiError::queue_timeout() || error.code == "programs_full";
        let is_refused = |placed: &Result<_, ApiError>| placed.as_ref().is_err_and(|error| !is_final(error));
        let mut placed = route(&other_workers, None).await;
        if is_refused(&placed) && other_workers != excluded.ranks {
            placed = route(&excluded.ranks, None).await;
        }
        if is_refused(&placed) && (excluded.ranks.is_empty() || std::mem::take(&mut excluded.retries_same_rank)) {
            placed = route(&none, None).await;
        }
        placed
    }
}

/// The error with times to first token since the request head: the target of the client, and the prediction of the
/// router plus the time that has elapsed before.
fn since_request_head(mut error: RouteError, (target, elapsed): (Option<Duration>, Duration)) -> RouteError {
    if let RouteError::Rejected(Rejection::TargetsMissed(missed)) = &mut error
        && let Some((ttft, target)) = missed.ttft.as_mut().zip(target)
    {
        (ttft.predicted, ttft.target) = (ttft.predicted.saturating_add(elapsed), target);
    }
    error
}

impl Progress<'_> {
    /// Records that a placement replaces the failed attempt before it.
    fn retried(&mut self, model: &Model, account: &mut Account) {
        if let Some((reason, worker)) = self.reports.failures.reasons.last().zip(self.last_worker.take()) {
            model.meters.retried(*reason);
            account.access.retried(reason.name());
            worker.retried(*reason);
        }
    }
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
    /// The rank of the last attempt, if it only closed a kept connection.
    again: Option<WorkerRank>,
}

impl ExcludedRanks {
    fn of(failed: &BTreeSet<WorkerRank>) -> Self {
        Self { ranks: failed.clone(), workers: failed.clone(), retries_same_rank: false, again: None }
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
