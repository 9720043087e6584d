//! Command line of the harness.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pointsman_bench::Failed;
use pointsman_bench::compare::Compare;
use pointsman_bench::drill::Drill;
use pointsman_bench::load::Load;
use pointsman_bench::replay::Replay;
use pointsman_bench::simulate::Simulate;
use pointsman_bench::suite::RunSuite;
use pointsman_bench::targets::Embedded;

/// Benchmarks for Pointsman
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replay a trace or a generated workload in a closed or an open loop and report the cost of routing
    Replay(Replay),
    /// Serve a workload on a simulated fleet in virtual time and report the latency for its users
    Simulate(Box<Simulate>),
    /// Simulate several policies on one workload, in pairs, with several seeds
    Compare(Box<Compare>),
    /// Simulate several policies on a list of workloads and report the wins and losses of each
    Suite(RunSuite),
    /// Kill, restart and separate gateways under load, on loopback
    Drill(Drill),
    /// Send a workload to an endpoint with OpenAI's API over HTTP and report the responses
    Load(Box<Load>),
}

/// Returns whether a run ended because a reader of its output, such as `head`, closed the pipe.
fn is_closed_pipe(error: &Failed) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Replay(replay) => {
            replay.run(Embedded::start).and_then(|report| Ok(report.write(io::stdout(), replay.json)?))
        }
        Command::Simulate(simulate) => simulate.run(io::stdout(), io::stderr()),
        Command::Compare(compare) => compare.run(io::stdout(), io::stderr()),
        Command::Suite(suite) => suite.run(io::stdout(), io::stderr()),
        Command::Drill(drill) => drill.run(io::stdout()),
        Command::Load(load) => load.run(io::stdout(), io::stderr()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // A write error on standard error is ignored, because there is no other output.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{ArgAction, CommandFactory};

    use super::*;

    #[test]
    fn json_is_a_switch_of_every_subcommand_with_figures() {
        for command in Arguments::command().get_subcommands() {
            let json = command.get_arguments().find(|argument| argument.get_id() == "json");
            let json = json.unwrap_or_else(|| panic!("{} lacks --json", command.get_name()));
            assert!(matches!(json.get_action(), ArgAction::SetTrue), "{}", command.get_name());
        }
    }
}
