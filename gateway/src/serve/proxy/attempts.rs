//! The tries of one request, until a worker has begun to answer.
//!
//! Owns where it is tried next, and what is said when nobody answers. Promises at most `attempts_max` tries, retries within
//! the gateway's budget, and none once a byte of an answer is there: until then the client has been told nothing. A retry
//! goes to another worker, or where there is none to another rank; to the same one only where that is the only one and
//! nothing was heard of it, as when it closed a connection that was just taken up again. Leaves the rest of the answer to [`Answer`](super::answer::Answer).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, Response, StatusCode, Uri};
use axum::response::IntoResponse as _;
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use pointsman::health::Outcome;
use pointsman::protocol::WorkerRank;
use pointsman::select::Constraints;
use pointsman::{Placement, RouteRequest};
use tokio::time::{Instant, timeout};

use super::answer::Begun;
use crate::openai::{ApiError, Authorization, Endpoint, ToWorker, to_client, to_worker};
use crate::serve::App;
use crate::serve::metrics::{Account, RetryReason};
use crate::serve::models::Model;
use crate::upstream::UpstreamError;

/// The longest error of a worker that is kept, in case nobody else answers.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// What every try of a request sends.
pub(super) struct Errand<'a> {
    pub(super) app: &'a Arc<App>,
    pub(super) model: &'a Arc<Model>,
    pub(super) endpoint: Endpoint,
    /// The client's.
    pub(super) headers: &'a HeaderMap,
    pub(super) request_id: &'a str,
    pub(super) body: Bytes,
    /// Whether the answer is streamed. If not its first byte comes when all of it is there, and lateness says nothing of the
    /// rank.
    pub(super) is_streamed: bool,
}

/// A worker has begun to answer.
pub(super) struct Begin {
    pub(super) placement: Placement,
    pub(super) head: axum::http::response::Parts,
    pub(super) body: Begun,
    /// As much as the client allows.
    pub(super) output_tokens: Option<u32>,
}

/// Why a try came to nothing.
enum Failure {
    /// There was no answer.
    Silence(UpstreamError),
    /// There was one, and another rank might give a better one.
    Refusal {
        status: StatusCode,
        headers: HeaderMap,
        /// Absent where it was too long or broke off.
        body: Option<Bytes>,
    },
}

impl Failure {
    fn reason(&self) -> RetryReason {
        match self {
            Self::Silence(UpstreamError::Connect(_) | UpstreamError::Address(_)) => RetryReason::Connect,
            Self::Silence(UpstreamError::Timeout(_)) => RetryReason::Timeout,
            Self::Silence(UpstreamError::Broken(_) | UpstreamError::TooLong(_) | UpstreamError::Status(_)) => {
                RetryReason::Broken
            }
            Self::Refusal { status, .. } if is_busy(*status) => RetryReason::Busy,
            Self::Refusal { .. } => RetryReason::ServerError,
        }
    }

    /// What it says of the rank's health. Who is busy (429, and 503 as engines say it whose queue is full) is well.
    fn outcome(&self) -> Outcome {
        match self {
            Self::Silence(error) => error.outcome(),
            Self::Refusal { status, .. } if status.is_server_error() && !is_busy(*status) => Outcome::ServerError,
            Self::Refusal { .. } => Outcome::Ok,
        }
    }

    /// Whether nothing at all was heard of the worker.
    fn is_unheard(&self) -> bool {
        matches!(self.reason(), RetryReason::Connect | RetryReason::Broken)
    }
}

fn is_busy(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE
}

