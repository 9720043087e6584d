//! Account of one request: its counts, its access log record and its trace, completed at every end of the request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use pointsman::{Placement, Usage};
use tokio::time::Instant;

use super::context::RequestContext;
use super::heartbeats::Heartbeats;
use super::hints::SessionCall;
use crate::admission::leases::QuotaLease;
use crate::admission::shared_sessions::SharedCall;
use crate::formats::openai::{ApiError, Endpoint};
use crate::observe::access::AccessRecord;
use crate::observe::activity::{Arrived, Ended};
use crate::observe::requests::{CLIENT_LEFT, Meters, MigrationResult, ModelMeters, RetryReason, StreamBreak};
use crate::observe::trace::RequestTrace;
use crate::tokens::LengthReport;

/// One request, from its head to the end of its response. An earlier drop means a client disconnect or the end of the
/// gateway.
pub(crate) struct Account {
    meters: Arc<Meters>,
    pub(super) model: Arc<ModelMeters>,
    endpoint: Endpoint,
    started: Instant,
    /// Accumulated waiting time outside the gateway.
    excluded: Duration,
    is_sent: bool,
    has_first_token: bool,
    is_answered: bool,
    is_over: bool,
    /// Result of a break-off of the response; absent while migrations are disabled.
    on_break: Option<MigrationResult>,
    /// Access log record.
    pub(crate) access: AccessRecord,
    /// Share of the limits of its tenant.
    pub(crate) quota: Option<QuotaLease>,
    /// The call of a session name that may be shared.
    pub(crate) shared_call: Option<SharedCall>,
    /// Its session at the engine.
    pub(super) engine_session: Option<SessionCall>,
    /// Receives the length of a prompt with media.
    pub(crate) media_report: Option<LengthReport>,
    /// Trace of the request.
    pub(crate) trace: RequestTrace,
    /// Heartbeats of the request; absent if the gateway does not send its response.
    pub(crate) heartbeats: Option<Arc<Heartbeats>>,
    /// Whether the client has an error in place of the end of a translated response.
    pub(crate) is_cut_short: Option<Arc<AtomicBool>>,
    /// Status of the response. The client has 200 if it has the head of a stream already.
    status: u16,
    outcome: &'static str,
}

impl Account {
    /// Begins with the head of the request.
    pub(crate) fn begin(context: &RequestContext, endpoint: Endpoint, headers: &HeaderMap, request_id: &str) -> Self {
        context.meters.in_flight.increment(1.0);
        let mut account = Self {
            meters: Arc::clone(&context.meters),
            model: Arc::clone(&context.meters.nameless),
            endpoint,
            started: Instant::now(),
            excluded: Duration::ZERO,
            is_sent: false,
            has_first_token: false,
            is_answered: false,
            is_over: false,
            on_break: None,
            access: AccessRecord::default(),
            quota: None,
            shared_call: None,
            engine_session: None,
            media_report: None,
            trace: RequestTrace::of(headers),
            heartbeats: None,
            is_cut_short: None,
            status: CLIENT_LEFT,
            outcome: "client_gone",
        };
        account.access.request_id = request_id.to_owned();
        if let Some(tracing) = &context.tracing {
            account.trace.begin(tracing, endpoint.path(), account.started);
        }
        account
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// Adds the time since `then` as waiting time.
    pub(crate) fn waited_since(&mut self, then: Instant) {
        self.excluded += then.elapsed();
    }

    /// Records a placement for which the router took the time since `then`.
    pub(crate) fn placed_since(&mut self, then: Instant, placement: &Placement) {
        self.waited_since(then);
        self.access.routed(then.elapsed());
        self.trace.placed(placement);
        self.model.activity.placed(self.arrived(), placement);
    }

    fn arrived(&self) -> Arrived<'_> {
        let AccessRecord { request_id, prompt_tokens, no_tokens, .. } = &self.access;
        Arrived { request_id, prompt_tokens: *prompt_tokens, no_tokens: *no_tokens }
    }

    /// Records a failed attempt.
    pub(crate) fn attempt_failed(&mut self, reason: RetryReason) {
        self.trace.attempt_failed(reason.name());
    }

    /// Records the first attempt, sent to the worker of the placement.
    pub(crate) fn sent(&mut self, placement: &Placement) {
        self.access.attempted(placement);
        self.trace.attempted(placement, false);
        self.record_overhead();
    }

    /// Records a prefill leg, sent to the worker of the placement in the pool with these meters.
    pub(crate) fn prefill_sent(&mut self, pool: &ModelMeters, placement: &Placement) {
        pool.activity.placed(self.arrived(), placement);
        self.access.prefilled(placement);
        self.trace.attempted(placement, true);
        self.record_overhead();
    }

    fn record_overhead(&mut self) {
        if !std::mem::replace(&mut self.is_sent, true) {
            self.meters.overhead.record(self.started.elapsed().saturating_sub(self.excluded));
        }
    }

    /// Records the first token of a streamed response, or the first byte of another; only the first call counts.
    pub(crate) fn first_token(&mut self, is_streamed: bool) {
        if !std::mem::replace(&mut self.has_first_token, true) {
            let elapsed = self.started.elapsed();
            self.model.first_byte.record(elapsed);
            self.trace.first_token();
            if is_streamed {
                self.access.first_token = Some(elapsed);
                self.model.activity.first_token(elapsed);
            }
        }
    }

