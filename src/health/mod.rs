//! Health: who is well enough to be sent requests.
//!
//! Owns, for each rank, what probes of its engine and requests on it have shown, and the [`Exclusions`] that follow:
//!
//! - *down*: probes fail, or connections cannot be made. Chosen after all other ranks, however many are down.
//! - *ejected on suspicion*: requests on it fail in another way. Not chosen. The last rank that can serve is never ejected
//!   on suspicion, nor more than a set share of all ranks; a rank beyond that limit stays in service, *suspected*.
//! - *refusing*: it has just refused a request. Chosen after the ranks that do not, until a back-off ends.
//!
//! Promises that each of them ends: by time, by good probes, by an answered request, or because nobody probes any more;
//! and that nothing is computed while nothing fails. Pure: `now` is an argument. Leaves to embedders to report how
//! requests went, to `actors/health.rs` to probe, and to `schedule` to keep requests away from those excluded and to let
//! those that return start slowly.

mod monitor;
mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use monitor::{Change, Input, Member, Monitor};

use crate::config::RouterConfig;
use crate::protocol::{Timestamp, WorkerRank};

/// The longest that failed requests put a rank out of service, however often they do.
/// (reference: Envoy's outlier detection, max_ejection_time)
pub const EJECTION_MAX: Duration = Duration::from_millis(RouterConfig::EJECTION_MS_MAX);

/// Back-off after a first refused request; each further one in a row doubles it.
const REFUSAL_BACKOFF: Duration = Duration::from_secs(1);

/// The longest back-off, unless the engine requests a longer one.
const REFUSAL_BACKOFF_MAX: Duration = Duration::from_secs(16);

/// The longest back-off that an engine can request with `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// How a request that was sent to a rank went, as far as it tells of the rank's health.
///
/// What the engine refuses for the request's own sake (a status of 4xx) is [`Outcome::Ok`]: it has answered. Exceptions:
/// 429 is [`Outcome::Refused`]; 401, 403 and 404 are [`Outcome::Misconfigured`] if another worker accepts the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was answered.
    Ok,
    /// No connection could be made.
    ConnectFailed,
    /// No answer came in time.
    Timeout,
    /// The answer was a status of 500 or above.
    ServerError,
    /// The connection broke off before the answer's end.
    Reset,
    /// The engine refused the request for lack of capacity (status 429 or 503).
    Refused {
        /// The delay that the engine requested in `Retry-After`; absent if it sent none.
        retry_after: Option<Duration>,
    },
    /// The engine answered with status 401, 403 or 404, and another worker accepted the same request.
    Misconfigured,
    /// The answer had a success status but no valid content: wrong content type, a body that does not parse, or a
    /// stream that ended without its end mark.
    InvalidAnswer,
}

impl Outcome {
    /// Whether it speaks for the rank.
    #[must_use]
    pub fn is_ok(self) -> bool {
        self == Self::Ok
    }

    /// What happened, in words.
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

    /// Its name in labels and log fields.
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

/// What speaks against a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its engine does not answer probes.
    Probe,
    /// Requests on it failed, one after the other.
    Outcomes,
}

impl Cause {
    /// Its name in labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Probe => "probe",
            Self::Outcomes => "outcomes",
        }
    }
}

/// What must hold before anybody is ejected, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Failed probes in a row that eject an engine's ranks.
    pub probe_failures_max: u32,
    /// Good probes in a row that end that.
    pub probe_successes_min: u32,
    /// How long a probe's word counts. A prober that hangs keeps nobody out for longer.
    pub probe_stale: Duration,
    /// Failed requests in a row that eject a rank; 0 for never.
    pub outcome_failures_max: u32,
    /// For how long, the first time; the n-th time n times as long, up to [`EJECTION_MAX`].
    pub ejection: Duration,
    /// Share of all ranks that may be ejected on suspicion at once, in [0, 1]; above 0 it lets at least one of two go.
    /// Ranks that are down do not count.
    pub ejected_share_max: f64,
}

impl Rules {
    /// Those of a validated configuration.
    #[must_use]
    pub fn of(config: &RouterConfig) -> Self {
        let probe = config.health_probe_interval_ms.saturating_add(config.health_probe_timeout_ms);
        Self {
            probe_failures_max: config.health_failures_max,
            probe_successes_min: config.health_successes_min,
            probe_stale: Duration::from_millis(probe.saturating_mul(3)),
            outcome_failures_max: config.outcome_failures_max,
            ejection: Duration::from_millis(config.ejection_ms),
            ejected_share_max: config.ejected_share_max,
        }
    }
}

/// The ranks that requests keep away from because of their health.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// Ejected on suspicion: not chosen while any other rank serves.
    pub ejected: BTreeSet<WorkerRank>,
    /// Down: not reachable, or failing their probes. A request for which no other rank is left may be sent to them.
    pub down: BTreeSet<WorkerRank>,
    /// Refusing: in a back-off after refused requests. Chosen after the ranks that are not.
    pub refusing: BTreeSet<WorkerRank>,
}

impl Exclusions {
    /// Whether nobody is excluded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ejected.is_empty() && self.down.is_empty() && self.refusing.is_empty()
    }

    /// Whether the rank is out of service: ejected on suspicion, or down.
    #[must_use]
    pub fn has_ejected(&self, rank: WorkerRank) -> bool {
        self.ejected.contains(&rank) || self.down.contains(&rank)
    }

    /// The ranks that are out of service: ejected on suspicion, or down.
    #[must_use]
    pub fn out_of_service(&self) -> BTreeSet<WorkerRank> {
        self.ejected.union(&self.down).copied().collect()
    }

    fn forget(&mut self, rank: WorkerRank) {
        self.retain(|known| known != rank);
    }

    fn retain(&mut self, keep: impl Fn(WorkerRank) -> bool) {
        for ranks in [&mut self.ejected, &mut self.down, &mut self.refusing] {
            ranks.retain(|rank| keep(*rank));
        }
    }
}

/// Whether a rank is sent requests, as far as its health goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthState {
    /// Nothing is held against it.
    Healthy,
    /// It should be out of service, but too many are, or nobody else is left.
    Suspected,
    /// It has just refused requests, and is chosen after the ranks that have not.
    Refusing {
        /// The end of its back-off.
        until: Timestamp,
    },
    /// It is out of service: ejected on suspicion, or down.
    Ejected {
        /// When it comes back by itself; absent while that depends on probes.
        until: Option<Timestamp>,
    },
}

/// How one rank is, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankHealth {
    /// The rank.
    pub rank: WorkerRank,
    /// What follows for it.
    pub state: HealthState,
    /// What is held against it, in words; empty where it is healthy.
    pub why: String,
}

impl fmt::Display for RankHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, state, why } = self;
        match state {
            HealthState::Healthy => write!(f, "{rank} is healthy"),
            HealthState::Suspected => write!(f, "{rank} is suspected, and kept for want of others: {why}"),
            HealthState::Refusing { until } => {
                let seconds = until.since(Timestamp::default()).as_secs_f64();
                write!(f, "{rank} is refusing requests until {seconds:.1} s after the router's start: {why}")
            }
            HealthState::Ejected { until: None } => write!(f, "{rank} is ejected until probes succeed: {why}"),
            HealthState::Ejected { until: Some(until) } => {
                let seconds = until.since(Timestamp::default()).as_secs_f64();
                write!(f, "{rank} is ejected until {seconds:.1} s after the router's start: {why}")
            }
        }
    }
}
