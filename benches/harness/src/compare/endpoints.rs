//! Subcommand that sends the same workloads to several endpoints over HTTP.

use std::io::Write;

use clap::Args;

use super::Comparison;
use super::command::seeds;
use crate::Failed;
use crate::load::Load;
use crate::results::Summary;
use crate::results::reporting::admit;

/// Several endpoints under the same load, one after the other.
///
/// Each seed's workload is sent to every endpoint; the order of the endpoints is reversed for every second seed.
/// Endpoints keep the cache contents of earlier seeds. A generated workload differs for each seed. A trace is always
/// the same, so its second run hits all prompts of its first.
#[derive(Args, Clone, Debug)]
pub struct CompareEndpoints {
    /// Another endpoint, compared with the one of --url; repeatable
    #[arg(long, required = true, value_name = "URL")]
    pub against: Vec<String>,
    /// Number of seeds for each endpoint: --seed and its successors
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub seeds: u32,
    /// Arguments of the load.
    #[command(flatten)]
    pub load: Load,
}

impl CompareEndpoints {
    /// Sends the loads; writes figures to `out` and warnings to `warnings_out`.
    ///
    /// # Errors
    /// The workload cannot be read or sent, or the figures cannot be written.
    pub fn run(&self, out: impl Write, warnings_out: impl Write) -> Result<(), Failed> {
        let urls: Vec<String> = std::iter::once(&self.load.url).chain(&self.against).cloned().collect();
        let comparison = Comparison::run(&urls, &seeds(self.load.seed, self.seeds), |url, seed| self.one(url, seed))?;
        let reporting = &self.load.reporting;
        admit(&comparison.warnings(), reporting.strict, warnings_out)?;
        Ok(comparison.write(out, reporting.json)?)
    }

    fn one(&self, url: &str, seed: u64) -> Result<Summary, Failed> {
        let load = Load { url: url.to_owned(), seed, ..self.load.clone() };
        let (run, facts) = load.measure().map_err(|source| format!("{url}, seed {seed}: {source}"))?;
        Ok(Summary::new(&run, &facts))
    }
}
