//! `versus simulate`: the same simulated fleet, driven by either router in virtual time.
//!
//! Both routers run in one process, one after the other, because no real clock is read. The result of a run depends on
//! its seed alone, which breaks ties between ranks. Several seeds show the size of that effect.

use std::io::{self, Write};
use std::str::FromStr;

use clap::Args;
use pointsman_bench::Failed;
use pointsman_bench::fleet::Setup;
use pointsman_bench::results::{Facts, Reporting, Run, Summary};
use pointsman_bench::simulate::{self, Simulate};
use pointsman_bench::targets::{Embedded, Target};
use pointsman_trial::workload::Workload;
use pointsman_versus::columns::{Column, by_key, head, median, print, row, shown};
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

const COLUMNS: [Column<Summary>; 6] = [
    Column::new("TTFT mean s", "ttft_mean", 4, |run| Some(run.ttft_seconds?.mean)),
    Column::new("TTFT p99 s", "ttft_p99", 3, |run| Some(run.ttft_seconds?.p99)),
    Column::new("end to end mean s", "e2e_mean", 3, |run| Some(run.e2e_seconds?.mean)),
    Column::new("ITL p99 ms", "itl_p99_ms", 1, |run| Some(run.itl_seconds?.p99 * 1e3)),
    Column::new("hit rate", "hit_rate", 4, |run| run.hit_rate),
    Column::new("load", "load_max_over_mean", 3, |run| run.load_max_over_mean),
];

/// All seeds of one fleet.
#[derive(Debug)]
struct FleetRow {
    pace: Pace,
    ours: Vec<Summary>,
    theirs: Vec<Summary>,
    /// Shares of the measured requests that both routers placed on the same rank.
    same_rank: Vec<f64>,
}

/// Runs `workload` over Dynamo's router, which is told of output blocks if `with_output`.
pub(crate) fn run_dynamo(
    setup: &Setup,
    workload: &Workload,
    reporting: &Reporting,
    options: DynamoOptions,
    with_output: bool,
) -> Result<(Run, Summary), Failed> {
    let run = simulate::run(setup, workload, async |setup: &Setup| {
        fastrand::seed(setup.router.seed); // A simulation has one thread, whose random numbers break ties.
        DynamoRouter::start(setup, options.dynamo_event_threads, with_output).await
    })?;
    let facts = setup.facts(workload, reporting);
    let summary = Summary::new(&run, &Facts { policy: DynamoRouter::NAME.to_owned(), consults_index: true, ..facts });
    Ok((run, summary))
}

impl Simulated {
    /// Runs every fleet and prints the table.
    pub(crate) fn run(&self) -> Result<(), Failed> {
        let given = [Pace { workers: self.simulate.fleet.workers, speedup: self.simulate.source.speedup }];
        let paces = if self.at.is_empty() { &given[..] } else { &self.at };
        let mut rows = Vec::new();
        for &pace in paces {
            let mut row = FleetRow { pace, ours: Vec::new(), theirs: Vec::new(), same_rank: Vec::new() };
            for pair in 0..self.pairs {
                self.run_pair(pair, &mut row)?;
            }
            rows.push(row);
        }
        let json = || json!({ "fleets": rows.iter().map(FleetRow::json).collect::<Vec<_>>() });
        print(&markdown(&rows), self.simulate.reporting.json.then(json))?;
        self.check(&rows)
    }

    fn run_pair(&self, pair: u32, row: &mut FleetRow) -> Result<(), Failed> {
        let Pace { workers, speedup } = row.pace;
        let mut arguments = self.simulate.clone();
        arguments.source.speedup = speedup;
        arguments.fleet.workers = workers;
        arguments.router.seed += u64::from(pair);
        let (workload, reporting) = (arguments.workload()?, &arguments.reporting);
        let setup = arguments.setup(workload.requests.len())?;
        let with_output = !self.without_output_blocks;
        let mut of_ours = setup.clone();
        if !with_output {
            of_ours.router.settings.insert("load.track_output_blocks".to_owned(), Value::Bool(false));
        }
        let ours = simulate::run(&of_ours, &workload, Embedded::start)?;
        let (theirs, summary_of_theirs) = run_dynamo(&setup, &workload, reporting, self.dynamo, with_output)?;
        let summary_of_ours = Summary::new(&ours, &setup.facts(&workload, reporting));
        for summary in [&summary_of_ours, &summary_of_theirs] {
            let (seed, policy) = (setup.router.seed, &summary.policy);
            let ttft = COLUMNS[0].shown(std::slice::from_ref(summary));
            writeln!(io::stderr(), "{workers} workers, x{speedup}, seed {seed}: {policy}, mean TTFT {ttft} s")?;
            let warnings: Vec<String> = summary.warnings.iter().map(|warning| warning.message.clone()).collect();
            reporting.admit(&warnings, io::stderr())?;
        }
        row.same_rank.push(same_rank(&ranks(&ours), &ranks(&theirs), ours.warmup_requests));
        row.ours.push(summary_of_ours);
        row.theirs.push(summary_of_theirs);
        Ok(())
    }

    fn check(&self, rows: &[FleetRow]) -> Result<(), Failed> {
        let Some(percent_max) = self.ttft_difference_max else { return Ok(()) };
        for row in rows {
            let ratio = COLUMNS[0].ratio(&row.ours, &row.theirs).ok_or("no pairs")?;
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
    fn json(&self) -> Value {
        let pairs = self.ours.iter().zip(&self.theirs).zip(&self.same_rank).map(|((ours, theirs), same_rank)| {
            json!({ "pointsman": ours, "dynamo-kv-router": theirs, "same_rank": same_rank })
        });
        json!({
            "workers": self.pace.workers,
            "speedup": self.pace.speedup,
            "median_ratios": by_key(&COLUMNS, |column| column.ratio(&self.ours, &self.theirs)),
            "pairs": pairs.collect::<Vec<_>>(),
        })
    }
}

/// Table of the medians as ours / theirs, with the median of the pairs' ratios in brackets.
fn markdown(rows: &[FleetRow]) -> String {
    let mut out = head(&["workers", "speed-up", "requests"], &COLUMNS, &["same rank"]);
    for FleetRow { pace, ours, theirs, same_rank } in rows {
        let requests = ours.first().map_or(0, |run| run.requests);
        let mut cells = vec![pace.workers.to_string(), pace.speedup.to_string(), requests.to_string()];
        cells.extend(COLUMNS.iter().map(|column| {
            let ratio = shown(column.ratio(ours, theirs), 3);
            format!("{} / {} ({ratio})", column.shown(ours), column.shown(theirs))
        }));
        cells.push(format!("{} %", shown(median(same_rank.iter().map(|share| share * 100.0)), 1)));
        out += &row(&cells);
    }
    out
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
