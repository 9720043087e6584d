//! Request metrics of the gateway.
//!
//! Defines names, labels and descriptions ([`METRICS`]), and the handles. Each request to an
//! endpoint is counted exactly once; handles are looked up once, not per request; labels contain configured names only,
//! never client input. The recorder defines buckets and renders the page.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};
use pointsman::named;

use crate::formats::openai::Endpoint;
use crate::observe::activity::Activity;
use crate::observe::metric::metric_table;
use crate::observe::throttle::LogThrottle;

metric_table! {
    REQUESTS: counter "pointsman_gateway_requests_total" ["model", "endpoint", "status"] =
        "Requests by response status; 499 if the client disconnected first, 503 if the shutdown of the gateway cut \
         the request off.";
    PICKS: counter "pointsman_gateway_picks_total" ["result"] =
        "Requests of proxies to the endpoint picker: `picked`, `refused` with an error, or later `moved` to another \
         endpoint.";
    IN_FLIGHT: gauge "pointsman_gateway_requests_in_flight" [] = "Requests in flight.";
    HELD: gauge "pointsman_gateway_held_requests" ["model"] = "Requests that wait for a first worker of the model.";
    FIRST_BYTE: histogram "pointsman_gateway_time_to_first_byte_seconds" ["model"] =
        "Time from the request head to the first token of a streamed response, or to the first byte of other \
         responses, including queue and retries.";
    WHOLE: histogram "pointsman_gateway_request_seconds" ["model"] =
        "Time from the request head to the end of a complete response.";
    OVERHEAD: histogram "pointsman_gateway_overhead_seconds" [] =
        "Gateway time from the request head to the first attempt, excluding the wait for the body and the router.";
    RETRIES: counter "pointsman_gateway_retries_total" ["model", "reason"] =
        "Retries on another rank, by failure of the previous attempt.";
    DENIED: counter "pointsman_gateway_retries_denied_total" [] = "Retries denied by the retry budget.";
    MIGRATIONS: counter "pointsman_gateway_stream_migrations_total" ["model", "result"] =
        "Streamed responses that broke off while `stream_migrations_max` is above 0: `resumed` on another rank, \
         `failed` to resume, `unsound` to resume, or `too_long`.";
    CLIENT_GONE: counter "pointsman_gateway_client_gone_total" [] =
        "Requests whose client disconnected before the end of the response.";
    BROKEN: counter "pointsman_gateway_streams_broken_total" ["reason"] =
        "Responses that failed after their start: the worker broke off, sent an error event, timed out or omitted \
         the end mark, or the gateway ended.";
    /// Rendered by [`workers`](crate::pools::workers) directly, like the next three.
    WORKER_REQUESTS: counter "pointsman_gateway_worker_requests_total"
        ["model", "worker", "worker_endpoint", "status", "outcome"] =
        "Attempts at a worker by status (`none` without one) and outcome.";
    WORKER_RETRIES: counter "pointsman_gateway_worker_retries_total" ["model", "worker", "worker_endpoint", "reason"] =
        "Retries on another rank after a failed attempt at this worker, by reason.";
    WORKER_FIRST_TOKEN: histogram "pointsman_gateway_worker_time_to_first_token_seconds"
        ["model", "worker", "worker_endpoint"] =
        "Time from sending an attempt to the first token of its streamed response.";
    WORKER_SECONDS: histogram "pointsman_gateway_worker_request_seconds" ["model", "worker", "worker_endpoint"] =
        "Time from sending an attempt to the end of its complete response.";
    BODY_BYTES: gauge "pointsman_gateway_body_bytes" [] = "Bytes of request bodies in memory.";
    REQUEST_BUDGET_BYTES: gauge "pointsman_gateway_request_budget_bytes" [] =
        "Memory budget of all requests in flight (`request_budget_bytes`).";
    REQUESTS_REFUSED: counter "pointsman_gateway_requests_refused_total" ["reason"] =
        "Refused requests: `body` or `budget` by the request budget, `connection` or `heads` by its part for one HTTP/2 \
         connection.";
}

named! {
/// Reason of a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryReason {
    /// No connection.
    Connect = "connect",
    /// First byte timeout.
    Timeout = "timeout",
    /// Connection broken, or invalid HTTP.
    Broken = "broken",
    /// Status 429 or 503.
    Busy = "busy",
    /// Another status of 500 or above.
    ServerError = "server_error",
    /// Status 401, 403 or 404.
    Misconfigured = "misconfigured",
    /// Success status without a valid response.
    InvalidAnswer = "invalid_answer",
}
}

named! {
/// Reason of a response that failed after its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamBreak {
    /// The worker broke off.
    Broken = "broken",
    /// The worker sent an error event.
    Error = "error",
    /// Idle timeout.
    Idle = "idle",
    /// Shutdown of the gateway.
    Drain = "drain",
    /// Regular end without an end mark.
    Incomplete = "incomplete",
}
}

