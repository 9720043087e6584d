//! The tries of one request, until a worker has begun to answer.
//!
//! Owns where it is tried next, and what is said when nobody answers. Promises at most `attempts_max` tries, retries within
//! the gateway's budget, and none once a valid answer has begun: until then the client has been told nothing. Workers that
//! cannot be reached count neither as tries nor against the budget, and have a bound of their own. A retry
//! goes to another worker, or where there is none to another rank; to the same one only where that is the only one and
//! nothing was heard of it, as when it closed a connection that was just taken up again. Leaves the rest of the answer to [`Answer`](super::answer::Answer).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Request, Response, Uri};
use axum::response::IntoResponse as _;
use http_body_util::{BodyExt as _, Full, Limited};
use pointsman::answer::AnswerKind;
use pointsman::health::Outcome;
use pointsman::protocol::WorkerRank;
use pointsman::select::Constraints;
use pointsman::{Placement, RouteRequest};
use tokio::time::{Instant, timeout};

use super::begin::Begun;
use super::failure::{Ending, Failure, Failures, Suspect, culprit, is_retried};
use crate::openai::{ApiError, Authorization, Endpoint, ToWorker, to_worker};
use crate::serve::App;
use crate::serve::metrics::{Account, RetryReason};
use crate::serve::models::Model;
use crate::serve::workers::{WorkerMeters, WorkerRequest};
use crate::upstream::UpstreamError;

/// The longest error of a worker that is kept, in case nobody else answers.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// The most workers that may be found unreachable by one request. They count neither as attempts nor against the retry
/// budget: no engine did any work.
const UNREACHABLE_MAX: u32 = 16;

/// What every try of a request sends.
pub(super) struct Errand<'a> {
    pub(super) app: &'a Arc<App>,
    pub(super) model: &'a Arc<Model>,
    pub(super) endpoint: Endpoint,
    /// The client's.
    pub(super) headers: &'a HeaderMap,
    pub(super) request_id: &'a str,
    pub(super) body: Bytes,
    /// What a valid answer is: events where a stream was requested.
    pub(super) kind: AnswerKind,
}

/// A worker has begun to answer.
pub(super) struct Begin {
    pub(super) placement: Placement,
    pub(super) sent: WorkerRequest,
    pub(super) head: axum::http::response::Parts,
    pub(super) body: Begun,
    /// How a successful answer was checked; absent for other answers, which pass as they are.
    pub(super) checked: Option<AnswerKind>,
    /// As much as the client expects.
    pub(super) output_tokens: Option<u32>,
    /// Whether the request already counts against a worker that failed before.
    pub(super) has_blamed: bool,
}

/// The head of an answer, its body from the first frame on, and how it was checked.
type Checked = (axum::http::response::Parts, Begun, Option<AnswerKind>);

