//! Access log: one line per request, written at its end.
//!
//! Lines contain no prompt, key or client address, and of a session only digests. They are `tracing` events of their own target, so a process
//! without a subscriber pays one branch per request. They share the writer of the log, which never waits for a reader.

use std::time::Duration;

use axum::http::StatusCode;
use pointsman::{Placement, Usage};

/// The target of access lines.
pub(crate) const ACCESS_TARGET: &str = "pointsman_gateway::access";

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenUse {
    /// Prompt tokens; `None` if unknown.
    pub(crate) prompt: Option<u64>,
    /// Cached tokens of the prompt.
    pub(crate) cached: u64,
    /// Tokens of the response.
    pub(crate) completion: u64,
}

/// Fields of an access line.
#[derive(Debug, Default)]
pub(crate) struct AccessRecord {
    pub(crate) request_id: String,
    pub(crate) tenant: Option<String>,
    /// Digests of the names of the session and its program.
    pub(crate) session: Option<String>,
    pub(crate) program: Option<String>,
    /// For unrouted requests: the path without its query.
    path: Option<String>,
    /// Source of the tokens used for routing.
    pub(crate) token_source: Option<&'static str>,
    /// Reason for routing without tokens.
    pub(crate) no_tokens: Option<&'static str>,
    /// Tokens used for routing; replaced by the engine's count.
    pub(crate) prompt_tokens: Option<u32>,
    /// Error code of the gateway.
    pub(crate) error: Option<&'static str>,
    /// Whether a worker's response was forwarded.
    pub(crate) is_answered_by_worker: bool,
    /// Time from the request head to the first token of a streamed response.
    pub(crate) first_token: Option<Duration>,
    worker: Option<String>,
    worker_id: Option<u64>,
    rank: Option<u32>,
    pub(crate) decision: Option<u64>,
    forgone_blocks: u32,
    /// Time in the router, over all placements.
    routing: Duration,
    /// Failures before each retry, oldest first.
    retry_reasons: Vec<&'static str>,
    pub(crate) prefill_worker: Option<String>,
    prefill_rank: Option<u32>,
    attempts: u32,
    migrations: u32,
    /// Output of attempts before the last resumption.
    earlier_output_tokens: u64,
    predicted_cached_tokens: Option<u32>,
    predicted_ttft: Option<Duration>,
    pub(super) cached_tokens: Option<u32>,
    pub(super) output_tokens: Option<u64>,
}

impl AccessRecord {
    /// A request outside the routed endpoints.
    pub(crate) fn unrouted(request_id: String, path: String, error: Option<&'static str>) -> Self {
        Self { request_id, path: Some(path), error, ..Self::default() }
    }

    /// Records an attempt at the worker of the placement.
    pub(crate) fn attempted(&mut self, placement: &Placement) {
        self.attempts += 1;
        self.worker = Some(placement.endpoint().to_owned());
        self.worker_id = Some(placement.rank().worker.0);
        self.rank = Some(placement.rank().rank);
        self.decision = Some(placement.number());
        if self.prefill_worker.is_none() {
            self.predicted(placement);
        }
    }

    /// Records time in the router.
    pub(crate) fn routed(&mut self, duration: Duration) {
        self.routing += duration;
    }

    /// Records a retry after this failure.
    pub(crate) fn retried(&mut self, reason: &'static str) {
        self.retry_reasons.push(reason);
    }

    /// Records a prefill leg at the worker of the placement. Its cache is that of the request.
    pub(crate) fn prefilled(&mut self, placement: &Placement) {
        self.prefill_worker = Some(placement.endpoint().to_owned());
        self.prefill_rank = Some(placement.rank().rank);
        self.predicted(placement);
    }

    fn predicted(&mut self, placement: &Placement) {
        self.predicted_cached_tokens = Some(placement.predicted_cached_tokens());
        self.predicted_ttft = placement.predicted_ttft();
        self.forgone_blocks = placement.forgone_blocks();
    }

