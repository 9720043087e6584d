//! The list of a suite's workloads.
//!
//! Owns its form. Promises that every entry is a command line that `simulate` takes.

use std::path::Path;

use clap::Parser;
use serde::Deserialize;

use crate::simulate::Simulate;

/// The list, as it is checked in.
const LIST: &str = include_str!("suite.toml");

/// One workload of the list.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// What it is called.
    pub name: String,
    /// What it is there for.
    pub why: String,
    /// The arguments of `simulate` that make it, with blanks between them.
    pub arguments: String,
    /// Whether it takes a trace, which the list cannot carry.
    #[serde(default)]
    pub trace: bool,
}

/// Why a list cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// It is no list.
    #[error("no list of workloads: {0}")]
    Form(#[from] toml::de::Error),
    /// An entry's arguments are wrong.
    #[error("workload {name}: {source}")]
    Arguments {
        /// The entry.
        name: String,
        /// What is wrong with them.
        source: clap::Error,
    },
    /// Nothing is called so.
    #[error("no workload is called {name:?}; there are {known}")]
    Unknown {
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    workload: Vec<Entry>,
}

#[derive(Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    simulate: Simulate,
}

/// The workloads of the suite, in order.
///
/// # Errors
/// The list is broken; a test holds it whole.
pub fn entries() -> Result<Vec<Entry>, ListError> {
    Ok(toml::from_str::<List>(LIST)?.workload)
}

/// What `arguments`, of the workload `name`, have `simulate` do.
///
/// # Errors
/// `simulate` does not take them.
pub(crate) fn parsed(name: &str, arguments: &str, more: &[&str]) -> Result<Simulate, ListError> {
    let words = arguments.split_whitespace().chain(more.iter().copied());
    let line = Line::try_parse_from(words);
    line.map(|line| line.simulate).map_err(|source| ListError::Arguments { name: name.to_owned(), source })
}

impl Entry {
    /// What it has `simulate` do, on `trace` if it takes one; absent if it lacks one.
    ///
    /// # Errors
    /// `simulate` does not take its arguments.
    pub fn simulate(&self, trace: Option<&Path>) -> Result<Option<Simulate>, ListError> {
        let simulate = parsed(&self.name, &self.arguments, &[])?;
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
    fn every_entry_is_a_command_line_and_has_a_name_of_its_own() {
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
    fn the_list_has_what_it_must_have() {
        let names: Vec<String> = entries().expect("a list").into_iter().map(|entry| entry.name).collect();
        for name in [
            "low",
            "peer-10",
            "peer-20",
            "peer-10-varied",
            "peer-20-varied",
            "burst",
            "chat",
            "shared-prefix",
            "agents",
            "siblings",
            "heterogeneous",
            "mooncake-8",
            "mooncake-16",
            "mooncake-32",
        ] {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
    }

    #[test]
    fn broken_arguments_are_refused_with_the_entrys_name() {
        let error = parsed("odd", "--workload chat --wheels 4", &[]).expect_err("refused").to_string();
        assert!(error.contains("odd") && error.contains("--wheels"), "{error}");
    }
}
