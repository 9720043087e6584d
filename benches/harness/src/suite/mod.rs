//! Comparison of policies on many workloads, which shows the wins and losses of each policy.
//!
//! Contains the list of workloads and the matrix of cases (`suite.toml`, beside this file), and the table of results. Each workload can be run
//! separately, by `simulate` with the arguments of its entry. [`crate::compare`] compares and
//! [`pointsman_trial::workload::generate`] generates the workloads.
//!
//! A policy is *better* than another on a workload if it is better by more than 2 % in mean time to the first token or
//! mean end-to-end time, and worse by more than 2 % in neither. It is *worse* if it is worse by more than 2 % in one of
//! them. Otherwise both are *equal*. The verdicts list all figures that are worse by more than 2 %.
//!
//! The regret of a run refers to the oracle of [`crate::simulate`]: for each request, the minimum time to the first
//! token over all ranks, from the engines' true state, for this request alone. It limits the possible gain of a policy
//! that considers single requests. It ignores the cost for other requests, so a policy without regret may lose to a
//! policy with regret.

mod baseline;
mod command;
mod list;
mod matrix;

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

pub use baseline::Baseline;
pub use command::RunSuite;
pub use list::{Entry, entries, matrix, parsed};
pub use matrix::{Matrix, Seeds, Selection};

use crate::compare::{Comparison, Contender, Figure, Ratio, TIE};
use crate::results::table::Table;

/// Result of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Suite {
    /// [`crate::results::SCHEMA_VERSION`] of the program that wrote it.
    pub schema_version: u32,
    /// Workloads in order.
    pub rows: Vec<Row>,
}

/// One workload of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the workload.
    pub name: String,
    /// Purpose of the workload.
    pub why: String,
    /// Results of the workload.
    pub comparison: Comparison,
}

impl Row {
    /// Cells of one table row per policy after the first: workload, policy, ratios to the first policy, and verdict.
    pub(crate) fn verdicts(&self) -> Vec<Vec<String>> {
        let cells = |contender: &Contender| {
            let ratio =
                |figure| contender.ratios.get(&figure).map_or("–".to_owned(), |of| format!("{:.3}", of.ratio));
            let names = [self.name.clone(), contender.name.clone()].into_iter();
            let ratios = Figure::ALL.into_iter().map(ratio);
            names.chain(ratios).chain([contender.judgement()]).collect()
        };
        self.comparison.contenders.iter().skip(1).map(cells).collect()
    }
}

impl Suite {
    /// Writes one table as text: a row per workload and policy, with ratios to the first policy, then geometric means over
    /// the workloads, and all [judged](Figure::JUDGED) figures that are worse by more than 2 %.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write_text(&self, mut out: impl Write) -> io::Result<()> {
        let columns = ["workload", "policy"].into_iter().chain(Figure::ALL.map(Figure::title));
        let mut table = Table::new(&[0, 1, 2 + Figure::ALL.len()], columns.chain(["verdict"]));
        for row in &self.rows {
            row.verdicts().into_iter().for_each(|cells| table.push(cells));
        }
        let means = self.geometric_means();
        for (policy, means) in &means {
            let mean = |figure| means.get(&figure).map_or("–".to_owned(), |mean: &f64| format!("{mean:.3}"));
            let names = ["geometric mean".to_owned(), policy.clone()].into_iter();
            table.push(names.chain(Figure::ALL.into_iter().map(mean)));
        }
        table.write(&mut out)?;
        let worse = self.worse();
        writeln!(out, "\nratios are to the first policy; {} figures are worse by more than 2 %", worse.len())?;
        for line in worse {
            writeln!(out, "{line}")?;
        }
        Ok(())
    }

    /// Geometric mean of each figure's ratios over the workloads, by policy.
    fn geometric_means(&self) -> BTreeMap<String, BTreeMap<Figure, f64>> {
        let mut ratios = BTreeMap::<String, BTreeMap<Figure, Vec<f64>>>::new();
        for contender in self.rows.iter().flat_map(|row| row.comparison.contenders.iter().skip(1)) {
            let of_policy = ratios.entry(contender.name.clone()).or_default();
            for (figure, Ratio { ratio, .. }) in &contender.ratios {
                of_policy.entry(*figure).or_default().push(*ratio);
            }
        }
        let mean = |(figure, ratios): (Figure, Vec<f64>)| {
            let logs: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
            (figure, (logs / ratios.len() as f64).exp())
        };
        ratios.into_iter().map(|(policy, figures)| (policy, figures.into_iter().map(mean).collect())).collect()
    }

    /// Judged figures that are worse by more than 2 %, one per line.
    fn worse(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (row, other) in self.rows.iter().flat_map(|row| row.comparison.contenders.iter().map(move |of| (row, of))) {
            let judged = Figure::JUDGED.into_iter().filter_map(|figure| Some((figure, other.ratios.get(&figure)?)));
            let worse = judged.filter(|(_, of)| of.ratio > 1.0 + TIE);
            lines.extend(
                worse.map(|(figure, of)| format!("{}  {}  {}  {:.3}", row.name, other.name, figure.title(), of.ratio)),
            );
        }
        lines
    }
}
