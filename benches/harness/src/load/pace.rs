//! Arguments that replace the arrival times of a workload. The order of the requests never changes.

use std::num::NonZeroU32;
use std::str::FromStr;

use clap::Args;
use pointsman_trial::workload::{Arrivals, Rng, Workload};

/// Arrival times of the requests. Without arguments, the workload's own times apply.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct Pace {
    /// Requests per second, instead of the workload's arrival times
    #[arg(long, value_name = "REQUESTS", value_parser = rate, conflicts_with_all = ["speedup", "steps", "concurrency"])]
    pub rate: Option<f64>,
    /// Sequence of rates with durations, instead of the workload's arrival times: 10:30s,20:2m
    ///
    /// Requests that are due after the end of the last step are not sent.
    #[arg(long, value_name = "RATE:TIME,...", conflicts_with_all = ["speedup", "concurrency"])]
    pub steps: Option<Steps>,
    /// Random gaps, as from independent users, instead of even gaps
    #[arg(long, conflicts_with = "concurrency")]
    pub poisson: bool,
    /// Closed loop with this number of requests in flight
    ///
    /// A slow endpoint then receives fewer requests, so the times are not comparable with those of an open loop.
    #[arg(long, value_name = "REQUESTS", conflicts_with = "speedup")]
    pub concurrency: Option<NonZeroU32>,
}

/// A rate with a duration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Requests per second.
    pub rate: f64,
    /// Duration in µs.
    pub lasts_us: f64,
}

/// Non-empty sequence of steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Steps(Vec<Step>);

impl FromStr for Steps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let step = |text: &str| {
            let form = || format!("{text:?} is not a rate and time such as 10:30s");
            let (rate_text, time) = text.split_once(':').ok_or_else(form)?;
            Ok::<_, String>(Step { rate: rate(rate_text)?, lasts_us: time_us(time)? })
        };
        text.split(',').map(|text| step(text.trim())).collect::<Result<_, _>>().map(Self)
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.trim().parse().ok().filter(|rate| (1e-6..=1e6).contains(rate));
    rate.ok_or_else(|| format!("{text:?} is not a rate from 0.000001 to 1000000 requests per second"))
}

fn time_us(text: &str) -> Result<f64, String> {
    let text = text.trim();
    let units = [("ms", 1e3), ("s", 1e6), ("m", 60e6)];
    let unit = units.into_iter().find_map(|(unit, us)| Some((text.strip_suffix(unit)?, us)));
    let time = unit.and_then(|(number, us)| Some(number.parse::<f64>().ok()? * us));
    time.filter(|us| (1.0..1e15).contains(us)).ok_or_else(|| format!("{text:?} is not a time such as 500ms, 30s or 2m"))
}

impl Pace {
    /// Sets the arrival times of `workload`. `seed` determines random gaps. Requests after the last step are dropped.
    #[must_use]
    pub fn apply(&self, mut workload: Workload, seed: u64) -> Workload {
        let steps = match (self.rate, &self.steps) {
            (Some(rate), _) => vec![Step { rate, lasts_us: f64::INFINITY }],
            (None, Some(Steps(steps))) => steps.clone(),
            // Random gaps without a rate: use the mean rate of the workload.
            (None, None) if self.poisson => {
                let last_us = workload.requests.last().map_or(0, |last| last.arrival_us).max(1);
                let rate = workload.requests.len() as f64 * 1e6 / last_us as f64;
                vec![Step { rate, lasts_us: f64::INFINITY }]
            }
            (None, None) => {
                if let Some(concurrency) = self.concurrency {
                    workload.arrivals = Arrivals::Concurrency(concurrency);
                }
                return workload;
            }
        };
        let mut due = Due { steps, begins_us: 0.0, at_us: 0.0, rng: self.poisson.then(|| Rng::stream(seed, 0x90)) };
        let mut sent = 0;
        for (request, due_us) in workload.requests.iter_mut().zip(&mut due) {
            request.arrival_us = due_us;
            sent += 1;
        }
        workload.requests.truncate(sent);
        workload.arrivals = Arrivals::OpenLoop;
        workload
    }
}

/// Iterator of arrival times in µs after the start.
struct Due {
    /// The current step and the following ones.
    steps: Vec<Step>,
    /// Start of the current step.
    begins_us: f64,
    /// Start of the next gap.
    at_us: f64,
    /// Source of random gaps; even gaps if none.
    rng: Option<Rng>,
}

impl Iterator for Due {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        loop {
            let step = self.steps.first()?;
            let gap_us = 1e6 / step.rate;
            // Even gaps begin with a request, random gaps end with one.
            let (due_us, next_us) = match &mut self.rng {
                None => (self.at_us, self.at_us + gap_us),
                Some(rng) => {
                    let due_us = self.at_us + rng.exponential() * gap_us;
                    (due_us, due_us)
                }
            };
            let ends_us = self.begins_us + step.lasts_us;
            if due_us < ends_us {
                self.at_us = next_us;
                return Some(due_us.round() as u64);
            }
            // Exponential gaps are memoryless: the next step draws a new gap from its start.
            (self.begins_us, self.at_us) = (ends_us, ends_us);
            self.steps.remove(0);
        }
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
    fn a_rate_has_even_gaps_and_steps_are_consecutive() {
        let rate = Pace { rate: Some(10.0), ..Pace::default() };
        assert_eq!(due_ms(&rate, 4), [0, 100, 200, 300]);
        let steps = Pace { steps: Some("10:0.2s, 2:1s,100:10ms".parse().expect("steps")), ..Pace::default() };
        assert_eq!(due_ms(&steps, 9), [0, 100, 200, 700, 1_200]);
    }

    #[test]
    fn random_gaps_match_the_rate_of_each_step_and_depend_on_the_seed() {
        let steps = "50:20s,200:20s".parse().expect("steps");
        let pace = Pace { steps: Some(steps), poisson: true, ..Pace::default() };
        let due = due_ms(&pace, 6_000);
        let first = due.iter().filter(|ms| **ms < 20_000).count();
        assert!((900..1_100).contains(&first), "{first}");
        assert!((3_800..4_200).contains(&(due.len() - first)), "{}", due.len());
        assert!(due.is_sorted() && due == due_ms(&pace, 6_000));
        assert_ne!(due[0..50], due_ms(&Pace { rate: Some(50.0), ..Pace::default() }, 50));
    }

    #[test]
    fn arrival_times_are_unchanged_without_arguments() {
        let own = requests(50);
        assert_eq!(Pace::default().apply(own.clone(), 1), own);
        let closed = Pace { concurrency: NonZeroU32::new(3), ..Pace::default() }.apply(own.clone(), 1);
        assert_eq!(
            (closed.requests, closed.arrivals),
            (own.requests.clone(), Arrivals::Concurrency(NonZeroU32::new(3).expect("3")))
        );
        let random = Pace { poisson: true, ..Pace::default() }.apply(own.clone(), 1);
        let last = |workload: &Workload| workload.requests[49].arrival_us as f64;
        assert!((0.5..2.0).contains(&(last(&random) / last(&own))));
    }

    #[test]
    fn invalid_steps_are_rejected() {
        for (text, expected) in [
            ("10", "\"10\" is not a rate and time such as 10:30s"),
            ("0:10s", "\"0\" is not a rate"),
            ("10:5", "\"5\" is not a time"),
            ("10:-5s", "\"-5s\" is not a time"),
            ("10:5s,", "\"\" is not a rate and time"),
        ] {
            let error = text.parse::<Steps>().expect_err(text).to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }
}
