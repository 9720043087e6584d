//! Log lines that come at a bounded rate.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Passes one line per interval and counts the suppressed ones.
#[derive(Debug)]
pub(crate) struct LogThrottle {
    every: Duration,
    last: Mutex<(Option<Instant>, u64)>,
}

impl LogThrottle {
    pub(crate) fn new(every: Duration) -> Self {
        Self { every, last: Mutex::default() }
    }

    /// Number of suppressed lines since the last one, if this line may be logged.
    pub(crate) fn next_line(&self, now: Instant) -> Option<u64> {
        let mut last = self.last.lock();
        if last.0.is_some_and(|logged| now.saturating_duration_since(logged) < self.every) {
            last.1 += 1;
            return None;
        }
        let suppressed = last.1;
        *last = (Some(now), 0);
        Some(suppressed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_interval_with_a_count_of_the_others() {
        let (start, throttle) = (Instant::now(), LogThrottle::new(Duration::from_secs(10)));
        assert_eq!(throttle.next_line(start), Some(0));
        assert_eq!([1, 9].map(|s| throttle.next_line(start + Duration::from_secs(s))), [None, None]);
        assert_eq!(throttle.next_line(start + Duration::from_secs(10)), Some(2));
        assert_eq!(throttle.next_line(start + Duration::from_secs(20)), Some(0));
    }
}
