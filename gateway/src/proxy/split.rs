//! Requests with two legs: prefill on one rank, decode on another.
//!
//! The decode rank is booked first. The prefill leg then runs before the decode leg, or beside it if the protocol sends
//! both at once. A prefill rank that fails is replaced by another one, then by the decode rank itself if it can compute
//! prompts. Both bookings end with their legs, however they end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Response, StatusCode};
use pointsman::{AnswerKind, Constraints, DisaggError, Outcome, Placement, PrefillPlacement, RouteRequest, WhyLocal};
use tokio::time::{Instant, timeout};

use super::account::Account;
use super::begin::ResponseStart;
use super::engine_abort::EngineAbort;
use super::exchange::{Checked, exchange};
use super::failure::{Ending, Failure, Failures};
use super::leg::Leg;
use super::outbound::{AttemptError, Outbound, Outgoing, Started};
use super::prefill_leg::{LegError, PrefillEnd, PrefillLeg};
use super::prefill_report::{NextTurn, PrefillReport};
use super::refusal::Refusal;
use super::reports::{Reports, siblings};
use crate::formats::handover::{LegBodies, NotSplit, Protocol, Transfer};
use crate::formats::openai::{ApiError, Endpoint};
use crate::net::upstream::UpstreamError;
use crate::pools::disaggregation::{PrefillResult, PrefillValues};
use crate::pools::model::{Model, PrefillSide};
use crate::pools::readiness::causes::placement_error;
use crate::pools::workers::WorkerRequest;

/// Time for a hand-over in progress to end after its client has left. A torn hand-over can block SGLang's engines.
const LINGER_MAX: Duration = Duration::from_secs(30);

/// The legs of a request to a model with a prefill pool.
pub(super) struct Split<'a> {
    side: &'a PrefillSide,
    bodies: Result<LegBodies, NotSplit>,
    include_usage: bool,
}

/// Both legs of a protocol that sends them at once. Dropped before their end, because the client has left, they continue
/// until the hand-over has ended, so that none is torn.
struct BothLegs {
    prefill: Option<Leg<PrefillEnd>>,
    decode: Option<Leg<Result<Checked, Failure>>>,
    decode_abort: EngineAbort,
    /// Kind of the response, if the legs continue.
    lingers: Option<AnswerKind>,
}

impl Drop for BothLegs {
    fn drop(&mut self) {
        let (Some(mut prefill), Some(mut decode)) = (self.prefill.take(), self.decode.take()) else { return };
        let Some(kind) = self.lingers else { return };
        let abort = std::mem::take(&mut self.decode_abort);
        tokio::spawn(async move {
            let handed_over = async {
                match kind {
                    // The first output of the decode leg proves that the hand-over has ended.
                    AnswerKind::Events => drop(decode.end().await),
                    // A whole response comes long after it. The prefill leg ends with the hand-over.
                    AnswerKind::Json if prefill.has_ended() => {}
                    AnswerKind::Json => tokio::select! {
                        biased;
                        end = decode.end() => drop(end),
                        end = prefill.end() => drop(end),
                    },
                }
            };
            let _ = timeout(LINGER_MAX, handed_over).await;
            drop((prefill, decode, abort));
        });
    }
}

/// Prefill ranks tried for one decode rank.
struct Tries<'a> {
    excluded: BTreeSet<pointsman::protocol::WorkerRank>,
    failures: Failures,
    reports: Reports<'a>,
}

impl<'a> Tries<'a> {
    fn new(model: &'a Model) -> Self {
        let reports = Reports::new(model, AnswerKind::Json);
        Self { excluded: BTreeSet::new(), failures: Failures::default(), reports }
    }
}

impl<'a> Split<'a> {
    pub(super) fn new(side: &'a PrefillSide, endpoint: Endpoint, body: Bytes, include_usage: bool) -> Self {
        Self { side, bodies: LegBodies::parse(endpoint, side.pool.protocol(), body), include_usage }
    }

    /// Whether the hashes of the decode rank's placement serve the prefill pool.
    pub(super) fn needs_hashes(&self) -> bool {
        self.bodies.is_ok() && self.side.pool.pools.hashes_alike()
    }

    /// Counts a request with a started response.
    pub(super) fn served(&self, prefill: Option<&PrefillReport>) {
        if let Some(prefill) = prefill {
            self.side.pool.served(prefill.result);
        }
    }

