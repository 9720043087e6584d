//! Command line of the harness.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pointsman_bench::cli::Replay;

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
    let _ = replay;
    let _ = writeln!(io::stderr(), "error: no router in this build");
    ExitCode::FAILURE
}
