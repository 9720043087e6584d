//! The subcommand: all workloads, or some.
//!
//! Owns which of them run and with how much. Promises to say what it is at, for a suite takes minutes.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

use super::{ListError, Row, Suite, entries};
use crate::compare::command::{jobs, seeds};
use crate::compare::{CompareError, Policied, simulated};
use crate::results::{Reporting, ReportingError, SCHEMA_VERSION};

/// Requests of each workload under `--quick`.
const QUICK_REQUESTS: u32 = 600;

/// All workloads of the suite, each under several policies.
#[derive(Args, Clone, Debug)]
pub struct RunSuite {
    /// Policies, or policies with settings as in kv+overlap_score_credit=0.5; the others are compared to the first
    #[arg(long, required = true, value_delimiter = ',', value_name = "POLICY,...")]
    pub policies: Vec<Policied>,
    /// Run this workload alone; may be given again
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Trace in Mooncake's format, for the workloads that take one; without it they are left out
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Run only the first 600 requests of each workload, to see that all is well
    #[arg(long)]
    pub quick: bool,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Seeds to run each policy with
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub seeds: u32,
    /// Simulations at a time [default: as many as there are cores]
    #[arg(long)]
    pub jobs: Option<NonZeroUsize>,
    /// Write every figure of every run to this file, as one JSON object
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Add what plots need to that
    #[arg(long)]
    pub series: bool,
    /// Print no table if there are warnings, and fail instead
    #[arg(long)]
    pub strict: bool,
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// The list, or a name that is to be on it, is wrong.
    #[error(transparent)]
    List(#[from] ListError),
    /// A workload failed.
    #[error("workload {name}: {source}")]
    Compare {
        /// Which.
        name: String,
        /// What went wrong.
        source: CompareError,
    },
    /// There are doubts under `--strict`, or nobody could be told.
    #[error(transparent)]
    Reporting(#[from] ReportingError),
    /// The file for the figures cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl RunSuite {
    /// Runs and says what came of it: the table to `out`, what it is at and warnings to `progress_out`.
    ///
    /// # Errors
    /// A workload is unknown or fails, or figures cannot be written.
    pub fn run(&self, out: impl Write, mut progress_out: impl Write) -> Result<(), SuiteError> {
        let suite = self.suite(&mut progress_out)?;
        let warnings: Vec<String> = suite.rows.iter().flat_map(|row| row.comparison.warnings()).collect();
        let reporting = Reporting { strict: self.strict, ..Reporting::default() };
        reporting.admit(&warnings, &mut progress_out)?;
        if let Some(path) = &self.json {
            let written = File::create(path).map(BufWriter::new).and_then(|file| suite.write_json(file));
            written.map_err(|source| SuiteError::Write { path: path.clone(), source })?;
        }
        Ok(suite.write_text(out).map_err(ReportingError::Io)?)
    }

    fn suite(&self, mut progress_out: impl Write) -> Result<Suite, SuiteError> {
        let entries = entries()?;
        if let Some(name) = self.only.iter().find(|name| entries.iter().all(|entry| entry.name != **name)) {
            let known = entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>().join(", ");
            return Err(ListError::Unknown { name: name.clone(), known }.into());
        }
        let (jobs, seeds) = (jobs(self.jobs), seeds(self.seed, self.seeds));
        let mut rows = Vec::new();
        for entry in entries.into_iter().filter(|entry| self.only.is_empty() || self.only.contains(&entry.name)) {
            let Some(mut simulate) = entry.simulate(self.trace.as_deref())? else {
                writeln!(progress_out, "{}: left out, for it takes a --trace", entry.name)
                    .map_err(ReportingError::Io)?;
                continue;
            };
            writeln!(progress_out, "{}: {}", entry.name, entry.why).map_err(ReportingError::Io)?;
            simulate.reporting.series = self.series;
            if self.quick {
                simulate.source.limit = Some(QUICK_REQUESTS);
            }
            let failed = |source| SuiteError::Compare { name: entry.name.clone(), source };
            let comparison = simulated(&simulate, &self.policies, &seeds, jobs).map_err(failed)?;
            rows.push(Row { name: entry.name, why: entry.why, comparison });
        }
        Ok(Suite { schema_version: SCHEMA_VERSION, rows })
    }
}
