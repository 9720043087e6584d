//! Classification of failed attempts: kind, counted rank, and final error for the client.
//!
//! A request counts against at most one worker, and against none if attempts at two or more workers failed alike,
//! because then the request is the likelier cause. A refused connection is a fact about the endpoint and is reported
//! separately in all cases. The attempt loop selects the next rank.

use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use pointsman::Outcome;
use pointsman::protocol::WorkerRank;

use super::refusal::{Refusal, WorkerError};
use crate::formats::openai::ApiError;
use crate::net::upstream::UpstreamError;
use crate::observe::requests::RetryReason;
use crate::pools::workers::{UnsettledFailure, WorkerRequest};

/// Read by the SDKs of OpenAI and Anthropic.
const X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Reason of a failed attempt.
pub(super) enum Failure {
    /// No response.
    NoResponse(UpstreamError),
    /// The engine sleeps, as the router has learned since.
    Asleep,
    /// A success status without a valid response, with the defect.
    Invalid(String),
    /// A retryable status.
    Status {
        status: StatusCode,
        headers: HeaderMap,
        /// Absent if too long or broken off.
        body: Option<Bytes>,
    },
}

impl Failure {
    pub(super) fn reason(&self) -> RetryReason {
        match self {
            Self::NoResponse(UpstreamError::NoDescriptor | UpstreamError::Connect(_) | UpstreamError::Address(_)) => {
                RetryReason::Connect
            }
            Self::NoResponse(UpstreamError::Timeout(_)) => RetryReason::Timeout,
            Self::NoResponse(
                UpstreamError::Broken(_)
                | UpstreamError::Closed(_)
                | UpstreamError::TooLong(_)
                | UpstreamError::Status(_),
            ) => RetryReason::Broken,
            Self::NoResponse(UpstreamError::Key(_)) => RetryReason::Misconfigured,
            Self::Invalid(_) => RetryReason::InvalidAnswer,
            Self::Asleep => RetryReason::Busy,
            Self::Status { status, .. } if is_refusal(*status) => RetryReason::Busy,
            Self::Status { status, .. } if is_misconfiguration(*status) => RetryReason::Misconfigured,
            Self::Status { .. } => RetryReason::ServerError,
        }
    }

    /// Whether the failure does not count against the rank: its cause is in this process, or known.
    pub(super) fn is_local(&self) -> bool {
        matches!(self, Self::NoResponse(error) if error.is_local()) || matches!(self, Self::Asleep)
    }

    /// Health outcome of the rank, if the failure counts.
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Self::NoResponse(error) => error.outcome(),
            Self::Asleep => Outcome::Refused { retry_after: None },
            Self::Invalid(_) => Outcome::InvalidAnswer,
            Self::Status { status, headers, .. } if is_refusal(*status) => {
                Outcome::Refused { retry_after: retry_after(headers) }
            }
            Self::Status { status, .. } if is_misconfiguration(*status) => Outcome::Misconfigured,
            Self::Status { .. } => Outcome::ServerError,
        }
    }

    /// Description of the failure.
    pub(super) fn cause(&self) -> String {
        match self {
            Self::NoResponse(error) => error.to_string(),
            Self::Asleep => "the engine sleeps".to_owned(),
            Self::Invalid(defect) => defect.clone(),
            Self::Status { status, .. } => format!("status {}", status.as_u16()),
        }
    }

    /// Whether no connection was made, or the engine sleeps, so that no engine did any work.
    pub(super) fn is_unreachable(&self) -> bool {
        matches!(self, Self::NoResponse(UpstreamError::Connect(error)) if error.is_unreachable)
            || matches!(self, Self::Asleep)
    }

    /// Whether a kept connection was closed, as engines do without a fault.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self, Self::NoResponse(UpstreamError::Closed(_)))
    }

    /// Whether the worker sent nothing at all.
    pub(super) fn is_without_response(&self) -> bool {
        matches!(self.reason(), RetryReason::Connect | RetryReason::Broken) || matches!(self, Self::Asleep)
    }
}

/// Outcome for the rank of a response with this status; `None` if the request itself is the cause.
pub(crate) fn failure_outcome(status: StatusCode, headers: &HeaderMap) -> Option<Outcome> {
    is_retried(status).then(|| Failure::Status { status, headers: headers.clone(), body: None }.outcome())
}

/// Whether a status is retried on another rank.
pub(super) fn is_retried(status: StatusCode) -> bool {
    status.is_server_error() || is_refusal(status) || is_misconfiguration(status)
}

/// A worker without capacity.
fn is_refusal(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE
}

/// A worker with another key or without the model, unless the request itself is the cause.
fn is_misconfiguration(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND)
}

/// The delay that a worker asks for: a number of seconds or a date.
#[expect(clippy::disallowed_methods, reason = "a date in a response is compared with the time of day")]
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    delay(headers.get(RETRY_AFTER)?.to_str().ok()?, SystemTime::now())
}

fn delay(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

/// A failed attempt whose report waits for the end of the request.
pub(super) struct FailedAttempt {
    pub(super) rank: WorkerRank,
    pub(super) outcome: Outcome,
    /// Counted at the end of the request, if its outcome depends on that.
    pub(super) sent: Option<WorkerRequest>,
    /// Keeps the rank among those with unsettled failures; absent in tests of the rules.
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) unsettled: Option<UnsettledFailure>,
}

/// End of the attempts of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// A worker has started a valid response.
    Served,
    /// A worker has responded with an error of the request itself.
    ClientError,
    /// No worker has responded.
    Failed,
}

