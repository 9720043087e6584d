//! `versus simulate`: the same simulated fleet, driven by either router in virtual time.
//!
//! Both routers run in one process, one after the other, because no real clock is read. The result of a run depends on
//! its seed alone, which breaks ties between ranks. Several seeds show the size of that effect.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::str::FromStr;

use clap::Args;
use pointsman_bench::embedded::Embedded;
use pointsman_bench::record::Run;
use pointsman_bench::results::{Facts, Summary};
use pointsman_bench::simulate::{self, Setup, Simulate};
use pointsman_bench::target::Target;
use pointsman_versus::medians::median;
use serde_json::{Value, json};

use crate::DynamoOptions;
use crate::dynamo::DynamoRouter;

/// A comparison of simulated fleets.
#[derive(Args, Debug)]
pub(crate) struct Simulated {
    #[command(flatten)]
    simulate: Simulate,
    /// Fleets with their speed-up, as workers:speedup, instead of --workers and --speedup
    #[arg(long, value_name = "WORKERS:SPEEDUP", value_delimiter = ',')]
    at: Vec<Pace>,
    /// Number of runs per router and fleet, with consecutive seeds from --seed on
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Do not report output blocks to either router
    #[arg(long)]
    without_output_blocks: bool,
    /// Maximum deviation of the median TTFT ratio from 1, in %; fail above it
    #[arg(long, value_name = "PERCENT")]
    ttft_difference_max: Option<f64>,
    #[command(flatten)]
    dynamo: DynamoOptions,
}

/// A fleet and the speed-up of its workload.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pace {
    workers: u32,
    speedup: f64,
}

impl FromStr for Pace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pace = text.split_once(':').and_then(|(workers, speedup)| {
            Some(Self { workers: workers.parse().ok().filter(|&workers| workers > 0)?, speedup: speedup.parse().ok()? })
        });
        pace.ok_or_else(|| format!("{text:?} is not a pace such as 8:2"))
    }
}

/// Results of one seed on one fleet.
#[derive(Debug)]
struct Pair {
    ours: Summary,
    theirs: Summary,
    /// Share of the measured requests that both routers placed on the same rank.
    same_rank: f64,
}

/// A figure of one run; none without measurements.
struct SimulationColumn {
    title: &'static str,
    key: &'static str,
    figure: fn(&Summary) -> Option<f64>,
    decimals: usize,
}

const COLUMNS: [SimulationColumn; 6] = [
    SimulationColumn {
        title: "TTFT mean s",
        key: "ttft_mean",
        figure: |run| Some(run.ttft_seconds?.mean),
        decimals: 4,
    },
    SimulationColumn { title: "TTFT p99 s", key: "ttft_p99", figure: |run| Some(run.ttft_seconds?.p99), decimals: 3 },
    SimulationColumn {
        title: "end to end mean s",
        key: "e2e_mean",
        figure: |run| Some(run.e2e_seconds?.mean),
        decimals: 3,
    },
    SimulationColumn {
        title: "ITL p99 ms",
        key: "itl_p99_ms",
        figure: |run| Some(run.itl_seconds?.p99 * 1e3),
        decimals: 1,
    },
    SimulationColumn { title: "hit rate", key: "hit_rate", figure: |run| run.hit_rate, decimals: 4 },
    SimulationColumn { title: "load", key: "load_max_over_mean", figure: |run| run.load_max_over_mean, decimals: 3 },
];

/// All seeds of one fleet.
#[derive(Debug)]
struct FleetRow {
    pace: Pace,
    pairs: Vec<Pair>,
}

impl Simulated {
    /// Runs every fleet and prints the table.
    pub(crate) fn run(&self) -> Result<(), Box<dyn Error>> {
        let given = [Pace { workers: self.simulate.fleet.workers, speedup: self.simulate.source.speedup }];
        let paces = if self.at.is_empty() { &given[..] } else { &self.at };
        let mut rows = Vec::new();
        for &pace in paces {
            let pairs = (0..self.pairs).map(|pair| self.pair(pace, pair));
            rows.push(FleetRow { pace, pairs: pairs.collect::<Result<_, _>>()? });
        }
        let table = markdown(&rows)?;
        if self.simulate.reporting.json {
            write!(io::stderr(), "{table}")?;
            let rows: Vec<Value> = rows.iter().map(FleetRow::json).collect();
            writeln!(io::stdout(), "{}", json!({ "fleets": rows }))?;
        } else {
            write!(io::stdout(), "{table}")?;
        }
        self.check(&rows)
    }

    fn pair(&self, pace: Pace, pair: u32) -> Result<Pair, Box<dyn Error>> {
        let mut arguments = self.simulate.clone();
        arguments.source.speedup = pace.speedup;
        arguments.fleet.workers = pace.workers;
        arguments.router.seed += u64::from(pair);
        let seed = arguments.router.seed;
        let workload = arguments.source.load(seed)?;
        let setup = arguments.setup(workload.requests.len())?;
        let with_output = !self.without_output_blocks;
        let mut of_ours = setup.clone();
        if !with_output {
            of_ours.router.settings.insert("load.track_output_blocks".to_owned(), Value::Bool(false));
        }
        let ours = simulate::run(&of_ours, &workload, Embedded::start_simulated)?;
        let event_threads = self.dynamo.dynamo_event_threads;
        let theirs = simulate::run(&setup, &workload, async |setup: &Setup| {
            DynamoRouter::start_simulated(setup, event_threads, with_output).await
        })?;
        let facts = setup.facts(&workload, &arguments.reporting);
        let summary_of_ours = Summary::new(&ours, &facts);
        let summary_of_theirs =
            Summary::new(&theirs, &Facts { policy: DynamoRouter::NAME.to_owned(), consults_index: true, ..facts });
        for summary in [&summary_of_ours, &summary_of_theirs] {
            let (workers, policy, ttft) = (pace.workers, &summary.policy, (COLUMNS[0].figure)(summary));
            let ttft = ttft.unwrap_or(f64::NAN);
            writeln!(
                io::stderr(),
                "{workers} workers, x{}, seed {seed}: {policy}, mean TTFT {ttft:.4} s",
                pace.speedup
            )?;
            let warnings: Vec<String> = summary.warnings.iter().map(|warning| warning.message.clone()).collect();
            arguments.reporting.admit(&warnings, io::stderr())?;
        }
        let same_rank = same_rank(&ranks(&ours), &ranks(&theirs), ours.warmup_requests);
        Ok(Pair { ours: summary_of_ours, theirs: summary_of_theirs, same_rank })
    }

