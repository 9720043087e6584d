//! Decision on one request: its rank, the endpoint of that rank, and the endpoint to fall back to.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri};
use axum::response::IntoResponse as _;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{Pin, PinMode, Placement, PrefillPlacement, Prompt, RouteRequest, Router, WhyLocal, WorkerEntry};
use tokio::time::{Instant, timeout};

use super::{PickRules, TEST_SELECTION};
use crate::admission::admit::Admitted;
use crate::admission::intake::receive;
use crate::admission::leases::QuotaLease;
use crate::formats::openai::{ApiError, BodyForm, Endpoint, request_id};
use crate::pools::disaggregation::{PrefillPool, PrefillResult};
use crate::pools::model::Model;
use crate::pools::readiness::causes::placement_error;
use crate::pools::workers::WorkerRequest;
use crate::proxy::account::Account;
use crate::proxy::context::RequestContext;
use crate::proxy::routable::{RoutableRequest, Target, body_limits};
use crate::proxy::{Answer, WorkerResponse, checked_kind, failure_outcome, follow};
use crate::settings::MessagesMode;

/// A request, as far as it has arrived.
pub(super) struct Arrival {
    pub(super) headers: HeaderMap,
    /// Path and query.
    pub(super) path: String,
    pub(super) body: Body,
    pub(super) has_body: bool,
    /// Endpoints to which the proxy limits the choice.
    pub(super) subset: Option<Vec<String>>,
    pub(super) rules: PickRules,
}

/// A booked request.
pub(super) struct Picked {
    pub(super) destination: Destination,
    pub(super) request_id: String,
    pub(super) has_body: bool,
    /// Headers of the response with the limits of the tenant.
    pub(super) limits: Vec<(HeaderName, HeaderValue)>,
    pub(super) body: Bytes,
    pub(super) placement: Placement,
    /// Booking of the prefill on another rank, until the response starts.
    pub(super) prefill: Option<Box<Placement>>,
    /// What a routed endpoint needs beyond its booking; absent for other paths.
    routed: Option<RoutedRequest>,
    /// Counts other requests against the limits of their tenant.
    _quota: Option<QuotaLease>,
}

/// A request to one of the endpoints that the gateway routes by prompt.
struct RoutedRequest {
    endpoint: Endpoint,
    prepared: RoutableRequest,
    account: Account,
    sent: WorkerRequest,
    is_reported: bool,
}

/// Chooses and books a rank. The error is the response for the client.
pub(super) async fn decide(context: Arc<RequestContext>, arrival: Arrival) -> Result<Box<Picked>, Response<Body>> {
    let request_id = request_id(&arrival.headers).map_or_else(|| context.ids.public(), str::to_owned);
    let path = arrival.path.split('?').next().unwrap_or_default();
    // Counts of tokens cause no work in the engine.
    let is_routed = |endpoint: &Endpoint| {
        arrival.has_body && *endpoint != Endpoint::CountTokens && endpoint.form() == BodyForm::Json
    };
    let Some(endpoint) = Endpoint::of_path(path).filter(is_routed) else {
        return decide_by_load(&context, arrival, request_id).await.map(Box::new).map_err(ApiError::into_response);
    };
    let mut account = Account::begin(&context, endpoint, &arrival.headers, &request_id);
    match decide_by_prompt(&context, &mut account, endpoint, arrival, &request_id).await {
        Ok((placement, prefill, destination, mut prepared)) => {
            if let Some((prefill, side)) = prefill.as_ref().zip(prepared.model.prefill.as_ref()) {
                account.prefill_sent(&side.model.meters, prefill);
            }
            account.sent(&placement);
            let sent = prepared.model.workers.sent(&placement);
            let body = std::mem::take(&mut prepared.body);
            let limits = account.quota_headers();
            let routed = Some(RoutedRequest { endpoint, prepared, account, sent, is_reported: false });
            let (has_body, _quota) = (true, None);
            Ok(Box::new(Picked { destination, request_id, has_body, limits, body, placement, prefill, routed, _quota }))
        }
        Err(error) => Err(account.complete_with(Some(error.code), error.into_response())),
    }
}

