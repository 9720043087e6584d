//! Latency targets of requests: preferred ranks, early rejections, and requests without targets.

use std::time::Duration;

use pointsman::config::PrefillModel;
use pointsman::internals::config::{LoadConfig, QueueConfig};
use pointsman::internals::load::EngineSpeed;
use pointsman::internals::schedule::{
    ExplainedRank, Explanation, LatencyPrediction, Purpose, ResolvedOptions, ResolvedTargets, TargetsMissed,
};
use pointsman::policy::{KvConfig, Policy, PolicyConfig};
use pointsman::test_support::{RequestOutcome, SampleRequest, SimulatedFleet};
use pointsman::{Filter, Rejection, RouterConfig};
use proptest::prelude::*;

use crate::effort::effort;

/// Prompt of every request: 6,400 tokens, 0.7 s of prefill at the prior speed.
const BLOCKS: u32 = 100;

fn latency() -> RouterConfig {
    RouterConfig { policy: Policy::Latency.into(), ..RouterConfig::default() }
}

/// Two ranks: rank 0 has the whole prompt cached, of which the last block is computed again, and a queue of 75 blocks, 0.51 s of prefill.
fn warm_and_idle(config: RouterConfig) -> SimulatedFleet {
    let mut fleet = SimulatedFleet::new(config, 2);
    fleet.occupy(9, 0, 75);
    fleet
}

fn sample(fleet: &SimulatedFleet, ttft_ms: Option<f64>, itl_ms: Option<f64>, rejects: bool) -> SampleRequest {
    let duration = |ms: f64| Duration::from_secs_f64(ms / 1e3);
    let ttft = ttft_ms.map(duration);
    let targets =
        ResolvedTargets { ttft, ttft_due: ttft.map(|ttft| fleet.now + ttft), itl: itl_ms.map(duration), rejects };
    let options = ResolvedOptions { targets: Some(targets), ..ResolvedOptions::default() };
    SampleRequest { blocks: BLOCKS, cached: vec![(0, BLOCKS)], options, ..SampleRequest::default() }
}

fn plain() -> SampleRequest {
    SampleRequest { blocks: BLOCKS, cached: vec![(0, BLOCKS)], ..SampleRequest::default() }
}

fn missed(ttft_ms: Option<f64>, itl_ms: Option<f64>) -> TargetsMissed {
    let mut fleet = warm_and_idle(latency());
    let sample = sample(&fleet, ttft_ms, itl_ms, true);
    fleet.request(1, &sample);
    match fleet.rejection(1) {
        Rejection::TargetsMissed(missed) => *missed,
        other => panic!("must be rejected for its targets, not {other}"),
    }
}

fn explained(fleet: &mut SimulatedFleet, sample: &SampleRequest) -> Explanation {
    fleet.request(1, &SampleRequest { purpose: Purpose::Explain, ..sample.clone() });
    fleet.explanation(1).clone()
}

fn prediction(row: &ExplainedRank) -> LatencyPrediction {
    row.prediction.expect("speeds are learned")
}

fn close(got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 1e-6, "{got} is not {want}");
}

#[test]
fn worked_example_of_predictions() {
    let rows = explained(&mut warm_and_idle(latency()), &plain()).ranks;
    let speed = EngineSpeed::prior(64);
    let work = |tokens: f64, cached: f64| tokens * (1.0 + (cached + tokens / 2.0) / 33_000.0);
    let wait = speed.prefill(work(4_800.0, 0.0));
    let step = 0.004 + 20e-6 + 75.0 * 64.0 * 65e-9;
    close(prediction(&rows[0]).ttft_seconds.expect("prefill"), wait + speed.prefill(work(64.0, 6_336.0)) + step);
    close(prediction(&rows[0]).itl_seconds.expect("decode"), 0.004 + 2.0 * 20e-6 + 175.0 * 64.0 * 65e-9);
    close(prediction(&rows[1]).ttft_seconds.expect("prefill"), speed.prefill(work(6_400.0, 0.0)) + 0.004);
    close(prediction(&rows[1]).itl_seconds.expect("decode"), 0.004 + 20e-6 + 100.0 * 64.0 * 65e-9);
}

#[test]
fn ranks_that_miss_a_target_are_explained() {
    let mut fleet = warm_and_idle(latency());
    let sample = sample(&fleet, None, Some(4.6), false);
    let table = explained(&mut fleet, &sample);
    assert_eq!(table.ranks.iter().map(|row| row.excluded_by).collect::<Vec<_>>(), [Some(Filter::Targets), None]);
    assert_eq!(table.chosen, Some(table.ranks[1].facts.rank));
}