/// The failed attempt that counts.
pub(super) fn counted_failure(failed_attempts: &[FailedAttempt], ending: Ending) -> Option<(WorkerRank, Outcome)> {
    // A missing key or model at a worker is proven only by another worker that serves the request.
    let counts = |attempt: &&FailedAttempt| ending == Ending::Served || attempt.outcome != Outcome::Misconfigured;
    let first = failed_attempts.iter().find(counts)?;
    let kind = |outcome: Outcome| std::mem::discriminant(&outcome);
    let mut counted = failed_attempts.iter().filter(counts);
    let is_alike = counted.clone().all(|attempt| kind(attempt.outcome) == kind(first.outcome))
        && counted.any(|attempt| attempt.rank.worker != first.rank.worker);
    (ending != Ending::Failed || !is_alike).then_some((first.rank, first.outcome))
}

/// Worker responses so far, for the client.
#[derive(Default)]
pub(super) struct Failures {
    pub(super) reasons: Vec<RetryReason>,
    /// Whether the engine of the last attempt sleeps.
    pub(super) is_asleep: bool,
    /// The last refusal or server error sent by a worker.
    last_error: Option<WorkerError>,
    /// The first response with 401, 403 or 404.
    first_misconfigured: Option<WorkerError>,
}

impl Failures {
    pub(super) fn add(&mut self, failure: Failure) {
        let reason = failure.reason();
        self.is_asleep = matches!(failure, Failure::Asleep);
        self.reasons.push(reason);
        if let Failure::Status { status, headers, body: Some(body) } = failure {
            let answer = Some(WorkerError { status, headers, body });
            if reason == RetryReason::Misconfigured {
                self.first_misconfigured = self.first_misconfigured.take().or(answer);
            } else {
                self.last_error = answer;
            }
        }
    }

    /// The error for the client: a worker's own if any sent one. A client that repeats the request would repeat all
    /// attempts.
    pub(super) fn refusal(self) -> Refusal {
        let has_worked = |reason: &RetryReason| !matches!(reason, RetryReason::Connect | RetryReason::Busy);
        let has_worked = self.reasons.iter().any(has_worked);
        let no_retry = (X_SHOULD_RETRY, HeaderValue::from_static("false"));
        match (self.last_error.or(self.first_misconfigured), self.reasons.last()) {
            (Some(mut error), _) => {
                // Clients repeat a request above a rate limit after `Retry-After`.
                let is_final = match error.status {
                    StatusCode::TOO_MANY_REQUESTS => false,
                    status => has_worked || status == StatusCode::SERVICE_UNAVAILABLE,
                };
                error.headers.extend(Some(no_retry).filter(|_| is_final));
                Refusal::Worker(error)
            }
            (None, last) => {
                let mut error = match last {
                    Some(RetryReason::Timeout) => ApiError::worker_timeout(),
                    _ => ApiError::worker_failed(),
                };
                error.headers.extend(Some(no_retry).filter(|_| has_worked));
                error.into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::WorkerId;

    use super::*;

    fn failed_attempts(of: &[(u64, Outcome)]) -> Vec<FailedAttempt> {
        let attempt = |&(worker, outcome)| FailedAttempt {
            rank: WorkerRank::new(WorkerId(worker), 0),
            outcome,
            sent: None,
            unsettled: None,
        };
        of.iter().map(attempt).collect()
    }

    fn counted(of: &[(u64, Outcome)], ending: Ending) -> Option<u64> {
        counted_failure(&failed_attempts(of), ending).map(|(rank, _)| rank.worker.0)
    }

    #[test]
    fn at_most_one_worker_counts_and_none_for_equal_failures() {
        use Outcome::{InvalidAnswer, Misconfigured, Reset, ServerError};
        let refused = |seconds| Outcome::Refused { retry_after: Some(Duration::from_secs(seconds)) };
        for ending in [Ending::Served, Ending::ClientError, Ending::Failed] {
            assert_eq!(counted(&[], ending), None);
            assert_eq!(counted(&[(1, ServerError)], ending), Some(1), "{ending:?}");
            assert_eq!(counted(&[(1, ServerError), (2, Reset)], ending), Some(1), "{ending:?}");
        }
        assert_eq!(counted(&[(1, ServerError), (2, ServerError)], Ending::Served), Some(1));
        assert_eq!(counted(&[(1, ServerError), (2, ServerError)], Ending::Failed), None, "a poison request");
        assert_eq!(counted(&[(1, refused(1)), (2, refused(9))], Ending::Failed), None);
        assert_eq!(counted(&[(1, Reset), (1, Reset)], Ending::Failed), Some(1), "the same worker twice");
        assert_eq!(counted(&[(1, Misconfigured)], Ending::Served), Some(1));
        assert_eq!(counted(&[(1, Misconfigured)], Ending::ClientError), None);
        assert_eq!(counted(&[(1, Misconfigured), (2, Misconfigured)], Ending::Failed), None);
        assert_eq!(counted(&[(1, Misconfigured), (2, InvalidAnswer)], Ending::Failed), Some(2));
    }

    #[test]
    fn a_delay_is_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(delay(" 7 ", now), Some(Duration::from_secs(7)));
        assert_eq!(delay("Sun, 06 Nov 1994 08:50:07 GMT", now), Some(Duration::from_secs(30)));
        assert_eq!(delay("Sun, 06 Nov 1994 08:49:07 GMT", now), Some(Duration::ZERO), "a date in the past");
        for none in ["", "-1", "soon", "1.5"] {
            assert_eq!(delay(none, now), None, "{none}");
        }
    }
}
