//! Arguments that select a workload: a trace or a generator.
//!
//! All subcommands select workloads by the same arguments. [`workload`](pointsman_trial::workload) defines formats,
//! generators and their errors.

use std::path::PathBuf;

use clap::Args;
use pointsman_trial::workload::generate::{Chat, Generator};
use pointsman_trial::workload::trace::read;
use pointsman_trial::workload::{Prompt, Workload, WorkloadError};

/// Number of requests without a trace and a limit.
const GENERATED: u32 = 4_000;

/// Arguments that select a workload.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct Source {
    /// Trace to send: Mooncake's or Alibaba's JSON lines
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    pub trace: Option<PathBuf>,
    /// Workload to generate: a name, or name:setting=value,setting=value [default: chat]
    ///
    /// chat, low, shared-prefix, agents, programs, siblings, burst, peer-first, documents, unique and mix.
    /// `--workload chat:rate=2,turns=3-8` changes two settings. Open-loop workloads accept peak, peak_share and period_s
    /// too, for a rate that varies. The error message for an unknown setting lists the valid ones.
    #[arg(long, value_name = "NAME[:SETTINGS]")]
    pub workload: Option<Generator>,
    /// Number of requests from the start of the workload [default: all]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// Factor by which requests arrive faster
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = speedup)]
    pub speedup: f64,
}

fn speedup(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok().filter(|factor| (1e-3..=1e6).contains(factor));
    factor.ok_or_else(|| "must be a number from 0.001 to 1000000".to_owned())
}

impl Source {
    /// Loads the workload. `seed` determines generated content.
    ///
    /// # Errors
    /// The trace cannot be read.
    pub fn load(&self, seed: u64) -> Result<Workload, WorkloadError> {
        let limit = self.limit.map(|limit| limit as usize);
        let mut workload = match (&self.trace, &self.workload) {
            (Some(path), _) => read(path, limit)?,
            (None, Some(generator)) => generator.generate(seed),
            (None, None) => Generator::Chat(Default::default()).generate(seed),
        };
        workload.requests.truncate(limit.unwrap_or(usize::MAX));
        Ok(workload.sped_up(self.speedup))
    }

    /// Name of the generated workload; empty for a trace.
    pub(crate) fn workload_name(&self) -> String {
        self.workload.as_ref().map(Generator::to_string).unwrap_or_default()
    }
}

/// Prompts for closed loops: from a trace, or from [`Chat`].
///
/// # Errors
/// The trace cannot be read.
pub(crate) fn prompts(trace: Option<PathBuf>, limit: Option<u32>, seed: u64) -> Result<Vec<Prompt>, WorkloadError> {
    let sessions = limit.unwrap_or(GENERATED);
    let limit = limit.or(trace.is_none().then_some(sessions));
    let workload = Some(Generator::Chat(Chat { sessions, ..Chat::default() }));
    Ok(Source { trace, workload, limit, speedup: 1.0 }.load(seed)?.prompts())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        source: Source,
    }

    fn parsed(line: &str) -> Result<Source, String> {
        let arguments = Arguments::try_parse_from(std::iter::once("test").chain(line.split_whitespace()));
        arguments.map(|arguments| arguments.source).map_err(|error| error.to_string())
    }

    #[test]
    fn generators_support_limit_and_speedup() {
        let load = |line| parsed(line).expect("arguments").load(7).expect("a workload");
        let whole = load("--workload siblings:groups=10");
        let part = load("--workload siblings:groups=10 --limit 12 --speedup 2");
        assert_eq!((whole.requests.len(), part.requests.len()), (80, 12));
        assert_eq!(part.requests[11].arrival_us, (whole.requests[11].arrival_us as f64 / 2.0).round() as u64);
        assert_eq!(load("--limit 3").requests.len(), 3);
    }

    #[test]
    fn invalid_arguments_are_rejected_by_name() {
        for (line, expected) in [
            ("--workload chats", "unknown workload \"chats\""),
            ("--workload chat:rate=0", "rate is 0"),
            ("--trace a --workload chat", "cannot be used with"),
            ("--speedup 0", "--speedup"),
            ("--limit 0", "--limit"),
        ] {
            let error = parsed(line).expect_err(line);
            assert!(error.contains(expected), "{line}: {error}");
        }
        assert!(parsed("--trace /nowhere").expect("arguments").load(1).is_err());
    }
}
