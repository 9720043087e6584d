//! Retry budget: retries stay within a share of the requests of the last ten seconds.
//!
//! The budget keeps retries from multiplying the load of a failing fleet. Ten retries are always allowed, because a share
//! of few requests is nothing. The attempt loop decides which failures are retried.
//!
//! Not `tower::retry::budget::TpsBudget` (0.5.3), which adds the ten to the share, rounds `1 / share` down to an integer and
//! takes no refunds: of 1,000 requests it allows 343 retries at `retry_share_max = 0.3` and 1,010 at 0.6, where 300 and 600
//! are documented.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// Length of the window in seconds; each second has its own counts.
const SECONDS: usize = 10;

/// Retries per window that are allowed at any share.
const ALWAYS: u64 = 10;

/// The gateway's budget of retries.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    share_max: f64,
    origin: Instant,
    window: Mutex<Window>,
}

#[derive(Debug, Default)]
struct Window {
    /// Second of the last count, from the origin on.
    second: u64,
    requests: [u64; SECONDS],
    retries: [u64; SECONDS],
}

impl RetryBudget {
    /// `share_max`: retries per request.
    pub(crate) fn new(share_max: f64, now: Instant) -> Self {
        Self { share_max, origin: now, window: Mutex::default() }
    }

    /// Counts a request.
    pub(crate) fn requested(&self, now: Instant) {
        self.at(now, |window, slot| window.requests[slot] += 1);
    }

    /// Takes a retry; false when the budget is spent.
    #[must_use]
    pub(crate) fn take(&self, now: Instant) -> bool {
        self.at(now, |window, slot| {
            let (requests, retries) = (window.requests.iter().sum::<u64>(), window.retries.iter().sum::<u64>());
            let has_one = retries < ALWAYS || as_float(retries + 1) <= as_float(requests) * self.share_max;
            window.retries[slot] += u64::from(has_one);
            has_one
        })
    }

    /// Returns the retry that was just taken: no rank was left for it.
    pub(crate) fn give_back(&self, now: Instant) {
        self.at(now, |window, slot| window.retries[slot] = window.retries[slot].saturating_sub(1));
    }

    fn at<T>(&self, now: Instant, count: impl FnOnce(&mut Window, usize) -> T) -> T {
        // Counts are whole after every statement.
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let second = now.saturating_duration_since(self.origin).as_secs().max(window.second);
        let passed = usize::try_from(second - window.second).unwrap_or(SECONDS).min(SECONDS);
        for n in 1..=passed {
            let slot = slot_of(second - (passed - n) as u64);
            (window.requests[slot], window.retries[slot]) = (0, 0);
        }
        window.second = second;
        count(&mut window, slot_of(second))
    }
}

fn slot_of(second: u64) -> usize {
    usize::try_from(second % SECONDS as u64).expect("less than ten slots")
}

#[expect(clippy::cast_precision_loss, reason = "counts are exact in f64")]
fn as_float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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

    #[test]
    fn a_stopped_or_decreasing_clock_is_tolerated() {
        let start = Instant::now();
        let budget = RetryBudget::new(1.0, after(start, 5));
        budget.requested(after(start, 100));
        budget.requested(start);
        assert_eq!(left(&budget, start), 10);
    }
}
