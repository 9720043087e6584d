//! `versus index`: the replay of all indexes, in rounds of separate processes, and its table.

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use clap::Args;
use pointsman_bench::Failed;
use pointsman_bench::replay::Common;
use pointsman_versus::columns::{Column, head, print, row, shown};
use pointsman_versus::index::replay::{Heap, Timed, Which};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A comparison of indexes.
#[derive(Args, Debug)]
pub(crate) struct Indexes {
    /// Indexes to replay; the others are compared with the first
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Which::ALL)]
    indexes: Vec<Which>,
    /// Number of ranks whose caches the indexes track
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Number of rounds; every round runs each index once, in rotating order
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    #[command(flatten)]
    common: Common,
    /// Print all runs as one JSON array; the table is printed on standard error
    #[arg(long)]
    json: bool,
}

/// All runs of one index. Runs at the same position of two lists are a pair.
#[derive(Debug, Serialize)]
struct IndexRow {
    index: Which,
    timed: Vec<Timed>,
    heap: Heap,
}

const COLUMNS: [Column<Timed>; 7] = [
    Column::new("store ns", 1, |run| Some(run.time_ns.store)),
    Column::new("remove ns", 1, |run| Some(run.time_ns.remove)),
    Column::new("query p50 ns", 0, |run| Some(run.time_ns.query)),
    Column::new("p99 ns", 0, |run| Some(run.query_p99_ns)),
    Column::new("store instr.", 1, |run| Some(run.instructions?.store)),
    Column::new("remove instr.", 1, |run| Some(run.instructions?.remove)),
    Column::new("query instr.", 0, |run| Some(run.instructions?.query)),
];

impl Indexes {
    /// Executes all runs, checks that the query results agree, and prints the table.
    pub(crate) fn run(&self) -> Result<(), Failed> {
        let mut rows = Vec::new();
        for &index in &self.indexes {
            rows.push(IndexRow { index, timed: Vec::new(), heap: self.child("versus-heap", &[], index)? });
        }
        for round in 0..self.pairs as usize {
            for turn in 0..rows.len() {
                let at = (round + turn) % rows.len();
                let index = rows[at].index;
                let run: Timed = self.child("versus", &["index-run"], index)?;
                writeln!(
                    io::stderr(),
                    "round {} of {}: {}, store {:.1} ns, remove {:.1} ns, query p50 {:.0} ns",
                    round + 1,
                    self.pairs,
                    index.name(),
                    run.time_ns.store,
                    run.time_ns.remove,
                    run.time_ns.query,
                )?;
                rows[at].timed.push(run);
            }
        }
        let queries = agree(&rows)?;
        Ok(print(&markdown(&rows, queries), &rows, self.json)?)
    }

    /// Executes one run in its own process: `program` in the directory of this binary.
    fn child<T: DeserializeOwned>(&self, program: &str, command: &[&str], index: Which) -> Result<T, Failed> {
        let beside = std::env::current_exe()?.parent().unwrap_or(Path::new("")).join(program);
        let mut child = Command::new(beside);
        child.args(command).args(["--index", index.name(), "--ranks", &self.ranks.to_string()]);
        let output = child.args(self.common.to_arguments()).stderr(Stdio::inherit()).output();
        let output = output.map_err(|error| format!("cannot run {program} beside this program: {error}"))?;
        if !output.status.success() {
            return Err(format!("{child:?} failed: {}", output.status).into());
        }
        Ok(serde_json::from_slice(&output.stdout).map_err(|error| format!("{child:?} printed no figures: {error}"))?)
    }
}

/// Number of queries with equal results in all runs.
///
/// # Errors
/// Results differ; the error names the first difference.
fn agree(rows: &[IndexRow]) -> Result<usize, Failed> {
    let runs = || rows.iter().flat_map(|row| row.timed.iter().map(|run| (row.index.name(), &run.answers)));
    let Some((first, expected)) = runs().next() else { return Err("no runs".into()) };
    for (name, answers) in runs() {
        let differs = answers.iter().zip(expected).position(|(answer, expected)| answer != expected);
        if let Some(query) = differs {
            return Err(format!("query {query}: results of {name} and {first} differ").into());
        }
        if answers.len() != expected.len() {
            return Err(format!("{name} answered {} queries, {first} {}", answers.len(), expected.len()).into());
        }
    }
    Ok(expected.len())
}

/// Table of the medians, and of the medians of the pairs' ratios, ours over theirs.
fn markdown(rows: &[IndexRow], queries: usize) -> String {
    let mut out = head(&["index"], &COLUMNS, &["bytes a held block"]);
    let mut push = |name: String, figures: &dyn Fn(&Column<Timed>) -> String, bytes: String| {
        let cells: Vec<String> = [name].into_iter().chain(COLUMNS.iter().map(figures)).chain([bytes]).collect();
        out += &row(&cells);
    };
    for row in rows {
        let bytes = format!("{:.1}", row.heap.bytes_a_block());
        push(row.index.name().to_owned(), &|column| column.shown(&row.timed), bytes);
    }
    if let Some((ours, others)) = rows.split_first() {
        for theirs in others {
            let name = format!("{} / {}", ours.index.name(), theirs.index.name());
            let bytes = format!("{:.2}", ours.heap.bytes_a_block() / theirs.heap.bytes_a_block());
            push(name, &|column| shown(column.ratio(&ours.timed, &theirs.timed), 2), bytes);
        }
        let (stored, removed) = ours.timed.first().map_or((0, 0), |run| (run.stored_blocks, run.removed_blocks));
        out += &format!(
            "\n{} held blocks, {stored} stored and {removed} removed in the measured half; {queries} queries \
             answered alike by all.\n",
            ours.heap.held_blocks
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use pointsman_versus::index::replay::Costs;

    use super::*;

    fn row(index: Which, stores: &[f64], answers: &[u64]) -> IndexRow {
        let run = |&store: &f64| Timed {
            time_ns: Costs { store, remove: 2.0, query: 3.0 },
            query_p99_ns: 4.0,
            instructions: None,
            stored_blocks: 5,
            removed_blocks: 6,
            answers: answers.to_vec(),
        };
        let heap = Heap { held_blocks: 10, heap_bytes: 500, reserved_bytes: 100 };
        IndexRow { index, timed: stores.iter().map(run).collect(), heap }
    }

    #[test]
    fn ratios_are_computed_pair_by_pair() {
        let [ours, theirs] = [[10.0, 10.0, 30.0], [20.0, 40.0, 30.0]].map(|ns| row(Which::Pointsman, &ns, &[1]).timed);
        assert_eq!(COLUMNS[0].ratios(&ours, &theirs), Some(vec![0.5, 0.25, 1.0]));
        assert_eq!((COLUMNS[0].ratio(&ours, &theirs), COLUMNS[0].median(&theirs)), (Some(0.5), Some(30.0)));
    }

    #[test]
    fn different_results_are_an_error_with_the_query() {
        let rows = |theirs: &[u64]| [row(Which::Pointsman, &[1.0], &[1, 2]), row(Which::KvIndex, &[1.0], theirs)];
        assert_eq!(agree(&rows(&[1, 2])).expect("all agree"), 2);
        let error = agree(&rows(&[1, 3])).expect_err("one differs").to_string();
        assert_eq!(error, "query 1: results of kv-index and pointsman differ");
        assert!(agree(&rows(&[1])).is_err());
        assert!(agree(&[]).is_err());
    }
}
