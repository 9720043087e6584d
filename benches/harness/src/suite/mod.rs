//! Comparison of policies on many workloads, which shows the wins and losses of each policy.
//!
//! Contains the list of workloads (`suite.toml`, beside this file) and the table of results. Each workload can be run
//! separately, by `simulate` with the arguments of its entry. [`crate::compare`] compares and
//! [`pointsman_trial::workload::generate`] generates the workloads.
//!
//! A policy *wins* a workload if it is better than the first one by more than 2 % in mean time to the first token or
//! mean end-to-end time, and worse by more than 2 % in neither. It *loses* if it is worse by more than 2 % in one of
//! them. Otherwise it *ties*. Other figures that are worse by more than 2 % are listed beside the verdict.
//!
//! The regret of a run refers to the oracle of [`crate::simulate`]: for each request, the minimum time to the first
//! token over all ranks, from the engines' true state, for this request alone. It limits the possible gain of a policy
//! that considers single requests. It ignores the cost for other requests, so a policy without regret may lose to a
//! policy with regret.

mod command;
mod list;

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

pub use command::{RunSuite, SuiteError};
pub(crate) use list::parsed;
pub use list::{Entry, ListError, entries};

use crate::compare::text::judgement;
use crate::compare::{Comparison, Figure};
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

impl Suite {
    /// Writes one table as text: a row per workload and policy, with ratios to the first policy.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write_text(&self, out: impl Write) -> io::Result<()> {
        let columns = ["workload", "policy"].into_iter().chain(Figure::ALL.map(Figure::title));
        let mut table = Table::new(&[0, 1, 2 + Figure::ALL.len()], columns.chain(["beside the first"]));
        for row in &self.rows {
            for contender in row.comparison.contenders.iter().skip(1) {
                let ratio =
                    |figure| contender.ratios.get(&figure).map_or("–".to_owned(), |of| format!("{:.3}", of.ratio));
                let names = [row.name.clone(), contender.name.clone()].into_iter();
                let ratios = Figure::ALL.into_iter().map(ratio);
                table.push(names.chain(ratios).chain([judgement(contender)]));
            }
        }
        table.write(out)
    }

    /// Writes the suite as one line of JSON.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write_json(&self, mut out: impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut out, self)?;
        writeln!(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::comparison;
    use crate::results::SCHEMA_VERSION;

    #[test]
    fn the_table_has_a_row_per_workload_and_policy() {
        let row = |name: &str, factor| Row {
            name: name.into(),
            why: String::new(),
            comparison: comparison(&[("kv", 1.0), ("latency", factor)]),
        };
        let suite = Suite { schema_version: SCHEMA_VERSION, rows: vec![row("chat", 0.5), row("low", 1.0)] };
        let mut text = Vec::new();
        suite.write_text(&mut text).expect("written");
        let text = String::from_utf8(text).expect("text");
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["chat", "latency", "0.500", "0.500", "0.500", "0.500", "0.500", "1.000", "wins"]);
        assert_eq!(lines[2][..3], ["low", "latency", "1.000"]);
        assert_eq!(lines[2][8], "ties");
    }
}
