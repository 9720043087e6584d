//! The subcommand: several endpoints, sent the same workloads over HTTP.

use std::io::Write;

use clap::Args;

use super::command::seeds;
use super::{CompareError, Comparison};
use crate::load::Load;
use crate::results::{ReportingError, Summary};

/// Several endpoints under the same load, one after the other.
///
/// Each seed's workload goes to every endpoint, in an order that changes sides from seed to seed. Endpoints keep what
/// earlier seeds have left in their caches: a generated workload is another one for each seed, a trace is the same, and
/// its second run finds all of its first.
#[derive(Args, Clone, Debug)]
pub struct CompareEndpoints {
    /// Another endpoint, compared to the one that --url names; may be given again
    #[arg(long, required = true, value_name = "URL")]
    pub against: Vec<String>,
    /// Seeds to send to each of them: --seed and those that follow it
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub seeds: u32,
    /// What is sent.
    #[command(flatten)]
    pub load: Load,
}

impl CompareEndpoints {
    /// Sends, and says what came of it: figures to `out`, warnings to `warnings_out`.
    ///
    /// # Errors
    /// The workload cannot be read or sent, or its figures cannot be said.
    pub fn run(&self, out: impl Write, warnings_out: impl Write) -> Result<(), CompareError> {
        let urls: Vec<String> = std::iter::once(&self.load.url).chain(&self.against).cloned().collect();
        let comparison = Comparison::run(&urls, &seeds(self.load.seed, self.seeds), |url, seed| self.one(url, seed))?;
        let reporting = &self.load.reporting;
        reporting.admit(&comparison.warnings(), warnings_out)?;
        Ok(comparison.write(out, reporting.json).map_err(ReportingError::Io)?)
    }

    fn one(&self, url: &str, seed: u64) -> Result<Summary, CompareError> {
        let load = Load { url: url.to_owned(), seed, ..self.load.clone() };
        let failed = |source| CompareError::Load { url: url.to_owned(), seed, source: Box::new(source) };
        let (run, facts) = load.measure().map_err(failed)?;
        Ok(Summary::new(&run, &facts))
    }
}
