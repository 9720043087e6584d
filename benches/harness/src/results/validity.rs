//! Validity checks of a run.
//!
//! Defines the gates: the checked property, the threshold and its reason. A gate only uses facts of the run and does
//! not fire for properties that were not observable. [`super::Reporting`] decides whether a warning is printed or
//! suppresses the figures.

use serde::{Deserialize, Serialize};

use super::distribution::nearest_rank;
use super::text::{percent, time};
use super::{Facts, share};
use crate::results::{RequestRecord, Run};

/// Maximum lateness of a client in µs. Beyond it the client affects its own measurements: a step of an engine takes
/// several ms, so 10 ms are visible in a time to the first token. Timers of a healthy client are late by less than 2
/// ms.
pub const LATE_US_MAX: u64 = 10_000;

/// Maximum CPU share of a client. Beyond it, bursts of tokens wait for each other in the client.
pub const CLIENT_CPU_SHARE_MAX: f64 = 0.8;

/// Maximum share of failed requests. With more failures the remaining requests no longer represent the workload, and
/// slow requests fail more often than fast ones. At 1 % a p99 can hide all of them.
pub const FAILURE_SHARE_MAX: f64 = 0.01;

/// Minimum number of answered requests for a percentile, so that ten are beyond it. One slow request in twenty does not
/// determine a p99.
pub const ANSWERED_MIN: [(&str, u64); 3] = [("p99", 1_000), ("p90", 100), ("p50", 20)];

/// Minimum share of arriving requests that remain waiting in a growing queue. Stable queues fluctuate: a few per cent
/// are noise, more over a third of a run means that the fleet is overloaded.
pub const GROWTH_SHARE_MAX: f64 = 0.05;

/// Minimum absolute growth of a queue in requests.
pub const GROWTH_MIN: f64 = 10.0;

/// Health of a client that sent real requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientHealth {
    /// CPU time of the process divided by the run's wall time and the number of available cores; 1 is all of them.
    pub cpu_share: f64,
    /// 99th percentile of timer delays in µs: the delay until a received token is observed.
    pub lag_p99_us: u64,
}

/// Kind of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// The policy uses cache contents, but its decisions had no information about them.
    IndexNotConsulted,
    /// No engine found a cached token.
    CacheNeverWarmed,
    /// Requests were sent late.
    ArrivalsLate,
    /// The client lacked CPU time.
    ClientSaturated,
    /// Timers of the client were late.
    TimersLate,
    /// There are too few requests for the percentiles.
    TooFewRequests,
    /// Too many requests failed.
    Failures,
    /// For a third of the run or longer, more requests arrived than were served.
    QueueGrowing,
}

/// A gate that fired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Kind of the check.
    pub gate: Gate,
    /// Observation as text.
    pub message: String,
}

/// Returns all gates that fire for `run` with `facts`.
#[must_use]
pub fn warnings(run: &Run, facts: &Facts) -> Vec<Warning> {
    let measured = run.measured();
    let fired = [
        (Gate::IndexNotConsulted, facts.consults_index.then(|| index_not_consulted(measured)).flatten()),
        (Gate::CacheNeverWarmed, cache_never_warmed(measured)),
        (Gate::ArrivalsLate, arrivals_late(measured)),
        (Gate::ClientSaturated, facts.client.and_then(client_saturated)),
        (Gate::TimersLate, facts.client.and_then(timers_late)),
        (Gate::TooFewRequests, too_few_requests(measured)),
        (Gate::Failures, failures(measured)),
        (Gate::QueueGrowing, queue_growing(measured, run.ended_us)),
    ];
    fired.into_iter().filter_map(|(gate, message)| Some(Warning { gate, message: message? })).collect()
}

