//! Latency targets of requests: predictions per rank, the ranks that are preferred, and early rejections.
//!
//! A request with targets restricts its eligible ranks to those that are predicted to miss the fewest of them. The
//! choice among these is that of the policy. A request without targets takes none of this code. Predictions need learned
//! prefill speeds; without them targets have no effect on the choice.

use std::time::Duration;

use super::eligible::Eligibility;
use super::latency::formula::{LatencyCost, LatencyFacts};
use super::latency::prediction::{LatencyPrediction, MissedTarget, TargetsMissed, duration};
use super::pending::Case;
use super::rank::Rank;
use super::search::scratch::Scratch;
use super::{LoadView, PendingRequest, ResolvedTargets, Schedule};
use crate::config::PoolRole;
use crate::load::PredictionBias;
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

/// Prediction for one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Predicted {
    /// With the correction.
    pub(super) latency: LatencyPrediction,
    /// Part of the time to first token that earlier prefills take.
    wait_seconds: f64,
    /// The correction.
    pub(super) bias: PredictionBias,
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

impl<T> Schedule<T> {
    /// Targets that can be compared with predictions.
    pub(super) fn targets_of(&self, pending: &PendingRequest<T>) -> Option<ResolvedTargets> {
        pending.request.options.as_ref()?.targets.filter(|_| self.settings.models_prefill)
    }

    /// Restricts the eligible ranks to those that miss the fewest targets. Requires the request's eligibility in
    /// `scratch`; no effect without targets.
    ///
    /// # Errors
    /// Every eligible rank misses a target, and the request must not be served then.
    pub(super) fn restrict_to_targets<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        scratch: &mut Scratch,
    ) -> Result<(), TargetsMissed> {
        let Some(targets) = self.targets_of(case.pending) else { return Ok(()) };
        let compared = self.compare(&targets, case, scratch, |eligibility, position| eligibility.is_open(position));
        if let Some(missed) = rejection(&compared).filter(|_| targets.rejects) {
            return Err(missed);
        }
        let fewest = compared.iter().map(|(_, compared)| compared.missed()).min().unwrap_or(0);
        let others: Vec<usize> =
            compared.iter().filter(|(_, compared)| compared.missed() > fewest).map(|(position, _)| *position).collect();
        scratch.eligibility.refuse(Filter::Targets, |position| others.binary_search(&position).is_ok());
        Ok(())
    }

    /// The early rejection of a request that would have to wait because all ranks are busy: a wait only adds to the
    /// predictions. Requires the request's eligibility in `scratch`.
    pub(super) fn targets_missed_by_all<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        scratch: &mut Scratch,
    ) -> Option<TargetsMissed> {
        let targets = self.targets_of(case.pending).filter(|targets| targets.rejects)?;
        let may_serve = |eligibility: &Eligibility, position| eligibility.of(position).is_none_or(Filter::passes);
        rejection(&self.compare(&targets, case, scratch, may_serve))
    }

    /// Predictions of the ranks for which `includes` holds, compared with the targets, by position.
    fn compare<V: LoadView>(
        &self,
        targets: &ResolvedTargets,
        case: Case<'_, T, V>,
        scratch: &mut Scratch,
        includes: impl Fn(&Eligibility, usize) -> bool,
    ) -> Vec<(usize, Compared)> {
        self.fill_overlaps(&case.pending.request.overlaps, scratch);
        let cost = self.latency_cost_of(case.pending);
        let ranks = self.ranks.as_slice().iter().enumerate();
        let included = ranks.filter(|(position, _)| includes(&scratch.eligibility, *position));
        included
            .map(|(position, rank)| {
                let projected = rank.project(case.candidate);
                let facts = self.latency_facts(case.pending, rank, scratch.overlaps[position], &projected);
                let predicted = self.predict(&cost, case.loads, rank, &facts);
                (position, Compared::new(targets, &predicted, self.now))
            })
            .collect()
    }

    /// Predicted latency of a request on a rank with these `facts`.
    pub(super) fn predict<V: LoadView>(
        &self,
        cost: &LatencyCost,
        loads: &V,
        rank: &Rank,
        facts: &LatencyFacts,
    ) -> Predicted {
        let bias = loads.prediction_bias(rank.slot(), self.now);
        let decodes = self.settings.role != PoolRole::Prefill;
        let latency = LatencyPrediction {
            ttft_seconds: cost.track_prefill_tokens.then(|| bias.ttft * cost.terms(facts).ttft_seconds),
            itl_seconds: decodes.then(|| bias.itl * cost.itl_seconds(facts)),
        };
        Predicted { latency, wait_seconds: bias.ttft * facts.wait_seconds, bias }
    }
}