    fn check(&self, rows: &[FleetRow]) -> Result<(), Box<dyn Error>> {
        let Some(percent_max) = self.ttft_difference_max else { return Ok(()) };
        for row in rows {
            let ratio = row.ratio(&COLUMNS[0]).ok_or("no pairs")?;
            let percent = (ratio - 1.0) * 100.0;
            if percent.is_nan() || percent.abs() > percent_max {
                let workers = row.pace.workers;
                return Err(
                    format!("{workers} workers: mean TTFT differs by {percent:+.2} %, at most {percent_max}").into()
                );
            }
        }
        Ok(())
    }
}

/// Rank of each request.
fn ranks(run: &Run) -> Vec<Option<u32>> {
    run.requests.iter().map(|request| request.rank).collect()
}

/// Share of the measured requests that two runs of one workload placed on the same rank. Equal ranks of a fleet differ
/// only in their names, and random numbers decide which is used first. Therefore ranks are renumbered in order of first
/// use.
fn same_rank(ours: &[Option<u32>], theirs: &[Option<u32>], warmup_requests: usize) -> f64 {
    let (ours, theirs) = (by_first_use(ours), by_first_use(theirs));
    let pairs = || ours.iter().zip(&theirs).skip(warmup_requests);
    let same = pairs().filter(|(ours, theirs)| ours == theirs).count();
    same as f64 / pairs().count().max(1) as f64
}

/// Ranks numbered in order of first use.
fn by_first_use(ranks: &[Option<u32>]) -> Vec<Option<usize>> {
    let mut used = Vec::new();
    let mut number = |rank| {
        used.iter().position(|&earlier| earlier == rank).unwrap_or_else(|| {
            used.push(rank);
            used.len() - 1
        })
    };
    ranks.iter().map(|rank| rank.map(&mut number)).collect()
}

impl FleetRow {
    /// Median of the pairs' ratios, ours over theirs.
    fn ratio(&self, column: &SimulationColumn) -> Option<f64> {
        let ratio = |pair: &Pair| Some((column.figure)(&pair.ours)? / (column.figure)(&pair.theirs)?);
        median(self.pairs.iter().map(ratio).collect::<Option<Vec<f64>>>()?)
    }

    fn json(&self) -> Value {
        let ratios: Value = COLUMNS.iter().map(|column| (column.key.to_owned(), json!(self.ratio(column)))).collect();
        let pairs = self.pairs.iter().map(
            |pair| json!({ "pointsman": pair.ours, "dynamo-kv-router": pair.theirs, "same_rank": pair.same_rank }),
        );
        json!({
            "workers": self.pace.workers,
            "speedup": self.pace.speedup,
            "median_ratios": ratios,
            "pairs": pairs.collect::<Vec<_>>(),
        })
    }
}

/// Table of the medians as ours / theirs, with the median of the pairs' ratios in brackets.
fn markdown(rows: &[FleetRow]) -> Result<String, std::fmt::Error> {
    let mut out = String::from("| workers | speed-up | requests ");
    for SimulationColumn { title, .. } in &COLUMNS {
        write!(out, "| {title} ")?;
    }
    writeln!(out, "| same rank |\n{}|", "|---".repeat(COLUMNS.len() + 4))?;
    for row in rows {
        let requests = row.pairs.first().map_or(0, |pair| pair.ours.requests);
        write!(out, "| {} | {} | {requests} ", row.pace.workers, row.pace.speedup)?;
        for column in &COLUMNS {
            let of = |side: fn(&Pair) -> &Summary| {
                median(row.pairs.iter().filter_map(|pair| (column.figure)(side(pair)))).unwrap_or(f64::NAN)
            };
            let (ours, theirs, decimals) = (of(|pair| &pair.ours), of(|pair| &pair.theirs), column.decimals);
            let ratio = row.ratio(column).unwrap_or(f64::NAN);
            write!(out, "| {ours:.decimals$} / {theirs:.decimals$} ({ratio:.3}) ")?;
        }
        let same = median(row.pairs.iter().map(|pair| pair.same_rank)).unwrap_or(f64::NAN);
        writeln!(out, "| {:.1} % |", same * 100.0)?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_compared_independently_of_names() {
        let share = |theirs: [u32; 4]| same_rank(&[0, 1, 0, 2].map(Some), &theirs.map(Some), 1);
        assert_eq!(share([2, 0, 2, 1]), 1.0);
        assert_eq!(share([2, 0, 0, 1]), 2.0 / 3.0);
    }

    #[test]
    fn paces_are_parsed_as_workers_and_speedup() {
        assert_eq!("16:3.5".parse(), Ok(Pace { workers: 16, speedup: 3.5 }));
        for wrong in ["16", "0:2", "a:1", "8:", "8:x"] {
            assert!(wrong.parse::<Pace>().expect_err("refused").contains(wrong));
        }
    }
}
