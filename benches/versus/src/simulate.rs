//! `versus simulate`: the same simulated fleet, driven by either router in virtual time.
//!
//! Both routers run in one process, one after the other, because no real clock is read. The result of a run depends on
//! its seed alone, which breaks ties between ranks. Several seeds show the size of that effect.

use std::io::{self, Write};
use std::str::FromStr;

use clap::Args;
use pointsman_bench::Failed;
use pointsman_bench::compare::{Comparison, Figure};
use pointsman_bench::fleet::Setup;
use pointsman_bench::results::{Facts, Reporting, Summary};
use pointsman_bench::simulate::{self, Simulate};
use pointsman_bench::targets::{Embedded, Target};
use pointsman_trial::workload::Workload;
use serde_json::Value;

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
    /// Maximum deviation of the ratio of mean TTFTs from 1, in %; fail above it
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

/// Runs `workload` over Dynamo's router, which is told of output blocks if `with_output`.
pub(crate) fn run_dynamo(
    setup: &Setup,
    workload: &Workload,
    reporting: &Reporting,
    options: DynamoOptions,
    with_output: bool,
) -> Result<Summary, Failed> {
    let run = simulate::run(setup, workload, async |setup: &Setup| {
        fastrand::seed(setup.router.seed); // A simulation has one thread, whose random numbers break ties.
        DynamoRouter::start(setup, options.dynamo_event_threads, with_output).await
    })?;
    let facts = setup.facts(workload, reporting);
    Ok(Summary::new(&run, &Facts { policy: DynamoRouter::NAME.to_owned(), consults_index: true, ..facts }))
}

impl Simulated {
    /// Simulates every fleet and prints a comparison of each.
    pub(crate) fn run(&self) -> Result<(), Failed> {
        let given = [Pace { workers: self.simulate.fleet.workers, speedup: self.simulate.source.speedup }];
        let reporting = &self.simulate.reporting;
        for &pace in if self.at.is_empty() { &given[..] } else { &self.at } {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for pair in 0..self.pairs {
                let [of_ours, of_theirs] = self.run_pair(pace, pair)?;
                ours.push(of_ours);
                theirs.push(of_theirs);
            }
            let policy = ours.first().map(|run| run.policy.clone()).unwrap_or_default();
            let comparison = Comparison::of_runs(vec![(DynamoRouter::NAME.to_owned(), theirs), (policy, ours)]);
            reporting.admit(&comparison.warnings(), io::stderr())?;
            if reporting.json {
                comparison.write(io::stderr(), false)?;
            }
            comparison.write(io::stdout(), reporting.json)?;
            self.check(pace, &comparison)?;
        }
        Ok(())
    }

    /// Simulates both routers with one seed.
    fn run_pair(&self, pace: Pace, pair: u32) -> Result<[Summary; 2], Failed> {
        let mut arguments = self.simulate.clone();
        (arguments.source.speedup, arguments.fleet.workers) = (pace.speedup, pace.workers);
        arguments.router.seed += u64::from(pair);
        let (workload, reporting) = (arguments.workload()?, &arguments.reporting);
        let setup = arguments.setup(workload.requests.len())?;
        let with_output = !self.without_output_blocks;
        let mut of_ours = setup.clone();
        if !with_output {
            of_ours.router.settings.push(("load.track_output_blocks".to_owned(), Value::Bool(false)));
        }
        let ours = simulate::run(&of_ours, &workload, Embedded::start)?;
        let theirs = run_dynamo(&setup, &workload, reporting, self.dynamo, with_output)?;
        writeln!(io::stderr(), "{} workers, x{}, seed {}: simulated", pace.workers, pace.speedup, setup.router.seed)?;
        Ok([Summary::new(&ours, &setup.facts(&workload, reporting)), theirs])
    }

    /// Checks the ratio of the mean TTFT against the given limit.
    fn check(&self, pace: Pace, comparison: &Comparison) -> Result<(), Failed> {
        let Some(percent_max) = self.ttft_difference_max else { return Ok(()) };
        let ratio = comparison.contenders[1].ratios.get(&Figure::TtftMean).ok_or("no pairs")?.ratio;
        let percent = (ratio - 1.0) * 100.0;
        if percent.abs() <= percent_max {
            return Ok(());
        }
        let workers = pace.workers;
        Err(format!("{workers} workers: mean TTFT differs by {percent:+.2} %, at most {percent_max}").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paces_are_parsed_as_workers_and_speedup() {
        assert_eq!("16:3.5".parse(), Ok(Pace { workers: 16, speedup: 3.5 }));
        for wrong in ["16", "0:2", "a:1", "8:", "8:x"] {
            assert!(wrong.parse::<Pace>().expect_err("refused").contains(wrong));
        }
    }
}
