//! Load of the pool: sums over its ranks, and its arrival rate.
//!
//! Both are maintained incrementally: a decision reads a few numbers, whatever the number of ranks.

use std::time::Duration;

use crate::load::PlacementRate;
use crate::protocol::Timestamp;
use crate::record::bytes::recorded;

/// Sums over the ranks of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolSums {
    pub(super) ranks: u32,
    /// Active requests.
    pub(super) requests: u32,
}

/// Placements and their prefill times over the last [`WINDOW`], with exponential weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Arrivals {
    count: f64,
    prefill_seconds: f64,
    /// Time of the first placement.
    since: Option<Timestamp>,
    /// Time of the last placement, to which the sums refer.
    at: Timestamp,
}

recorded! {
    Arrivals { count, prefill_seconds, since, at }
}

/// Time constant of the weights.
const WINDOW: Duration = Duration::from_secs(20);

/// Minimum time that a rate refers to, so that the first placements are no high rate.
const SECONDS_MIN: f64 = 1.0;

impl Arrivals {
    /// Adds a placement with its prefill time.
    pub(super) fn placed(&mut self, prefill: Duration, now: Timestamp) {
        let weight = weight_after(now.since(self.at));
        *self = Self {
            count: self.count * weight + 1.0,
            prefill_seconds: self.prefill_seconds * weight + prefill.as_secs_f64(),
            since: self.since.or(Some(now)),
            at: now.max(self.at),
        };
    }

    /// The rate at `now`.
    pub(super) fn rate(&self, now: Timestamp) -> PlacementRate {
        let Some(since) = self.since else { return PlacementRate::default() };
        let seconds = WINDOW.as_secs_f64() * (1.0 - weight_after(now.since(since)));
        let per_second = weight_after(now.since(self.at)) / seconds.max(SECONDS_MIN);
        PlacementRate {
            placements_per_second: self.count * per_second,
            work_per_second: self.prefill_seconds * per_second,
        }
    }
}

/// Weight of a placement after `age`.
fn weight_after(age: Duration) -> f64 {
    (-age.as_secs_f64() / WINDOW.as_secs_f64()).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_steady_traffic_and_decay() {
        let (mut arrivals, mut now) = (Arrivals::default(), Timestamp::default());
        assert_eq!(arrivals.rate(now), PlacementRate::default());
        for _ in 0..600 {
            now = now + Duration::from_millis(100);
            arrivals.placed(Duration::from_millis(30), now);
        }
        let PlacementRate { placements_per_second, work_per_second } = arrivals.rate(now);
        assert!((placements_per_second - 10.0).abs() < 0.1, "{placements_per_second}");
        assert!((work_per_second - 0.3).abs() < 0.003, "{work_per_second}");
        let later = arrivals.rate(now + WINDOW).placements_per_second;
        assert!((later / placements_per_second - 0.37).abs() < 0.02, "{later}");
    }

    #[test]
    fn the_first_placements_are_no_high_rate() {
        let mut arrivals = Arrivals::default();
        arrivals.placed(Duration::from_secs(2), Timestamp(5));
        let PlacementRate { placements_per_second, work_per_second } = arrivals.rate(Timestamp(5));
        assert_eq!((placements_per_second, work_per_second), (1.0, 2.0));
    }
}
