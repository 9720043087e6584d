//! Regression test of policies against recorded figures.
//!
//! Defines the file of recorded figures and the limit of drift. A failure names the policy and its recorded and current
//! figures. After an intended change, the developer records the figures again.
//!
//! A simulation gives the same figures each time, so the recorded figures only change with the code: with a policy,
//! with the engine model, or with the workload generator. The last two affect all policies alike. Therefore the test
//! compares ratios to the first policy, and the absolute time of the first policy only.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::compare::command::{jobs, seeds};
use crate::compare::{CompareError, Comparison, Figure, Policied, simulated};
use crate::progress::Progress;
use crate::suite::{ListError, parsed};

/// Maximum relative deviation from a recorded figure: small enough to detect a change of a policy, large enough for a
/// different rounding of a term.
const DRIFT_MAX: f64 = 0.03;

/// Header of the file of recorded figures.
const HEAD: &str = "\
# Figures of one small simulation, from which policies must not drift by more than 3 %: `first_ttft_mean_seconds` is the
# mean time to the first token under the first policy, `ttft_ratios` are the ratios of the other policies to it. After an
# intended change, record them again:
#
#     cargo run -p pointsman-bench -- drift benches/harness/drift.toml --record
#
# With --policies kv,latency,... other policies are recorded.

";

/// Compares policies with recorded figures.
#[derive(Args, Clone, Debug)]
pub struct Drift {
    /// File of recorded figures
    pub file: PathBuf,
    /// Record the current figures
    #[arg(long)]
    pub record: bool,
    /// Policies to record, relative to the first [default: the recorded ones]
    #[arg(long, requires = "record", value_delimiter = ',', value_name = "POLICY,...")]
    pub policies: Vec<Policied>,
    /// Print the figures as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Content of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recorded {
    /// Arguments of `simulate`.
    arguments: String,
    /// Number of seeds, from 1 on.
    seeds: u32,
    /// Policies in command-line form.
    policies: Vec<String>,
    /// Mean time to the first token under the first policy, averaged over the seeds.
    first_ttft_mean_seconds: f64,
    /// Ratios of the other policies to that, as geometric means over the seeds.
    ttft_ratios: BTreeMap<String, f64>,
}

