//! Rejections at queue limits: backpressure and retry delays.
//!
//! Defines the rejection ([`Backpressure`]) and measures the drain rate of a class. Retry delays are between
//! [`RETRY_AFTER_MIN`] and [`RETRY_AFTER_MAX`] and depend on timestamps alone. They are advice to callers; no decision
//! depends on them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::names::named;
use crate::protocol::Timestamp;

use super::key::QueueEntry;

/// Minimum retry delay.
pub const RETRY_AFTER_MIN: Duration = Duration::from_millis(100);

/// Maximum retry delay.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

/// Retry delay before any comparable request has left the queue.
pub const RETRY_AFTER_UNKNOWN: Duration = Duration::from_secs(1);

/// Time constant of the drain rate in seconds: after this time, an observation has weight 1/e.
const MEMORY_SECS: f64 = 10.0;

named! {
    /// Reason for which a request may not wait.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum LimitKind {
        /// `requests_max_per_rank` of the class.
        Requests = "requests",
        /// `raw_tokens_max_per_rank` of the class.
        RawTokens = "raw_tokens",
        /// `cached_tokens_max_per_rank` of the class.
        CachedTokens = "cached_tokens",
        /// The request set `do_not_queue`.
        DoNotQueue = "do_not_queue",
        /// `refuse_program_starts` of the class.
        ProgramStarts = "program_starts",
    }
}

impl fmt::Display for LimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Rejection of a request that would have to wait.
///
/// ```
/// use std::time::Duration;
/// use pointsman::{internals::queue::Backpressure, LimitKind};
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
    /// The limit.
    pub limit: LimitKind,
    /// Current amount in the class, in the unit of the limit: requests or tokens.
    pub current: u64,
    /// The limit for the whole pool.
    pub max: u64,
    /// Expected time until the class has room, at its current drain rate; for starts of programs, the time until the
    /// first claim ends.
    pub retry_after: Duration,
}

/// Drain rate of a class: departures divided by the time with waiting requests, both with exponential decay. Time with
/// an empty class does not count.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drain {
    requests: f64,
    raw_tokens: f64,
    cached_tokens: f64,
    secs: f64,
    /// End of the counted time.
    until: Timestamp,
}

impl Drain {
    /// Restarts the time at `now`, when an empty class receives a request.
    pub(super) fn resume(&mut self, now: Timestamp) {
        self.until = self.until.max(now);
    }

    /// Records a dispatched request.
    pub(super) fn sent(&mut self, now: Timestamp, entry: &QueueEntry) {
        let secs = self.uncounted_secs(now);
        let kept = (-secs / MEMORY_SECS).exp();
        self.secs = self.secs * kept + secs;
        self.requests = self.requests * kept + 1.0;
        self.raw_tokens = self.raw_tokens * kept + f64::from(entry.prompt_tokens);
        self.cached_tokens = self.cached_tokens * kept + f64::from(entry.cached_tokens);
        self.resume(now);
    }

    /// Expected time until `amount` has left the class.
    pub(super) fn retry_after(&self, now: Timestamp, limit: LimitKind, amount: u64) -> Duration {
        let drained = match limit {
            LimitKind::Requests | LimitKind::DoNotQueue | LimitKind::ProgramStarts => self.requests,
            LimitKind::RawTokens => self.raw_tokens,
            LimitKind::CachedTokens => self.cached_tokens,
        };
        if drained <= 0.0 {
            return RETRY_AFTER_UNKNOWN;
        }
        // Exact decay would shrink the numerator and the denominator up to now. Growing the stall instead avoids 0 / 0
        // after a long stall.
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

    /// A class that dispatches a request of 1,000 tokens, a tenth of them cached, every `every_ms` until `until_ms`.
    fn draining(every_ms: u64, until_ms: u64) -> Drain {
        let mut drain = Drain::default();
        drain.resume(START);
        let entry = QueueEntry { prompt_tokens: 1000, cached_tokens: 100, ..QueueEntry::default() };
        (1..=until_ms / every_ms).for_each(|n| drain.sent(at(n * every_ms), &entry));
        drain
    }

    fn near(found: Duration, expected_ms: u64) -> bool {
        found.abs_diff(Duration::from_millis(expected_ms)) < Duration::from_micros(expected_ms)
    }

    #[test]
    fn steady_rate_is_measured_immediately_and_kept() {
        for (every_ms, until_ms) in [(200, 200), (200, 5_000), (200, 600_000), (25_000, 100_000)] {
            let drain = draining(every_ms, until_ms);
            let one = |limit, amount| near(drain.retry_after(at(until_ms), limit, amount), every_ms);
            assert!(one(LimitKind::Requests, 1) && one(LimitKind::DoNotQueue, 1), "{drain:?}");
            assert!(one(LimitKind::RawTokens, 1000) && one(LimitKind::CachedTokens, 100), "{drain:?}");
        }
    }

    #[test]
    fn retry_delays_respect_their_bounds() {
        let drain = draining(200, 10_000);
        assert_eq!(drain.retry_after(at(10_000), LimitKind::RawTokens, 1), RETRY_AFTER_MIN);
        assert_eq!(drain.retry_after(at(10_000), LimitKind::Requests, u64::MAX), RETRY_AFTER_MAX);
        assert_eq!(Drain::default().retry_after(at(0), LimitKind::Requests, 1), RETRY_AFTER_UNKNOWN);
        let mut uncached = draining(1, 0);
        uncached.sent(at(0), &QueueEntry { prompt_tokens: 5, ..QueueEntry::default() });
        assert_eq!(uncached.retry_after(at(0), LimitKind::CachedTokens, 1), RETRY_AFTER_UNKNOWN);
        assert_eq!(uncached.retry_after(at(0), LimitKind::Requests, 1), RETRY_AFTER_MIN, "no time has passed");
    }

    #[test]
    fn stalled_time_counts_and_idle_time_does_not() {
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
    fn changed_rate_is_measured() {
        let mut drain = draining(1_000, 100_000);
        let entry = QueueEntry::default();
        (1..=1000).for_each(|n| drain.sent(at(100_000 + n * 100), &entry));
        assert!(near(drain.retry_after(at(200_000), LimitKind::Requests, 20), 2_000));
    }
}
