//! Requests and cache hits of the last minute, from totals since a rank joined.
//!
//! Keeps a sample of all totals every few seconds while there are viewers. Without a sample, the time begins when the
//! rank joined.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use pointsman::RankReport;
use pointsman::protocol::WorkerRank;
use tokio::time::Instant;

use crate::formats::live::HitsState;

/// Interval of samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum age of a sample.
const WINDOW: Duration = Duration::from_secs(60);

/// Samples of one router.
#[derive(Debug, Default)]
pub(super) struct HitWindow(VecDeque<(Instant, BTreeMap<WorkerRank, RankReport>)>);

impl HitWindow {
    /// Records the reports, if the last sample is old enough.
    pub(super) fn sample(&mut self, reports: &BTreeMap<WorkerRank, RankReport>, now: Instant) {
        while self.0.front().is_some_and(|(at, _)| now.duration_since(*at) > WINDOW) {
            self.0.pop_front();
        }
        if self.0.back().is_none_or(|(at, _)| now.duration_since(*at) >= SAMPLE_INTERVAL) {
            self.0.push_back((now, reports.clone()));
        }
    }

    /// Hits of a rank since the oldest sample.
    pub(super) fn hits(&self, report: &RankReport, now: Instant) -> HitsState {
        let oldest = self.0.front().filter(|(at, _)| *at < now);
        let sample = oldest.and_then(|(at, sample)| Some((now.duration_since(*at), sample.get(&report.rank)?)));
        // Totals of a rank that has joined again begin at 0.
        let sample = sample.filter(|(_, sample)| sample.placements <= report.placements);
        let since = |total: u64, sample: fn(&RankReport) -> u64, of: Option<(Duration, &RankReport)>| {
            total.saturating_sub(of.map_or(0, |(_, report)| sample(report)))
        };
        HitsState {
            seconds: sample.map(|(seconds, _)| seconds.as_secs_f64()),
            placements: report.placements,
            prompt_tokens: since(report.prompt_tokens, |report| report.prompt_tokens, sample),
            predicted_tokens: since(report.predicted_tokens, |report| report.predicted_tokens, sample),
            delivered_tokens: since(report.delivered_tokens, |report| report.delivered_tokens, sample),
        }
    }
}

/// Hits of all ranks together.
pub(super) fn sum(hits: impl IntoIterator<Item = HitsState>) -> HitsState {
    hits.into_iter()
        .reduce(|sum, hits| HitsState {
            seconds: sum.seconds.zip(hits.seconds).map(|(one, another)| one.max(another)),
            placements: sum.placements + hits.placements,
            prompt_tokens: sum.prompt_tokens + hits.prompt_tokens,
            predicted_tokens: sum.predicted_tokens + hits.predicted_tokens,
            delivered_tokens: sum.delivered_tokens + hits.delivered_tokens,
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::WorkerId;

    use super::*;

    fn report(tokens: u64) -> RankReport {
        RankReport {
            rank: WorkerRank::new(WorkerId(1), 0),
            active_requests: 0,
            active_blocks: 0,
            prefill_tokens: 0,
            prefill_wait: Duration::ZERO,
            held_blocks: 0,
            placements: tokens,
            prompt_tokens: tokens,
            predicted_tokens: tokens / 2,
            delivered_tokens: tokens / 4,
        }
    }

    fn at_seconds(window: &mut HitWindow, start: Instant, seconds: u64, tokens: u64) -> HitsState {
        let (now, report) = (start + Duration::from_secs(seconds), report(tokens));
        window.sample(&BTreeMap::from([(report.rank, report)]), now);
        window.hits(&report, now)
    }

    #[tokio::test]
    async fn hits_are_those_of_the_last_minute() {
        let (mut window, start) = (HitWindow::default(), Instant::now());
        let first = at_seconds(&mut window, start, 0, 400);
        assert_eq!((first.seconds, first.prompt_tokens, first.predicted_tokens), (None, 400, 200), "since it joined");
        let later = at_seconds(&mut window, start, 30, 1_000);
        assert_eq!((later.seconds, later.prompt_tokens, later.delivered_tokens), (Some(30.0), 600, 150));
        let last = at_seconds(&mut window, start, 70, 1_400);
        assert_eq!((last.seconds, last.prompt_tokens), (Some(40.0), 400), "the first sample is too old");
        assert_eq!(last.placements, 1_400);
    }

    #[tokio::test]
    async fn a_rank_that_joins_again_starts_at_zero() {
        let (mut window, start) = (HitWindow::default(), Instant::now());
        at_seconds(&mut window, start, 0, 1_000);
        let again = at_seconds(&mut window, start, 10, 40);
        assert_eq!((again.seconds, again.prompt_tokens), (None, 40));
    }
}