#[test]
fn requests_that_must_meet_their_targets_are_rejected_early() {
    let both = missed(Some(300.0), Some(4.0));
    let ttft = both.ttft.expect("missed");
    assert!((0.50..0.55).contains(&ttft.predicted.as_secs_f64()), "the earliest first token: {both}");
    assert_eq!((ttft.target, both.itl.expect("missed").target), (Duration::from_millis(300), Duration::from_millis(4)));
    assert_eq!(both.retry_after, None, "no queue makes the steps longer");
    let one = missed(Some(300.0), None);
    assert_eq!(one.retry_after, one.ttft.map(|ttft| ttft.predicted - ttft.target), "the queue must shrink by that");
    assert_eq!(missed(Some(1.0), None).retry_after, None, "its own step takes longer");
    let predicted = one.ttft.expect("missed").predicted.as_secs_f64() * 1e3;
    let named = format!("targets, time to first token {predicted:.1} ms with a target of 300.0 ms");
    assert!(one.to_string().ends_with(&named), "{one}");

    let mut fleet = warm_and_idle(latency());
    let sample = sample(&fleet, Some(600.0), None, true);
    fleet.request(1, &sample);
    assert_eq!(fleet.worker(1), 0, "a rank meets it");
}

/// The time that a request has waited counts: a target of 600 ms, 300 ms ago.
#[test]
fn waited_time_counts() {
    let mut fleet = warm_and_idle(latency());
    let early = sample(&fleet, Some(600.0), None, true);
    fleet.now = fleet.now + Duration::from_millis(300);
    // The queue of rank 0 has become shorter by as much. The cold rank 1 needs 0.7 s from now.
    fleet.request(1, &early);
    assert_eq!(fleet.worker(1), 0);
    fleet.now = fleet.now + Duration::from_millis(301);
    fleet.request(2, &early);
    match fleet.rejection(2) {
        Rejection::TargetsMissed(missed) => assert!(missed.ttft.is_some_and(|ttft| ttft.predicted > ttft.target)),
        other => panic!("late, not {other}"),
    }
}

#[test]
fn requests_that_must_wait_are_rejected_or_expire_by_their_target() {
    let queue = QueueConfig { threshold: Some(0.0), ..QueueConfig::default() };
    let mut fleet = warm_and_idle(RouterConfig { queue, ..latency() });
    fleet.occupy(8, 1, 75);
    let hopeless = sample(&fleet, Some(300.0), None, true);
    fleet.request(1, &hopeless);
    assert!(matches!(fleet.rejection(1), Rejection::TargetsMissed(_)), "before any wait");

    let served = sample(&fleet, Some(300.0), None, false);
    fleet.request(2, &served);
    assert_eq!(fleet.waiting(), 1, "may be late");
    let mut possible = sample(&fleet, Some(600.0), None, true);
    possible.options.due = possible.options.targets.and_then(|targets| targets.ttft_due);
    fleet.request(3, &possible);
    assert_eq!(fleet.waiting(), 2);
    fleet.now = fleet.now + Duration::from_millis(600);
    fleet.wake();
    match fleet.rejection(3) {
        Rejection::TargetsMissed(missed) => {
            assert_eq!(missed.ttft.map(|ttft| ttft.predicted), Some(Duration::from_millis(600)))
        }
        other => panic!("expired by its target, not {other}"),
    }
}

#[test]
fn other_policies_need_learned_speeds() {
    let with = |policy: PolicyConfig, prefill_model| {
        let load = LoadConfig { prefill_model, ..LoadConfig::default() };
        let mut fleet = SimulatedFleet::new(RouterConfig { policy, load, ..RouterConfig::default() }, 2);
        fleet.occupy(9, 0, 20);
        let sample = sample(&fleet, None, Some(4.5), false);
        fleet.request(1, &sample);
        let decision = fleet.decision(1);
        (decision.rank().worker.0, decision.predicted_itl().is_some())
    };
    let kv = || PolicyConfig::Kv(KvConfig::default());
    assert_eq!(with(kv(), PrefillModel::None), (0, false), "the cached rank: no effect");
    assert_eq!(with(kv(), PrefillModel::Learned), (1, true));
    for policy in [Policy::LeastLoaded, Policy::RoundRobin, Policy::Random, Policy::PowerOfTwo, Policy::CacheAware] {
        assert_eq!(with(policy.into(), PrefillModel::Learned), (1, true), "{policy:?}");
    }
    let rejecting = RouterConfig { on_target_miss: pointsman::config::OnTargetMiss::Reject, policy: kv(), ..latency() };
    let error = rejecting.validate().expect_err("nothing is predicted").to_string();
    assert!(error.starts_with("on_target_miss is reject, must be serve unless prefill speeds are learned"), "{error}");
}