fn index_not_consulted(requests: &[RequestRecord]) -> Option<String> {
    let placed = || requests.iter().filter(|request| request.rank.is_some() || request.placed_us.is_some());
    let predicted: Vec<u64> = placed().filter_map(|request| request.predicted_cached_tokens).collect();
    // Simultaneous requests share blocks in the engines although no rank held the blocks at any decision.
    let cached_in_engines =
        placed().filter_map(|request| request.reachable_tokens.or(request.cached_tokens)).sum::<u64>();
    if placed().next().is_none() || predicted.iter().any(|tokens| *tokens > 0) {
        None
    } else if predicted.is_empty() {
        Some("the index was not consulted: no decision came with a prediction of cached tokens".to_owned())
    } else if cached_in_engines > 0 {
        Some(format!("the index was empty: no cached token was predicted, although {cached_in_engines} were cached"))
    } else {
        None
    }
}

fn cache_never_warmed(requests: &[RequestRecord]) -> Option<String> {
    let reported = requests.iter().filter_map(|request| request.cached_tokens);
    let (reported, cached) =
        reported.fold((0_u64, 0_u64), |(reported, cached), tokens| (reported + 1, cached + tokens));
    if reported == 0 || cached > 0 {
        return None;
    }
    let reachable: u64 = requests.iter().filter_map(|request| request.reachable_tokens).sum();
    Some(if reachable > 0 {
        format!("caches were never used: engines found no token cached, although {reachable} were reachable")
    } else {
        "caches never warmed: engines found no token cached, and none was reachable; prompts may share no prefix"
            .to_owned()
    })
}

fn arrivals_late(requests: &[RequestRecord]) -> Option<String> {
    let mut late: Vec<u64> = requests.iter().map(|request| request.sent_us.saturating_sub(request.due_us)).collect();
    late.sort_unstable();
    let p99 = nearest_rank(&late, 99).filter(|p99| *p99 > LATE_US_MAX)?;
    Some(format!(
        "arrivals were late: one request in a hundred was sent {} or more after it was due, the limit is {}",
        time(p99 as f64 / 1e6),
        time(LATE_US_MAX as f64 / 1e6)
    ))
}

fn client_saturated(client: ClientHealth) -> Option<String> {
    let (used, limit) = (percent(Some(client.cpu_share)), percent(Some(CLIENT_CPU_SHARE_MAX)));
    (client.cpu_share > CLIENT_CPU_SHARE_MAX)
        .then(|| format!("the client was saturated: it used {used} of its CPU, the limit is {limit}"))
}

fn timers_late(client: ClientHealth) -> Option<String> {
    (client.lag_p99_us > LATE_US_MAX).then(|| {
        format!(
            "timers were late by {} at p99, the limit is {}: the machine is busy, so responses were observed late; this \
             process used {} of its CPU",
            time(client.lag_p99_us as f64 / 1e6),
            time(LATE_US_MAX as f64 / 1e6),
            percent(Some(client.cpu_share))
        )
    })
}

fn too_few_requests(requests: &[RequestRecord]) -> Option<String> {
    let answered = requests.iter().filter(|request| request.answered()).count() as u64;
    let lacking = ANSWERED_MIN.iter().filter(|(_, least)| answered < *least);
    let lacking: Vec<String> = lacking.map(|(percentile, least)| format!("{percentile} needs {least}")).collect();
    (!lacking.is_empty()).then(|| format!("too few requests: {answered} were answered, {}", lacking.join(", ")))
}

fn failures(requests: &[RequestRecord]) -> Option<String> {
    let failed = requests.iter().filter(|request| !request.answered()).count() as u64;
    let failed_share = share(failed, requests.len() as u64).filter(|share| *share > FAILURE_SHARE_MAX)?;
    Some(format!(
        "{failed} of {} requests failed, {}; the limit is {}",
        requests.len(),
        percent(Some(failed_share)),
        percent(Some(FAILURE_SHARE_MAX))
    ))
}

