//! How much of a class may wait, what is said when it is too much, and when to come back.
//!
//! Owns the refusal ([`Backpressure`]) and the rate at which a class drains. Promises an answer within
//! [`RETRY_AFTER_MIN`] and [`RETRY_AFTER_MAX`], from timestamps alone. It is advice to callers: no decision depends on
//! it. Leaves to the queue what waits, and to whoever asks what becomes of the refused.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::protocol::Timestamp;

use super::QueueEntry;

/// Nobody is told to come back sooner.
pub const RETRY_AFTER_MIN: Duration = Duration::from_millis(100);

/// Nobody is told to stay away longer.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

/// What is said while nothing of the kind has left the queue yet.
pub const RETRY_AFTER_UNKNOWN: Duration = Duration::from_secs(1);

/// Over which time the rate of draining forgets: after that long, what was seen counts for 1/e.
const MEMORY_SECS: f64 = 10.0;

/// Why a request may not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitKind {
    /// `requests_max_per_rank` of its class.
    Requests,
    /// `raw_tokens_max_per_rank` of its class.
    RawTokens,
    /// `cached_tokens_max_per_rank` of its class.
    CachedTokens,
    /// It asked not to wait.
    DoNotQueue,
}

impl LimitKind {
    /// Its name in logs, metrics and answers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::RawTokens => "raw_tokens",
            Self::CachedTokens => "cached_tokens",
            Self::DoNotQueue => "do_not_queue",
        }
    }
}

impl fmt::Display for LimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A request would have to wait and may not.
///
/// ```
/// use std::time::Duration;
/// use pointsman::queue::{Backpressure, LimitKind};
///
/// let refused = Backpressure {
///     class: "batch".into(),
///     limit: LimitKind::Requests,
///     current: 12,
///     max: 12,
///     retry_after: Duration::from_millis(1500),
/// };
/// assert_eq!(
///     refused.to_string(),
///     "class batch takes no more waiting requests: limit requests is 12, 12 are waiting, retry after 1.5s"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "class {class} takes no more waiting requests: limit {limit} is {max}, {current} are waiting, retry after {retry_after:?}"
)]
pub struct Backpressure {
    /// The class.
    pub class: Arc<str>,
    /// Which limit.
    pub limit: LimitKind,
    /// What waits in the class of what the limit is about: requests, or tokens.
    pub current: u64,
    /// The limit for the whole pool.
    pub max: u64,
    /// When a place can be expected to be free, at the rate at which the class has been draining.
    pub retry_after: Duration,
}

/// How fast a class drains: what has left it, over the time in which it had something to send, both forgotten at the
/// same pace. Time without requests does not count, for then nothing could leave.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drain {
    requests: f64,
    raw_tokens: f64,
    cached_tokens: f64,
    secs: f64,
    /// Up to when time has been counted.
    until: Timestamp,
}

impl Drain {
    /// The class has requests again since `now`.
    pub(super) fn resume(&mut self, now: Timestamp) {
        self.until = self.until.max(now);
    }

    /// A request has been sent.
    pub(super) fn sent(&mut self, now: Timestamp, entry: &QueueEntry) {
        let secs = self.uncounted_secs(now);
        let kept = (-secs / MEMORY_SECS).exp();
        self.secs = self.secs * kept + secs;
        self.requests = self.requests * kept + 1.0;
        self.raw_tokens = self.raw_tokens * kept + f64::from(entry.isl_tokens);
        self.cached_tokens = self.cached_tokens * kept + f64::from(entry.cached_tokens);
        self.resume(now);
    }

    /// When `amount` more will have left.
    pub(super) fn retry_after(&self, now: Timestamp, limit: LimitKind, amount: u64) -> Duration {
        let drained = match limit {
            LimitKind::Requests | LimitKind::DoNotQueue => self.requests,
            LimitKind::RawTokens => self.raw_tokens,
            LimitKind::CachedTokens => self.cached_tokens,
        };
        if drained <= 0.0 {
            return RETRY_AFTER_UNKNOWN;
        }
        // What is counted would have to shrink up to now, above and below; letting the stall grow instead keeps a long
        // one from ending in zero by zero.
        let stalled = self.uncounted_secs(now);
        let secs = self.secs + stalled * (stalled / MEMORY_SECS).exp();
        let after_secs = amount.max(1) as f64 * secs / drained;
        Duration::from_secs_f64(after_secs.clamp(RETRY_AFTER_MIN.as_secs_f64(), RETRY_AFTER_MAX.as_secs_f64()))
    }

