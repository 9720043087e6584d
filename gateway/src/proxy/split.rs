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
use pointsman::protocol::WorkerRank;
use pointsman::{AnswerKind, Outcome, Placement, PrefillPlacement, RouteRequest, WhyLocal};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};

use super::begin::{ResponseStart, TimeLimit};
use super::engine_calls::EngineCalls;
use super::exchange::Checked;
use super::failure::{Ending, Failure};
use super::leg::Leg;
use super::outbound::{Attempt, AttemptError, Outbound, Outgoing, Started};
use super::prefill_leg::{Booked, LegError, PrefillEnd, PrefillLeg};
use super::prefill_report::PrefillReport;
use super::refusal::Refusal;
use super::reports::{Reports, siblings};
use crate::formats::handover::{LegBodies, NotSplit, Protocol, Transfer};
use crate::formats::openai::{ApiError, Endpoint};
use crate::net::upstream::UpstreamError;
use crate::pools::disaggregation::{PrefillResult, PrefillTokens};
use crate::pools::model::PrefillSide;
use crate::pools::readiness::causes::placement_error;

/// Time for a hand-over in progress to end after its client has left. A torn hand-over can block SGLang's engines.
const LINGER_MAX: Duration = Duration::from_secs(30);

/// The legs of a request to a model with a prefill pool.
pub(super) struct Split<'a> {
    pub(super) side: &'a PrefillSide,
    bodies: Result<LegBodies, NotSplit>,
    include_usage: bool,
}

/// Both legs of a protocol that sends them at once. Dropped before their end, because the client has left, they continue
/// until the hand-over has ended, so that none is torn.
struct BothLegs {
    prefill: Leg<PrefillEnd>,
    decode: Leg<Result<Checked, Failure>>,
    decode_abort: EngineCalls,
    /// Kind of the response, if the legs continue.
    lingers: Option<AnswerKind>,
}

impl BothLegs {
    /// Ends the decode leg, and returns the prefill leg. Without a use of it, both legs end now.
    fn cancel(&mut self) -> Leg<PrefillEnd> {
        self.lingers = None;
        self.decode = Leg::default();
        std::mem::take(&mut self.prefill)
    }
}

impl Drop for BothLegs {
    fn drop(&mut self) {
        let Some(kind) = self.lingers else { return };
        let (mut prefill, mut decode) = (std::mem::take(&mut self.prefill), std::mem::take(&mut self.decode));
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
    excluded: BTreeSet<WorkerRank>,
    reports: Reports<'a>,
}

impl<'a> Split<'a> {
    pub(super) fn new(side: &'a PrefillSide, endpoint: Endpoint, body: Bytes, include_usage: bool) -> Self {
        Self { side, bodies: LegBodies::parse(endpoint, side.pool.protocol(), body), include_usage }
    }

    /// Whether the hashes of the decode rank's placement serve the prefill pool.
    pub(super) fn needs_hashes(&self) -> bool {
        self.bodies.is_ok() && self.side.pool.pools.hashes_alike()
    }