    /// Records usage and output of the worker. Returns the number of prompt tokens, if the worker reports it.
    pub(crate) fn used(&mut self, usage: Option<Usage>, output_tokens: u64) -> Option<u32> {
        let usage = usage.unwrap_or_default();
        // The prompt of a resumed attempt contains the output so far.
        let earlier = u32::try_from(self.earlier_output_tokens).unwrap_or(u32::MAX);
        let prompt_tokens = usage.prompt_tokens.map(|tokens| tokens.saturating_sub(earlier));
        self.prompt_tokens = prompt_tokens.or(self.prompt_tokens);
        self.cached_tokens = usage.cached_tokens;
        self.output_tokens = Some(self.earlier_output_tokens + output_tokens);
        prompt_tokens
    }

    /// Tokens of the request; `None` before its first attempt at a worker.
    pub(crate) fn token_use(&self) -> Option<TokenUse> {
        let prompt = self.prompt_tokens.map(u64::from);
        let (cached, completion) = (self.cached_tokens.map_or(0, u64::from), self.output_tokens.unwrap_or(0));
        (self.attempts > 0).then_some(TokenUse { prompt, cached, completion })
    }

    /// Mean time between the tokens of a streamed response that has ended after `duration`.
    pub(crate) fn mean_itl(&self, duration: Duration) -> Option<Duration> {
        let intervals = u32::try_from(self.output_tokens?.checked_sub(1)?).ok().filter(|intervals| *intervals > 0)?;
        Some(duration.saturating_sub(self.first_token?) / intervals)
    }

    /// Records the resumption of the response.
    pub(crate) fn resumed(&mut self) {
        self.migrations += 1;
        self.earlier_output_tokens = self.output_tokens.unwrap_or(0);
    }

    /// The worker of the last attempt: endpoint and rank.
    pub(crate) fn worker(&self) -> (Option<&str>, Option<u32>) {
        (self.worker.as_deref(), self.rank)
    }

    /// Outcome of a request with a complete response.
    pub(crate) fn outcome_of(&self, status: u16) -> &'static str {
        let is_error =
            StatusCode::from_u16(status).is_ok_and(|status| status.is_client_error() || status.is_server_error());
        match (is_error, self.is_answered_by_worker) {
            (false, _) => "ok",
            (true, true) => "worker_error",
            (true, false) if status < 500 => "refused",
            (true, false) => "failed",
        }
    }

    /// Writes the line. `model` is empty for requests without a served model.
    pub(crate) fn write(
        &self,
        endpoint: &str,
        (model, trace_id): (&str, Option<&str>),
        status: u16,
        outcome: &str,
        duration: Duration,
    ) {
        let retry_reasons = Some(self.retry_reasons.join(",")).filter(|reasons| !reasons.is_empty());
        tracing::info!(
            target: ACCESS_TARGET,
            request_id = self.request_id.as_str(),
            trace_id,
            tenant = self.tenant.as_deref(),
            session = self.session.as_deref(),
            program = self.program.as_deref(),
            endpoint,
            path = self.path.as_deref(),
            model = Some(model).filter(|model| !model.is_empty()),
            worker = self.worker.as_deref(),
            worker_id = self.worker_id.map(tracing::field::display),
            rank = self.rank,
            decision = self.decision,
            prefill_worker = self.prefill_worker.as_deref(),
            prefill_rank = self.prefill_rank,
            status,
            outcome,
            error = self.error,
            attempts = self.attempts,
            retry_reasons,
            migrations = Some(self.migrations).filter(|migrations| *migrations > 0),
            tokens = self.no_tokens.or(self.token_source),
            prompt_tokens = self.prompt_tokens,
            predicted_cached_tokens = self.predicted_cached_tokens,
            cached_tokens = self.cached_tokens,
            forgone_blocks = Some(self.forgone_blocks).filter(|blocks| *blocks > 0),
            output_tokens = self.output_tokens,
            route_ms = self.decision.map(|_| milliseconds(self.routing)),
            predicted_ttft_ms = self.predicted_ttft.map(milliseconds),
            ttft_ms = self.first_token.map(milliseconds),
            duration_ms = milliseconds(duration),
        );
    }
}

/// Milliseconds, rounded to microseconds.
fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
