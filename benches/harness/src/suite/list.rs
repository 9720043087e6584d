//! List of the suite's workloads. Each entry is a valid command line of `simulate`.

use std::path::Path;

use clap::Parser;
use serde::Deserialize;

use super::Matrix;
use crate::Failed;
use crate::simulate::Simulate;

/// Content of the list file.
const LIST: &str = include_str!("suite.toml");

/// One workload of the list.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Name of the workload.
    pub name: String,
    /// Purpose of the workload.
    pub why: String,
    /// Arguments of `simulate`, separated by spaces.
    pub arguments: String,
    /// Whether the workload needs a trace, which is not part of the list.
    #[serde(default)]
    pub trace: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    workload: Vec<Entry>,
    matrix: Matrix,
}

#[derive(Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    simulate: Simulate,
}

fn list() -> Result<List, Failed> {
    toml::from_str(LIST).map_err(|error| format!("invalid list of workloads: {error}").into())
}

/// Workloads of the suite, in order.
///
/// # Errors
/// The list is invalid; a test checks it.
pub fn entries() -> Result<Vec<Entry>, Failed> {
    Ok(list()?.workload)
}

/// Matrix of the suite.
///
/// # Errors
/// The list is invalid; a test checks it.
pub fn matrix() -> Result<Matrix, Failed> {
    Ok(list()?.matrix)
}

/// Parses `arguments` of the workload `name` as arguments of `simulate`.
///
/// # Errors
/// `simulate` rejects them.
pub fn parsed(name: &str, arguments: &str) -> Result<Simulate, Failed> {
    let line = Line::try_parse_from(arguments.split_whitespace());
    line.map(|line| line.simulate).map_err(|source| format!("workload {name}: {source}").into())
}

impl Entry {
    /// Simulation of this entry, on `trace` if it needs one; none if the trace is missing.
    ///
    /// # Errors
    /// `simulate` rejects the arguments.
    pub fn simulate(&self, trace: Option<&Path>) -> Result<Option<Simulate>, Failed> {
        let simulate = parsed(&self.name, &self.arguments)?;
        Ok(match (self.trace, trace) {
            (false, _) => Some(simulate),
            (true, Some(trace)) => {
                let mut simulate = simulate;
                simulate.source.trace = Some(trace.to_owned());
                Some(simulate)
            }
            (true, None) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_a_valid_command_line_with_a_unique_name() {
        let entries = entries().expect("a list");
        for entry in &entries {
            let simulate = entry.simulate(Some(Path::new("trace.jsonl"))).expect("arguments").expect("a trace");
            assert_eq!(simulate.source.trace.is_some(), entry.trace, "{}", entry.name);
            assert_eq!(entry.simulate(None).expect("arguments").is_none(), entry.trace);
            assert_eq!(entries.iter().filter(|other| other.name == entry.name).count(), 1, "{}", entry.name);
            assert!(!entry.why.is_empty());
        }
    }

    #[test]
    fn invalid_arguments_are_rejected_with_the_entry_name() {
        let error = parsed("odd", "--workload chat --wheels 4").expect_err("refused").to_string();
        assert!(error.contains("odd") && error.contains("--wheels"), "{error}");
    }
}
