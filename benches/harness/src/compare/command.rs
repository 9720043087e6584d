//! Subcommand that simulates several policies on one workload.

use std::io::Write;
use std::num::NonZeroUsize;
use std::thread::available_parallelism;

use clap::Args;

use super::jobs::in_parallel;
use super::{Comparison, Policied};
use crate::Failed;
use crate::progress::Progress;
use crate::results::Summary;
use crate::results::reporting::admit;
use crate::simulate::{self, Simulate};
use crate::targets::Embedded;

/// Simulates several policies on one workload.
#[derive(Args, Clone, Debug)]
pub struct Compare {
    /// Policies, optionally with settings as in kv+policy.overlap_score_credit=0.5; the others are compared with the first
    #[arg(long, required = true, value_delimiter = ',', value_name = "POLICY,...", conflicts_with = "policy")]
    pub policies: Vec<Policied>,
    /// Number of seeds for each policy: --seed and its successors
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub seeds: u32,
    /// Number of parallel simulations [default: number of cores]
    #[arg(long)]
    pub jobs: Option<NonZeroUsize>,
    /// Arguments of the simulations.
    #[command(flatten)]
    pub simulate: Simulate,
}

impl Compare {
    /// Runs the comparison; writes figures to `out` and warnings to `warnings_out`, progress to standard error.
    ///
    /// # Errors
    /// The workload cannot be read, a simulation fails, or the figures cannot be written.
    pub fn run(&self, out: impl Write, warnings_out: impl Write) -> Result<(), Failed> {
        let seeds = seeds(self.simulate.router.seed, self.seeds);
        let comparison = simulated(&self.simulate, &self.policies, &seeds, self.jobs)?;
        admit(&comparison.warnings(), self.simulate.reporting.strict, warnings_out)?;
        Ok(comparison.write(out, self.simulate.reporting.json)?)
    }
}

/// `count` consecutive seeds from `first` on.
pub(crate) fn seeds(first: u64, count: u32) -> Vec<u64> {
    (0..u64::from(count)).map(|turn| first.wrapping_add(turn)).collect()
}

/// Compares `policies` in simulations like `simulate`, with at most `jobs` in parallel, or one per core.
///
/// Simulations run in virtual time, so neither their order nor parallel jobs change the figures.
///
/// # Errors
/// The trace cannot be read, or a simulation fails.
pub fn simulated(
    simulate: &Simulate,
    policies: &[Policied],
    seeds: &[u64],
    jobs: Option<NonZeroUsize>,
) -> Result<Comparison, Failed> {
    let pairs: Vec<(&Policied, u64)> =
        seeds.iter().flat_map(|seed| policies.iter().map(move |policy| (policy, *seed))).collect();
    let progress = Progress::new(pairs.len(), "simulations");
    let counted = |(policy, seed): &(&Policied, u64)| {
        let run = one(simulate, policy, *seed);
        progress.add(1);
        run
    };
    let jobs = jobs.or_else(|| available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN);
    let mut runs = in_parallel(&pairs, jobs, counted)?.into_iter();
    drop(progress);
    let mut contenders: Vec<(String, Vec<Summary>)> =
        policies.iter().map(|policy| (policy.to_string(), Vec::new())).collect();
    for _ in seeds {
        for (_, of_policy) in &mut contenders {
            of_policy.extend(runs.next());
        }
    }
    Ok(Comparison::of_runs(contenders))
}

fn one(simulate: &Simulate, policy: &Policied, seed: u64) -> Result<Summary, Failed> {
    let workload = simulate.source.load(seed)?;
    let failed = |source: Failed| -> Failed { format!("{policy}, seed {seed}: {source}").into() };
    let mut setup = simulate.setup(workload.requests.len()).map_err(failed)?;
    (setup.router.policy, setup.router.rule) = (policy.policy, policy.rule);
    setup.router.seed = seed;
    setup.router.settings.extend(policy.settings.clone());
    let run = simulate::run(&setup, &workload, Embedded::start).map_err(failed)?;
    let facts = setup.facts(&workload, &simulate.reporting);
    Ok(Summary { policy: policy.to_string(), ..Summary::new(&run, &facts) })
}
