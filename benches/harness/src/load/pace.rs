//! Arguments that replace the arrival times of a workload. The order of the requests never changes.

use std::num::NonZeroU32;

use clap::Args;
use pointsman_trial::workload::{Arrivals, Rng, Workload};

/// Arrival times of the requests. Without arguments, the workload's own times apply.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct Pace {
    /// Requests per second, instead of the workload's arrival times
    #[arg(long, value_name = "REQUESTS", value_parser = rate, conflicts_with_all = ["speedup", "concurrency"])]
    pub rate: Option<f64>,
    /// Random gaps, as from independent users, instead of even gaps
    #[arg(long, conflicts_with = "concurrency")]
    pub poisson: bool,
    /// Closed loop with this number of requests in flight
    ///
    /// A slow endpoint then receives fewer requests, so the times are not comparable with those of an open loop.
    #[arg(long, value_name = "REQUESTS", conflicts_with = "speedup")]
    pub concurrency: Option<NonZeroU32>,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.trim().parse().ok().filter(|rate| (1e-6..=1e6).contains(rate));
    rate.ok_or_else(|| format!("{text:?} is not a rate from 0.000001 to 1000000 requests per second"))
}

impl Pace {
    /// Sets the arrival times of `workload`. `seed` determines random gaps.
    #[must_use]
    pub fn apply(&self, mut workload: Workload, seed: u64) -> Workload {
        if let Arrivals::Causal { .. } = workload.arrivals {
            return workload; // which the clients reject
        }
        let requests = &mut workload.requests;
        // Random gaps without a rate: use the mean rate of the workload.
        let mean = || requests.len() as f64 * 1e6 / requests.last().map_or(0, |last| last.arrival_us).max(1) as f64;
        let Some(rate) = self.rate.or_else(|| self.poisson.then(mean)) else {
            if let Some(concurrency) = self.concurrency {
                workload.arrivals = Arrivals::Concurrency(concurrency);
            }
            return workload;
        };
        // Even gaps begin with a request, random gaps end with one.
        let (mut at_us, mut rng) = (0.0, self.poisson.then(|| Rng::stream(seed, 0x90)));
        for request in requests {
            at_us += rng.as_mut().map_or(0.0, |rng| rng.exponential() * 1e6 / rate);
            request.arrival_us = at_us.round() as u64;
            at_us += if rng.is_none() { 1e6 / rate } else { 0.0 };
        }
        workload.arrivals = Arrivals::OpenLoop;
        workload
    }
}

#[cfg(test)]
mod tests {
    use pointsman_trial::workload::generate::SharedPrefix;

    use super::*;

    fn requests(count: u32) -> Workload {
        SharedPrefix { requests: count, ..SharedPrefix::default() }.generate(1)
    }

    fn due_ms(pace: &Pace, count: u32) -> Vec<u64> {
        let paced = pace.apply(requests(count), 1);
        paced.requests.iter().map(|request| request.arrival_us / 1_000).collect()
    }

    #[test]
    fn a_rate_has_even_gaps_or_random_ones_of_the_seed() {
        let rate = Pace { rate: Some(10.0), ..Pace::default() };
        assert_eq!(due_ms(&rate, 4), [0, 100, 200, 300]);
        let pace = Pace { poisson: true, rate: Some(50.0), ..Pace::default() };
        let due = due_ms(&pace, 1_000);
        assert!((18_000..22_000).contains(&due[999]), "{}", due[999]);
        assert!(due.is_sorted() && due == due_ms(&pace, 1_000));
    }
}
