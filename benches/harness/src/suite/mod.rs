//! Many workloads, each with a comparison of its own: where does a policy win, and where does it lose?
//!
//! Owns the list of workloads (`suite.toml`, beside this file) and the table of what came of them. Promises that each
//! workload can be run alone, by `simulate` and the arguments of its entry. Leaves comparing to [`crate::compare`], and
//! generating to [`pointsman_trial::workload::generate`].
//!
//! A policy *wins* a workload if it is better than the first one by more than 2 % in mean time to the first token or mean
//! end-to-end time and worse by more than that in neither; it *loses* if it is worse by more than 2 % in one of them;
//! otherwise it *ties*. What else got worse by more than 2 % is named beside that.
//!
//! The regret in its runs is against the oracle that [`crate::simulate`] defines: for each request, the least time to
//! the first token over all ranks as the engines' true state gives it, for this request alone. It bounds what a policy
//! that looks at one request at a time can still gain; what a request costs others is not in it, so a policy that has
//! no regret may well lose to one that has some.

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

/// What a suite gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Suite {
    /// [`crate::results::SCHEMA_VERSION`] of the program that wrote it.
    pub schema_version: u32,
    /// Its workloads, in order.
    pub rows: Vec<Row>,
}

/// One workload of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What it is called.
    pub name: String,
    /// What it is there for.
    pub why: String,
    /// What was run on it.
    pub comparison: Comparison,
}

impl Suite {
    /// Writes one table for a reader: a row for each workload and policy, ratios to the first policy.
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
    fn a_reader_finds_each_policy_of_each_workload_in_one_table() {
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