async fn decide_by_prompt(
    context: &Arc<RequestContext>,
    account: &mut Account,
    endpoint: Endpoint,
    arrival: Arrival,
    request_id: &str,
) -> Result<(Placement, Option<Box<Placement>>, Destination, RoutableRequest), ApiError> {
    let Arrival { headers, body, subset, rules, .. } = arrival;
    let uri = Uri::from_static(endpoint.path());
    let target = Target { endpoint, method: &Method::POST, uri: &uri, is_forwarded: false };
    // The proxy forwards the response, so that it cannot be converted.
    let messages = Some(MessagesMode::Pass);
    let prepared = RoutableRequest::receive(context, account, target, (&headers, body), messages, None).await?;
    let mut request = prepared.request();
    request.request_id = Some(context.ids.booking(request_id).into());
    let allowed = allowed_workers(&prepared.model.router, subset.as_deref(), &headers, rules)?;
    request.options.constraints.allowed_workers = allowed;
    request.options.phases = account.trace.wants_phases();
    let routed = Instant::now();
    let pool = prepared.model.prefill.as_ref().map(|side| &side.pool);
    request.options.routing_hashes = pool.is_some_and(|pool| pool.pools.hashes_alike());
    let placement = place(context, &prepared.model, request.clone()).await?;
    account.placed_since(routed, &placement);
    let routed = Instant::now();
    let prefill = match pool {
        Some(pool) => place_prefill(context, pool, request.clone(), &placement).await?,
        None => None,
    };
    account.waited_since(routed);
    let destination = destination(&prepared.model, &placement, request, rules).await?;
    Ok((placement, prefill, destination, prepared))
}

/// Books the prefill of a request on another rank, if the conditions for it hold. A sidecar of the decode worker sends
/// the prefill leg.
async fn place_prefill(
    context: &RequestContext,
    pool: &PrefillPool,
    mut request: RouteRequest<'_>,
    decode: &Placement,
) -> Result<Option<Box<Placement>>, ApiError> {
    // The proxy does not report the end of the prefill leg, which precedes the head of the response.
    request.options.not_streamed = true;
    let within = context.placement_timeout(pool.pools.prefill(), &request.options);
    let placed = timeout(within, pool.place(request, &BTreeSet::new(), decode)).await;
    let (result, prefill) = match placed.map_err(|_| ApiError::queue_timeout())?? {
        PrefillPlacement::Remote(prefill) => (PrefillResult::Remote, Some(prefill)),
        PrefillPlacement::Local(WhyLocal::Skipped(_)) | PrefillPlacement::Completed => (PrefillResult::Skipped, None),
        PrefillPlacement::Local(WhyLocal::Fallback(_)) => (PrefillResult::Fallback, None),
    };
    pool.legs.served(result);
    prefill.iter().for_each(|prefill| pool.legs.sent((prefill.rank(), decode.rank())));
    Ok(prefill)
}

/// Chooses a rank for a request without a readable prompt, such as a list of models.
async fn decide_by_load(
    context: &Arc<RequestContext>,
    arrival: Arrival,
    request_id: String,
) -> Result<Picked, ApiError> {
    let Arrival { headers, body, has_body, subset, rules, .. } = arrival;
    let Admitted { quota, .. } = context.admission.admit(&headers)?;
    let model = context.models.of_clients().next().ok_or_else(ApiError::not_found)?;
    let body = match has_body {
        true => receive(body, body_limits(context, &headers), &context.admission.budget).await?,
        false => Bytes::new(),
    };
    let mut request = RouteRequest::query(Prompt::Tokens(&[]));
    request.request_id = Some(context.ids.booking(&request_id).into());
    let allowed = allowed_workers(&model.router, subset.as_deref(), &headers, rules)?;
    request.options.constraints.allowed_workers = allowed;
    let placement = place(context, model, request.clone()).await?;
    let destination = destination(model, &placement, request, rules).await?;
    let limits = quota.as_ref().map(QuotaLease::headers).unwrap_or_default();
    let (prefill, routed) = (None, None);
    Ok(Picked { destination, request_id, has_body, limits, body, placement, prefill, routed, _quota: quota })
}

