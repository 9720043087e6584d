//! Table of the medians of all runs.

use std::fmt::{self, Display};
use std::num::NonZeroU32;

use pointsman_bench::replay::Report;
use pointsman_versus::columns::{Column, head, row, shown};
use serde::Serialize;

/// Source of the requests of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Source {
    /// Clients of a closed loop.
    Clients { clients: usize, take_turns: bool },
    /// An open loop with a mean rate in requests per second.
    Rate(NonZeroU32),
}

impl Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clients { clients, take_turns } => {
                write!(f, "{clients} clients{}", if *take_turns { " in turn" } else { "" })
            }
            Self::Rate(rate) => write!(f, "{rate}/s"),
        }
    }
}

/// Runs of one combination of threads, workers and source of requests. Runs at the same position of both lists are a pair.
#[derive(Debug, Serialize)]
pub(crate) struct Cell {
    pub(crate) threads: usize,
    pub(crate) workers: u32,
    pub(crate) source: Source,
    pub(crate) ours: Vec<Report>,
    pub(crate) theirs: Vec<Report>,
}

const CPU: Column<Report> = Column::new("CPU µs", 1, |run| Some(run.router_cpu_us_per_request));
const P50: Column<Report> = Column::new("p50 µs", 1, |run| Some(run.route_us.p50));
const P99: Column<Report> = Column::new("p99 µs", 0, |run| Some(run.route_us.p99));

const COLUMNS: [Column<Report>; 7] = [
    CPU,
    P50,
    P99,
    Column::new("hit rate", 4, |run| Some(run.hit_rate)),
    Column::new("load", 2, |run| Some(run.load_max_over_mean)),
    Column::new("requests/s", 0, |run| Some(run.requests_per_second)),
    Column::new("RSS MiB", 0, rss_grown_mib),
];

/// Growth of memory during the run: the router, and the simulated caches, which are equal on both sides.
fn rss_grown_mib(run: &Report) -> Option<f64> {
    let grown = run.rss_bytes.unwrap_or(0).saturating_sub(run.rss_before_bytes.unwrap_or(0));
    Some(grown as f64 / f64::from(1 << 20))
}

impl Cell {
    /// Ratio of the medians of a figure, ours over theirs.
    fn ratio(&self, column: &Column<Report>) -> Option<f64> {
        Some(column.median(&self.ours)? / column.median(&self.theirs)?)
    }

    /// Ratios of CPU times, pair by pair.
    fn cpu_ratios(&self) -> Vec<f64> {
        CPU.ratios(&self.ours, &self.theirs).unwrap_or_default()
    }

    fn row(&self) -> String {
        let mut cells = vec![self.threads.to_string(), self.workers.to_string(), self.source.to_string()];
        cells.extend(
            COLUMNS.iter().map(|column| format!("{} / {}", column.shown(&self.ours), column.shown(&self.theirs))),
        );
        cells.extend([CPU, P50, P99].map(|column| shown(self.ratio(&column), 2)));
        let pairs: Vec<String> = self.cpu_ratios().iter().map(|ratio| format!("{ratio:.2}")).collect();
        cells.push(pairs.join(" "));
        row(&cells)
    }
}

/// Markdown table of the medians; each figure is ours / theirs.
pub(crate) fn markdown(cells: &[Cell]) -> String {
    let last = ["CPU ratio", "p50 ratio", "p99 ratio", "CPU by pair"];
    let rows: String = cells.iter().map(Cell::row).collect();
    head(&["threads", "workers", "requests from"], &COLUMNS, &last) + &rows
}
