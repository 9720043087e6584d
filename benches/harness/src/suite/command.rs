//! Subcommand that runs all or some workloads of the suite.
//!
//! Selects the workloads and their number of requests. A suite takes minutes, so progress is shown.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

use super::{Baseline, Entry, Row, Seeds, Selection, Suite, entries, matrix};
use crate::Failed;
use crate::compare::command::seeds;
use crate::compare::{Comparison, Policied, simulated};
use crate::progress::Progress;
use crate::results::reporting::admit;
use crate::results::{SCHEMA_VERSION, write_json};

/// Runs the workloads of the suite, each under several policies.
#[derive(Args, Clone, Debug)]
pub struct RunSuite {
    /// Policies, optionally with settings as in kv+policy.overlap_score_credit=0.5; the others are compared with the first,
    /// or all with --baseline
    #[arg(long, required = true, value_delimiter = ',', value_name = "POLICY,...")]
    pub policies: Vec<Policied>,
    /// Trace in Mooncake's format for workloads that need one; without it they are skipped
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// First seed, unless --families is given
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Selection of cases of the matrix, which replace the list if --families is given.
    #[command(flatten)]
    pub selection: Selection,
    /// File with the figures of another router, to which all policies are compared; requires --families
    #[arg(long, value_name = "FILE", requires = "families")]
    pub baseline: Option<PathBuf>,
    /// Number of parallel simulations [default: number of cores]
    #[arg(long)]
    pub jobs: Option<NonZeroUsize>,
    /// Print all figures of all runs as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Fail instead of printing a table if there are warnings
    #[arg(long)]
    pub strict: bool,
}

impl RunSuite {
    /// Runs the suite; writes the table to `out`, and warnings to `warnings_out`, progress to standard error.
    ///
    /// # Errors
    /// A workload fails, or figures cannot be written.
    pub fn run(&self, out: impl Write, mut warnings_out: impl Write) -> Result<(), Failed> {
        let suite = self.suite(&mut warnings_out)?;
        let warnings: Vec<String> = suite.rows.iter().flat_map(|row| row.comparison.warnings()).collect();
        admit(&warnings, self.strict, &mut warnings_out)?;
        let written = if self.json { write_json(out, &suite) } else { suite.write_text(out) };
        Ok(written?)
    }

    fn suite(&self, mut warnings_out: impl Write) -> Result<Suite, Failed> {
        let (entries, seeds) = self.entries()?;
        let baseline = self.baseline.as_deref().map(Baseline::read).transpose()?;
        let progress = Progress::new(entries.len(), "workloads");
        let mut rows = Vec::new();
        for entry in entries {
            let Some(simulate) = entry.simulate(self.trace.as_deref())? else {
                writeln!(warnings_out, "{}: skipped, because it requires --trace", entry.name)?;
                progress.add(1);
                continue;
            };
            progress.name(&format!("now {}", entry.name));
            let failed = |source| format!("workload {}: {source}", entry.name);
            let mut comparison = simulated(&simulate, &self.policies, &seeds, self.jobs).map_err(failed)?;
            progress.add(1);
            if let Some(baseline) = &baseline {
                let runs = baseline.runs(&entry.name, &seeds, &simulate.source.workload_name())?;
                let policies = comparison.contenders.into_iter().map(|contender| (contender.name, contender.runs));
                let first = (baseline.router.clone(), runs);
                comparison = Comparison::of_runs(std::iter::once(first).chain(policies).collect());
            }
            rows.push(Row { name: entry.name, why: entry.why, comparison });
        }
        Ok(Suite { schema_version: SCHEMA_VERSION, rows })
    }

    /// Workloads of the list, or cases of the matrix, with their seeds.
    fn entries(&self) -> Result<(Vec<Entry>, Vec<u64>), Failed> {
        if !self.selection.families.is_empty() {
            let matrix = matrix()?;
            return Ok((matrix.cases(&self.selection)?, matrix.seeds(&self.selection)?));
        }
        let seeds = match self.selection.seeds {
            Seeds::Count(count) => seeds(self.seed, count),
            Seeds::Tuning | Seeds::HeldBack => matrix()?.seeds(&self.selection)?,
        };
        Ok((entries()?, seeds))
    }
}