    /// Records usage and output of the worker.
    pub(crate) fn used(&mut self, usage: Option<Usage>, output_tokens: u64) {
        if let (Some(tokens), Some(report)) = (self.access.used(usage, output_tokens), self.media_report.take()) {
            report.record(tokens);
        }
    }

    /// Charges the prompt to the limits of the tenant.
    ///
    /// # Errors
    /// 429 above a limit.
    pub(crate) fn charge_prompt(&mut self, body_bytes: usize, tokens_max: Option<u32>) -> Result<(), ApiError> {
        let tokens = self.access.prompt_tokens;
        self.quota.as_mut().map_or(Ok(()), |quota| quota.charge(tokens, body_bytes, tokens_max))
    }

    /// Headers with the limits of the tenant.
    pub(crate) fn quota_headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        self.quota.as_ref().map(QuotaLease::headers).unwrap_or_default()
    }

    /// Completes a request with a response of the gateway, which refuses it with `error` if present.
    pub(crate) fn complete_with(mut self, error: Option<&'static str>, mut response: Response<Body>) -> Response<Body> {
        response.headers_mut().extend(self.quota_headers());
        self.access.error = error;
        self.access.is_answered_by_worker = error.is_none();
        self.answered(response.status());
        self.complete();
        response
    }

    /// Records the status of the response.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        if !std::mem::replace(&mut self.is_answered, true) {
            self.status = status.as_u16();
            self.model.answered(self.endpoint, self.sent_status());
        }
    }

    /// Whether the client has the head of a stream without a response.
    fn has_head(&self) -> bool {
        self.heartbeats.as_ref().is_some_and(|heartbeats| heartbeats.has_head())
    }

    /// The status that the client has received.
    fn sent_status(&self) -> u16 {
        if self.has_head() { StatusCode::OK.as_u16() } else { self.status }
    }

    /// Sets the migration result that a break-off of the response counts.
    pub(crate) fn breaks_as(&mut self, result: MigrationResult) {
        self.on_break = Some(result);
    }

    /// Records a response that another rank continues.
    pub(crate) fn resumed(&mut self) {
        self.access.resumed();
        self.model.migrations[MigrationResult::Resumed as usize].increment(1);
    }

    /// Records the complete end of the response.
    pub(crate) fn complete(&mut self) {
        self.complete_as(self.status);
    }

    /// The same for a response whose end reports this status.
    pub(crate) fn complete_as(&mut self, status: u16) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.outcome = self.access.outcome_of(status);
            self.model.whole.record(self.started.elapsed());
        }
    }

    /// Records a response that was cut off, or that the worker ended with an error event.
    pub(crate) fn broke(&mut self, reason: StreamBreak) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.outcome = reason.name();
            self.meters.broken[reason as usize].increment(1);
            if let Some(result) = self.on_break.filter(|_| reason != StreamBreak::Drain) {
                self.model.migrations[result as usize].increment(1);
            }
        }
    }

    /// Adds the request to the recent ones of its model. An error is a response that a correct request within the limits
    /// of its tenant should not have.
    fn record_activity(&self) {
        let activity = &self.model.activity;
        let is_cut = StreamBreak::ALL.iter().any(|reason| reason.name() == self.outcome);
        let is_limit = self.access.error.is_some_and(|code| code.ends_with("_exceeded"));
        let is_error = is_cut || self.status >= 500 || self.status == 429 && !is_limit;
        let is_placed = self.access.decision.is_some() || self.access.prefill_worker.is_some();
        if let Some(code) = self.access.error.filter(|_| is_error && !is_placed) {
            activity.rejected(self.arrived(), code);
        }
        activity.ended(&Ended { is_error, itl: self.access.mean_itl(self.started.elapsed()).filter(|_| !is_error) });
    }

    /// Closes the account.
    fn end(&mut self) {
        if self.is_over {
            if self.outcome == "ok" && self.is_cut_short.as_ref().is_some_and(|cut| cut.load(Ordering::Relaxed)) {
                self.is_over = false;
                self.broke(StreamBreak::Incomplete);
            }
            return;
        }
        if std::thread::panicking() {
            self.answered(StatusCode::INTERNAL_SERVER_ERROR);
            self.outcome = "failed";
            return;
        }
        if self.meters.is_deadline_passed.load(Ordering::Relaxed) {
            let has_started = self.is_answered || self.has_head();
            self.answered(StatusCode::SERVICE_UNAVAILABLE);
            if has_started {
                self.broke(StreamBreak::Drain);
            }
            self.outcome = StreamBreak::Drain.name();
            return;
        }
        self.meters.client_gone.increment(1);
        if !self.is_answered {
            self.model.answered(self.endpoint, self.sent_status());
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.meters.in_flight.decrement(1.0);
        self.end();
        if let Some(quota) = &mut self.quota {
            // A client that disconnects has caused the work of the attempt so far.
            let is_served = self.status < 400 || self.status == CLIENT_LEFT;
            quota.settle(self.access.token_use().filter(|_| is_served));
        }
        self.record_activity();
        let (endpoint, model) = (self.endpoint.name(), &self.model.model);
        let (trace_id, status) = (self.trace.trace_id(), self.sent_status());
        self.access.write(endpoint, (model, trace_id.as_deref()), status, self.outcome, self.started.elapsed());
        self.trace.end(&self.access, model, status, self.outcome);
    }
}
