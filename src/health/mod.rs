//! Health of ranks: ejection and back-off derived from probes and request outcomes.
//!
//! For each rank, the results of probes and requests determine the [`Exclusions`]:
//!
//! - *down*: probes fail, or connections cannot be made. Selected after all other ranks, for any number of down ranks.
//! - *ejected on suspicion*: requests fail in another way. Not selected. Neither the last serving rank nor more than a
//!   configured share of all ranks is ejected on suspicion; a rank beyond that limit remains in service as *suspected*.
//! - *refusing*: the rank has recently refused a request. Selected after ranks that do not, until a back-off ends.
//! - *stalled*: the rank owes first tokens and makes no progress. Treated like a refusing one.
//! - *asleep*: the engine has reported that it sleeps. Never selected; requests may wait for it.
//!
//! Each of these states ends: by time, by successful probes, by an answered request, or when probing stops. Without
//! failures nothing is computed. Pure: `now` is an argument. Embedders report request outcomes, `actors/health`
//! sends probes, and `schedule` applies the exclusions and the slow start.

mod monitor;
mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use monitor::{HealthChange, HealthInput, Monitor};
pub use record::Member;

use crate::config::{HealthConfig, RouterConfig};
use crate::names::named;
use crate::protocol::{Timestamp, WorkerRank};

/// Maximum ejection time after failed requests. (reference: Envoy's outlier detection, max_ejection_time)
pub const EJECTION_MAX: Duration = Duration::from_millis(HealthConfig::EJECTION_MS_MAX);

/// Back-off after the first refused request; doubled by each further consecutive one.
const REFUSAL_BACKOFF: Duration = Duration::from_secs(1);

/// Consecutive back-offs as which the first one of a stalled rank counts: 4 s.
const STALL_BACKOFFS: u32 = 2;

/// Maximum back-off, unless the engine requests a longer one.
const REFUSAL_BACKOFF_MAX: Duration = Duration::from_secs(16);

/// Maximum back-off that an engine can request with `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Outcome of a request with respect to the health of its rank.
///
/// A response that rejects the request itself (status 4xx) is [`Outcome::Ok`], because the engine responded.
/// Exceptions: 429 is [`Outcome::Refused`]; 401, 403 and 404 are [`Outcome::Misconfigured`] if another worker accepts
/// the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The engine responded.
    Ok,
    /// The connection failed.
    ConnectFailed,
    /// No response in time.
    Timeout,
    /// A response with status 500 or above.
    ServerError,
    /// The connection was lost before the end of the response.
    Reset,
    /// The engine refused the request for lack of capacity (status 429 or 503).
    Refused {
        /// The delay in `Retry-After`; `None` if not sent.
        #[serde(default, rename = "retry_after_seconds", with = "crate::protocol::option_seconds")]
        retry_after: Option<Duration>,
    },
    /// The engine responded with status 401, 403 or 404, and another worker accepted the same request.
    Misconfigured,
    /// A response with a success status but without valid content: wrong content type, an unparsable body, or a stream
    /// without its end mark.
    InvalidAnswer,
}

impl Outcome {
    /// Whether the outcome is a success.
    #[must_use]
    pub fn is_ok(self) -> bool {
        self == Self::Ok
    }

    /// Description for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "answered",
            Self::ConnectFailed => "could not connect",
            Self::Timeout => "timed out",
            Self::ServerError => "server error",
            Self::Reset => "connection reset",
            Self::Refused { .. } => "refused for lack of capacity",
            Self::Misconfigured => "refused with 401, 403 or 404 what another worker accepts",
            Self::InvalidAnswer => "invalid answer",
        }
    }

    /// Name in labels and log fields.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ConnectFailed => "connect_failed",
            Self::Timeout => "timeout",
            Self::ServerError => "server_error",
            Self::Reset => "reset",
            Self::Refused { .. } => "refused",
            Self::Misconfigured => "misconfigured",
            Self::InvalidAnswer => "invalid_answer",
        }
    }
}

named! {
    /// Cause of an ejection.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Cause {
        /// The engine does not respond to probes.
        Probe = "probe",
        /// Consecutive requests failed.
        Outcomes = "outcomes",
    }
}

/// Thresholds and durations of ejections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HealthRules {
    /// Consecutive failed probes that eject an engine's ranks.
    pub probe_failures_max: u32,
    /// Consecutive successful probes that end this ejection.
    pub probe_successes_min: u32,
    /// Validity of a probe result. A prober that hangs ejects a rank for at most this time.
    pub probe_stale: Duration,
    /// Consecutive failed requests that eject a rank; 0 disables this.
    pub outcome_failures_max: u32,
    /// Duration of the first ejection; the n-th lasts n times as long, up to [`EJECTION_MAX`].
    pub ejection: Duration,
    /// Maximum share of all ranks ejected on suspicion at the same time, in [0, 1]; above 0, at least one of two ranks
    /// may be ejected. Down ranks do not count.
    pub ejected_share_max: f64,
}