impl Errand<'_> {
    /// Goes from rank to rank until one has begun to answer.
    ///
    /// # Errors
    /// What the client is to be told when none does: a worker's own error where one gave any.
    pub(super) async fn run(&self, account: &mut Account, request: RouteRequest<'_>) -> Result<Begin, Response<Body>> {
        let (asked, deadline) = (account.started(), request.deadline);
        let (mut elsewhere, mut failures) = (Elsewhere::default(), Failures::default());
        let mut reports = Reports { errand: self, suspects: Vec::new() };
        let attempts_max = self.app.settings.gateway.attempts_max;
        let (mut counted, mut unreachable, mut holds_retry) = (0, 0, false);
        let mut last_worker: Option<Arc<WorkerMeters>> = None;
        for attempt in 1.. {
            let booking_id = self.app.ids.booking(self.request_id);
            let request = RouteRequest {
                request_id: Some(&booking_id),
                deadline: deadline.map(|deadline| deadline.saturating_sub(asked.elapsed())),
                ..request
            };
            let routed = Instant::now();
            let placement = match self.place(request, &mut elsewhere).await {
                Ok(placement) => placement,
                Err(error) if attempt == 1 => return Err(error.into_response()),
                // Nobody else can serve it, so what is known stands.
                Err(_) => {
                    if holds_retry {
                        self.app.retry_budget.give_back(Instant::now());
                    }
                    break;
                }
            };
            account.waited_since(routed);
            if let Some((reason, worker)) = failures.reasons.last().zip(last_worker.take()) {
                self.model.meters.retried(*reason);
                worker.retried(*reason);
            }
            let mut sent = self.model.workers.sent(&placement);
            let failure = match self.attempt(account, &placement, &mut sent).await {
                Ok((head, body, checked)) => {
                    let ending = if head.status.is_success() { Ending::Served } else { Ending::ClientError };
                    let has_blamed = reports.settle(ending);
                    let output_tokens = request.expected_output_tokens;
                    return Ok(Begin { placement, sent, head, body, checked, output_tokens, has_blamed });
                }
                Err(failure) => failure,
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
            last_worker = Some(Arc::clone(sent.worker()));
            let may_retry = self.is_worth_a_retry(failure.reason(), &failures.reasons);
            let is_unreachable = failure.is_unreachable();
            elsewhere.than(&placement, &failure, self);
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
            if !self.app.retry_budget.take(Instant::now()) {
                self.app.meters.retry_denied();
                break;
            }
            holds_retry = true;
        }
        reports.settle(Ending::Failed);
        Err(failures.answer(self.request_id))
    }

    /// Whether another attempt may end better than this one and those before.
    fn is_worth_a_retry(&self, reason: RetryReason, before: &[RetryReason]) -> bool {
        match reason {
            // The same work would only begin anew: once where a stream's first token is late, never where all of the
            // answer had the time to come.
            RetryReason::Timeout => self.kind == AnswerKind::Events && !before.contains(&reason),
            // Two workers that agree are right.
            RetryReason::Misconfigured => !before.contains(&reason),
            RetryReason::Connect
            | RetryReason::Broken
            | RetryReason::Busy
            | RetryReason::ServerError
            | RetryReason::InvalidAnswer => true,
        }
    }

    /// A rank for the next try: another worker's, else another rank, else perhaps the same.
    async fn place(&self, request: RouteRequest<'_>, elsewhere: &mut Elsewhere) -> Result<Placement, ApiError> {
        let within = Duration::from_millis(self.app.settings.gateway.queue_timeout_ms);
        let route = async |constraints: Option<&Constraints>| {
            let routed = timeout(within, self.model.router.route(RouteRequest { constraints, ..request })).await;
            routed.map_err(|_| ApiError::queue_timeout())?.map_err(ApiError::from)
        };
        let failing = self.model.workers.failing();
        if elsewhere.ranks.is_empty() && failing.is_empty() {
            return route(None).await;
        }
        let excluded_ranks = elsewhere.workers.union(&failing).copied().collect();
        let other_workers = Constraints { excluded_ranks, ..Constraints::default() };
        let other_ranks = Constraints { excluded_ranks: elsewhere.ranks.clone(), ..Constraints::default() };
        // Whoever has waited in vain has waited long enough.
        let is_refused =
            |placed: &Result<_, ApiError>| placed.as_ref().is_err_and(|error| *error != ApiError::queue_timeout());
        let mut placed = route(Some(&other_workers)).await;
        if is_refused(&placed) && other_workers != other_ranks {
            placed = route(Some(&other_ranks)).await;
        }
        if is_refused(&placed) && (elsewhere.ranks.is_empty() || std::mem::take(&mut elsewhere.same_again)) {
            placed = route(None).await;
        }
        placed
    }

    /// All ranks of a rank's worker.
    fn siblings(&self, rank: WorkerRank) -> impl Iterator<Item = WorkerRank> + use<> {
        let workers = self.model.router.workers();
        let entry = workers.iter().find(|entry| entry.worker == rank.worker).cloned();
        entry.into_iter().flat_map(|entry| entry.ranks)
    }

    /// One attempt: the head of an answer and its body, which is known to be a valid one if the status says success.
    async fn attempt(
        &self,
        account: &mut Account,
        placement: &Placement,
        sent: &mut WorkerRequest,
    ) -> Result<Checked, Failure> {
        let request = self.request(placement).map_err(Failure::Silence)?;
        account.sent(placement);
        let settings = &self.app.settings.gateway;
        let within = match self.kind {
            AnswerKind::Events => settings.first_byte_timeout_ms,
            AnswerKind::Json => settings.answer_timeout_ms,
        };
        let within = Duration::from_millis(within);
        let begun = async {
            let (head, body) = self.app.upstream.send(request).await.map_err(Failure::Silence)?.into_parts();
            sent.answered(head.status);
            if head.status.is_success() {
                let checked = self.check(&head.headers).map_err(Failure::Invalid)?;
                let begun = match checked {
                    Some(kind) => Begun::valid(body, kind).await?,
                    None => Begun::any(body).await?,
                };
                return Ok((head, begun, checked));
            }
            if is_retried(head.status) {
                let body = Limited::new(body, ERROR_BYTES_MAX).collect().await.ok();
                let body = body.map(http_body_util::Collected::to_bytes);
                return Err(Failure::Status { status: head.status, headers: head.headers, body });
            }
            if !head.status.is_client_error() {
                // Nothing that clients of models are told: they would be sent elsewhere, or into another protocol.
                return Err(Failure::Silence(UpstreamError::Status(head.status)));
            }
            Ok((head, Begun::any(body).await?, None))
        };
        timeout(within, begun).await.unwrap_or(Err(Failure::Silence(UpstreamError::Timeout(within))))
    }

    /// How the body of a successful answer is checked, by its headers; `None` where its content cannot be read.
    fn check(&self, headers: &HeaderMap) -> Result<Option<AnswerKind>, String> {
        let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        // vLLM sends embeddings in this form if a client asks for `encoding_format: bytes`.
        let is_binary = self.endpoint == Endpoint::Embeddings && content_type.starts_with(b"application/octet-stream");
        let is_encoded = headers.get(CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity");
        if is_binary || is_encoded {
            return Ok(None);
        }
        if self.kind.accepts(content_type) {
            return Ok(Some(self.kind));
        }
        Err(format!("content type {:?}", String::from_utf8_lossy(content_type)))
    }

    fn request(&self, placement: &Placement) -> Result<Request<Full<Bytes>>, UpstreamError> {
        let endpoint = placement.endpoint();
        let address = || UpstreamError::Address(endpoint.to_owned());
        let url = [endpoint.trim_end_matches('/'), self.endpoint.path()].concat();
        let url = Uri::try_from(url).map_err(|_| address())?;
        let rank = placement.rank_at_worker();
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = axum::http::Method::POST;
        *request.uri_mut() = url;
        let own =
            ToWorker { request_id: self.request_id, data_parallel_rank: rank, authorization: self.authorization() };
        *request.headers_mut() = to_worker(self.headers, own);
        Ok(request)
    }

    /// A client's key passes where nobody here has looked at it, so that it can only be the worker's.
    fn authorization(&self) -> Authorization<'_> {
        match &self.app.worker_key {
            Some(key) => Authorization::Key(key),
            None if self.app.tenants.is_empty() => Authorization::Pass,
            None => Authorization::Drop,
        }
    }
}