    fn uncounted_secs(&self, now: Timestamp) -> f64 {
        now.since(self.until).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp(1_000_000_000);

    fn at(millis: u64) -> Timestamp {
        START + Duration::from_millis(millis)
    }

    /// A class that has sent a request of 1,000 tokens, a tenth of them cached, every `every_ms`, up to `until_ms`.
    fn draining(every_ms: u64, until_ms: u64) -> Drain {
        let mut drain = Drain::default();
        drain.resume(START);
        let entry = QueueEntry { isl_tokens: 1000, cached_tokens: 100, ..QueueEntry::default() };
        (1..=until_ms / every_ms).for_each(|n| drain.sent(at(n * every_ms), &entry));
        drain
    }

    fn near(found: Duration, expected_ms: u64) -> bool {
        found.abs_diff(Duration::from_millis(expected_ms)) < Duration::from_micros(expected_ms)
    }

    #[test]
    fn a_steady_rate_is_found_at_once_and_kept() {
        for (every_ms, until_ms) in [(200, 200), (200, 5_000), (200, 600_000), (25_000, 100_000)] {
            let drain = draining(every_ms, until_ms);
            let one = |limit, amount| near(drain.retry_after(at(until_ms), limit, amount), every_ms);
            assert!(one(LimitKind::Requests, 1) && one(LimitKind::DoNotQueue, 1), "{drain:?}");
            assert!(one(LimitKind::RawTokens, 1000) && one(LimitKind::CachedTokens, 100), "{drain:?}");
        }
    }

    #[test]
    fn answers_stay_within_their_bounds() {
        let drain = draining(200, 10_000);
        assert_eq!(drain.retry_after(at(10_000), LimitKind::RawTokens, 1), RETRY_AFTER_MIN);
        assert_eq!(drain.retry_after(at(10_000), LimitKind::Requests, u64::MAX), RETRY_AFTER_MAX);
        assert_eq!(Drain::default().retry_after(at(0), LimitKind::Requests, 1), RETRY_AFTER_UNKNOWN);
        let mut uncached = draining(1, 0);
        uncached.sent(at(0), &QueueEntry { isl_tokens: 5, ..QueueEntry::default() });
        assert_eq!(uncached.retry_after(at(0), LimitKind::CachedTokens, 1), RETRY_AFTER_UNKNOWN);
        assert_eq!(uncached.retry_after(at(0), LimitKind::Requests, 1), RETRY_AFTER_MIN, "no time has passed");
    }

    #[test]
    fn a_stall_counts_and_idleness_does_not() {
        let drain = draining(200, 10_000);
        let now = drain.retry_after(at(10_000), LimitKind::Requests, 10);
        let stalled = drain.retry_after(at(15_000), LimitKind::Requests, 10);
        assert!(stalled > now * 2, "{stalled:?} after {now:?}");
        assert_eq!(drain.retry_after(at(1 << 40), LimitKind::Requests, 10), RETRY_AFTER_MAX);
        let mut idle = drain;
        idle.resume(at(500_000));
        assert_eq!(idle.retry_after(at(500_000), LimitKind::Requests, 10), now);
        idle.resume(at(400_000));
        assert_eq!(idle.retry_after(at(500_000), LimitKind::Requests, 10), now, "time never runs backwards");
    }

    #[test]
    fn a_new_pace_is_learnt() {
        let mut drain = draining(1_000, 100_000);
        let entry = QueueEntry::default();
        (1..=1000).for_each(|n| drain.sent(at(100_000 + n * 100), &entry));
        assert!(near(drain.retry_after(at(200_000), LimitKind::Requests, 20), 2_000));
    }
}
