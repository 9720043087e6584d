//! Tests of comparisons.

use super::*;
use crate::results::summary::tests::facts;
use crate::results::tests::{request, run};
use crate::results::{Distribution, Facts, Warning};

/// A run of `policy` with all times multiplied by `times`.
pub(crate) fn summary(policy: &str, seed: u64, times: f64) -> Summary {
    let facts = Facts { policy: policy.into(), seed, ..facts() };
    let requests = (0..1_000).map(|number| request(10 * number)).collect();
    let mut summary = Summary::new(&run(requests), &facts);
    let longer = |of: &mut Option<Distribution>| {
        let of = of.as_mut().expect("measured");
        [of.mean, of.p50, of.p90, of.p99] = [of.mean, of.p50, of.p90, of.p99].map(|seconds| seconds * times);
    };
    longer(&mut summary.ttft_seconds);
    longer(&mut summary.e2e_seconds);
    longer(&mut summary.itl_seconds);
    summary
}

pub(crate) fn comparison(factors: &[(&str, f64)]) -> Comparison {
    let runs = |factor: f64, name: &str| [1, 2, 3].map(|seed| summary(name, seed, factor * seed as f64)).to_vec();
    Comparison::of_runs(factors.iter().map(|(name, factor)| ((*name).to_owned(), runs(*factor, name))).collect())
}

#[test]
fn ratios_are_relative_to_the_first_and_seed_effects_cancel() {
    let of = comparison(&[("kv", 1.0), ("latency", 0.8), ("random", 1.5)]);
    assert_eq!(of.seeds, [1, 2, 3]);
    assert_eq!((of.contenders[0].verdict, of.contenders[0].ratios.len()), (None, 0));
    let latency = &of.contenders[1];
    let ttft = latency.ratios[&Figure::TtftMean];
    assert!((ttft.ratio - 0.8).abs() < 1e-9 && ttft.pairs == 3, "{ttft:?}");
    assert_eq!((latency.verdict, of.contenders[2].verdict), (Some(Verdict::Wins), Some(Verdict::Loses)));
    assert_eq!(latency.ratios[&Figure::HitRate].ratio, 1.0);
}

#[test]
fn runs_with_different_seeds_are_not_paired() {
    let of = Comparison::of_runs(vec![
        ("kv".into(), vec![summary("kv", 1, 1.0), summary("kv", 2, 1.0)]),
        ("random".into(), vec![summary("random", 1, 2.0), summary("random", 9, 9.0)]),
    ]);
    assert_eq!(of.contenders[1].ratios[&Figure::TtftMean].pairs, 1);
}

#[test]
fn a_warning_of_several_seeds_is_reported_once() {
    let doubtful = |seed, count: u64| {
        let message = format!("too few requests: {count} were answered");
        let warnings = vec![Warning { gate: Gate::TooFewRequests, message }];
        Summary { warnings, ..summary("kv", seed, 1.0) }
    };
    let runs = vec![summary("kv", 1, 1.0), doubtful(2, 9), doubtful(3, 8)];
    let of = Comparison::of_runs(vec![("kv".into(), runs)]);
    assert_eq!(of.warnings(), ["kv on chat, seed 2, and 2 of 3 seeds in total: too few requests: 9 were answered"]);
}
