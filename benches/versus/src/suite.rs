//! `versus suite`: figures of Dynamo's router for cases of the suite's matrix, as a baseline for `pointsman-bench suite`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use pointsman_bench::Failed;
use pointsman_bench::results::Summary;
use pointsman_bench::simulate::Simulate;
use pointsman_bench::suite::{Baseline, Selection};
use pointsman_bench::targets::Target;

use crate::dynamo::DynamoRouter;
use crate::simulate::run_dynamo;

/// Cases to compute.
#[derive(Args, Debug)]
pub(crate) struct SuiteOfDynamo {
    #[command(flatten)]
    selection: Selection,
    /// File for the figures; cases that it contains already are not computed again
    #[arg(long, value_name = "FILE")]
    baseline: PathBuf,
    /// Number of parallel simulations
    #[arg(long, default_value = "1")]
    jobs: NonZeroUsize,
}

impl SuiteOfDynamo {
    /// Adds the missing cases to the file.
    pub(crate) fn run(&self) -> Result<(), Failed> {
        let run = |simulate: &Simulate, seed| self.simulated(simulate, seed);
        Baseline::extend(&self.baseline, DynamoRouter::NAME, &self.selection, self.jobs, run)
    }

    fn simulated(&self, simulate: &Simulate, seed: u64) -> Result<Summary, Failed> {
        let workload = simulate.source.load(seed)?;
        let mut setup = simulate.setup(workload.requests.len())?;
        setup.router.seed = seed;
        run_dynamo(&setup, &workload, &simulate.reporting, true)
    }
}
