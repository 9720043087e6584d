//! Command line of the harness.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pointsman_bench::cli::Replay;
use pointsman_bench::embedded::Embedded;

/// Measures Pointsman under load
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replays a trace, or a generated workload, in a closed loop and reports what routing cost
    Replay(Replay),
}

fn main() -> ExitCode {
    let Command::Replay(replay) = Arguments::parse().command;
    match run(&replay) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to tell if standard error is gone.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(replay: &Replay) -> Result<(), Box<dyn Error>> {
    let report = replay.run(Embedded::start)?;
    Ok(report.write(io::stdout().lock(), replay.json)?)
}
