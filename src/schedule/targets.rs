//! Latency targets of requests: predictions per rank, the ranks that are preferred, and early rejections.
//!
//! A request with targets restricts its eligible ranks to those that are predicted to miss the fewest of them. The
//! choice among these is that of the policy. A request without targets takes none of this code. Predictions need learned
//! prefill speeds; without them targets have no effect on the choice.

use std::time::Duration;

use super::case::Case;
use super::eligible::Eligibility;
use super::latency::facts::Predicted;
use super::latency::prediction::{MissedTarget, TargetsMissed, duration};
use super::{LoadView, ResolvedTargets};
use crate::protocol::Timestamp;
use crate::select::Filter;

impl ResolvedTargets {
    /// Time since the request arrived; zero without a target of the time to first token.
    fn waited(&self, now: Timestamp) -> Duration {
        let arrival = self
            .ttft
            .zip(self.ttft_due)
            .map(|(target, due)| Timestamp(due.0.saturating_sub(u64::try_from(target.as_nanos()).unwrap_or(u64::MAX))));
        arrival.map_or(Duration::ZERO, |arrival| now.since(arrival))
    }

    /// The rejection at `now` of a request whose first token must not be late and is.
    pub(super) fn expired(&self, now: Timestamp) -> Option<TargetsMissed> {
        let target = self.ttft.filter(|_| self.rejects && self.ttft_due.is_some_and(|due| due <= now))?;
        let ttft = Some(MissedTarget { predicted: self.waited(now), target });
        Some(TargetsMissed { ttft, ..TargetsMissed::default() })
    }
}

/// Prediction for one rank, compared with the targets.
#[derive(Clone, Copy, Debug)]
struct Compared {
    ttft: Option<MissedTarget>,
    itl: Option<MissedTarget>,
    ttft_seconds: f64,
    /// Part of the time to first token that earlier prefills take.
    wait: Duration,
}

impl Compared {
    fn new(targets: &ResolvedTargets, predicted: &Predicted, now: Timestamp) -> Self {
        let Predicted { latency, wait_seconds, .. } = *predicted;
        let missed =
            |predicted: Duration, target: Duration| (predicted > target).then_some(MissedTarget { predicted, target });
        let ttft = targets.ttft.zip(latency.ttft_seconds);
        let ttft =
            ttft.and_then(|(target, seconds)| missed(targets.waited(now).saturating_add(duration(seconds)), target));
        let itl = targets.itl.zip(latency.itl_seconds);
        let itl = itl.and_then(|(target, seconds)| missed(duration(seconds), target));
        Self { ttft, itl, ttft_seconds: latency.ttft_seconds.unwrap_or(0.0), wait: duration(wait_seconds) }
    }

    /// Number of missed targets.
    fn missed(&self) -> u8 {
        u8::from(self.ttft.is_some()) + u8::from(self.itl.is_some())
    }

    /// Time after which only the first token would be in time, if a shorter queue suffices.
    fn retry_after(&self) -> Option<Duration> {
        let MissedTarget { predicted, target } = self.ttft.filter(|_| self.itl.is_none())?;
        Some(predicted.saturating_sub(target)).filter(|excess| *excess <= self.wait)
    }
}

/// The rejection of a request for which these are the predictions; `None` if any rank meets all targets.
fn rejection(compared: &[(usize, Compared)]) -> Option<TargetsMissed> {
    let order =
        |a: &Compared, b: &Compared| a.missed().cmp(&b.missed()).then(a.ttft_seconds.total_cmp(&b.ttft_seconds));
    let best = compared.iter().map(|(_, compared)| compared).min_by(|a, b| order(a, b))?;
    let retry_after = compared.iter().filter_map(|(_, compared)| compared.retry_after()).min();
    (best.missed() > 0).then_some(TargetsMissed { ttft: best.ttft, itl: best.itl, retry_after })
}

impl<T, V: LoadView> Case<'_, T, V> {
    /// Restricts the eligible ranks to those that miss the fewest targets; no effect without targets.
    ///
    /// # Errors
    /// Every eligible rank misses a target, and the request must not be served then.
    pub(super) fn restrict_to_targets(&self, eligibility: &mut Eligibility) -> Result<(), TargetsMissed> {
        let Some(targets) = self.targets() else { return Ok(()) };
        let compared = self.compare(&targets, |position| eligibility.is_open(position));
        if let Some(missed) = rejection(&compared).filter(|_| targets.rejects) {
            return Err(missed);
        }
        let fewest = compared.iter().map(|(_, compared)| compared.missed()).min().unwrap_or(0);
        let others: Vec<usize> =
            compared.iter().filter(|(_, compared)| compared.missed() > fewest).map(|(position, _)| *position).collect();
        eligibility.refuse(Filter::Targets, |position| others.binary_search(&position).is_ok());
        Ok(())
    }

    /// The early rejection of a request that would have to wait because all ranks are busy: a wait only adds to the
    /// predictions.
    pub(super) fn targets_missed_by_all(&self, eligibility: &Eligibility) -> Option<TargetsMissed> {
        let targets = self.targets().filter(|targets| targets.rejects)?;
        rejection(&self.compare(&targets, |position| eligibility.of(position).is_none_or(Filter::passes)))
    }

    /// Predictions of the ranks for which `includes` holds, compared with the targets, by position.
    fn compare(&self, targets: &ResolvedTargets, includes: impl Fn(usize) -> bool) -> Vec<(usize, Compared)> {
        let (cost, overlaps) = (self.latency_cost(), self.overlaps());
        let included = self.ranks().as_slice().iter().enumerate().filter(|(position, _)| includes(*position));
        included
            .map(|(position, rank)| {
                let facts = self.latency_facts(rank, overlaps[position], &rank.project(self.candidate));
                let predicted = self.predict(&cost, rank, &facts);
                (position, Compared::new(targets, &predicted, self.pool.now))
            })
            .collect()
    }
}