named! {
/// Result of a streamed response that broke off while migrations are enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MigrationResult {
    /// Another rank continues the response.
    Resumed = "resumed",
    /// No rank could continue it within the limits.
    Failed = "failed",
    /// The request or the output has no sound resumption.
    Unsound = "unsound",
    /// The output is longer than the maximum.
    TooLong = "too_long",
}
}

/// Log interval of cut-off responses.
const BROKEN_STREAM_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Statuses with cached counters; others are looked up.
const COMMON: [u16; 10] = [200, 400, 401, 404, 429, CLIENT_LEFT, 500, 502, 503, 504];

/// Status of a request whose client disconnected before a response; never sent.
pub(crate) const CLIENT_LEFT: u16 = 499;

/// Handles of one model, or of requests without a model (empty name).
pub(crate) struct ModelMeters {
    pub(crate) model: String,
    /// Its last decisions and requests.
    pub(crate) activity: Activity,
    /// By endpoint, then by status; a series exists from its first request on.
    pub(crate) requests: [[OnceLock<Counter>; COMMON.len()]; Endpoint::ALL.len()],
    pub(crate) held: Gauge,
    pub(crate) first_byte: Histogram,
    pub(crate) whole: Histogram,
    pub(crate) retries: [Counter; RetryReason::ALL.len()],
    pub(crate) migrations: [Counter; MigrationResult::ALL.len()],
}

/// A request that waits for a worker.
pub(crate) struct Held<'a>(&'a Gauge);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

impl ModelMeters {
    pub(crate) fn of(model: &str) -> Self {
        let name = || model.to_owned();
        let retries =
            |reason: RetryReason| metrics::counter!(RETRIES.name, "model" => name(), "reason" => reason.name());
        let migrations =
            |result: MigrationResult| metrics::counter!(MIGRATIONS.name, "model" => name(), "result" => result.name());
        Self {
            model: name(),
            activity: Activity::new(),
            requests: Default::default(),
            held: metrics::gauge!(HELD.name, "model" => name()),
            first_byte: metrics::histogram!(FIRST_BYTE.name, "model" => name()),
            whole: metrics::histogram!(WHOLE.name, "model" => name()),
            retries: RetryReason::ALL.map(retries),
            migrations: MigrationResult::ALL.map(migrations),
        }
    }

    /// Counts a request that waits for a worker, until the returned value is dropped.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.held.increment(1.0);
        Held(&self.held)
    }

    pub(crate) fn retried(&self, reason: RetryReason) {
        self.retries[reason as usize].increment(1);
    }

    pub(crate) fn answered(&self, endpoint: Endpoint, status: u16) {
        let counter = || {
            let (model, status) = (self.model.clone(), status.to_string());
            metrics::counter!(REQUESTS.name, "model" => model, "endpoint" => endpoint.name(), "status" => status)
        };
        match COMMON.iter().position(|common| *common == status) {
            Some(n) => self.requests[endpoint as usize][n].get_or_init(counter).increment(1),
            None => counter().increment(1),
        }
    }
}

/// Handles of all requests.
pub(crate) struct Meters {
    pub(crate) in_flight: Gauge,
    pub(crate) overhead: Histogram,
    pub(crate) denied: Counter,
    pub(crate) client_gone: Counter,
    pub(crate) broken: [Counter; StreamBreak::ALL.len()],
    /// Limits the log lines of cut-off responses.
    pub(crate) broken_streams: LogThrottle,
    /// Whether requests in flight are being cut off.
    pub(crate) is_deadline_passed: AtomicBool,
    /// Of requests without a model.
    pub(crate) nameless: Arc<ModelMeters>,
}

impl Meters {
    pub(crate) fn new() -> Self {
        let broken = |reason: StreamBreak| metrics::counter!(BROKEN.name, "reason" => reason.name());
        Self {
            in_flight: metrics::gauge!(IN_FLIGHT.name),
            overhead: metrics::histogram!(OVERHEAD.name),
            denied: metrics::counter!(DENIED.name),
            client_gone: metrics::counter!(CLIENT_GONE.name),
            broken: StreamBreak::ALL.map(broken),
            broken_streams: LogThrottle::new(BROKEN_STREAM_LOG_INTERVAL),
            is_deadline_passed: AtomicBool::new(false),
            nameless: Arc::new(ModelMeters::of("")),
        }
    }

    /// From now on ended requests count as cut off by the gateway instead of client disconnects.
    pub(crate) fn deadline_passed(&self) {
        self.is_deadline_passed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn retry_denied(&self) {
        self.denied.increment(1);
    }
}
