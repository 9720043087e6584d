//! Restart budget of supervised actors.

use std::collections::VecDeque;
use std::time::Duration;

use crate::protocol::Timestamp;

/// Upper limit of restarts within a sliding window. (Erlang/OTP: intensity and period.)
///
/// ```
/// use std::time::Duration;
/// use pointsman::protocol::Timestamp;
/// use pointsman::internals::membership::RestartBudget;
///
/// let mut budget = RestartBudget::new(1, Duration::from_secs(10));
/// let start = Timestamp::default();
/// assert!(budget.spend(start));
/// assert!(!budget.spend(start + Duration::from_secs(9)));
/// assert!(budget.spend(start + Duration::from_secs(11)));
/// ```
#[derive(Clone, Debug)]
pub struct RestartBudget {
    restarts_max: u32,
    window: Duration,
    /// Times of the restarts inside the window, oldest first.
    spent: VecDeque<Timestamp>,
}

impl RestartBudget {
    /// Budget of `restarts_max` restarts within any `window`.
    #[must_use]
    pub fn new(restarts_max: u32, window: Duration) -> Self {
        Self { restarts_max, window, spent: VecDeque::new() }
    }

    /// Takes one restart; false if the window has none left.
    #[must_use]
    pub fn spend(&mut self, now: Timestamp) -> bool {
        while self.spent.front().is_some_and(|at| now.since(*at) > self.window) {
            self.spent.pop_front();
        }
        if self.spent.len() >= self.restarts_max as usize {
            return false;
        }
        self.spent.push_back(now);
        true
    }
}
