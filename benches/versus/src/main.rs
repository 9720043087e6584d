//! Comparisons of Pointsman with `dynamo-kv-router`: the same closed loop over both in alternating runs, both side by
//! side over one fleet to compare their decisions, their indexes alone (and that of `kv-index`), and a fleet in virtual
//! time driven by either router.

mod compare;
mod dynamo;
mod indexes;
mod parity;
mod simulate;
mod suite;
mod table;
mod tally;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use pointsman_bench::Failed;
use pointsman_bench::fleet::Setup;
use pointsman_bench::replay::Replay;
use pointsman_bench::targets::Embedded;
use pointsman_versus::index;

use dynamo::DynamoRouter;

/// Compare Pointsman with dynamo-kv-router under the same load
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    compare: compare::Compare,
}

#[derive(Subcommand)]
enum Command {
    /// Execute a single run in this process
    Run(Run),
    /// Simulate a fleet in virtual time, driven by either router
    Simulate(Box<simulate::Simulated>),
    /// Compute the figures of dynamo-kv-router for cases of the suite's matrix
    Suite(suite::SuiteOfDynamo),
    /// Replay events and queries on the indexes alone
    Index(indexes::Indexes),
    /// Replay one index in this process and print its figures as JSON
    IndexRun(index::Replay),
    /// Drive both routers side by side and count different decisions
    Parity(parity::Parity),
}

#[derive(Args)]
struct Run {
    /// Router to run
    #[arg(long, value_enum)]
    target: RouterChoice,
    #[command(flatten)]
    replay: Replay,
}

/// A router to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RouterChoice {
    /// Pointsman
    Pointsman,
    /// dynamo-kv-router
    Dynamo,
}

impl Run {
    fn run(&self) -> Result<(), Failed> {
        let report = match self.target {
            RouterChoice::Pointsman => self.replay.run(Embedded::start),
            RouterChoice::Dynamo => self.replay.run(async |setup: &Setup| DynamoRouter::start(setup, true).await),
        };
        Ok(report?.write(io::stdout().lock(), self.replay.json)?)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.command {
        Some(Command::Run(run)) => run.run(),
        Some(Command::Simulate(simulated)) => simulated.run(),
        Some(Command::Suite(suite)) => suite.run(),
        Some(Command::Index(indexes)) => indexes.run(),
        Some(Command::IndexRun(replayed)) => {
            replayed.time().and_then(|timed| Ok(writeln!(io::stdout(), "{}", serde_json::to_string(&timed)?)?))
        }
        Some(Command::Parity(parity)) => parity.run(),
        None => arguments.compare.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A write error on standard error is ignored, because there is no other output.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}
