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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(cpu: f64) -> Report {
        serde_json::from_value(json!({
            "target": "test", "requests_per_second": 1.0, "router_cpu_us_per_request": cpu,
            "engine_cpu_us_per_request": 1.0, "route_us": { "p50": 2.0, "p99": 3.0, "p999": 4.0 },
            "event_blocks_per_request": 1.0, "hit_rate": 0.25, "load_max_over_mean": 1.5,
            "rss_bytes": 5 << 20, "rss_before_bytes": 2 << 20, "requests": 1, "policy": "kv", "workers": 8,
            "dp_size": 1, "clients": 1, "threads": 2, "inflight": 1, "block_size": 64, "kv_blocks": 1,
            "shards": null, "seed": 1, "take_turns": false,
        }))
        .expect("a report")
    }

    fn cell(ours: &[f64], theirs: &[f64]) -> Cell {
        let reports = |cpu: &[f64]| cpu.iter().copied().map(report).collect();
        Cell {
            threads: 2,
            workers: 8,
            source: Source::Clients { clients: 1, take_turns: false },
            ours: reports(ours),
            theirs: reports(theirs),
        }
    }

    #[test]
    fn medians_and_ratios_are_computed_over_the_runs() {
        let cell = cell(&[30.0, 50.0, 40.0], &[100.0, 80.0, 120.0]);
        assert_eq!((cell.ratio(&CPU), cell.ratio(&P99)), (Some(0.4), Some(1.0)));
        assert_eq!(cell.cpu_ratios(), [0.3, 0.625, 1.0 / 3.0]);
        assert_eq!((CPU.median(&[report(1.0), report(4.0)]), CPU.median(&[])), (Some(2.5), None));
    }

    #[test]
    fn a_row_names_the_source_of_its_requests() {
        let rate = Source::Rate(NonZeroU32::new(3_000).expect("not zero"));
        assert_eq!(rate.to_string(), "3000/s");
        assert_eq!(Source::Clients { clients: 16, take_turns: true }.to_string(), "16 clients in turn");
        let cell = Cell { source: rate, ..cell(&[30.0], &[60.0]) };
        assert!(markdown(&[cell]).contains("| 2 | 8 | 3000/s |"));
    }

    #[test]
    fn the_table_has_equal_numbers_of_cells_per_line() {
        let markdown = markdown(&[cell(&[30.0], &[60.0]), cell(&[], &[60.0])]);
        let lines: Vec<&str> = markdown.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines.iter().all(|line| line.matches('|').count() == 15), "{markdown}");
        assert!(
            lines[2].contains("| 30.0 / 60.0 |") && lines[2].contains("| 0.50 | 1.00 | 1.00 | 0.50 |"),
            "{markdown}"
        );
        assert!(lines[3].contains("| - / 60.0 |"), "{markdown}");
        assert!(lines[2].contains("| 3 / 3 |"), "{markdown}");
    }
}
