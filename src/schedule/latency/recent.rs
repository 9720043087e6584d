//! Recent work of a rank, by which idle ranks are ordered.

use std::cmp::Ordering;
use std::time::Duration;

use crate::protocol::Timestamp;
use crate::record::bytes::recorded;

/// Time in which the weight of past work falls to 1/e.
const DECAY: Duration = Duration::from_secs(10);

/// Work of a request without prefill.
const WORK_MIN: Duration = Duration::from_millis(1);

/// Sum of prefill times with exponentially decaying weights.
///
/// Stored as the logarithm of the sum at time 0, which has the order of the sums at any time: reading it needs no clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::schedule) struct RecentWork(f64);

recorded! {
    RecentWork { 0 }
}

impl Default for RecentWork {
    /// No work.
    fn default() -> Self {
        Self(f64::NEG_INFINITY)
    }
}

impl RecentWork {
    /// Adds a prefill.
    pub(in crate::schedule) fn add(&mut self, prefill: Duration, now: Timestamp) {
        let elapsed = Duration::from_nanos(now.0).as_secs_f64() / DECAY.as_secs_f64();
        let added = prefill.max(WORK_MIN).as_secs_f64().ln() + elapsed;
        let (more, less) = (self.0.max(added), self.0.min(added));
        self.0 = more + (less - more).exp().ln_1p();
    }

    /// Order by recent work.
    pub(in crate::schedule) fn order(self, other: Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn work(prefills: &[(u64, u64)]) -> RecentWork {
        let mut work = RecentWork::default();
        for (at_seconds, prefill_ms) in prefills {
            work.add(Duration::from_millis(*prefill_ms), Timestamp(at_seconds * SECOND));
        }
        work
    }

    #[test]
    fn newer_and_longer_work_counts_more() {
        let ordered = [
            work(&[]),
            work(&[(100, 0)]),
            work(&[(100, 20)]),
            work(&[(0, 5_000), (100, 20)]), // 5 s of work weigh 0.2 ms after 100 s
            work(&[(100, 21)]),
            work(&[(100, 20), (100, 20)]),
            work(&[(110, 20)]), // 1/e of 2 · 20 ms is less than 20 ms
        ];
        for pair in ordered.windows(2) {
            assert_eq!(pair[0].order(pair[1]), Ordering::Less, "{pair:?}");
        }
    }

    /// A year of steady work: no overflow, and a later prefill still counts.
    #[test]
    fn a_long_uptime_keeps_the_order() {
        let year = 365 * 86_400;
        let (mut busy, mut idle) = (RecentWork::default(), RecentWork::default());
        for n in 0..1_000 {
            busy.add(Duration::from_secs(1), Timestamp((year + n) * SECOND));
        }
        idle.add(Duration::from_secs(1), Timestamp((year + 995) * SECOND));
        assert_eq!(idle.order(busy), Ordering::Less);
        for _ in 0..20 {
            idle.add(Duration::from_secs(1), Timestamp((year + 1_000) * SECOND));
        }
        assert_eq!(idle.order(busy), Ordering::Greater);
    }
}