/// Compares the mean number of requests that wait for their first token in three consecutive sixths of the arrival
/// times. The distance between the middles of the first and the third is a third of the run. Runs with simultaneous
/// arrivals have no such time and are not checked.
fn queue_growing(requests: &[RequestRecord], ended_us: u64) -> Option<String> {
    const PARTS: u64 = 6;
    let (first, last) = (requests.first()?.due_us, requests.last()?.due_us);
    let part_us = last.saturating_sub(first) / PARTS;
    if part_us == 0 {
        return None;
    }
    let waited = |part: u64| {
        let (from, until) = (first + part * part_us, first + (part + 1) * part_us);
        let within = |request: &RequestRecord| {
            let served = request.first_token_us.or(request.ended_us).unwrap_or(ended_us);
            served.min(until).saturating_sub(request.due_us.max(from))
        };
        let arrived = requests.iter().filter(|request| (from..until).contains(&request.due_us)).count();
        (requests.iter().map(within).sum::<u64>() as f64 / part_us as f64, arrived as f64)
    };
    let parts: Vec<(f64, f64)> = (0..PARTS).map(waited).collect();
    let growing = parts.windows(3).filter_map(|three| {
        let [(early, some), (middle, more), (late, last)] = *three else { return None };
        let (growth, first_step, second_step) = (late - early, middle - early, late - middle);
        let grew = growth >= GROWTH_MIN
            && first_step > GROWTH_SHARE_MAX * (some + more) / 2.0
            && second_step > GROWTH_SHARE_MAX * (more + last) / 2.0;
        grew.then_some((growth, early, late))
    });
    let (_, early, late) = growing.max_by(|one, other| one.0.total_cmp(&other.0))?;
    Some(format!(
        "the queue grew for a third of the run, from {early:.1} to {late:.1} waiting requests; \
         the load exceeds the capacity of the fleet, so times depend on its duration"
    ))
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::facts;
    use super::super::tests::{request, run};
    use super::*;

    /// A thousand requests, one every 10 ms, each modified by `change`, which receives its number.
    fn thousand(change: impl Fn(u64, RequestRecord) -> RequestRecord) -> Run {
        run((0..1_000).map(|number| change(number, request(10 * number))).collect())
    }

    fn fired(run: &Run, facts: &Facts) -> Vec<Gate> {
        warnings(run, facts).into_iter().map(|warning| warning.gate).collect()
    }

    fn fired_by(change: impl Fn(u64, RequestRecord) -> RequestRecord) -> Vec<Gate> {
        fired(&thousand(change), &facts())
    }

    #[test]
    fn a_valid_run_has_no_warnings() {
        assert_eq!(fired_by(|_, sound| sound), []);
    }

    #[test]
    fn an_unused_or_empty_index_is_reported() {
        let without = |_, sound| RequestRecord { predicted_cached_tokens: None, ..sound };
        assert_eq!(fired_by(without), [Gate::IndexNotConsulted]);
        let zero = |_, sound| RequestRecord { predicted_cached_tokens: Some(0), ..sound };
        assert_eq!(fired_by(zero), [Gate::IndexNotConsulted]);
        let together = |_, sound| RequestRecord { reachable_tokens: Some(0), ..zero(0, sound) };
        assert_eq!(fired_by(together), [], "simultaneous requests find no cached blocks");
        let blind = Facts { consults_index: false, ..facts() };
        assert_eq!(fired(&thousand(without), &blind), []);
        let once = |number, sound| if number == 7 { sound } else { zero(number, sound) };
        assert_eq!(fired_by(once), []);
    }

    #[test]
    fn caches_without_hits_are_reported_with_reachable_tokens() {
        let cold =
            |reachable| move |_, sound| RequestRecord { cached_tokens: Some(0), reachable_tokens: reachable, ..sound };
        for (reachable, words) in [(Some(600), "600000 were reachable"), (None, "none was reachable")] {
            let warnings = warnings(&thousand(cold(reachable)), &facts());
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert!(warnings[0].gate == Gate::CacheNeverWarmed && warnings[0].message.contains(words), "{warnings:?}");
        }
        assert_eq!(
            fired_by(|_, sound| RequestRecord { cached_tokens: None, ..sound }),
            [],
            "cached tokens are not observable"
        );
    }

    #[test]
    fn p99_lateness_of_ten_milliseconds_is_tolerated() {
        let late = |share, us| {
            move |number, sound: RequestRecord| match number < share {
                true => RequestRecord { sent_us: sound.due_us + us, ..sound },
                false => sound,
            }
        };
        assert_eq!(fired_by(late(11, 10_001)), [Gate::ArrivalsLate]);
        assert_eq!(fired_by(late(10, 10_001)), []);
        assert_eq!(fired_by(late(1_000, 10_000)), []);
    }

    #[test]
    fn a_client_without_cpu_time_or_with_late_timers_is_reported() {
        let with = |cpu_share, lag_p99_us| {
            let facts = Facts { client: Some(ClientHealth { cpu_share, lag_p99_us }), ..facts() };
            fired(&thousand(|_, sound| sound), &facts)
        };
        assert_eq!(with(0.81, 0), [Gate::ClientSaturated]);
        assert_eq!(with(0.1, 10_001), [Gate::TimersLate]);
        assert_eq!(with(0.9, 10_001), [Gate::ClientSaturated, Gate::TimersLate]);
        assert_eq!(with(0.8, 10_000), []);
    }

    #[test]
    fn each_percentile_requires_a_minimum_number_of_requests() {
        let message = |count| {
            let run = run((0..count).map(|number| request(10 * number)).collect());
            warnings(&run, &facts()).into_iter().map(|warning| warning.message).collect::<Vec<_>>()
        };
        assert_eq!(message(999), ["too few requests: 999 were answered, p99 needs 1000"]);
        assert_eq!(message(99), ["too few requests: 99 were answered, p99 needs 1000, p90 needs 100"]);
        assert_eq!(message(19), ["too few requests: 19 were answered, p99 needs 1000, p90 needs 100, p50 needs 20"]);
        assert!(message(1_000).is_empty());
    }

    #[test]
    fn one_failed_request_in_a_hundred_is_tolerated() {
        let failing = |count: u64| {
            let fail = |number, sound| match number < count {
                true => RequestRecord { failure: Some("reset".into()), ..sound },
                false => sound,
            };
            fired(&run((0..2_000).map(|number| fail(number, request(10 * number))).collect()), &facts())
        };
        assert_eq!(failing(21), [Gate::Failures]);
        assert_eq!(failing(20), []);
    }

    #[test]
    fn a_lasting_queue_growth_is_reported() {
        let waits = |ms_at: fn(u64) -> u64| {
            move |number, sound: RequestRecord| {
                let served = sound.due_us + 1_000 * ms_at(number);
                RequestRecord { first_token_us: Some(served), ended_us: Some(served + 500_000), ..sound }
            }
        };
        // Served at four fifths of the arrival rate.
        assert_eq!(fired_by(waits(|number| 100 + 10 * number / 4)), [Gate::QueueGrowing]);
        // The same until the middle of the run, when arrivals become rare and the queue drains.
        assert_eq!(fired_by(waits(|number| 100 + 10 * number.min(1_000 - number) / 2)), [Gate::QueueGrowing]);
        // A queue of constant length, and one of a short burst in the middle.
        assert_eq!(fired_by(waits(|_| 3_000)), [Gate::QueueGrowing], "three seconds of a run of ten");
        assert_eq!(fired_by(waits(|_| 1_000)), []);
        assert_eq!(fired_by(waits(|number| if (400..460).contains(&number) { 1_000 } else { 100 })), []);
        // Simultaneous arrivals, as in a burst on a cold fleet.
        let burst = (0..1_000).map(|number| RequestRecord { first_token_us: Some(5_000 * number), ..request(0) });
        assert_eq!(fired(&run(burst.collect()), &facts()), []);
    }
}