/// Errors of the drift test.
#[derive(Debug, thiserror::Error)]
pub enum DriftError {
    /// The file cannot be read or written.
    #[error("cannot use {path}: {source}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The file has invalid content.
    #[error("{path} contains no recorded figures: {reason}")]
    Form {
        /// Path of the file.
        path: PathBuf,
        /// Reason for the rejection.
        reason: String,
    },
    /// `simulate` rejects the recorded arguments.
    #[error(transparent)]
    Arguments(#[from] ListError),
    /// The simulation failed.
    #[error(transparent)]
    Compare(#[from] CompareError),
    /// Figures have drifted.
    #[error("{}; record them again if the change is intended", .0.join("; "))]
    Drifted(Vec<String>),
    /// The output could not be written.
    #[error("cannot write the figures: {0}")]
    Write(#[source] io::Error),
}

impl Drift {
    /// Compares or records the figures and writes each of them to `out`.
    ///
    /// # Errors
    /// A figure has drifted, the file is invalid, or the simulation fails.
    pub fn run(&self, out: impl Write) -> Result<(), DriftError> {
        let recorded = self.read()?;
        let names = if self.policies.is_empty() {
            recorded.policies.clone()
        } else {
            self.policies.iter().map(Policied::to_string).collect()
        };
        let now = Recorded { policies: names, ..recorded.clone() }.measured(|reason| self.form(reason))?;
        if self.record {
            let text = toml::to_string(&now).map_err(|error| self.form(error))?;
            fs::write(&self.file, format!("{HEAD}{text}")).map_err(|source| self.file(source))?;
        }
        let moved = if self.record { Vec::new() } else { moved(&recorded, &now) };
        self.write(&now, &moved, out).map_err(DriftError::Write)?;
        if moved.is_empty() { Ok(()) } else { Err(DriftError::Drifted(moved)) }
    }

    fn write(&self, now: &Recorded, moved: &[String], mut out: impl Write) -> io::Result<()> {
        if self.json {
            let figures: BTreeMap<String, f64> = now.figures().into_iter().collect();
            return writeln!(out, "{}", json!({ "figures": figures, "drifted": moved }));
        }
        now.figures().into_iter().try_for_each(|(policy, figure)| writeln!(out, "{policy}: {figure:.4}"))
    }

    fn read(&self) -> Result<Recorded, DriftError> {
        let text = fs::read_to_string(&self.file).map_err(|source| self.file(source))?;
        toml::from_str(&text).map_err(|error| self.form(error))
    }

    fn file(&self, source: io::Error) -> DriftError {
        DriftError::File { path: self.file.clone(), source }
    }

    fn form(&self, reason: impl ToString) -> DriftError {
        DriftError::Form { path: self.file.clone(), reason: reason.to_string() }
    }
}

impl Recorded {
    /// The same content with current figures.
    fn measured(self, form: impl Fn(String) -> DriftError) -> Result<Self, DriftError> {
        let simulate = parsed("drift", &self.arguments, &[])?;
        let policies: Result<Vec<Policied>, String> = self.policies.iter().map(|policy| policy.parse()).collect();
        let (policies, seeds) = (policies.map_err(&form)?, seeds(1, self.seeds));
        let progress = Progress::new(policies.len() * seeds.len(), "simulations");
        let comparison = simulated(&simulate, &policies, &seeds, jobs(None), &progress)?;
        self.with(&comparison).ok_or_else(|| form("a run without a time to the first token".to_owned()))
    }

    fn with(self, comparison: &Comparison) -> Option<Self> {
        let (first, others) = comparison.contenders.split_first()?;
        let ratio = |contender: &crate::compare::Contender| {
            Some((contender.name.clone(), rounded(contender.ratios.get(&Figure::TtftMean)?.ratio)))
        };
        Some(Self {
            first_ttft_mean_seconds: rounded(first.mean(Figure::TtftMean)?),
            ttft_ratios: others.iter().map(ratio).collect::<Option<_>>()?,
            ..self
        })
    }

    /// Figures with their names.
    fn figures(&self) -> Vec<(String, f64)> {
        let first = self.policies.first().map(String::as_str).unwrap_or_default();
        let seconds = (format!("mean TTFT of {first}, seconds"), self.first_ttft_mean_seconds);
        let ratio = |(policy, ratio): (&String, &f64)| (format!("mean TTFT of {policy} over that of {first}"), *ratio);
        std::iter::once(seconds).chain(self.ttft_ratios.iter().map(ratio)).collect()
    }
}

/// Rounds to five decimals, enough for a limit of three per cent.
fn rounded(value: f64) -> f64 {
    (value * 1e5).round() / 1e5
}

/// Descriptions of the figures that differ between `recorded` and `now`.
fn moved(recorded: &Recorded, now: &Recorded) -> Vec<String> {
    let of_now: BTreeMap<String, f64> = now.figures().into_iter().collect();
    let far = |(figure, was): (String, f64)| {
        let is = of_now.get(&figure).copied().unwrap_or(f64::NAN);
        let drift = is / was - 1.0;
        // The negated comparison also reports NaN.
        let near = drift.abs() <= DRIFT_MAX;
        (!near).then(|| {
            format!(
                "{figure} is {is:.4}, recorded {was:.4}: off by {:+.1} %, the limit is {:.0} %",
                drift * 100.0,
                DRIFT_MAX * 100.0
            )
        })
    };
    recorded.figures().into_iter().filter_map(far).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::comparison;

    fn recorded(seconds: f64, ratios: &[(&str, f64)]) -> Recorded {
        Recorded {
            arguments: "--workload chat".into(),
            seeds: 2,
            policies: vec!["kv".into(), "random".into()],
            first_ttft_mean_seconds: seconds,
            ttft_ratios: ratios.iter().map(|(policy, ratio)| ((*policy).to_owned(), *ratio)).collect(),
        }
    }

    #[test]
    fn drift_above_three_per_cent_is_reported() {
        let was = recorded(0.2, &[("random", 1.5)]);
        assert!(moved(&was, &recorded(0.2059, &[("random", 1.456)])).is_empty());
        let messages = moved(&was, &recorded(0.2061, &[("random", 1.546)]));
        assert_eq!(messages[0], "mean TTFT of kv, seconds is 0.2061, recorded 0.2000: off by +3.0 %, the limit is 3 %");
        assert_eq!(
            messages[1],
            "mean TTFT of random over that of kv is 1.5460, recorded 1.5000: off by +3.1 %, the limit is 3 %"
        );
        assert_eq!(moved(&was, &recorded(0.2, &[])).len(), 1, "a missing policy counts as drift");
    }

    #[test]
    fn recorded_figures_come_from_the_comparison() {
        let of = comparison(&[("kv", 1.0), ("random", 1.5)]);
        let now = recorded(9.0, &[("random", 9.0)]).with(&of).expect("figures");
        assert_eq!((now.first_ttft_mean_seconds, now.ttft_ratios["random"]), (0.2, 1.5));
    }

    #[test]
    fn the_recorded_file_has_the_written_format() {
        let text = include_str!("../drift.toml");
        let of: Recorded = toml::from_str(text).expect("recorded figures");
        assert_eq!(text, format!("{HEAD}{}", toml::to_string(&of).expect("toml")));
        assert_eq!(of.ttft_ratios.len() + 1, of.policies.len());
        assert!(parsed("drift", &of.arguments, &[]).is_ok());
    }
}
