//! The access log: one line for each request, written when the request ends.
//!
//! Owns the fields of a line and the rules of `access_log`. A line carries no prompt, key, session or client address.
//! Lines are `tracing` events of their own target, so a process without a subscriber pays one branch for each request, and
//! the writer is the log's: it never waits for the reader.

use std::path::PathBuf;
use std::time::Duration;

use axum::http::StatusCode;
use pointsman::Placement;
use pointsman::answer::Usage;

/// The target of access lines.
pub(crate) const ACCESS_TARGET: &str = "pointsman_gateway::access";

/// Where the access log is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessLog {
    /// Nowhere.
    Off,
    /// The standard output of the process.
    Stdout,
    /// The standard error of the process, beside the log.
    Stderr,
    /// Appended to this file.
    File(PathBuf),
}

impl AccessLog {
    /// Parses `gateway.access_log`; `None` if the value breaks the rule.
    ///
    /// ```
    /// use pointsman_gateway::serve::telemetry::AccessLog;
    ///
    /// assert_eq!(AccessLog::parse("stdout"), Some(AccessLog::Stdout));
    /// assert_eq!(AccessLog::parse("/var/log/a.jsonl"), Some(AccessLog::File("/var/log/a.jsonl".into())));
    /// assert_eq!(AccessLog::parse("access.jsonl"), None);
    /// ```
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        match value {
            "off" => Some(Self::Off),
            "stdout" => Some(Self::Stdout),
            "stderr" => Some(Self::Stderr),
            path => Some(PathBuf::from(path)).filter(|path| path.is_absolute()).map(Self::File),
        }
    }
}

/// The machine-readable code of an error that the gateway answered itself; an extension of the response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorCode(pub(crate) &'static str);

/// What is known of one request for its access line.
#[derive(Debug, Default)]
pub(crate) struct AccessRecord {
    pub(crate) request_id: String,
    pub(crate) tenant: Option<String>,
    /// Of a request to no endpoint that routes: the path without its query.
    path: Option<String>,
    /// Tokens that the request was routed by; the engine's own count replaces it.
    pub(crate) prompt_tokens: Option<u32>,
    /// The code of the gateway's own error.
    pub(crate) error: Option<&'static str>,
    /// Whether a worker's answer was passed on.
    pub(crate) is_answered_by_worker: bool,
    /// From the request's head to the first token of a streamed answer.
    pub(crate) first_token: Option<Duration>,
    worker: Option<String>,
    rank: Option<u32>,
    attempts: u32,
    predicted_cached_tokens: Option<u32>,
    cached_tokens: Option<u32>,
    output_tokens: Option<u64>,
}

impl AccessRecord {
    /// A request to no endpoint that routes.
    pub(crate) fn unrouted(request_id: String, path: String, error: Option<&'static str>) -> Self {
        Self { request_id, path: Some(path), error, ..Self::default() }
    }

    /// Records that the request is sent to the placement's worker.
    pub(crate) fn attempted(&mut self, placement: &Placement) {
        self.attempts += 1;
        self.worker = Some(placement.endpoint().to_owned());
        self.rank = Some(placement.rank().rank);
        self.predicted_cached_tokens = Some(placement.cached_tokens());
    }

    /// Records what the worker reported and produced.
    pub(crate) fn used(&mut self, usage: Option<Usage>, output_tokens: u64) {
        let usage = usage.unwrap_or_default();
        self.prompt_tokens = usage.prompt_tokens.or(self.prompt_tokens);
        self.cached_tokens = usage.cached_tokens;
        self.output_tokens = Some(output_tokens);
    }

    /// The worker of the last attempt: endpoint and rank.
    pub(crate) fn worker(&self) -> (Option<&str>, Option<u32>) {
        (self.worker.as_deref(), self.rank)
    }

    /// The outcome of a request whose answer came to its end.
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

    /// Writes the line. `model` is empty if the request named none that is served.
    pub(crate) fn write(&self, endpoint: &str, model: &str, status: u16, outcome: &str, duration: Duration) {
        tracing::info!(
            target: ACCESS_TARGET,
            request_id = self.request_id.as_str(),
            tenant = self.tenant.as_deref(),
            endpoint,
            path = self.path.as_deref(),
            model = Some(model).filter(|model| !model.is_empty()),
            worker = self.worker.as_deref(),
            rank = self.rank,
            status,
            outcome,
            error = self.error,
            attempts = self.attempts,
            prompt_tokens = self.prompt_tokens,
            predicted_cached_tokens = self.predicted_cached_tokens,
            cached_tokens = self.cached_tokens,
            output_tokens = self.output_tokens,
            ttft_ms = self.first_token.map(milliseconds),
            duration_ms = milliseconds(duration),
        );
    }
}

/// Milliseconds, rounded to microseconds.
fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
