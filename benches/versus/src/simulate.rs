//! `versus simulate`: the same simulated fleet, driven by either router in virtual time.
//!
//! Both routers run in one process, one after the other, because no real clock is read. The result of a run depends on
//! its seed alone, which breaks ties between ranks. Several seeds show the size of that effect.

use std::io::{self, Write};

use clap::Args;
use pointsman_bench::Failed;
use pointsman_bench::compare::Comparison;
use pointsman_bench::fleet::Setup;
use pointsman_bench::results::reporting::admit;
use pointsman_bench::results::{Facts, Reporting, Summary};
use pointsman_bench::simulate::{self, Simulate};
use pointsman_bench::targets::{Embedded, Target};
use pointsman_trial::workload::Workload;
use serde_json::Value;

use crate::dynamo::DynamoRouter;

/// A comparison of simulated fleets.
#[derive(Args, Debug)]
pub(crate) struct Simulated {
    #[command(flatten)]
    simulate: Simulate,
    /// Number of runs per router and fleet, with consecutive seeds from --seed on
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Do not report output blocks to either router
    #[arg(long)]
    without_output_blocks: bool,
}

/// Runs `workload` over Dynamo's router, which is told of output blocks if `with_output`.
pub(crate) fn run_dynamo(
    setup: &Setup,
    workload: &Workload,
    reporting: &Reporting,
    with_output: bool,
) -> Result<Summary, Failed> {
    let run = simulate::run(setup, workload, async |setup: &Setup| {
        fastrand::seed(setup.router.seed); // A simulation has one thread, whose random numbers break ties.
        DynamoRouter::start(setup, with_output).await
    })?;
    let facts = setup.facts(workload, reporting);
    Ok(Summary::new(&run, &Facts { policy: DynamoRouter::NAME.to_owned(), consults_index: true, ..facts }))
}

impl Simulated {
    /// Simulates the fleet with both routers and prints their comparison.
    pub(crate) fn run(&self) -> Result<(), Failed> {
        let reporting = &self.simulate.reporting;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for pair in 0..self.pairs {
            let [of_ours, of_theirs] = self.run_pair(pair)?;
            ours.push(of_ours);
            theirs.push(of_theirs);
        }
        let policy = ours.first().map(|run| run.policy.clone()).unwrap_or_default();
        let comparison = Comparison::of_runs(vec![(DynamoRouter::NAME.to_owned(), theirs), (policy, ours)]);
        admit(&comparison.warnings(), reporting.strict, io::stderr())?;
        if reporting.json {
            comparison.write(io::stderr(), false)?;
        }
        Ok(comparison.write(io::stdout(), reporting.json)?)
    }

    /// Simulates both routers with one seed.
    fn run_pair(&self, pair: u32) -> Result<[Summary; 2], Failed> {
        let mut arguments = self.simulate.clone();
        arguments.router.seed += u64::from(pair);
        let (workload, reporting) = (arguments.workload()?, &arguments.reporting);
        let setup = arguments.setup(workload.requests.len())?;
        let with_output = !self.without_output_blocks;
        let mut of_ours = setup.clone();
        if !with_output {
            of_ours.router.settings.push(("load.track_output_blocks".to_owned(), Value::Bool(false)));
        }
        let ours = simulate::run(&of_ours, &workload, Embedded::start)?;
        let theirs = run_dynamo(&setup, &workload, reporting, with_output)?;
        writeln!(io::stderr(), "seed {}: simulated", setup.router.seed)?;
        Ok([Summary::new(&ours, &setup.facts(&workload, reporting)), theirs])
    }
}
