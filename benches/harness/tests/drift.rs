//! Policies do not drift from recorded figures.
//!
//! A simulation gives the same figures each time, so the recorded figures only change with the code: with a policy, with the
//! engine model, or with the workload generator. The last two affect all policies alike. Therefore the test compares ratios
//! to the first policy, and the absolute time of the first policy only. A failure shows the current figures; after an
//! intended change they replace the recorded ones.

use pointsman_bench::compare::{Comparison, Figure, Policied, simulated};
use pointsman_bench::suite::parsed;

/// Maximum relative deviation from a recorded figure: small enough to detect a change of a policy, large enough for a
/// different rounding of a term.
const DRIFT_MAX: f64 = 0.03;

/// Arguments of `simulate`, with two seeds.
const ARGUMENTS: &str = "--workload chat:rate=60,sessions=60,think_ms=500-2000 --workers 4";

/// Mean time to the first token under the first policy in seconds, and ratios of the other policies to it, as geometric
/// means over the seeds.
const RECORDED: [(&str, f64); 7] = [
    ("kv", 0.12996),
    ("latency", 0.53619),
    ("cache_aware", 0.53143),
    ("round_robin", 1.17023),
    ("random", 1.45936),
    ("power_of_two", 1.41553),
    ("least_loaded", 1.28677),
];

fn figures(comparison: &Comparison) -> Vec<(String, f64)> {
    let (first, others) = comparison.contenders.split_first().expect("contenders");
    let first = (first.name.clone(), first.mean(Figure::TtftMean).expect("a mean"));
    let ratio =
        |other: &pointsman_bench::compare::Contender| (other.name.clone(), other.ratios[&Figure::TtftMean].ratio);
    std::iter::once(first).chain(others.iter().map(ratio)).collect()
}

/// Figures that differ from the recorded ones.
fn drifted(figures: &[(String, f64)]) -> Vec<String> {
    let pairs = figures.iter().zip(RECORDED);
    let far = pairs.filter(|((_, is), (_, was))| (is / was - 1.0).abs() > DRIFT_MAX || is.is_nan());
    far.map(|((policy, is), (_, was))| format!("{policy} is {is:.5}, recorded {was:.5}")).collect()
}

#[test]
fn policies_do_not_drift_from_recorded_figures() {
    let simulate = parsed("drift", ARGUMENTS).expect("arguments");
    let policies = RECORDED.map(|(policy, _)| policy.parse::<Policied>().expect("a policy"));
    let comparison = simulated(&simulate, &policies, &[1, 2], None).expect("simulations");
    let figures = figures(&comparison);
    assert_eq!(drifted(&figures), [""; 0], "{figures:?}");
    let moved: Vec<_> = figures.iter().map(|(policy, figure)| (policy.clone(), figure * 1.07)).collect();
    assert_eq!(drifted(&moved).len(), RECORDED.len(), "a change of 7 % is detected");
}