async fn place(context: &RequestContext, model: &Model, request: RouteRequest<'_>) -> Result<Placement, ApiError> {
    let within = context.placement_timeout(&model.router, &request.options);
    let routed = timeout(within, model.router.route(request)).await;
    routed.map_err(|_| ApiError::queue_timeout())?.map_err(|error| placement_error(&model.router, error))
}

/// Destination of a request at the proxy.
pub(super) struct Destination {
    /// The chosen endpoint, then the one to fall back to.
    pub(super) endpoints: Vec<String>,
    /// `Authorization` for the first endpoint, replacing the client's.
    pub(super) authorization: Option<HeaderValue>,
}

async fn destination(
    model: &Model,
    placement: &Placement,
    request: RouteRequest<'_>,
    rules: PickRules,
) -> Result<Destination, ApiError> {
    let authorization = model.access.authorization(placement.rank().worker).map_err(|error| {
        tracing::debug!(worker = placement.endpoint(), %error, "no API key for the worker");
        ApiError::unavailable(StatusCode::BAD_GATEWAY, "worker_failed", "the API key of the worker cannot be read")
    })?;
    let endpoints = endpoints(model, placement, request, rules, authorization.as_ref()).await;
    Ok(Destination { endpoints, authorization })
}

/// The endpoint of the placement, then that of the next best worker. A worker with several ranks at one endpoint has no
/// substitute, because the rank is in a header that stays the same, and a worker with another key is none.
async fn endpoints(
    model: &Model,
    placement: &Placement,
    mut request: RouteRequest<'_>,
    rules: PickRules,
    authorization: Option<&HeaderValue>,
) -> Vec<String> {
    let mut endpoints = vec![address(placement.endpoint())];
    let workers = model.router.workers();
    if !rules.has_fallback || placement.rank_at_worker().is_some() || workers.len() < 2 {
        return endpoints;
    }
    request.options.constraints.excluded_ranks.insert(placement.rank());
    request.options.do_not_queue = true;
    let Ok(decision) = model.router.find_best_match(request).await else { return endpoints };
    let worker = decision.rank().worker;
    let has_key = model.access.authorization(worker).is_ok_and(|key| key.as_ref() == authorization);
    let next = workers.iter().find(|entry| entry.worker == worker && entry.ranks.len() == 1 && has_key);
    endpoints.extend(next.map(|entry| address(&entry.config.endpoint)));
    endpoints
}

/// Workers to which the proxy limits the choice, or a client of a conformance test; `None`: all.
fn allowed_workers(
    router: &Router,
    subset: Option<&[String]>,
    headers: &HeaderMap,
    rules: PickRules,
) -> Result<Option<BTreeSet<WorkerId>>, ApiError> {
    let among = |entry: &WorkerEntry, endpoints: &[String]| {
        let address = address(&entry.config.endpoint);
        endpoints.iter().any(|endpoint| is_at(&address, endpoint))
    };
    let workers = router.workers();
    let of = |endpoints: &[String]| -> BTreeSet<WorkerId> {
        workers.iter().filter(|entry| among(entry, endpoints)).map(|entry| entry.worker).collect()
    };
    let mut allowed = subset.map(of);
    if allowed.as_ref().is_some_and(BTreeSet::is_empty) {
        return Err(ApiError::no_endpoint());
    }
    if rules.is_conformance
        && let Some(selected) = headers.get(TEST_SELECTION).and_then(|value| value.to_str().ok())
    {
        let selected: Vec<String> = selected.split(',').map(|part| part.trim().to_owned()).collect();
        let selected = of(&selected);
        let both = match &allowed {
            Some(allowed) => allowed.intersection(&selected).copied().collect(),
            None => selected,
        };
        // Unknown endpoints do not limit the choice.
        allowed = if both.is_empty() { allowed } else { Some(both) };
    }
    Ok(allowed)
}

/// `HOST:PORT` of a worker's endpoint.
pub(super) fn address(endpoint: &str) -> String {
    let (rest, port) = match endpoint.split_once("://") {
        Some(("https", rest)) => (rest, 443),
        Some((_, rest)) => (rest, 80),
        None => (endpoint, 80),
    };
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_port { authority.to_owned() } else { format!("{authority}:{port}") }
}

