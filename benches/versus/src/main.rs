//! Comparisons of Pointsman with `dynamo-kv-router`: the same closed loop over both in alternating runs, both side by
//! side over one fleet to compare their decisions, their indexes alone (and that of `kv-index`), and a fleet in virtual
//! time driven by either router.

mod compare;
mod dynamo;
mod indexes;
mod parity;
mod round_robin;
mod simulate;
mod suite;
mod table;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use perf_event::events::Hardware;
use pointsman_bench::Failed;
use pointsman_bench::fleet::Setup;
use pointsman_bench::replay::{Replay, Report};
use pointsman_bench::targets::{Embedded, Target};
use pointsman_versus::index;

use dynamo::DynamoRouter;
use round_robin::RoundRobin;

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
    dynamo: DynamoOptions,
    /// Print the number of user-mode instructions per request instead, including the loop's own
    #[arg(long)]
    count_instructions: bool,
    #[command(flatten)]
    replay: Replay,
}

/// Options of dynamo-kv-router only.
#[derive(Args, Clone, Copy, Debug)]
struct DynamoOptions {
    /// Number of dynamo-kv-router's event threads [default: its own default]
    #[arg(long)]
    dynamo_event_threads: Option<usize>,
}

/// A router to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RouterChoice {
    /// Pointsman
    Pointsman,
    /// dynamo-kv-router
    Dynamo,
    /// A router that only selects ranks in rotation, to measure the loop itself
    RoundRobin,
}

impl Run {
    fn run(&self) -> Result<(), Failed> {
        match self.target {
            RouterChoice::Pointsman => self.drive(Embedded::start),
            RouterChoice::Dynamo => self
                .drive(async |setup: &Setup| DynamoRouter::start(setup, self.dynamo.dynamo_event_threads, true).await),
            RouterChoice::RoundRobin => self.drive(async |setup: &Setup| Ok(RoundRobin::new(setup.fleet))),
        }
    }

    fn drive<T: Target>(&self, start: impl AsyncFnOnce(&Setup) -> Result<T, Failed>) -> Result<(), Failed> {
        if !self.count_instructions {
            return Ok(self.replay.run(start)?.write(io::stdout().lock(), self.replay.json)?);
        }
        // Covers the threads created afterwards, from the start of the router to the end of the run: the loop, the
        // simulated engines and the shutdown are included, therefore the figure of a round-robin router is subtracted.
        let mut builder = perf_event::Builder::new().kind(Hardware::INSTRUCTIONS);
        builder.inherit(true);
        let mut counter = builder.build()?;
        let report: Report = self.replay.run(async |setup: &Setup| {
            let router = start(setup).await?;
            counter.enable()?;
            Ok(router)
        })?;
        // The number of warm-up requests equals that of measured requests, or is one less.
        let requests = 2 * report.requests;
        Ok(writeln!(io::stdout(), "{:.1}", counter.read()? as f64 / requests as f64)?)
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