/// A fleet with queues of this many blocks.
fn loaded(queued: &[Vec<u32>]) -> SimulatedFleet {
    let mut fleet = SimulatedFleet::new(latency(), queued.len());
    let queued = queued.iter().zip(0..).flat_map(|(queue, worker)| queue.iter().map(move |blocks| (worker, *blocks)));
    for ((worker, blocks), id) in queued.zip(100..) {
        fleet.occupy(id, worker, blocks);
    }
    fleet
}

proptest! {
    #![proptest_config(effort(256, "tests/schedule_targets.proptest-regressions"))]

    #[test]
    fn a_rank_that_meets_the_targets_serves_if_there_is_one(
        queued in prop::collection::vec(prop::collection::vec(1u32..200, 0..4), 1..6),
        cached in prop::collection::vec(0u32..=BLOCKS, 6),
        ttft_ms in prop::option::of(1.0f64..4_000.0),
        itl_ms in prop::option::of(4.3f64..8.0),
        rejects: bool,
    ) {
        prop_assume!(ttft_ms.is_some() || itl_ms.is_some());
        let mut fleet = loaded(&queued);
        let cached: Vec<_> = cached.into_iter().take(queued.len()).enumerate().collect();
        let with_targets = SampleRequest { cached: cached.clone(), ..sample(&fleet, ttft_ms, itl_ms, rejects) };
        let without = SampleRequest { cached, ..plain() };
        let rows = explained(&mut loaded(&queued), &without).ranks;
        let missed = |row: &ExplainedRank| {
            let LatencyPrediction { ttft_seconds, itl_seconds } = prediction(row);
            let exceeds = |target: Option<f64>, predicted: Option<f64>| {
                u8::from(target.zip(predicted).is_some_and(|(target, predicted)| predicted > target / 1e3))
            };
            exceeds(ttft_ms, ttft_seconds) + exceeds(itl_ms, itl_seconds)
        };
        let fewest = rows.iter().map(missed).min().expect("ranks");
        fleet.request(0, &with_targets);
        match fleet.outcome(0) {
            RequestOutcome::Booked(decision, _) => {
                let row = rows.iter().find(|row| row.facts.rank == decision.rank()).expect("a row");
                prop_assert_eq!(missed(row), fewest);
                prop_assert!(fewest == 0 || !rejects);
            }
            RequestOutcome::Rejected(Rejection::TargetsMissed(_)) => prop_assert!(fewest > 0 && rejects),
            other => prop_assert!(false, "{:?}", other),
        }
        prop_assert_eq!(fleet.open_queries.len(), 0);
    }

    /// Both choices have nearly the lowest cost. They may differ within a tenth, because a request without targets looks at
    /// few ranks only.
    #[test]
    fn generous_targets_keep_the_lowest_cost(
        queued in prop::collection::vec(prop::collection::vec(1u32..200, 0..4), 1..6),
        cached in prop::collection::vec(0u32..=BLOCKS, 6),
    ) {
        let cached: Vec<_> = cached.into_iter().take(queued.len()).enumerate().collect();
        let placed = |targets: Option<ResolvedTargets>| {
            let mut fleet = loaded(&queued);
            let options = ResolvedOptions { targets, ..ResolvedOptions::default() };
            fleet.request(0, &SampleRequest { cached: cached.clone(), options, ..plain() });
            fleet.worker(0)
        };
        let day = Duration::from_secs(86_400);
        let ttft_due = Some(SimulatedFleet::new(latency(), 0).now + day);
        let generous = ResolvedTargets { ttft: Some(day), ttft_due, itl: Some(day), rejects: true };
        let mut fleet = loaded(&queued);
        fleet.request(0, &SampleRequest { cached: cached.clone(), purpose: Purpose::Explain, ..plain() });
        let ranks = &fleet.explanation(0).ranks;
        let least = ranks.iter().map(|rank| rank.cost_max).fold(f64::INFINITY, f64::min);
        for worker in [placed(Some(generous)), placed(None)] {
            let cost = ranks.iter().find(|rank| rank.facts.rank.worker.0 == worker).map_or(f64::NAN, |rank| rank.cost_max);
            prop_assert!(cost <= 1.05 / 0.9 * least, "worker {worker} costs {cost}, least {least}");
        }
    }
}