/// Whether an address is this endpoint: `HOST:PORT`, or `HOST` for any port.
fn is_at(address: &str, endpoint: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    address == endpoint || host == endpoint || bare == endpoint
}

impl Picked {
    /// Value of `traceparent` for the worker, if the request has spans.
    pub(super) fn trace_header(&self) -> Option<HeaderValue> {
        self.routed.as_ref()?.account.trace.attempt_header()
    }

    /// Moves the booking to the worker that serves the request, because the chosen one failed. Returns whether there is
    /// such a worker; otherwise the booking ends.
    pub(super) async fn move_to(&mut self, context: &RequestContext, served: &str) -> bool {
        let Some(routed) = &mut self.routed else { return false };
        let workers = routed.prepared.model.router.workers();
        let entry = workers.iter().find(|entry| address(&entry.config.endpoint) == served);
        routed.sent.ended("moved");
        routed.account.trace.attempt_failed("moved");
        self.placement.outcome(pointsman::Outcome::ServerError);
        let Some(entry) = entry else {
            routed.account.complete();
            return false;
        };
        let mut request = routed.prepared.request();
        request.request_id = Some(context.ids.booking(&self.request_id).into());
        let rank = entry.ranks.first().map(|rank: &WorkerRank| rank.rank);
        request.options.constraints.pin = Some(Pin { worker: entry.worker, rank, mode: PinMode::Hard });
        request.options.do_not_queue = true;
        request.options.phases = routed.account.trace.wants_phases();
        let then = Instant::now();
        let Ok(placement) = routed.prepared.model.router.route(request).await else { return false };
        routed.account.placed_since(then, &placement);
        routed.account.sent(&placement);
        routed.sent = routed.prepared.model.workers.sent(&placement);
        routed.is_reported = true;
        self.placement = placement;
        true
    }

    /// Follows the response; `None` if nobody reads it.
    pub(super) fn follow(
        self,
        context: &Arc<RequestContext>,
        (status, headers): (StatusCode, HeaderMap),
        body: Body,
    ) -> Option<Answer<Body>> {
        if let Some(prefill) = self.prefill {
            prefill.prefill_completed();
        }
        let RoutedRequest { endpoint, prepared, account, mut sent, is_reported } = self.routed?;
        let mut response = Response::new(());
        (*response.status_mut(), *response.headers_mut()) = (status, headers);
        let head = response.into_parts().0;
        sent.answered(status);
        let mut checked = None;
        if status.is_success() {
            checked = checked_kind(endpoint, prepared.kind, &head.headers).unwrap_or_default();
        } else if let Some(outcome) = failure_outcome(status, &head.headers) {
            self.placement.outcome(outcome);
        }
        let output_tokens = prepared.request().options.forecast_output_tokens();
        let begin = WorkerResponse {
            placement: self.placement,
            sent,
            head,
            body,
            checked,
            output_tokens,
            is_reported,
            prefill: None,
        };
        Some(follow(context, account, begin, &self.request_id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_port() {
        for (endpoint, expected) in [
            ("http://10.0.0.1:8000", "10.0.0.1:8000"),
            ("http://10.0.0.1:8000/v1", "10.0.0.1:8000"),
            ("http://10.0.0.1", "10.0.0.1:80"),
            ("https://engine.example/", "engine.example:443"),
            ("http://[fd00::1]:8000", "[fd00::1]:8000"),
            ("http://[fd00::1]", "[fd00::1]:80"),
        ] {
            assert_eq!(address(endpoint), expected);
        }
    }

    #[test]
    fn subsets_name_addresses_or_hosts() {
        assert!(is_at("10.0.0.1:8000", "10.0.0.1:8000") && is_at("10.0.0.1:8000", "10.0.0.1"));
        assert!(is_at("[fd00::1]:8000", "fd00::1") && is_at("[fd00::1]:8000", "[fd00::1]"));
        assert!(!is_at("10.0.0.1:8000", "10.0.0.1:8001") && !is_at("10.0.0.10:8000", "10.0.0.1"));
    }
}
