//! Token bucket with exact integer arithmetic: a limit per window, refilled continuously.

use std::time::Duration;

use pointsman::protocol::Timestamp;

/// A limit of `limit` units per window. Full at the start. A settlement can overdraw it; then nothing is available until
/// the debt is refilled.
///
/// One unit costs as many credits as the window has nanoseconds, and a nanosecond refills `limit` credits, so no
/// rounding occurs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    limit: u64,
    window_ns: u64,
    credits: i128,
    at: Timestamp,
}

impl Bucket {
    /// A full bucket. `limit` and `window` are positive.
    pub(super) fn new(limit: u64, window: Duration, now: Timestamp) -> Self {
        let window_ns = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX).max(1);
        let limit = limit.max(1);
        Self { limit, window_ns, credits: i128::from(limit) * i128::from(window_ns), at: now }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    fn capacity(&self) -> i128 {
        self.cost(self.limit)
    }

    fn cost(&self, units: u64) -> i128 {
        i128::from(units) * i128::from(self.window_ns)
    }

    /// Adds the credits since the last call. An earlier `now` has no effect.
    fn refill(&mut self, now: Timestamp) {
        let elapsed_ns = now.0.saturating_sub(self.at.0);
        self.at = self.at.max(now);
        let added = i128::from(elapsed_ns).saturating_mul(i128::from(self.limit));
        self.credits = self.credits.saturating_add(added).min(self.capacity());
    }

    /// Whole units that can be taken now.
    pub(super) fn available(&mut self, now: Timestamp) -> u64 {
        self.refill(now);
        u64::try_from(self.credits.max(0) / i128::from(self.window_ns)).unwrap_or(u64::MAX)
    }

    /// Time until `units` can be taken. More than the limit can be taken from a full bucket, which then is overdrawn.
    pub(super) fn wait(&mut self, units: u64, now: Timestamp) -> Duration {
        self.refill(now);
        self.time_to(self.cost(units.min(self.limit)))
    }

    /// Time until the bucket is full.
    pub(super) fn full_in(&mut self, now: Timestamp) -> Duration {
        self.refill(now);
        self.time_to(self.capacity())
    }

    fn time_to(&self, credits: i128) -> Duration {
        let missing = (credits - self.credits).max(0);
        let limit = i128::from(self.limit);
        let ns = missing / limit + i128::from(missing % limit > 0);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// Takes units, if necessary by overdrawing.
    pub(super) fn take(&mut self, units: u64, now: Timestamp) {
        self.refill(now);
        self.credits = self.credits.saturating_sub(self.cost(units));
    }

    /// Returns units.
    pub(super) fn give_back(&mut self, units: u64, now: Timestamp) {
        self.refill(now);
        self.credits = self.credits.saturating_add(self.cost(units)).min(self.capacity());
    }

    /// The same use under another limit of the same window.
    pub(super) fn with_limit(mut self, limit: u64, now: Timestamp) -> Self {
        self.refill(now);
        let limit = limit.max(1);
        // The used share of the window, in credits of the old limit, is a number of units.
        let used = self.capacity() - self.credits;
        self.limit = limit;
        self.credits = self.capacity() - used;
        self
    }
}
