//! Comparison of several policies on one workload.
//!
//! Defines the comparison and its computation from runs. Runs are paired by seed. The caller executes
//! the runs.

pub(crate) mod command;
mod contender;
mod figure;
pub(crate) mod jobs;
mod ratio;
pub(crate) mod text;

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

    /// A word with the figures in which it is worse than the first.
    pub(crate) fn judgement(&self) -> String {
        let worse = worse(&self.ratios).into_iter().map(Figure::title).collect::<Vec<_>>().join(", ");
        let beside = if worse.is_empty() { String::new() } else { format!(", worse in {worse}") };
        match self.verdict {
            Some(Verdict::Wins) => format!("better{beside}"),
            Some(Verdict::Ties) => format!("equal{beside}"),
            Some(Verdict::Loses) => format!("worse in {worse}"),
            None => format!("not comparable{beside}"),
        }
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
pub(crate) mod tests;
