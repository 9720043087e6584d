//! Figures of one run, in the form that `--json` prints.
//!
//! Percentiles are exact, because all samples are kept. [`super::report`] formats the figures.

use serde::Serialize;

use super::drive::Driven;
use crate::driver::{Answer, Exchange};
use crate::mock::RankCounters;

/// Mean and percentiles of a set of times in milliseconds; all 0 if the set is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Arithmetic mean.
    pub mean_ms: f64,
    /// Median.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
}

/// Figures of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Name of the policy in the router's configuration.
    pub policy: String,
    /// Number of requests that succeeded.
    pub requests: u64,
    /// Number of requests that failed, including requests that were never sent because their conversation had ended
    /// with an error.
    pub errors: u64,
    /// The first distinct error messages.
    pub error_reasons: Vec<String>,
    /// Time from the request to the first content.
    pub first_token: Times,
    /// Time between consecutive pieces of content.
    pub between_tokens: Times,
    /// Time from the request to the end of the answer.
    pub whole_answer: Times,
    /// Sum of prompt tokens from the usage of all answers.
    pub prompt_tokens: u64,
    /// Sum of cached prompt tokens from the usage of all answers.
    pub cached_tokens: u64,
    /// `cached_tokens` divided by `prompt_tokens`.
    pub hit_rate: f64,
    /// Number of requests on the busiest rank, divided by the mean over all ranks.
    pub spread_requests: f64,
    /// Number of prompt tokens computed by the busiest rank, divided by the mean over all ranks.
    pub spread_computed: f64,
    /// Duration of the run in real seconds.
    pub run_seconds: f64,
    /// Delay of timers in real milliseconds.
    pub timer_lag: Times,
    /// Sum of the FNV-1a hashes of all request bodies. Equal sets of requests have equal digests in any order.
    pub requests_digest: String,
}

impl Figures {
    /// Computes the figures of a run. Times are multiplied by `time_scale` (virtual seconds per real second).
    pub(super) fn of(policy: &str, driven: &Driven, ranks: &[RankCounters], planned: usize, time_scale: f64) -> Self {
        // At full speed there is no virtual pace to convert to.
        let pace = if time_scale > 0.0 { time_scale } else { 1.0 };
        let exchanges = &driven.exchanges;
        let tokens = |of: fn(&Answer) -> Option<u64>| exchanges.iter().filter_map(|sent| of(&sent.answer)).sum::<u64>();
        let (prompt_tokens, cached_tokens) = (tokens(Answer::prompt_tokens), tokens(Answer::cached_tokens));
        let first_token_us = |sent: &Exchange| sent.answer.first_token_us.unwrap_or(sent.ended_us) - sent.sent_us;
        let gaps_us = exchanges.iter().flat_map(|sent| sent.answer.gaps_us.iter().copied().map(u64::from));
        Self {
            policy: policy.to_owned(),
            requests: exchanges.len() as u64,
            errors: planned.saturating_sub(exchanges.len()) as u64,
            error_reasons: driven.reasons.clone(),
            first_token: Times::of(exchanges.iter().map(first_token_us), pace),
            between_tokens: Times::of(gaps_us, pace),
            whole_answer: Times::of(exchanges.iter().map(|sent| sent.ended_us - sent.sent_us), pace),
            prompt_tokens,
            cached_tokens,
            hit_rate: ratio(cached_tokens, prompt_tokens),
            spread_requests: spread(ranks.iter().map(|rank| rank.requests_finished)),
            spread_computed: spread(ranks.iter().map(|rank| rank.prompt_tokens.saturating_sub(rank.cache_hits))),
            run_seconds: driven.took.as_secs_f64(),
            timer_lag: Times::of(driven.lags.iter().map(|lag| lag.as_micros() as u64), 1.0),
            requests_digest: format!("{:016x}", driven.digest),
        }
    }

    /// Number of prompt tokens that the engines computed.
    #[must_use]
    pub fn computed_tokens(&self) -> u64 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }
}

impl Times {
    #[expect(clippy::cast_precision_loss, reason = "a run has far fewer than 2^53 samples and microseconds")]
    fn of(times_us: impl Iterator<Item = u64>, pace: f64) -> Self {
        let mut all: Vec<f64> = times_us.map(|us| us as f64 / 1e3 * pace).collect();
        if all.is_empty() {
            return Self::default();
        }
        all.sort_unstable_by(f64::total_cmp);
        let mean_ms = all.iter().sum::<f64>() / all.len() as f64;
        Self { mean_ms, p50_ms: percentile(&all, 50), p99_ms: percentile(&all, 99) }
    }
}

/// Nearest-rank percentile. `sorted` is not empty.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank - 1]
}

/// Maximum divided by mean; 0 for an empty or all-zero set.
fn spread(counts: impl Iterator<Item = u64> + Clone) -> f64 {
    let (greatest, sum) = (counts.clone().max().unwrap_or(0), counts.clone().sum::<u64>());
    ratio(greatest.saturating_mul(counts.count() as u64), sum)
}

#[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let times = |all: &[u64], pace| Times::of(all.iter().map(|ms| ms * 1_000), pace);
        let hundred: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(times(&hundred, 1.0), Times { mean_ms: 50.5, p50_ms: 50.0, p99_ms: 99.0 });
        assert_eq!(times(&[4, 2, 9], 2.0), Times { mean_ms: 10.0, p50_ms: 8.0, p99_ms: 18.0 });
        assert_eq!(times(&[7], 1.0), Times { mean_ms: 7.0, p50_ms: 7.0, p99_ms: 7.0 });
        assert_eq!(times(&[], 1.0), Times::default());
    }

    #[test]
    fn spread_is_maximum_over_mean() {
        let cases: [(&[u64], f64); 4] = [(&[5, 5, 5, 5], 1.0), (&[8, 0, 0, 0], 4.0), (&[3, 1], 1.5), (&[0, 0], 0.0)];
        for (counts, expected) in cases {
            assert!((spread(counts.iter().copied()) - expected).abs() < 1e-9, "{counts:?}");
        }
    }
}
