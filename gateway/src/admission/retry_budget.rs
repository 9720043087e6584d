//! Retry budget: retries stay within a share of the requests of the last ten seconds.
//!
//! The budget keeps retries from multiplying the load of a failing fleet. Ten retries are always allowed, because a share
//! of few requests is nothing. The attempt loop decides which failures are retried.
//!
//! Not `tower::retry::budget::TpsBudget` (0.5.3), which adds the ten to the share, rounds `1 / share` down to an integer and
//! takes no refunds: of 1,000 requests it allows 343 retries at `retry_share_max = 0.3` and 1,010 at 0.6, where 300 and 600
//! are documented.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::observe::window::Window;

/// Length of the window in seconds; each second has its own counts.
const SECONDS: u64 = 10;

/// Retries per window that are allowed at any share.
const ALWAYS: u64 = 10;

/// The gateway's budget of retries.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    share_max: f64,
    window: Mutex<Window<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    requests: u64,
    retries: u64,
}

impl RetryBudget {
    /// `share_max`: retries per request.
    pub(crate) fn new(share_max: f64, now: Instant) -> Self {
        Self { share_max, window: Mutex::new(Window::new(now, Duration::from_secs(1), SECONDS)) }
    }

    /// Counts a request.
    pub(crate) fn requested(&self, now: Instant) {
        self.window.lock().at(now).requests += 1;
    }

    /// Takes a retry; false when the budget is spent.
    #[must_use]
    pub(crate) fn take(&self, now: Instant) -> bool {
        let mut window = self.window.lock();
        let sum = |sum: (u64, u64), (_, counts): &(u64, Counts)| (sum.0 + counts.requests, sum.1 + counts.retries);
        let (requests, retries) = window.recent(now).fold((0, 0), sum);
        let has_one = retries < ALWAYS || (retries + 1) as f64 <= requests as f64 * self.share_max;
        window.at(now).retries += u64::from(has_one);
        has_one
    }

    /// Returns the retry that was just taken: no rank was left for it.
    pub(crate) fn give_back(&self, now: Instant) {
        let mut window = self.window.lock();
        let counts = window.at(now);
        counts.retries = counts.retries.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    /// Retries left at `now`.
    fn left(budget: &RetryBudget, now: Instant) -> usize {
        (0..10_000).take_while(|_| budget.take(now)).count()
    }

    #[test]
    fn a_minimum_of_retries_is_always_allowed() {
        let start = Instant::now();
        let budget = RetryBudget::new(0.0, start);
        assert_eq!(left(&budget, start), 10);
        assert_eq!(left(&budget, after(start, 9)), 0, "the minimum of ten is spent");
        assert_eq!(left(&budget, after(start, 10)), 10);
    }

    #[test]
    fn a_share_of_requests_may_be_retried() {
        let start = Instant::now();
        let budget = RetryBudget::new(0.2, start);
        for second in 0..10 {
            (0..50).for_each(|_| budget.requested(after(start, second)));
        }
        assert_eq!(left(&budget, after(start, 9)), 100);
        // The first second's 50 requests are forgotten, the retries of the ninth are not.
        assert_eq!(left(&budget, after(start, 10)), 0);
        assert_eq!(left(&budget, after(start, 1_000)), 10, "an idle period clears the window");
    }

    #[test]
    fn returned_retries_are_available_again() {
        let start = Instant::now();
        let budget = RetryBudget::new(0.0, start);
        assert_eq!(left(&budget, start), 10);
        budget.give_back(start);
        assert_eq!(left(&budget, start), 1);
        budget.give_back(after(start, 30));
        assert_eq!(left(&budget, after(start, 30)), 10, "no retry was taken in that second");
    }
}
