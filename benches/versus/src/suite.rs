//! `versus suite`: figures of Dynamo's router for cases of the suite's matrix, as a baseline for `pointsman-bench suite`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use pointsman_bench::results::{Facts, Summary};
use pointsman_bench::simulate::{self, Setup, Simulate};
use pointsman_bench::suite::{Baseline, Selection, SuiteError};
use pointsman_bench::target::{Refusal, Target};

use crate::DynamoOptions;
use crate::dynamo::DynamoRouter;

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
    #[command(flatten)]
    dynamo: DynamoOptions,
}

impl SuiteOfDynamo {
    /// Adds the missing cases to the file.
    pub(crate) fn run(&self) -> Result<(), SuiteError> {
        let run = |simulate: &Simulate, seed| self.simulated(simulate, seed);
        Baseline::extend(&self.baseline, DynamoRouter::NAME, &self.selection, self.jobs, run)
    }

    fn simulated(&self, simulate: &Simulate, seed: u64) -> Result<Summary, Refusal> {
        let workload = simulate.source.load(seed)?;
        let mut setup = simulate.setup(workload.requests.len())?;
        setup.router.seed = seed;
        let event_threads = self.dynamo.dynamo_event_threads;
        let run = simulate::run(&setup, &workload, async |setup: &Setup| {
            DynamoRouter::start_simulated(setup, event_threads, true).await
        })?;
        let facts = setup.facts(&workload, &simulate.reporting);
        Ok(Summary::new(&run, &Facts { policy: DynamoRouter::NAME.to_owned(), consults_index: true, ..facts }))
    }
}
