//! Prefill leg of a request with two legs.

use axum::body::Bytes;
use axum::http::Request;
use http_body_util::Full;
use pointsman::{Outcome, Placement};

use super::begin::TimeLimit;
use super::engine_calls::EngineCalls;
use super::exchange::exchange_whole;
use super::failure::Failure;
use super::refusal::WorkerError;
use crate::formats::handover::{PrefillResponse, Protocol};
use crate::net::upstream::Upstream;
use crate::pools::disaggregation::LegTokens;
use crate::pools::workers::WorkerRequest;

/// Maximum length of the response of a prefill leg. TensorRT-LLM's contains the prompt as token ids.
const PREFILL_BYTES_MAX: usize = 64 << 20;

/// Booking of a leg, and its request.
pub(super) type Booked = (Placement, WorkerRequest);

/// End of a prefill leg.
pub(super) type PrefillEnd = Result<(Booked, PrefillResponse), LegError>;

/// Failure of a prefill leg.
pub(super) enum LegError {
    /// Another rank may succeed.
    Failed(Box<Booked>, Failure),
    /// The engine's error about the request itself.
    Refused(WorkerError),
}

/// A prefill leg to be sent.
pub(super) struct PrefillLeg {
    pub(super) upstream: Upstream,
    pub(super) request: Request<Full<Bytes>>,
    pub(super) protocol: Protocol,
    pub(super) limit: TimeLimit,
    pub(super) tokens: LegTokens,
    /// Abort of the leg, if its response does not end.
    pub(super) abort: EngineCalls,
}

impl PrefillLeg {
    /// Sends the leg. A response ends the booking's prefill and reports the cached tokens.
    pub(super) async fn run(self, placement: Placement, mut sent: WorkerRequest) -> PrefillEnd {
        let Self { upstream, request, protocol, limit, tokens, mut abort } = self;
        let on_head = |status| sent.answered(status);
        let received = exchange_whole(upstream, request, PREFILL_BYTES_MAX, limit, on_head).await;
        if received.is_ok() {
            abort.ended();
        }
        let parsed = match received {
            Err(failure) => Err(failure),
            Ok((head, body)) if !head.status.is_success() => {
                sent.ended("client_error");
                return Err(LegError::Refused(WorkerError { status: head.status, headers: head.headers, body }));
            }
            Ok((_, body)) => {
                PrefillResponse::parse(protocol, body).map_err(|error| Failure::Invalid(error.to_string()))
            }
        };
        let response = match parsed {
            Ok(response) => response,
            Err(failure) => return Err(LegError::Failed(Box::new((placement, sent)), failure)),
        };
        placement.prefill_completed();
        if let Some(tokens) = response.cached_tokens {
            placement.delivered_cached_tokens(tokens);
        }
        tokens.send_replace(Some(response.cached_tokens));
        placement.outcome(Outcome::Ok);
        sent.completed();
        Ok(((placement, sent), response))
    }
}