    /// SGLang's bodies name the data-parallel rank.
    fn outgoing<'r>(&self, body: Bytes, request_id: &'r str) -> Outgoing<'r> {
        Outgoing { body, request_id, names_rank: self.side.pool.protocol() != Protocol::Sglang }
    }

    /// One attempt with this decode rank, and several prefill ranks if need be.
    pub(super) async fn attempt(
        &self,
        decode: &mut Attempt<'_>,
        request: &RouteRequest<'_>,
    ) -> Result<Started, AttemptError> {
        let Ok(bodies) = &self.bodies else { return self.on_decode_rank(decode, PrefillResult::Unsplit).await };
        let PrefillSide { pool, model } = self.side;
        let reports = Reports::new(model, AnswerKind::Json);
        let mut tries = Tries { excluded: BTreeSet::new(), reports };
        for nth in 1..=pool.settings.prefill_attempts_max {
            let prefill = match self.place(decode, request, &tries.excluded).await {
                Ok(PrefillPlacement::Remote(prefill)) => *prefill,
                Ok(PrefillPlacement::Local(WhyLocal::Skipped(_))) => {
                    return self.on_decode_rank(decode, PrefillResult::Skipped).await;
                }
                Ok(PrefillPlacement::Local(WhyLocal::Fallback(_)) | PrefillPlacement::Completed) => break,
                Err(error) if nth == 1 => return Err(AttemptError::Final(error.into())),
                Err(_) => break,
            };
            tries.reports.failures.reasons.last().iter().for_each(|reason| model.meters.retried(**reason));
            decode.account.prefill_sent(&model.meters, &prefill);
            pool.legs.sent((prefill.rank(), decode.placement.rank()));
            let sent = model.workers.sent(&prefill);
            let (leg, legs) = match self.legs(decode, &prefill, bodies).await {
                Ok(legs) => legs,
                Err(error) => {
                    let failure = Failure::NoResponse(error);
                    if self.after_failure(decode.outbound, &mut tries, (prefill, sent), failure) {
                        continue;
                    }
                    break;
                }
            };
            let leg = leg.run(prefill, sent);
            let ended = match pool.protocol().is_concurrent() {
                true => self.at_once(decode, &legs, leg).await,
                false => self.in_turn(decode, &legs, leg).await,
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
                Err(SplitError::Prefill(error)) => {
                    pool.forget(&legs.transfer);
                    match error {
                        LegError::Refused(error) => {
                            decode.sent.withdraw();
                            tries.reports.settle(Ending::ClientError);
                            return Err(AttemptError::Final(Refusal::Worker(error)));
                        }
                        LegError::Failed(booked, failure) => {
                            if !self.after_failure(decode.outbound, &mut tries, *booked, failure) {
                                break;
                            }
                        }
                    }
                }
            }
        }
        self.without_prefill_rank(decode, tries).await
    }

    /// The whole request on the decode rank after failures of prefill ranks, if it can compute prompts.
    async fn without_prefill_rank(
        &self,
        decode: &mut Attempt<'_>,
        Tries { mut reports, .. }: Tries<'_>,
    ) -> Result<Started, AttemptError> {
        if !self.side.pool.settings.conditions().decode_fallback {
            decode.sent.withdraw();
            reports.settle(Ending::Failed);
            return Err(AttemptError::Final(std::mem::take(&mut reports.failures).refusal()));
        }
        let started = self.on_decode_rank(decode, PrefillResult::Fallback).await;
        // A request that no rank serves is the likelier cause of all failures.
        reports.settle(if started.is_ok() { Ending::Served } else { Ending::Failed });
        started
    }

    /// A prefill leg that is ready to be sent, and what both legs need.
    async fn legs<'b>(
        &self,
        decode: &Attempt<'_>,
        prefill: &Placement,
        bodies: &'b LegBodies,
    ) -> Result<(PrefillLeg, Legs<'b>), UpstreamError> {
        let (PrefillSide { pool, model }, outbound) = (self.side, decode.outbound);
        let (upstream, number) = (&outbound.context.upstream, outbound.context.ids.transfer());
        let (transfer, request_id) = pool.transfer(upstream, (prefill, decode.placement), number).await?;
        let request_id = request_id.unwrap_or_else(|| outbound.request_id.to_owned());
        let outgoing = self.outgoing(bodies.prefill(&transfer), &request_id);
        let mut prefill_request = outbound.request_to(model, prefill, outgoing)?;
        decode.account.trace.inject(prefill_request.headers_mut());
        let (within, (leg_tokens, tokens)) = (outbound.response_time_max(), PrefillTokens::of_leg());
        let leg = PrefillLeg {
            upstream: upstream.clone(),
            request: prefill_request,
            protocol: pool.protocol(),
            limit: TimeLimit::new(within, within, (model, prefill.rank())),
            tokens: leg_tokens,
            abort: outbound.abort_of(model, prefill, bodies.abort_ids(&transfer)),
        };
        Ok((leg, Legs { bodies, transfer, request_id, tokens }))
    }

    /// Books a prefill rank other than the excluded ones.
    async fn place(
        &self,
        decode: &mut Attempt<'_>,
        request: &RouteRequest<'_>,
        excluded: &BTreeSet<WorkerRank>,
    ) -> Result<PrefillPlacement, ApiError> {
        let (waits, pool, outbound) = (Instant::now(), &self.side.pool, decode.outbound);
        let mut prefill = request.clone();
        prefill.request_id = Some(outbound.context.ids.booking(outbound.request_id).into());
        let options = &mut prefill.options;
        // The leg generates one token, and its end is reported as the first token.
        (options.expected_output_tokens, options.output_tokens_max, options.not_streamed) = (Some(1), Some(1), false);
        let within = outbound.context.placement_timeout(pool.pools.prefill(), &prefill.options);
        let placed = timeout(within, pool.place(prefill, excluded, decode.placement)).await;
        decode.account.waited_since(waits);
        decode.account.access.routed(waits.elapsed());
        let placed = placed.map_err(|_| ApiError::queue_timeout())?;
        placed.map_err(|error| placement_error(pool.pools.prefill(), error))
    }

    /// Sends the whole request to the decode rank.
    async fn on_decode_rank(&self, decode: &mut Attempt<'_>, result: PrefillResult) -> Result<Started, AttemptError> {
        let outbound = decode.outbound;
        let outgoing = self.outgoing(outbound.body.clone(), outbound.request_id);
        decode.sent.begin();
        let checked = decode.send(outgoing).await.map_err(AttemptError::Failed)?;
        Ok(Started { checked, prefill: Some(PrefillReport::new(result)), served_by: None })
    }

    /// The decode leg after the prefill leg.
    async fn in_turn(
        &self,
        decode: &mut Attempt<'_>,
        Legs { bodies, transfer, request_id, tokens }: &Legs<'_>,
        leg: impl Future<Output = PrefillEnd>,
    ) -> Result<Started, SplitError> {
        let (booked, response) = leg.await.map_err(SplitError::Prefill)?;
        let (tokens, outbound) = (tokens.clone(), decode.outbound);
        let report = |result| Some(PrefillReport { tokens, ..PrefillReport::new(result) });
        if response.is_complete() {
            let is_stream = outbound.kind == AnswerKind::Events;
            let body = response.complete_response(outbound.endpoint, is_stream, self.include_usage);
            decode.sent.withdraw();
            let (checked, prefill) = (whole_response(body, outbound.kind), report(PrefillResult::Complete));
            return Ok(Started { checked, prefill, served_by: Some(booked) });
        }
        let body = bodies.decode(transfer, Some(&response));
        drop(booked);
        let outgoing = self.outgoing(body, request_id);
        decode.sent.begin();
        let checked = decode.send(outgoing).await.map_err(SplitError::Decode)?;
        Ok(Started { checked, prefill: report(PrefillResult::Remote), served_by: None })
    }

    /// The decode leg beside the prefill leg. The failure of one leg cancels the other at once.
    async fn at_once(
        &self,
        decode: &mut Attempt<'_>,
        Legs { bodies, transfer, request_id, tokens }: &Legs<'_>,
        leg: impl Future<Output = PrefillEnd> + Send + 'static,
    ) -> Result<Started, SplitError> {
        let (pool, outbound) = (&self.side.pool, decode.outbound);
        let outgoing = self.outgoing(bodies.decode(transfer, None), request_id);
        let request = decode.request(outgoing);
        let request = request.map_err(|error| SplitError::Decode(Failure::NoResponse(error)))?;
        decode.sent.begin();
        let status = Arc::new(AtomicU16::new(0));
        let seen = Arc::clone(&status);
        let on_head = move |head: StatusCode| seen.store(head.as_u16(), Ordering::Relaxed);
        let heartbeats = decode.account.heartbeats.clone();
        let runtime = Handle::current();
        let mut both = BothLegs {
            prefill: Leg::start(&runtime, leg),
            decode: Leg::start(&runtime, outbound.exchange(request, decode.placement.rank(), heartbeats, on_head)),
            decode_abort: outbound.abort_of(outbound.model, decode.placement, bodies.abort_ids(transfer)),
            lingers: (pool.protocol() == Protocol::Sglang).then_some(outbound.kind),
        };
        let checked = loop {
            tokio::select! {
                biased;
                end = both.prefill.end() => if let Err(error) = end {
                    both.cancel();
                    return Err(SplitError::Prefill(error));
                },
                checked = both.decode.end() => break checked,
            }
        };
        if let Ok(status) = StatusCode::from_u16(status.load(Ordering::Relaxed)) {
            decode.sent.answered(status);
        }
        let decode_abort = std::mem::take(&mut both.decode_abort);
        let _leg = both.cancel();
        let is_served = checked.as_ref().is_ok_and(|checked| checked.head.status.is_success());
        if !is_served && pool.is_stale(&outbound.context.upstream, transfer).await {
            return Err(SplitError::Stale);
        }
        let checked = checked.map_err(SplitError::Decode)?;
        let tokens = tokens.clone();
        let prefill = Some(PrefillReport { result: PrefillResult::Remote, tokens, _leg, decode_abort });
        Ok(Started { checked, prefill, served_by: None })
    }

    /// Records a failed prefill leg. Returns whether another rank may be tried.
    fn after_failure(
        &self,
        outbound: &Outbound<'_>,
        tries: &mut Tries<'_>,
        (placement, sent): Booked,
        failure: Failure,
    ) -> bool {
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
        tries.reports.add(&placement, failure, sent);
        is_unreachable || outbound.takes_retry()
    }
}

/// Failure of an attempt, by leg.
enum SplitError {
    Prefill(LegError),
    Decode(Failure),
    /// The prefill engine has restarted; the request was sent with the id of its former incarnation.
    Stale,
}

/// What both legs need: their identifiers, and the values of the first one for the second.
struct Legs<'a> {
    bodies: &'a LegBodies,
    transfer: Transfer,
    request_id: String,
    tokens: PrefillTokens,
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
