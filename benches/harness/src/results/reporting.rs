//! Output of a run's results.
//!
//! Defines the output flags common to all runs over time. Warnings are written before figures. With `--strict`, figures
//! with warnings are not written.

use std::io::Write;

use clap::Args;

use pointsman_trial::workload::Workload;

use super::{Facts, Machine, Run, Summary, facts, write_figures};
use crate::Failed;

/// Output options of a run.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Reporting {
    /// Print the figures as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Fail instead of printing figures with warnings
    #[arg(long)]
    pub strict: bool,
}

impl Reporting {
    /// Facts of a run of `workload` on this machine. Those of a simulated fleet and of a client are unknown.
    #[must_use]
    pub fn facts(&self, policy: String, seed: u64, workload: &Workload) -> Facts {
        Facts {
            policy,
            consults_index: false,
            workers: 0,
            dp_size: 0,
            seed,
            workload: workload.name.clone(),
            trace_checksum: workload.trace_checksum.clone(),
            command: facts::command_line(),
            machine: Machine::read(),
            commit: facts::commit(),
            client: None,
        }
    }

    /// Summarizes `run`, writes its warnings to `warnings_out` and its figures to `out`.
    ///
    /// # Errors
    /// There are warnings under `--strict`, or a writer fails.
    pub fn finish(&self, run: &Run, facts: &Facts, out: impl Write, warnings_out: impl Write) -> Result<(), Failed> {
        let summary = Summary::new(run, facts);
        let warnings: Vec<String> = summary.warnings.iter().map(|warning| warning.message.clone()).collect();
        admit(&warnings, self.strict, warnings_out)?;
        Ok(write_figures(out, &summary, self.json)?)
    }
}

/// Writes `warnings` to `out`, one per line.
///
/// # Errors
/// There are warnings and `is_strict`; they are then returned instead of written. Or the writer fails.
pub fn admit(warnings: &[String], is_strict: bool, mut out: impl Write) -> Result<(), Failed> {
    if is_strict && !warnings.is_empty() {
        return Err(format!("--strict rejects figures with warnings: {}", warnings.join("; ")).into());
    }
    Ok(warnings.iter().try_for_each(|warning| writeln!(out, "warning: {warning}"))?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::summary::tests::facts;
    use super::super::tests::{request, run};
    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        reporting: Reporting,
    }

    fn finish(arguments: &[&str], requests: u64) -> (Result<(), Failed>, String, String) {
        let arguments = Arguments::parse_from(std::iter::once(&"test").chain(arguments));
        let (mut out, mut warnings) = (Vec::new(), Vec::new());
        let run = run((0..requests).map(request).collect());
        let done = arguments.reporting.finish(&run, &facts(), &mut out, &mut warnings);
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (done, text(out), text(warnings))
    }

    #[test]
    fn figures_with_warnings_are_marked_or_suppressed() {
        let (done, out, warnings) = finish(&["--json"], 10);
        assert!(done.is_ok() && out.starts_with('{') && out.contains("too_few_requests"), "{out}");
        assert!(warnings.starts_with("warning: ") && warnings.ends_with('\n'), "{warnings}");

        let (done, out, _) = finish(&["--json", "--strict"], 10);
        let error = done.expect_err("refused").to_string();
        assert!(out.is_empty() && error.contains("--strict") && error.contains("10"), "{error}");
    }

    #[test]
    fn figures_without_warnings_pass_strict() {
        let (done, out, warnings) = finish(&["--strict"], 1_000);
        assert!(done.is_ok() && out.lines().any(|line| line.starts_with("ttft_seconds.p99 ")), "{done:?} {out}");
        assert_eq!(warnings, "");
    }
}