    /// One attempt with this decode rank, and several prefill ranks if need be.
    pub(super) async fn attempt(
        &self,
        outbound: &Outbound<'_>,
        account: &mut Account,
        request: &RouteRequest<'_>,
        (decode, sent): (&Placement, &mut WorkerRequest),
    ) -> Result<Started, AttemptError> {
        let Ok(bodies) = &self.bodies else {
            return self.on_decode_rank(outbound, account, (decode, sent), PrefillResult::Unsplit).await;
        };
        let PrefillSide { pool, model } = self.side;
        let mut tries = Tries::new(model);
        // Used once: after a failure the blocks may be gone.
        let mut previous_turn = pool.previous_turn(request.options.session_id.as_ref());
        for nth in 1..=pool.settings.prefill_attempts_max {
            let prefill = match self.place(outbound, account, request, decode, &tries.excluded).await {
                Ok(PrefillPlacement::Remote(prefill)) => *prefill,
                Ok(PrefillPlacement::Local(WhyLocal::Skipped(_))) => {
                    return self.on_decode_rank(outbound, account, (decode, sent), PrefillResult::Skipped).await;
                }
                Ok(PrefillPlacement::Local(WhyLocal::Fallback(_)) | PrefillPlacement::Completed) => break,
                Err(error) if nth == 1 => return Err(AttemptError::Final(error.into())),
                Err(_) => break,
            };
            tries.failures.reasons.last().iter().for_each(|reason| model.meters.retried(**reason));
            account.prefill_sent(&model.meters, &prefill);
            pool.leg_sent(&prefill, decode);
            let prefill_sent = model.workers.sent(&prefill);
            let (leg, handover) =
                match self.leg(outbound, account, (&prefill, decode), bodies, &mut previous_turn).await {
                    Ok(leg) => leg,
                    Err(error) => {
                        let end = PrefillEnd::unsent(prefill, prefill_sent, error);
                        if self.after_failure(outbound, &mut tries, end) {
                            continue;
                        }
                        break;
                    }
                };
            let (next_turn, leg) = (self.next_turn(request), leg.run(prefill, prefill_sent));
            let legs = Legs { bodies, handover: &handover, next_turn };
            let ended = if pool.protocol().is_concurrent() {
                self.at_once(outbound, account, (decode, &mut *sent), legs, leg).await
            } else {
                self.in_turn(outbound, account, (decode, &mut *sent), legs, leg).await
            };
            match ended {
                Ok(started) => {
                    tries.reports.settle(Ending::Served);
                    return Ok(started);
                }
                Err(SplitError::Stale) => {}
                Err(SplitError::Decode(failure)) => {
                    tries.reports.settle(Ending::Served);
                    return Err(AttemptError::Failed(failure));
                }
                Err(SplitError::Prefill(end)) => {
                    pool.forget(&handover.transfer);
                    if let Err(LegError::Refused(error)) = end.result {
                        sent.withdraw();
                        tries.reports.settle(Ending::ClientError);
                        return Err(AttemptError::Final(Refusal::Worker(error)));
                    } else if !self.after_failure(outbound, &mut tries, *end) {
                        break;
                    }
                }
            }
        }
        self.without_prefill_rank(outbound, account, (decode, sent), tries).await
    }

    /// The whole request on the decode rank after failures of prefill ranks, if it can compute prompts.
    async fn without_prefill_rank(
        &self,
        outbound: &Outbound<'_>,
        account: &mut Account,
        (decode, sent): (&Placement, &mut WorkerRequest),
        Tries { failures, mut reports, .. }: Tries<'_>,
    ) -> Result<Started, AttemptError> {
        if !self.side.pool.settings.conditions().decode_fallback {
            sent.withdraw();
            reports.settle(Ending::Failed);
            return Err(AttemptError::Final(failures.refusal()));
        }
        let started = self.on_decode_rank(outbound, account, (decode, sent), PrefillResult::Fallback).await;
        // A request that no rank serves is the likelier cause of all failures.
        reports.settle(if started.is_ok() { Ending::Served } else { Ending::Failed });
        started
    }

    /// A prefill leg that is ready to be sent, with the identifiers of both legs.
    async fn leg(
        &self,
        outbound: &Outbound<'_>,
        account: &Account,
        (prefill, decode): (&Placement, &Placement),
        bodies: &LegBodies,
        previous_turn: &mut Option<Bytes>,
    ) -> Result<(PrefillLeg, Handover), UpstreamError> {
        let (pool, model, context) = (&self.side.pool, &self.side.model, outbound.context);
        let (transfer, request_id) =
            pool.transfer(&context.upstream, (prefill, decode), context.ids.transfer()).await?;
        let transfer = Transfer { previous_turn: previous_turn.take(), ..transfer };
        let request_id = request_id.unwrap_or_else(|| outbound.request_id.to_owned());
        let outgoing = Outgoing::new(bodies.prefill(&transfer), &request_id).to(pool.protocol());
        let mut request = outbound.request_to(model, prefill, outgoing)?;
        account.trace.inject(request.headers_mut());
        let (leg_values, values) = PrefillValues::of_leg();
        let leg = PrefillLeg {
            upstream: context.upstream.clone(),
            request,
            protocol: pool.protocol(),
            within: outbound.response_time_max(),
            values: leg_values,
            wants_logprobs: bodies.wants_prompt_logprobs(),
            abort: outbound.abort_of(model, prefill, bodies.abort_ids(&transfer)),
        };
        Ok((leg, Handover { transfer, request_id, values }))
    }

