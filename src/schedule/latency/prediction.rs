//! Predicted latency of a request on a rank, and the rejection for targets that no rank is predicted to meet.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// Predicted latency of a request on a rank, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencyPrediction {
    /// Time from the decision to the first token. Absent where prefill is not tracked, as in decode pools.
    pub ttft_seconds: Option<f64>,
    /// Mean time between two tokens of the response. Absent in prefill pools.
    pub itl_seconds: Option<f64>,
}

/// A target below the prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissedTarget {
    /// Predicted time. For the first token it includes the time that the request has waited.
    pub predicted: Duration,
    /// Target of the request.
    pub target: Duration,
}

/// Rejection of a request whose targets no eligible rank is predicted to meet: the rank that misses the fewest, and of
/// these the one with the earliest first token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetsMissed {
    /// The target of the time to first token, if that rank misses it.
    pub ttft: Option<MissedTarget>,
    /// The target of the time between tokens, if that rank misses it.
    pub itl: Option<MissedTarget>,
    /// Time after which the prefill queue of some rank is short enough, if nothing joins it. `None` if shorter queues do
    /// not suffice on any rank.
    pub retry_after: Option<Duration>,
}

impl std::error::Error for TargetsMissed {}

impl fmt::Display for TargetsMissed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no rank is predicted to meet the targets")?;
        for (name, missed) in [("time to first token", self.ttft), ("inter-token latency", self.itl)] {
            if let Some(MissedTarget { predicted, target }) = missed {
                let [predicted, target] = [predicted, target].map(|duration| duration.as_secs_f64() * 1e3);
                write!(f, ", {name} {predicted:.1} ms with a target of {target:.1} ms")?;
            }
        }
        Ok(())
    }
}

/// A prediction as a duration, of at most 584 years.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
pub(in crate::schedule) fn duration(seconds: f64) -> Duration {
    Duration::from_nanos((seconds * 1e9) as u64)
}