impl Errand<'_> {
    /// Goes from rank to rank until one has begun to answer.
    ///
    /// # Errors
    /// What the client is to be told when none does: a worker's own error where one gave any.
    pub(super) async fn run(&self, account: &mut Account, request: RouteRequest<'_>) -> Result<Begin, Response<Body>> {
        let (asked, deadline) = (account.started(), request.deadline);
        let (mut elsewhere, mut failures) = (Elsewhere::default(), Failures::default());
        let attempts_max = self.app.settings.gateway.attempts_max;
        for attempt in 1.. {
            let booking_id = self.app.ids.next();
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
                    self.app.retry_budget.give_back(Instant::now());
                    break;
                }
            };
            account.waited_since(routed);
            if let Some(reason) = failures.last {
                self.model.meters.retried(reason);
            }
            let failure = match self.attempt(account, &placement).await {
                Ok((head, body)) => {
                    let output_tokens = request.expected_output_tokens;
                    return Ok(Begin { placement, head, body, output_tokens });
                }
                Err(failure) => failure,
            };
            let is_late = failure.reason() == RetryReason::Timeout && !self.is_streamed;
            if !is_late {
                self.blame(&placement, failure.outcome());
            }
            tracing::debug!(
                request_id = self.request_id,
                worker = placement.endpoint(),
                rank = placement.rank().rank,
                attempt,
                reason = failure.reason().name(),
                "a try came to nothing"
            );
            elsewhere.than(&placement, &failure, self);
            drop(placement);
            failures.add(failure);
            // The same work would only begin anew.
            if is_late || attempt >= attempts_max {
                break;
            }
            if !self.app.retry_budget.take(Instant::now()) {
                self.app.meters.retry_denied();
                break;
            }
        }
        Err(failures.answer(self.request_id))
    }

    /// A rank for the next try: another worker's, else another rank, else perhaps the same.
    async fn place(&self, request: RouteRequest<'_>, elsewhere: &mut Elsewhere) -> Result<Placement, ApiError> {
        let within = Duration::from_millis(self.app.settings.gateway.queue_timeout_ms);
        let route = async |constraints: Option<&Constraints>| {
            let routed = timeout(within, self.model.router.route(RouteRequest { constraints, ..request })).await;
            routed.map_err(|_| ApiError::queue_timeout())?.map_err(ApiError::from)
        };
        if elsewhere.ranks.is_empty() {
            return route(None).await;
        }
        let other_workers = Constraints { excluded_ranks: elsewhere.workers.clone(), ..Constraints::default() };
        let other_ranks = Constraints { excluded_ranks: elsewhere.ranks.clone(), ..Constraints::default() };
        // Whoever has waited in vain has waited long enough.
        let is_refused =
            |placed: &Result<_, ApiError>| placed.as_ref().is_err_and(|error| *error != ApiError::queue_timeout());
        let mut placed = route(Some(&other_workers)).await;
        if is_refused(&placed) && other_workers != other_ranks {
            placed = route(Some(&other_ranks)).await;
        }
        if is_refused(&placed) && std::mem::take(&mut elsewhere.same_again) {
            placed = route(None).await;
        }
        placed
    }

    /// Reports how a try went. That nobody could be connected to is true of all ranks behind the endpoint.
    fn blame(&self, placement: &Placement, outcome: Outcome) {
        placement.outcome(outcome);
        if outcome == Outcome::ConnectFailed {
            for rank in self.siblings(placement.rank()).filter(|rank| *rank != placement.rank()) {
                self.model.router.report_outcome(rank, outcome);
            }
        }
    }

    /// All ranks of a rank's worker.
    fn siblings(&self, rank: WorkerRank) -> impl Iterator<Item = WorkerRank> + use<> {
        let workers = self.model.router.workers();
        let entry = workers.iter().find(|entry| entry.worker == rank.worker).cloned();
        entry.into_iter().flat_map(|entry| entry.ranks)
    }

    /// One try: the head of the answer and its body, of which the first byte is there.
    async fn attempt(
        &self,
        account: &mut Account,
        placement: &Placement,
    ) -> Result<(axum::http::response::Parts, Begun), Failure> {
        let request = self.request(placement).map_err(Failure::Silence)?;
        account.sent(placement);
        let settings = &self.app.settings.gateway;
        let within = if self.is_streamed { settings.first_byte_timeout_ms } else { settings.answer_timeout_ms };
        let within = Duration::from_millis(within);
        let begun = async {
            let (head, mut body) = self.app.upstream.send(request).await.map_err(Failure::Silence)?.into_parts();
            if head.status.is_server_error() || head.status == StatusCode::TOO_MANY_REQUESTS {
                let body = Limited::new(body, ERROR_BYTES_MAX).collect().await.ok();
                let body = body.map(http_body_util::Collected::to_bytes);
                return Err(Failure::Refusal { status: head.status, headers: head.headers, body });
            }
            if !head.status.is_success() && !head.status.is_client_error() {
                // Nothing that clients of models are told: they would be sent elsewhere, or into another protocol.
                return Err(Failure::Silence(UpstreamError::Status(head.status)));
            }
            let first = first_frame(&mut body).await.map_err(Failure::Silence)?;
            Ok((head, Begun::new(first, body)))
        };
        timeout(within, begun).await.unwrap_or(Err(Failure::Silence(UpstreamError::Timeout(within))))
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
        if matches!(failure, Failure::Silence(_)) {
            self.workers.extend(errand.siblings(rank));
        }
    }
}

/// The first frame that says anything; `None` where the body is empty.
async fn first_frame(body: &mut Incoming) -> Result<Option<Frame<Bytes>>, UpstreamError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| UpstreamError::Broken(error.to_string()))?;
        if !frame.data_ref().is_some_and(Bytes::is_empty) {
            return Ok(Some(frame));
        }
    }
    Ok(None)
}

/// What has gone wrong so far.
#[derive(Default)]
struct Failures {
    last: Option<RetryReason>,
    /// The last error that a worker gave itself.
    told: Option<(StatusCode, HeaderMap, Bytes)>,
}

impl Failures {
    fn add(&mut self, failure: Failure) {
        self.last = Some(failure.reason());
        if let Failure::Refusal { status, headers, body: Some(body) } = failure {
            self.told = Some((status, headers, body));
        }
    }

    fn answer(self, request_id: &str) -> Response<Body> {
        if let Some((status, headers, body)) = self.told {
            let mut response = Response::new(Body::from(body));
            *response.status_mut() = status;
            *response.headers_mut() = to_client(&headers, request_id);
            return response;
        }
        match self.last {
            Some(RetryReason::Timeout) => ApiError::worker_timeout().into_response(),
            Some(RetryReason::Connect | RetryReason::Broken | RetryReason::Busy | RetryReason::ServerError) | None => {
                ApiError::worker_failed().into_response()
            }
        }
    }
}