    fn next_turn(&self, request: &RouteRequest<'_>) -> Option<NextTurn> {
        let session = request.options.session_id.clone();
        self.side.pool.settings.bidirectional.then(|| NextTurn { pool: Arc::clone(&self.side.pool), session })
    }

    /// Books a prefill rank other than the excluded ones.
    async fn place(
        &self,
        outbound: &Outbound<'_>,
        account: &mut Account,
        request: &RouteRequest<'_>,
        decode: &Placement,
        excluded: &BTreeSet<pointsman::protocol::WorkerRank>,
    ) -> Result<PrefillPlacement, ApiError> {
        let waits = Instant::now();
        let given = &request.options.constraints;
        let constraints = Constraints {
            required_taints: given.required_taints.clone(),
            preferred_taints: given.preferred_taints.clone(),
            excluded_ranks: excluded.iter().copied().chain(self.side.pool.ranks_at(decode.endpoint())).collect(),
            ..Constraints::default()
        };
        let mut prefill = request.clone();
        prefill.request_id = Some(outbound.context.ids.booking(outbound.request_id).into());
        let options = &mut prefill.options;
        // The leg generates one token, and its end is reported as the first token.
        (options.expected_output_tokens, options.output_tokens_max, options.not_streamed) = (Some(1), Some(1), false);
        let within = Duration::from_millis(outbound.context.settings.gateway.queue_timeout_ms);
        let placed = timeout(within, self.side.pool.pools.place_prefill(prefill, &constraints, decode)).await;
        account.waited_since(waits);
        account.access.routed(waits.elapsed());
        let failed = |error: DisaggError| placement_error(self.side.pool.pools.prefill(), error.error);
        placed.map_err(|_| ApiError::queue_timeout())?.map_err(failed)
    }

    /// Sends the whole request to the decode rank.
    async fn on_decode_rank(
        &self,
        outbound: &Outbound<'_>,
        account: &mut Account,
        (decode, sent): (&Placement, &mut WorkerRequest),
        result: PrefillResult,
    ) -> Result<Started, AttemptError> {
        let outgoing = Outgoing::new(outbound.body.clone(), outbound.request_id).to(self.side.pool.protocol());
        sent.begin();
        let checked = outbound.attempt(account, decode, sent, outgoing).await.map_err(AttemptError::Failed)?;
        Ok(Started { checked, prefill: Some(PrefillReport::new(result)), served_by: None })
    }

    /// The decode leg after the prefill leg.
    async fn in_turn(
        &self,
        outbound: &Outbound<'_>,
        account: &mut Account,
        (decode, sent): (&Placement, &mut WorkerRequest),
        legs: Legs<'_>,
        leg: impl Future<Output = PrefillEnd>,
    ) -> Result<Started, SplitError> {
        let end = leg.await;
        let response = match &end.result {
            Ok(response) => response,
            Err(_) => return Err(SplitError::Prefill(Box::new(end))),
        };
        let Legs { bodies, handover: Handover { transfer, request_id, values }, next_turn } = legs;
        let values = values.clone();
        let report = |result| Some(PrefillReport { values, next_turn, ..PrefillReport::new(result) });
        if response.is_complete() {
            let is_stream = outbound.kind == AnswerKind::Events;
            let body = response.complete_response(outbound.endpoint, is_stream, self.include_usage);
            sent.withdraw();
            let served_by = Some((end.placement, end.sent));
            let checked = whole_response(body, outbound.kind);
            return Ok(Started { checked, prefill: report(PrefillResult::Complete), served_by });
        }
        let body = bodies.decode(transfer, Some(response));
        drop((end.placement, end.sent));
        let outgoing = Outgoing::new(body, request_id).to(self.side.pool.protocol());
        sent.begin();
        let checked = outbound.attempt(account, decode, sent, outgoing).await.map_err(SplitError::Decode)?;
        Ok(Started { checked, prefill: report(PrefillResult::Remote), served_by: None })
    }

