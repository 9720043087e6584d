//! One request to one worker: URL, headers, credentials and time limits.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::Full;
use pointsman::protocol::WorkerRank;
use pointsman::{AnswerKind, Placement};
use serde_json::json;
use tokio::time::Instant;

use super::account::Account;
use super::begin::TimeLimit;
use super::context::RequestContext;
use super::engine_calls::EngineCalls;
use super::exchange::{Checked, exchange};
use super::failure::Failure;
use super::heartbeats::Heartbeats;
use super::hints::{Hints, with_fields};
use super::prefill_report::PrefillReport;
use super::refusal::Refusal;
use crate::formats::openai::{Authorization, Endpoint, ToWorker, to_worker};
use crate::net::upstream::UpstreamError;
use crate::pools::model::Model;
use crate::pools::workers::WorkerRequest;

/// Data sent by every attempt of a request.
pub(super) struct Outbound<'a> {
    pub(super) context: &'a Arc<RequestContext>,
    pub(super) model: &'a Arc<Model>,
    pub(super) endpoint: Endpoint,
    /// Method and path at the worker.
    pub(super) call: (&'a Method, &'a str),
    /// Headers of the client.
    pub(super) headers: &'a HeaderMap,
    pub(super) request_id: &'a str,
    pub(super) body: Bytes,
    pub(super) hints: &'a Hints,
    /// Kind of a valid response: events for a streamed request.
    pub(super) kind: AnswerKind,
}

/// One attempt at a rank.
pub(super) struct Attempt<'a> {
    pub(super) outbound: &'a Outbound<'a>,
    pub(super) account: &'a mut Account,
    pub(super) placement: &'a Placement,
    pub(super) sent: &'a mut WorkerRequest,
}

impl Attempt<'_> {
    /// The request, counted as sent.
    pub(super) fn request(&mut self, outgoing: Outgoing<'_>) -> Result<Request<Full<Bytes>>, UpstreamError> {
        let mut request = self.outbound.request_to(self.outbound.model, self.placement, outgoing)?;
        self.account.sent(self.placement);
        self.account.trace.inject(request.headers_mut());
        Ok(request)
    }

    /// Sends it.
    pub(super) async fn send(&mut self, outgoing: Outgoing<'_>) -> Result<Checked, Failure> {
        let request = self.request(outgoing).map_err(Failure::NoResponse)?;
        let (rank, heartbeats) = (self.placement.rank(), self.account.heartbeats.clone());
        self.outbound.exchange(request, rank, heartbeats, |status| self.sent.answered(status)).await
    }

    /// Sends the whole request.
    pub(super) async fn whole(&mut self) -> Result<Started, AttemptError> {
        let (body, request_id) = (self.hinted_body(), self.outbound.request_id);
        let outgoing = Outgoing { body, request_id, names_rank: true };
        let checked = self.send(outgoing).await.map_err(AttemptError::Failed)?;
        Ok(Started { checked, prefill: None, served_by: None })
    }

    /// The body with the hints that the engine of the placement receives. Its session is open from now on.
    fn hinted_body(&mut self) -> Bytes {
        let (Outbound { context, model, body, hints, .. }, placement) = (self.outbound, self.placement);
        let worker = placement.rank().worker;
        let (fields, session) = hints.of(&model.settings.name, model.access.hints(worker));
        self.account.engine_session = session.map(|id| {
            let close = || {
                let bodies = vec![json!({ "session_id": id }).to_string()];
                self.outbound.calls_at_end(model, placement, "/close_session", bodies)
            };
            context.engine_sessions.called(&id, worker, close)
        });
        with_fields(body, &fields)
    }
}

impl Outbound<'_> {
    /// Sends a request to the rank: response head and body, validated if the status is a success.
    pub(super) fn exchange<F: FnOnce(StatusCode)>(
        &self,
        request: Request<Full<Bytes>>,
        rank: WorkerRank,
        heartbeats: Option<Arc<Heartbeats>>,
        on_head: F,
    ) -> impl Future<Output = Result<Checked, Failure>> + use<F> {
        let (upstream, kinds) = (self.context.upstream.clone(), (self.endpoint, self.kind));
        // Heartbeats prove that an engine works, up to the time of a response that is not streamed.
        let answer_max = Duration::from_millis(self.context.settings.gateway.answer_timeout_ms);
        let limit = TimeLimit::new(self.response_time_max(), answer_max, (self.model, rank));
        exchange(upstream, request, kinds, (limit, heartbeats), on_head)
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
        let (method, path) = self.call;
        let url = [endpoint.trim_end_matches('/'), path].concat();
        let url = Uri::try_from(url).map_err(|_| address())?;
        let rank = placement.rank_at_worker().filter(|_| outgoing.names_rank);
        let mut request = Request::new(Full::new(outgoing.body));
        request.method_mut().clone_from(method);
        *request.uri_mut() = url;
        let key = model.access.authorization(placement.rank().worker)?;
        let authorization = self.authorization(key.as_ref());
        let own = ToWorker { request_id: outgoing.request_id, data_parallel_rank: rank, authorization };
        *request.headers_mut() = to_worker(self.headers, own);
        if let Some(protocol) = self.headers.get(UPGRADE).filter(|_| self.endpoint == Endpoint::Realtime) {
            request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
            request.headers_mut().insert(UPGRADE, protocol.clone());
        }
        Ok(request)
    }

    /// Abort of the leg of a placement by these ids.
    pub(super) fn abort_of(&self, model: &Model, placement: &Placement, ids: Vec<String>) -> EngineCalls {
        let bodies = ids.iter().map(|id| json!({ "rid": id }).to_string());
        self.calls_at_end(model, placement, "/abort_request", bodies.collect())
    }

    /// Calls of the worker of a placement.
    pub(super) fn calls_at_end(
        &self,
        model: &Model,
        placement: &Placement,
        path: &str,
        bodies: Vec<String>,
    ) -> EngineCalls {
        let key = model.access.authorization(placement.rank().worker);
        let (false, Ok(key)) = (bodies.is_empty(), key) else { return EngineCalls::default() };
        let authorization = self.authorization(key.as_ref());
        let own = ToWorker { request_id: self.request_id, data_parallel_rank: None, authorization };
        let url = [placement.endpoint().trim_end_matches('/'), path].concat();
        EngineCalls::new(&self.context.upstream, url, &to_worker(self.headers, own), bodies)
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
    pub(super) body: Bytes,
    pub(super) request_id: &'a str,
    /// Whether a header names the data-parallel rank.
    pub(super) names_rank: bool,
}

/// A started response of one attempt.
pub(super) struct Started {
    pub(super) checked: Checked,
    pub(super) prefill: Option<PrefillReport>,
    /// The prefill rank, if it sent the response.
    pub(super) served_by: Option<(Placement, WorkerRequest)>,
}

/// End of an attempt without a response for the client.
pub(super) enum AttemptError {
    /// The decode rank failed; another one may not.
    Failed(Failure),
    /// No other rank helps.
    Final(Refusal),
}