impl HealthRules {
    /// The rules of a validated configuration.
    #[must_use]
    pub fn of(config: &RouterConfig) -> Self {
        let probe = config.health.probe_interval_ms.saturating_add(config.health.probe_timeout_ms);
        Self {
            probe_failures_max: config.health.probe_failures_max,
            probe_successes_min: config.health.probe_successes_min,
            probe_stale: Duration::from_millis(probe.saturating_mul(3)),
            outcome_failures_max: config.health.outcome_failures_max,
            ejection: Duration::from_millis(config.health.ejection_ms),
            ejected_share_max: config.health.ejected_share_max,
        }
    }
}

/// The ranks excluded from normal selection because of their health.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// Ejected on suspicion: not selected while any other rank serves.
    pub ejected: BTreeSet<WorkerRank>,
    /// Down: unreachable, or failing probes. Selected only if no other rank is left for a request.
    pub down: BTreeSet<WorkerRank>,
    /// Refusing or stalled: in a back-off. Selected after other ranks.
    pub refusing: BTreeSet<WorkerRank>,
    /// Asleep, as reported by the engine. Not selected.
    pub asleep: BTreeSet<WorkerRank>,
}

impl Exclusions {
    /// Whether no rank is excluded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ejected.is_empty() && self.down.is_empty() && self.refusing.is_empty() && self.asleep.is_empty()
    }

    /// Whether the rank is out of service: ejected on suspicion, or down.
    #[must_use]
    pub fn has_ejected(&self, rank: WorkerRank) -> bool {
        self.ejected.contains(&rank) || self.down.contains(&rank)
    }

    /// All ranks out of service: ejected on suspicion, or down.
    #[must_use]
    pub fn out_of_service(&self) -> BTreeSet<WorkerRank> {
        self.ejected.union(&self.down).copied().collect()
    }

    fn forget(&mut self, rank: WorkerRank) {
        self.retain(|known| known != rank);
    }

    fn retain(&mut self, keep: impl Fn(WorkerRank) -> bool) {
        for ranks in [&mut self.ejected, &mut self.down, &mut self.refusing, &mut self.asleep] {
            ranks.retain(|rank| keep(*rank));
        }
    }
}

/// Effect of a rank's health on selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthState {
    /// No restriction.
    Healthy,
    /// Should be ejected, but the ejection limit is reached or no other rank is left.
    Suspected,
    /// Recently refused requests; selected after other ranks.
    Refusing {
        /// End of the back-off.
        #[serde(rename = "until_seconds", serialize_with = "crate::protocol::timestamp_seconds::serialize")]
        until: Timestamp,
    },
    /// Owes first tokens without progress; selected after other ranks.
    Stalled {
        /// End of the back-off, after which it is tried again.
        #[serde(rename = "until_seconds", serialize_with = "crate::protocol::timestamp_seconds::serialize")]
        until: Timestamp,
    },
    /// Its engine has reported that it sleeps.
    Asleep,
    /// Out of service: ejected on suspicion, or down.
    Ejected {
        /// End of the ejection; `None` if it depends on probes.
        #[serde(rename = "until_seconds", serialize_with = "crate::protocol::option_timestamp_seconds::serialize")]
        until: Option<Timestamp>,
    },
}

/// Health of one rank with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankHealth {
    /// The rank.
    pub rank: WorkerRank,
    /// The resulting state.
    pub state: HealthState,
    /// The reason; empty for a healthy rank.
    pub reason: String,
}

impl fmt::Display for RankHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, state, reason } = self;
        match state {
            HealthState::Healthy => write!(f, "{rank} is healthy"),
            HealthState::Asleep => write!(f, "{rank} is asleep: {reason}"),
            HealthState::Suspected => write!(f, "{rank} is suspected and kept as the last eligible rank: {reason}"),
            HealthState::Refusing { until } | HealthState::Stalled { until } => {
                let what = if matches!(state, HealthState::Stalled { .. }) { "stalled" } else { "refusing requests" };
                let seconds = until.since(Timestamp::default()).as_secs_f64();
                write!(f, "{rank} is {what} until {seconds:.1} s after the router's start: {reason}")
            }
            HealthState::Ejected { until: None } => write!(f, "{rank} is ejected until probes succeed: {reason}"),
            HealthState::Ejected { until: Some(until) } => {
                let seconds = until.since(Timestamp::default()).as_secs_f64();
                write!(f, "{rank} is ejected until {seconds:.1} s after the router's start: {reason}")
            }
        }
    }
}
