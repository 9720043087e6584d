//! Comparison of several policies on one workload.
//!
//! Defines the comparison and its computation from runs. Runs are paired by seed. The order of the contenders is
//! reversed for every second seed, so that drift of the environment favours none of them. The caller executes the runs.

pub(crate) mod command;
mod contender;
mod figure;
pub(crate) mod jobs;
mod ratio;
pub(crate) mod text;
pub(crate) mod view;

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

pub use command::{Compare, simulated};
pub use contender::Policied;
pub use figure::{Figure, TIE, Verdict, worse};
pub use ratio::Ratio;

use crate::results::{Gate, SCHEMA_VERSION, Summary, write_json};

/// Comparison of several policies on one workload, each relative to the first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`SCHEMA_VERSION`] of the program that wrote it.
    pub schema_version: u32,
    /// Seeds; every contender has one run for each.
    pub seeds: Vec<u64>,
    /// Contenders; the others are compared with the first.
    pub contenders: Vec<Contender>,
}

/// One policy with its runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contender {
    /// Name of the contender.
    pub name: String,
    /// Ratios of its figures to those of the first; empty for the first itself.
    pub ratios: BTreeMap<Figure, Ratio>,
    /// Verdict from the ratios; none for the first itself.
    pub verdict: Option<Verdict>,
    /// Its runs, in order of the seeds.
    pub runs: Vec<Summary>,
}

impl Comparison {
    /// Runs each of `names` once for each of `seeds`.
    ///
    /// # Errors
    /// Those of `run`.
    pub fn run<E>(
        names: &[String],
        seeds: &[u64],
        mut run: impl FnMut(&str, u64) -> Result<Summary, E>,
    ) -> Result<Self, E> {
        let mut runs: Vec<Vec<Summary>> = names.iter().map(|_| Vec::new()).collect();
        for (turn, seed) in seeds.iter().enumerate() {
            let mut order: Vec<usize> = (0..names.len()).collect();
            if turn % 2 == 1 {
                order.reverse();
            }
            for which in order {
                runs[which].push(run(&names[which], *seed)?);
            }
        }
        Ok(Self::of_runs(names.iter().cloned().zip(runs).collect()))
    }

    /// Creates a comparison from existing runs: for each contender its runs, in the same order of seeds. A run is
    /// paired if the first contender has a run with the same seed at the same position.
    #[must_use]
    pub fn of_runs(runs: Vec<(String, Vec<Summary>)>) -> Self {
        let first = runs.first().map(|(_, runs)| runs.clone()).unwrap_or_default();
        let contender = |(place, (name, runs)): (usize, (String, Vec<Summary>))| {
            let ratios = if place == 0 { BTreeMap::new() } else { ratios(&first, &runs) };
            Contender { name, verdict: Verdict::of(&ratios), ratios, runs }
        };
        Self {
            schema_version: SCHEMA_VERSION,
            seeds: first.iter().map(|run| run.seed).collect(),
            contenders: runs.into_iter().enumerate().map(contender).collect(),
        }
    }

    /// Warnings of all runs with the name of their contender. A warning of several seeds is reported once, for the
    /// first of them.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.contenders.iter().flat_map(Contender::warnings).collect()
    }

    /// Writes the comparison as one line of JSON or as text.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write(&self, out: impl Write, json: bool) -> io::Result<()> {
        if json { write_json(out, self) } else { self.write_text(out) }
    }
}

impl Contender {
    fn warnings(&self) -> Vec<String> {
        let mut by_gate = BTreeMap::<Gate, Vec<(&Summary, &str)>>::new();
        for run in &self.runs {
            for warning in &run.warnings {
                by_gate.entry(warning.gate).or_default().push((run, &warning.message));
            }
        }
        let warning = |seeds: &Vec<(&Summary, &str)>| {
            let (run, message) = seeds.first()?;
            let more = if seeds.len() > 1 {
                format!(", and {} of {} seeds in total", seeds.len(), self.runs.len())
            } else {
                String::new()
            };
            Some(format!("{} on {}, seed {}{more}: {message}", self.name, run.workload, run.seed))
        };
        by_gate.values().filter_map(warning).collect()
    }

    /// Mean of a figure over all runs; none if a run lacks it.
    #[must_use]
    pub fn mean(&self, figure: Figure) -> Option<f64> {
        let values: Option<Vec<f64>> = self.runs.iter().map(|run| figure.of(run)).collect();
        values.filter(|values| !values.is_empty()).map(|values| values.iter().sum::<f64>() / values.len() as f64)
    }
}

fn ratios(first: &[Summary], other: &[Summary]) -> BTreeMap<Figure, Ratio> {
    let ratio = |figure: Figure| {
        let same_seed = first.iter().zip(other).filter(|(first, other)| first.seed == other.seed);
        let pairs: Option<Vec<_>> =
            same_seed.map(|(first, other)| Some((figure.of(first)?, figure.of(other)?))).collect();
        Some((figure, Ratio::of_pairs(pairs?)?))
    };
    Figure::ALL.into_iter().filter_map(ratio).collect()
}

#[cfg(test)]
pub(crate) mod tests {
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
        let names: Vec<String> = factors.iter().map(|(name, _)| (*name).to_owned()).collect();
        let run = |name: &str, seed: u64| {
            let factor = factors.iter().find(|(known, _)| *known == name).expect("a contender").1;
            Ok::<_, ()>(summary(name, seed, factor * seed as f64))
        };
        Comparison::run(&names, &[1, 2, 3], run).expect("runs")
    }

    #[test]
    fn contenders_run_in_alternating_order() {
        let mut order = Vec::new();
        let names = ["kv".to_owned(), "random".to_owned()];
        Comparison::run(&names, &[5, 6, 7], |name, seed| {
            order.push(format!("{name} {seed}"));
            Ok::<_, ()>(summary(name, seed, 1.0))
        })
        .expect("runs");
        assert_eq!(order, ["kv 5", "random 5", "random 6", "kv 6", "kv 7", "random 7"]);
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

    #[test]
    fn json_round_trips() {
        let of = comparison(&[("kv", 1.0), ("latency", 0.7)]);
        let mut line = Vec::new();
        of.write(&mut line, true).expect("written");
        assert_eq!(serde_json::from_slice::<Comparison>(&line).expect("reads back"), of);
    }
}