    /// The decode leg beside the prefill leg. The failure of one leg cancels the other at once.
    async fn at_once(
        &self,
        outbound: &Outbound<'_>,
        account: &mut Account,
        (decode, sent): (&Placement, &mut WorkerRequest),
        legs: Legs<'_>,
        leg: impl Future<Output = PrefillEnd> + Send + 'static,
    ) -> Result<Started, SplitError> {
        let Legs { bodies, handover: Handover { transfer, request_id, values }, next_turn } = legs;
        let values = values.clone();
        let outgoing = Outgoing::new(bodies.decode(transfer, None), request_id).to(self.side.pool.protocol());
        let request = outbound.request_to(outbound.model, decode, outgoing);
        let mut request = request.map_err(|error| SplitError::Decode(Failure::NoResponse(error)))?;
        account.sent(decode);
        account.trace.inject(request.headers_mut());
        sent.begin();
        let status = Arc::new(AtomicU16::new(0));
        let seen = Arc::clone(&status);
        let on_head = move |head: StatusCode| seen.store(head.as_u16(), Ordering::Relaxed);
        let (upstream, kinds) = (outbound.context.upstream.clone(), (outbound.endpoint, outbound.kind));
        let within = outbound.response_time_max();
        let mut both = BothLegs {
            prefill: Some(Leg::start(leg)),
            decode: Some(Leg::start(async move { exchange(upstream, request, kinds, within, on_head).await })),
            decode_abort: outbound.abort_of(outbound.model, decode, bodies.abort_ids(transfer)),
            lingers: (self.side.pool.protocol() == Protocol::Sglang).then_some(outbound.kind),
        };
        let (checked, is_prefill_over) = loop {
            let BothLegs { prefill: Some(prefill), decode: Some(decode), .. } = &mut both else {
                unreachable!("legs are taken at the end only")
            };
            tokio::select! {
                biased;
                end = prefill.end() => if end.result.is_err() {
                    both.cancel();
                    return Err(SplitError::Prefill(Box::new(end)));
                },
                checked = decode.end() => break (checked, prefill.has_ended()),
            }
        };
        if let Ok(status) = StatusCode::from_u16(status.load(Ordering::Relaxed)) {
            sent.answered(status);
        }
        let decode_abort = std::mem::take(&mut both.decode_abort);
        let leg = both.cancel().filter(|_| !is_prefill_over);
        let is_served = checked.as_ref().is_ok_and(|checked| checked.head.status.is_success());
        if !is_served && self.side.pool.is_stale(&outbound.context.upstream, transfer).await {
            return Err(SplitError::Stale);
        }
        let checked = checked.map_err(SplitError::Decode)?;
        let adds_logprobs = bodies.wants_prompt_logprobs();
        let report = PrefillReport::new(PrefillResult::Remote);
        let prefill = Some(PrefillReport { values, adds_logprobs, next_turn, _leg: leg, decode_abort, ..report });
        Ok(Started { checked, prefill, served_by: None })
    }

    /// Records a failed prefill leg. Returns whether another rank may be tried.
    fn after_failure(&self, outbound: &Outbound<'_>, tries: &mut Tries<'_>, end: PrefillEnd) -> bool {
        let PrefillEnd { placement, sent, result } = end;
        let Err(LegError::Failed(failure)) = result else { return false };
        tracing::debug!(
            request_id = outbound.request_id,
            worker = placement.endpoint(),
            rank = placement.rank().rank,
            reason = failure.reason().name(),
            cause = failure.cause(),
            "prefill leg failed"
        );
        sent.worker().retried(failure.reason());
        tries.excluded.insert(placement.rank());
        if failure.outcome() == Outcome::ConnectFailed {
            tries.excluded.extend(siblings(&self.side.model, placement.rank()));
        }
        let is_unreachable = failure.is_unreachable();
        tries.reports.add(&placement, &failure, sent);
        tries.failures.add(failure);
        is_unreachable || outbound.takes_retry()
    }
}

impl BothLegs {
    /// Returns the prefill leg. Without a use of it, both legs end now.
    fn cancel(&mut self) -> Option<Leg<PrefillEnd>> {
        self.decode = None;
        self.prefill.take()
    }
}

/// Failure of an attempt, by leg.
enum SplitError {
    Prefill(Box<PrefillEnd>),
    Decode(Failure),
    /// The prefill engine has restarted; the request was sent with the id of its former incarnation.
    Stale,
}

/// Identifiers of both legs, and the values of the first one for the second.
struct Handover {
    transfer: Transfer,
    request_id: String,
    values: PrefillValues,
}

/// What both legs need.
struct Legs<'a> {
    bodies: &'a LegBodies,
    handover: &'a Handover,
    next_turn: Option<NextTurn>,
}

/// A response that is complete already.
fn whole_response(body: Bytes, kind: AnswerKind) -> Checked {
    let content_type = match kind {
        AnswerKind::Events => "text/event-stream; charset=utf-8",
        AnswerKind::Json => "application/json",
    };
    let mut response = Response::new(());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    let head = response.into_parts().0;
    Checked { head, body: ResponseStart::of(body), kind: Some(kind) }
}