/// Where a request has failed.
#[derive(Default)]
struct Elsewhere {
    /// The ranks that were tried.
    ranks: BTreeSet<WorkerRank>,
    /// These, and all ranks of workers that did not answer.
    workers: BTreeSet<WorkerRank>,
    /// Whether, where there is nobody else, the same rank may be tried once more.
    same_again: bool,
}

impl Elsewhere {
    fn than(&mut self, placement: &Placement, failure: &Failure, errand: &Errand<'_>) {
        let rank = placement.rank();
        self.same_again = failure.is_unheard() && self.ranks.is_empty();
        self.ranks.insert(rank);
        self.workers.insert(rank);
        match failure.reason() {
            RetryReason::Busy | RetryReason::ServerError => {}
            RetryReason::Connect | RetryReason::Timeout | RetryReason::Broken | RetryReason::InvalidAnswer => {
                self.workers.extend(errand.siblings(rank));
            }
            // No rank of this engine answers differently.
            RetryReason::Misconfigured => {
                self.workers.extend(errand.siblings(rank));
                self.ranks.extend(errand.siblings(rank));
            }
        }
    }
}

/// Outcomes of failed attempts that wait for the end of their request. Dropped before, the client has left: they count as
/// if no worker had answered.
struct Reports<'a> {
    errand: &'a Errand<'a>,
    suspects: Vec<Suspect>,
}

impl Reports<'_> {
    fn add(&mut self, placement: &Placement, failure: &Failure, mut sent: WorkerRequest) {
        let (rank, outcome) = (placement.rank(), failure.outcome());
        // The whole answer of a long generation may be late at a rank that serves others meanwhile.
        let is_long_answer =
            outcome == Outcome::Timeout && self.errand.kind == AnswerKind::Json && sent.has_rank_sent();
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
            // A fact about the endpoint, and so about all ranks behind it.
            placement.outcome(outcome);
            self.report_siblings(rank, outcome);
        } else if !is_long_answer {
            let unsettled = Some(self.errand.model.workers.failed(rank));
            self.suspects.push(Suspect { rank, outcome, sent, unsettled });
        }
    }

    /// Reports what counts. Returns whether anything does.
    fn settle(&mut self, ending: Ending) -> bool {
        let culprit = culprit(&self.suspects, ending);
        let outcome = if ending == Ending::Served { Outcome::Misconfigured.label() } else { "client_error" };
        for sent in self.suspects.drain(..).filter_map(|suspect| suspect.sent) {
            { sent }.ended(outcome);
        }
        let Some((rank, outcome)) = culprit else { return false };
        self.errand.model.router.report_outcome(rank, outcome);
        if outcome == Outcome::Misconfigured {
            // Key and model are the engine's, and so the same for all ranks behind its endpoint.
            self.report_siblings(rank, outcome);
        }
        true
    }

    fn report_siblings(&self, rank: WorkerRank, outcome: Outcome) {
        for sibling in self.errand.siblings(rank).filter(|sibling| *sibling != rank) {
            self.errand.model.router.report_outcome(sibling, outcome);
        }
    }
}

impl Drop for Reports<'_> {
    fn drop(&mut self) {
        self.settle(Ending::Failed);
    }
}
